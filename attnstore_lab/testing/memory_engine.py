# SPDX-License-Identifier: Apache-2.0
"""A copy engine for machines where HBM is ordinary memory, whose copies are a GPU's all the same:
asynchronous, slow, and ordered by streams.

What a copy engine can do to who does not wait for it:

- What a copy reads is read when it is carried out, and not when it is begun: a source that was
  given away meanwhile is copied with its new bytes.
- What a copy fills may be half filled from its beginning to its end. `poison` shows that.
- A copy fails, and its target holds anything.

Which copy is carried out when is the streams' business (attnstore_lab/testing/copy_streams.py).
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from attnstore_lab.testing.copy_streams import SteppedStream, Stream, StreamPiece, ThrottledStream
from attnstore_vllm.transfer.engine import Over, Pages, Rows, StreamEvent, bytes_of, check_layers
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from attnstore_vllm.transfer.plan import Moved

__all__ = ["POISON", "MemoryEngine", "SteppedStream", "Stream", "ThrottledStream"]

POISON = 0xA5
WAIT_DEADLINE_S = 60.0
MEASURED_MAX = 4096

Bytes = npt.NDArray[np.uint8]


class MemoryEngine:
    """Implements transfer.engine.CopyEngine for a model that runs on the calling thread.

    Its copies run on the streams' threads, without OpenMP: a second team of threads beside the
    model's would take the processors from it. One call is one piece.

    Args:
        slots_base: address of the pool's slot 0 in this process; mapped until close().
        layouts: of the layers, in the order in which slots hold them; the tensors outlive this.
        loads, saves: closed by close(); may be one and the same.
        num_rows: of the write buffer; 0: none.
        poison: load() fills its blocks with POISON, as a copy that has begun may have written
            anything, so that who reads without waiting sees it.
        deadline_s: a wait that takes longer raises CopyError, so that a test ends. The copy is
            still in flight then.
    Raises: IndexError from load(), save(), gather() and drain(), before anything is copied, for a
        slot, block, row or layer that does not exist.
    """

    overlaps = True

    def __init__(
        self,
        slots_base: int,
        num_slots: int,
        rank: int,
        geometry: Geometry,
        layouts: Sequence[LayerLayout],
        *,
        loads: Stream,
        saves: Stream,
        num_rows: int,
        poison: bool = False,
        deadline_s: float = WAIT_DEADLINE_S,
    ) -> None:
        g, shape = geometry, layouts[0]
        assert tuple(layout.page_bytes for layout in layouts) == g.regions
        assert all(layout.num_blocks == shape.num_blocks for layout in layouts)
        self.num_rows = num_rows
        self._limits = np.array([num_slots, g.blocks_per_chunk, shape.num_blocks])
        self._geometry = g
        part = slots_base + g.part_at(rank)
        # by layer: [slot, block of the chunk, run, byte]
        self._slots = [
            _memory(
                part + g.region_at(layer),
                (num_slots, g.blocks_per_chunk, len(found.run_offsets), found.run_bytes),
                (g.slot_bytes, found.page_bytes, found.run_bytes, 1),
            )
            for layer, found in enumerate(layouts)
        ]
        # by layer and run: [block id, byte]
        self._blocks = [
            [
                _memory(
                    layout.base + at,
                    (layout.num_blocks, layout.run_bytes),
                    (layout.block_stride, 1),
                )
                for at in layout.run_offsets
            ]
            for layout in layouts
        ]
        # by layer: [row, run, byte]
        self._rows = [
            np.zeros((num_rows, len(found.run_offsets), found.run_bytes), np.uint8)
            for found in layouts
        ]
        self._loads, self._saves = loads, saves
        self._poison = poison
        self._deadline_s = deadline_s
        self._waited_s = 0.0
        self._unmeasured: deque[StreamPiece] = deque(maxlen=MEASURED_MAX)  # loads, in their order

    def mark(self) -> StreamEvent:
        """Over when it is made, as all that runs on the calling thread."""
        return Over()

    def load(self, pages: Pages, layers: range, after: StreamEvent | None = None) -> StreamPiece:
        slots, within, blocks = self._checked(pages, layers)
        if self._poison:
            for layer in layers:
                for run in self._blocks[layer]:
                    run[blocks] = POISON
        work = partial(self._load, slots, within, blocks, layers)
        piece = self._loads.submit(work, self._num_bytes(pages, layers))
        self._unmeasured.append(piece)
        return piece

    def move(self, moved: Moved, layers: range | None = None, *, group: int = 0) -> StreamEvent:
        raise AssertionError("only the CPU's engine moves KV so far")

    def save(self, pages: Pages, layers: range) -> StreamPiece:
        slots, within, blocks = self._checked(pages, layers)
        work = partial(self._save, slots, within, blocks, layers)
        return self._saves.submit(work, self._num_bytes(pages, layers))

    def gather(self, pages: Pages, rows: Rows, layers: range) -> None:
        _, _, blocks = self._checked(pages, layers)
        rows = self._checked_rows(pages, rows)
        for layer in layers:
            for run, source in enumerate(self._blocks[layer]):
                self._rows[layer][rows, run] = source[blocks]

    def drain(self, pages: Pages, rows: Rows, layers: range) -> StreamPiece:
        slots, within, _ = self._checked(pages, layers)
        work = partial(self._drain, slots, within, self._checked_rows(pages, rows), layers)
        return self._saves.submit(work, self._num_bytes(pages, layers))

    def model_waits(self, event: StreamEvent) -> None:
        if not event.done():
            began_at = time.monotonic()
            try:
                self.wait(event)
            finally:
                self._waited_s += time.monotonic() - began_at

    def wait(self, event: StreamEvent) -> None:
        assert isinstance(event, StreamPiece), "this is another engine's event"
        event.wait(self._deadline_s)

    def waited_s(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def measured(self) -> list[tuple[int, float]]:
        """The last MEASURED_MAX at most; without those that failed."""
        measured = []
        while self._unmeasured and self._unmeasured[0].is_over():
            piece = self._unmeasured.popleft()
            if not piece.has_failed():
                measured.append((piece.num_bytes, piece.worked_s))
        return measured

    def close(self) -> None:
        """Copies in flight are carried out at once; a piece that fails is over as well."""
        self._loads.close()
        self._saves.close()

    def _load(self, slots: Pages, within: Pages, blocks: Pages, layers: range) -> None:
        for layer in layers:
            for run, target in enumerate(self._blocks[layer]):
                target[blocks] = self._slots[layer][slots, within, run]

    def _save(self, slots: Pages, within: Pages, blocks: Pages, layers: range) -> None:
        for layer in layers:
            for run, source in enumerate(self._blocks[layer]):
                self._slots[layer][slots, within, run] = source[blocks]

    def _drain(self, slots: Pages, within: Pages, rows: Rows, layers: range) -> None:
        for layer in layers:
            for run in range(self._rows[layer].shape[1]):
                self._slots[layer][slots, within, run] = self._rows[layer][rows, run]

    def _num_bytes(self, pages: Pages, layers: range) -> int:
        return len(pages) * bytes_of(self._geometry, layers)

    def _checked(self, pages: Pages, layers: range) -> Pages:
        """[3, blocks], a copy: the caller's array may change before the bytes are copied."""
        assert layers.step == 1
        assert pages.ndim == 2 and pages.shape[1] == 3
        check_layers(layers, self._geometry.num_layers)
        exists = ((pages >= 0) & (pages < self._limits)).all(axis=1)
        if not exists.all():
            slot, within, block = pages[~exists][0]
            raise IndexError(
                f"slot {slot}, block {within} of the chunk, block id {block}: one of them does "
                "not exist"
            )
        return np.array(pages.T, order="C")

    def _checked_rows(self, pages: Pages, rows: Rows) -> Rows:
        assert rows.shape == (len(pages),)
        if not ((rows >= 0) & (rows < self.num_rows)).all():
            raise IndexError(f"rows {rows}: one of them does not exist")
        return rows.copy()


def _memory(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    """The bytes at `address`, in place; they are not kept alive by it."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    owner = (ctypes.c_uint8 * span).from_address(address)
    return np.ndarray(shape, np.uint8, np.ctypeslib.as_array(owner), 0, strides)
