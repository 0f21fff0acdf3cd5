# SPDX-License-Identifier: Apache-2.0
"""Copies between HBM and the page-locked pool on CUDA, beside the model.

Three streams of ours, for loads, for saves and for what fills the read buffer; the model's own
gathers into the write buffer.
docs/overlap.md says which stream waits for what. It is long since it has all these waits.

Priorities. In CUDA a lower number is a higher priority, 0 is the lowest there is, and 0 is what
PyTorch, and so the model, has if no other is asked for. So ours are equal to such a model's
stream and cannot be lower; they are lower where the model's was made with a negative number.
Priorities order thread blocks of kernels that wait for room and nothing else: not the copy engines,
and no block that runs already. What keeps our copies out of the model's way is that the kernel
takes few multiprocessors, and DMA none (transfer/cuda_methods.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import numpy as np
import torch

from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError, CopyError, UnsupportedError
from attnstore_vllm.transfer.cuda_batches import Batch, make_batch
from attnstore_vllm.transfer.cuda_cells import Cells, Check, DecodedMover, LoadWord
from attnstore_vllm.transfer.cuda_events import CudaEvent, FailedEvent, StopWatch, copy_error
from attnstore_vllm.transfer.cuda_kernels import load_kernels, native_module
from attnstore_vllm.transfer.cuda_methods import Copy, Method, ReadOrder, Rules, find_rules
from attnstore_vllm.transfer.cuda_moves import TokenMover
from attnstore_vllm.transfer.cuda_pool import LockedPool
from attnstore_vllm.transfer.cuda_read_buffer import ReadSize, make_read_buffer
from attnstore_vllm.transfer.cuda_selftest import check_engine, check_moves
from attnstore_vllm.transfer.cuda_tables import TableRing
from attnstore_vllm.transfer.encoded import DecodedChunk
from attnstore_vllm.transfer.engine import (
    Pages,
    Rotation,
    Rows,
    StreamEvent,
    bytes_moved,
    bytes_of,
    check_layers,
    page_numbers,
    rotation_numbers,
)
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout, kinds_of
from attnstore_vllm.transfer.plan import Moved

logger = logging.getLogger(__name__)

_LOADS, _SAVES, _MODEL = "loads", "saves", "model"
"""Lanes of events."""
_NO_ROWS = np.empty(0, np.int64)
_NO_WORD = LoadWord(0, lambda: None)
_STREAMS_TRIED = 64


class CudaEngine:
    """Implements transfer.engine.CopyEngine.

    What the caller keeps: a slot, block or row that a copy reads or fills is not reused before its
    event is over; for a block that was gathered, the model's order is enough. The KV tensors and
    the slots outlive this.

    Made before anything else uses the slots and the blocks: the last slot is written to, and
    cleared, in a test of all copies.

    Args:
        slots_base: address of the pool's slot 0 in this process; the slots are page-locked from
            here to close(), and mapped: the first `num_slots` of them, if the driver refuses more.
        layouts: of the layers, in the order in which slots hold them; addresses on `device`.
        num_rows: of the write buffer, each of which takes a block's bytes as slots have them; 0:
            none.
        rules: which way copies go; may be assigned to at any time. None: find_rules().
        rotations: of each group; empty where nothing is moved.
        borders: slots at which another file of the pool begins (SharedPool.borders).
        read_size: of the read buffer. None: READ_SIZE if a rule says that loads go through it, or
            slots keep pages encoded, else there is none; without one they go by DMA, and what is
            encoded by the kernel.
    Raises: UnsupportedError if this machine, or this build, cannot copy, or copies wrongly;
        ConfigError if there is too little HBM.
        IndexError from load(), move(), save(), gather() and drain(), before anything is copied, for
        a slot, token, block, row or layer that does not exist.
    """

    overlaps = True
    why_not_moved: str | None = None
    """`rotations` were given, but KV cannot be moved here, or was moved wrongly when that was
    tried: move() may not be called."""

    def __init__(
        self,
        slots_base: int,
        num_slots: int,
        rank: int,
        geometry: Geometry,
        layouts: Sequence[LayerLayout],
        device: torch.device,
        num_rows: int,
        rules: Rules | None = None,
        rotations: Sequence[Rotation] = (),
        borders: Sequence[int] = (),
        read_size: ReadSize | None = None,
    ) -> None:
        self._native = native_module()
        _refuse_without_gpu(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self.num_rows = num_rows
        self.rules = rules or find_rules(
            torch.cuda.get_device_name(index), self._native.driver_version()
        )
        self._geometry = geometry
        self._is_closed = False
        with ExitStack() as undo:
            self._buffer = self._make_buffer(num_rows)
            size = geometry.slot_bytes
            pool = LockedPool(self._native, index, slots_base, num_slots, size, borders)
            self._pool = pool
            undo.callback(pool.close)
            self.num_slots = num_slots = pool.num_slots
            self._kernels = load_kernels(self._native, index)
            numbers = page_numbers(pool.seen, num_slots, rank, geometry, layouts)
            self._cells = (
                Cells(slots_base, num_slots, rank, geometry) if geometry.is_encoded else None
            )
            self._kinds = kinds_of(layouts)
            self._arrays: list[torch.Tensor] = []
            """Numbers that native code reads in HBM."""
            self._loads, self._saves, fills = self._make_streams()
            self.read_buffer = make_read_buffer(
                self._device,
                read_size,
                self.rules,
                fills,
                self._loads,
                is_encoded=geometry.is_encoded,
            )
            self._copiers = [self._make_copier(i, of_kind) for i, of_kind in enumerate(numbers)]
            self._tables = self._make_tables()
            self._numbers = count(1)
            self._load_times = StopWatch()
            self._model_waits = StopWatch()
            self._has_waited: dict[tuple[str, int], int] = {}
            """(lane, the model's stream): the number of the latest event that it waits for."""
            self._gathered: dict[int, torch.cuda.Event] = {}
            """The model's stream: behind its latest gather."""
            self._spoilt: set[tuple[int, int]] = set()
            """(row, layer) that a failed gather was to fill."""
            self._batches: dict[Copy, Batch] = {}
            """The latest of each."""
            self._loads_after: StreamEvent | None = None
            """The mark that the stream of loads has waited for last."""
            self._load_ended: torch.cuda.Event | None = None
            """Behind the latest load, if nothing was given to its stream since."""
            place = (geometry, slots_base, num_slots, rank, layouts[0].num_blocks)
            check_engine(self, *place)
            self.token_movers = self._make_token_movers(numbers, layouts, rotations)
            self._check_moves(rotations, place)
            undo.pop_all()

    # ---- transfer.engine.CopyEngine ----------------------------------------------------

    def mark(self) -> StreamEvent:
        try:
            return CudaEvent(self._model().record_event(), _MODEL, next(self._numbers))
        except RuntimeError as error:
            return FailedEvent(copy_error(error))

    def load(self, pages: Pages, layers: range, after: StreamEvent | None = None) -> StreamEvent:
        num_bytes = len(pages) * bytes_of(self._geometry, layers)
        start, self._load_ended = self._load_ended, None
        try:
            if not isinstance(after, CudaEvent):  # a mark that was refused too
                self._loads.wait_stream(self._model())
                start = None
            elif after is not self._loads_after:
                self._loads.wait_event(after.event)
                self._loads_after, start = after, None
            if start is None:
                start = self._load_times.start(self._loads)
                self.read_buffer.comes_after(start)
            word = self._cells.load_word() if self._cells else _NO_WORD
            self._copy(Copy.LOAD, pages, _NO_ROWS, layers, self._loads, word.address)
            stop = self._load_times.stop(start, self._loads, num_bytes)
            self._load_ended = stop
            return self._event(Copy.LOAD, stop, word.check if self._cells else None)
        except RuntimeError as error:
            return self._failed(self._loads, error)

    def move(self, moved: Moved, layers: range | None = None, *, group: int = 0) -> StreamEvent:
        assert self.token_movers, "it is not known how K is rotated"
        layers = self._geometry.layers_of(group) if layers is None else layers
        num_bytes = bytes_moved(self._geometry, moved, layers, group)
        self._load_ended = None
        try:
            self._loads.wait_stream(self._model())
            start = self._load_times.start(self._loads)
            ring, handle = self._tables[Copy.LOAD], self._loads.cuda_stream
            word = self._cells.load_word() if self._cells else _NO_WORD
            self.token_movers[group].give(moved, layers, ring, handle, word.address)
            stop = self._load_times.stop(start, self._loads, num_bytes)
            return self._event(Copy.LOAD, stop, word.check if self._cells else None)
        except RuntimeError as error:
            return self._failed(self._loads, error)

    def save(self, pages: Pages, layers: range) -> StreamEvent:
        try:
            self._saves.wait_stream(self._model())
            self._copy(Copy.SAVE, pages, _NO_ROWS, layers, self._saves, self._misfit_word())
            check = self._cells.check_of(pages, layers) if self._cells else None
            return self._event(Copy.SAVE, self._saves.record_event(), check)
        except RuntimeError as error:
            return self._failed(self._saves, error)

    def gather(self, pages: Pages, rows: Rows, layers: range) -> None:
        model = self._model()
        try:
            self._copy(Copy.GATHER, pages, rows, layers, model, self._misfit_word())
            event = model.record_event()
            self._tables[Copy.GATHER].used_until(event)
            self._gathered[model.cuda_stream] = event
            if self._spoilt:
                self._spoilt -= _places(rows, layers)
        except RuntimeError as error:  # the drain of these rows says so
            logger.error("KV could not be gathered into the write buffer: %s", error)
            self._spoilt |= _places(rows, layers)

    def drain(self, pages: Pages, rows: Rows, layers: range) -> StreamEvent:
        if self._spoilt and self._spoilt & _places(rows, layers):
            return FailedEvent(CopyError("these rows could not be gathered"))
        try:
            for event in self._gathered.values():
                self._saves.wait_event(event)
            self._copy(Copy.DRAIN, pages, rows, layers, self._saves)
            check = self._cells.check_of(pages, layers) if self._cells else None
            return self._event(Copy.DRAIN, self._saves.record_event(), check)
        except RuntimeError as error:
            return self._failed(self._saves, error)

    def model_waits(self, event: StreamEvent) -> None:
        if event.done():
            return
        assert isinstance(event, CudaEvent), "this is another engine's event"
        model = self._model()
        key = (event.lane, model.cuda_stream)
        if event.number <= self._has_waited.get(key, 0):
            return  # a stream that waited for a later event of that lane is behind this one as well
        try:
            if event.lane == _LOADS:  # its event has a time
                self._model_waits.add(self._model_waits.start(model), event.event, 0)
            model.wait_event(event.event)
        except RuntimeError as error:
            raise copy_error(error) from error
        self._has_waited[key] = event.number

    def wait(self, event: StreamEvent) -> None:
        assert isinstance(event, CudaEvent | FailedEvent), "this is another engine's event"
        event.wait()

    def waited_s(self) -> float:
        """For loads only: from when the model came to each wait until its load was over."""
        return sum(seconds for _, seconds in self._model_waits.take())

    def measured(self) -> list[tuple[int, float]]:
        return self._load_times.take()

    def close(self) -> None:
        """Also if the device has failed. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            logger.error("the GPU could not complete its copies: %s", error)
        self._pool.close()
        self._tables.clear()
        self._cells = None
        del self._buffer, self.read_buffer

    # ---- one copy ----------------------------------------------------------------------

    def _copy(
        self,
        copy: Copy,
        pages: Pages,
        rows: Rows,
        layers: range,
        stream: torch.cuda.Stream,
        failed: int = 0,
    ) -> None:
        """Append a copy to `stream`, kind by kind. Raises RuntimeError if CUDA refuses it.

        Args:
            failed: address of the word for what cannot be encoded or decoded.
        """
        assert layers.step == 1
        check_layers(layers, self._geometry.num_layers)
        batch, ring, handle = self._batch(copy, pages, rows), self._tables[copy], stream.cuda_stream
        for kind, copier, (rule, parts) in zip(
            self._kinds, self._copiers, batch.kinds, strict=True
        ):
            of_kind = kind.within(layers)
            for part in parts if of_kind else ():
                if rule.method is Method.BUFFER:
                    self.read_buffer.give(copier, rule, part, of_kind, ring, failed)
                    continue
                if rule.method is Method.DMA:
                    is_early = rule.order is ReadOrder.ANY
                    copier.by_dma(part.native, of_kind.start, of_kind.stop, is_early, handle)
                    continue
                staged = ring.stage(part.words, handle)
                copier.by_kernel(
                    part.native,
                    of_kind.start,
                    of_kind.stop,
                    staged.device,
                    staged.host,
                    rule.thread_blocks,
                    handle,
                    failed,
                )
                ring.was_given()

    def _batch(self, copy: Copy, pages: Pages, rows: Rows) -> Batch:
        """Copies layer by layer come with the same arrays, of which all is worked out once.

        Raises: IndexError for what does not exist.
        """
        last = self._batches.get(copy)
        if last is None or not last.is_of(pages, rows, self.rules):
            last = make_batch(copy, self._native.Copy, pages, rows, self.rules, self._copiers)
            self._batches[copy] = last
        return last

    def _failed(self, stream: torch.cuda.Stream, error: RuntimeError) -> FailedEvent:
        """Work given to `stream` before the failure may still write, so it is waited for; and what
        may still read slots for it."""
        try:
            stream.synchronize()
            self.read_buffer.synchronize()
        except RuntimeError:
            logger.debug("the stream of a failed copy has failed as well")
        return FailedEvent(copy_error(error))

    def _event(self, copy: Copy, event: torch.cuda.Event, check: Check | None = None) -> CudaEvent:
        """`event` was just recorded on the copy's stream."""
        self._tables[copy].used_until(event)
        lane = _LOADS if copy is Copy.LOAD else _SAVES
        return CudaEvent(event, lane, next(self._numbers), check)

    def _misfit_word(self) -> int:
        return self._cells.misfit_word if self._cells else 0

    def _model(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    # ---- what it is made of ------------------------------------------------------------

    def _check_moves(
        self, rotations: Sequence[Rotation], place: tuple[Geometry, int, int, int, int]
    ) -> None:
        for group, rotation in enumerate(rotations if self.token_movers else ()):
            why_not = check_moves(self, rotation, group, *place)
            self.why_not_moved = self.why_not_moved or why_not

    def _make_tables(self) -> dict[Copy, TableRing]:
        loads, saves, gathers = (TableRing(self._device) for _ in range(3))
        return {Copy.LOAD: loads, Copy.SAVE: saves, Copy.DRAIN: saves, Copy.GATHER: gathers}

    def _make_buffer(self, num_rows: int) -> torch.Tensor:
        """[layers][rows][bytes that a page of the layer has in a slot], flat;
        csrc/copy/page_map.h."""
        num_bytes = num_rows * sum(self._geometry.cells)
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise ConfigError(
                f"write_buffer: {format_size(num_bytes)} of HBM are not free: {error}; ask for "
                "less, or lower vLLM's --gpu-memory-utilization"
            ) from error

    def _make_copier(self, number: int, numbers: dict[str, Any]) -> Any:
        """Args: number: of the kind of pages."""
        first = self._kinds[number].first
        rows_base = self._buffer.data_ptr() + self.num_rows * sum(self._geometry.cells[:first])
        shape = self._native.PageShape(**numbers, rows_base=rows_base, num_rows=self.num_rows)
        spans = self._native.ReadSpans(*self.read_buffer.place())
        return self._copier_of(shape, spans, first)

    def _copier_of(self, shape: Any, spans: Any, layer: int) -> Any:
        """Args: layer: one of those that it copies."""
        cell_bytes = self._geometry.cells[layer] if self._geometry.is_encoded else 0
        arrays = self._native.PageCopier.arrays_of(shape, spans, cell_bytes)
        return self._native.PageCopier(
            shape, spans, **self._on_device(arrays), cell_bytes=cell_bytes
        )

    def _on_device(self, numbers: list[int]) -> dict[str, Any]:
        """The kernels, and where these numbers are from now on in their device's memory."""
        self._arrays.append(torch.tensor(numbers, dtype=torch.int64, device=self._device))
        return {"kernels": self._kernels, "arrays": self._arrays[-1].data_ptr()}

    def _make_token_movers(
        self,
        of_kinds: Sequence[dict[str, Any]],
        layouts: Sequence[LayerLayout],
        rotations: Sequence[Rotation],
    ) -> list[TokenMover]:
        """One for each group; none if a rotation does not go with these pages."""
        native, numbers = self._native, of_kinds[0]
        movers: list[TokenMover] = []
        assert len(self._kinds) == 1 or not rotations, "K of several kinds cannot be rotated"
        decoder = None
        if rotations and self._geometry.is_encoded:
            decoder, numbers = self._make_decoder(numbers, layouts)
        on_device = self._on_device([*numbers["layer_bases"], *numbers["run_offsets"]])
        for group, rotation in zip(self._geometry.groups, rotations, strict=False):
            turned = rotation_numbers(rotation, group.block_tokens)
            shapes = native.PageShape(**numbers), native.RotationShape(**turned)
            try:
                rotator = native.PageRotator(*shapes, **on_device)
            except ValueError as error:
                self.why_not_moved = str(error)
                return []
            facts = (rotator, len(turned["theta"]))
            if decoder is None:
                movers.append(TokenMover(*facts))
            else:
                load = native.Copy.LOAD
                movers.append(DecodedMover(*facts, decoder, load, group.block_tokens))
        return movers

    def _make_decoder(
        self, numbers: dict[str, Any], layouts: Sequence[LayerLayout]
    ) -> tuple[Any, dict[str, Any]]:
        """A copier from the slots to a chunk in HBM, and the numbers of that chunk's pages as the
        source of moves."""
        num_bytes = self._geometry.decoded.slot_bytes
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._arrays.append(memory)
        chunk = DecodedChunk(self._geometry, memory.data_ptr())
        into = kinds_of(chunk.layouts())[0].layouts
        shape = self._native.PageShape(
            **{
                **numbers,
                "layer_bases": [layout.base for layout in into],
                "num_blocks": into[0].num_blocks,
                "block_stride": into[0].block_stride,
                "run_offsets": list(into[0].run_offsets),
                "run_bytes": into[0].run_bytes,
            }
        )
        decoder = self._copier_of(shape, self._native.ReadSpans(), 0)
        (decoded,) = page_numbers(chunk.address, 1, 0, chunk.geometry, layouts)
        return decoder, decoded

    def _make_streams(self) -> list[torch.cuda.Stream]:
        """For loads, for saves and for fills of the read buffer. PyTorch hands streams out of a
        pool and begins again when it has been through it, so one that the model has is passed over.
        """
        taken = {self._model().cuda_stream}
        ours: list[torch.cuda.Stream] = []
        for _ in range(_STREAMS_TRIED):
            stream = torch.cuda.Stream(self._device, priority=0)
            if stream.cuda_stream not in taken:
                taken.add(stream.cuda_stream)
                ours.append(stream)
            if len(ours) == 3:
                return ours
        raise UnsupportedError("PyTorch gives out no streams but the model's own")


def _places(rows: Rows, layers: range) -> set[tuple[int, int]]:
    return {(row, layer) for row in rows.tolist() for layer in layers}


def _refuse_without_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise UnsupportedError(f"CUDA does not copy to and from the device {device}")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"PyTorch {torch.__version__} sees no CUDA device; is there a GPU with its driver, and "
            "is this PyTorch a CUDA build?"
        )
