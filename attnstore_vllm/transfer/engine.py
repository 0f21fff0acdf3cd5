# SPDX-License-Identifier: Apache-2.0
"""The engine that moves bytes between a worker's HBM and its part of the pool's slots: the device
seam.

CpuEngine is for vLLM's CPU build, where HBM is ordinary memory; CudaEngine
(transfer/cuda_engine.py) is for CUDA; attnstore_lab/testing/memory_engine.py has slow and stepped
ones. All move bytes as vLLM wrote them. transfer/worker_copies.py decides which copy comes when.

*The model's order* is the order in which the device runs what the model and the engine were given:
the model's stream on CUDA; where the model runs on the calling thread, simply what was called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from attnstore_vllm._native import (
    EncodedCopier,
    PageCopier,
    PageRotator,
    PageShape,
    RotationShape,
    omp_team_size,
)
from attnstore_vllm.errors import CopyError, DoesNotFitError
from attnstore_vllm.transfer.encoded import DecodedChunk, DecodedMoves
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import Kind, LayerLayout, kinds_of
from attnstore_vllm.transfer.page_content import ContentMap
from attnstore_vllm.transfer.plan import Moved
from attnstore_vllm.transfer.rope import Rope

logger = logging.getLogger(__name__)

Pages = npt.NDArray[np.int64]
"""[blocks, 3]: DRAM slot, block of the chunk, block id (transfer/plan.py: pages)."""
Rows = npt.NDArray[np.int64]
"""[blocks]: where in the write buffer each of as many pages is."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Facts about one KV cache group's layers that are needed to move its KV to other positions.

    dtype: "bfloat16", "float16" or "float32".
    """

    rope: Rope
    content: ContentMap
    num_heads: int
    head_dim: int
    dtype: str


class StreamEvent(Protocol):
    """A point in one of the engine's streams: behind it lie the copies that were begun before."""

    def done(self) -> bool:
        """Whether those copies are over. Never waits. Raises CopyError if one of them failed."""


class CopyEngine(Protocol):
    """One worker's copies. All methods are called on the worker's thread."""

    overlaps: bool
    """Copies run beside the model; else what is begun is over on return."""
    num_rows: int
    """Rows of the write buffer in HBM; one holds one block, all layers. 0: there is none."""

    def mark(self) -> StreamEvent:
        """A point in the model's order: behind all that the model was given so far."""

    def load(self, pages: Pages, layers: range, after: StreamEvent | None = None) -> StreamEvent:
        """Begin to fill blocks from slots: after earlier loads and the mark() `after`; None: after
        the model's order so far. A caller that loads layer by layer hands over the same arrays,
        which are not changed any more; so for gather(), drain() and save()."""

    def move(self, moved: Moved, layers: range | None = None, *, group: int = 0) -> StreamEvent:
        """Begin to fill single tokens of a group's blocks, K rotated as that group's is: after
        earlier loads. Layers: those of its regions; None: all that the group has."""

    def save(self, pages: Pages, layers: range) -> StreamEvent:
        """Begin to copy blocks into slots: after the model's order so far and earlier saves.
        wait() and done() raise DoesNotFitError of pages that are encoded, when all is over."""

    def gather(self, pages: Pages, rows: Rows, layers: range) -> None:
        """Copy blocks into rows, in the model's order: what comes later may overwrite them."""

    def drain(self, pages: Pages, rows: Rows, layers: range) -> StreamEvent:
        """Begin to copy rows into slots: after their gather() and earlier saves."""

    def model_waits(self, event: StreamEvent) -> None:
        """All that comes from here on in the model's order comes after `event`.

        Waits itself only where the model runs on the calling thread. Raises CopyError.
        """

    def wait(self, event: StreamEvent) -> None:
        """Return when `event` is over. Raises CopyError."""

    def waited_s(self) -> float:
        """Seconds that the model has waited in model_waits() since the last call, as far as they
        are known by now."""

    def measured(self) -> list[tuple[int, float]]:
        """Bytes and seconds of load() calls that are over, each once: the time in which the stream
        worked at it, without the wait for what was before. Never waits; bounded; may be empty."""

    def close(self) -> None:
        """Complete what is in flight; the slots may be unmapped after it."""


class Over:
    """The event of copies that were over when they were begun."""

    def done(self) -> bool:
        return True


class Failed(Over):
    """That of copies of which some failed."""

    def __init__(self, error: CopyError) -> None:
        self._error = error

    def done(self) -> bool:
        raise self._error


class CpuEngine:
    """Copies on the model's own OpenMP threads; what is begun is over on return.

    The model has all processors, so a thread of our own beside it takes from the model what it
    gives to the copy, and the two together are slower (docs/design.md, "Copies").

    Args:
        slots_base: address of the pool's slot 0 in this process; mapped until close().
        layouts: of the layers, in the order in which slots hold them; the tensors outlive this.
        rotations: of each group; empty where nothing is moved.
    """

    overlaps = False
    num_rows = 0

    def __init__(
        self,
        slots_base: int,
        num_slots: int,
        rank: int,
        geometry: Geometry,
        layouts: Sequence[LayerLayout],
        rotations: Sequence[Rotation] = (),
    ) -> None:
        place = (slots_base, num_slots, rank, geometry, layouts)
        self._pages = page_copier(*place)
        self._rotators = [page_rotator(*place, *of_group) for of_group in enumerate(rotations)]
        self._geometry = geometry
        self._measured: list[tuple[int, float]] = []
        logger.info("copies between HBM and DRAM run on %d threads", omp_team_size())

    def mark(self) -> StreamEvent:
        return Over()

    def load(self, pages: Pages, layers: range, after: StreamEvent | None = None) -> StreamEvent:
        began = time.perf_counter()
        try:
            self._pages.load(pages, layers.start, layers.stop)
        except RuntimeError as error:
            return Failed(CopyError(str(error)))
        num_bytes = len(pages) * bytes_of(self._geometry, layers)
        self._measured.append((num_bytes, time.perf_counter() - began))
        return Over()

    def move(self, moved: Moved, layers: range | None = None, *, group: int = 0) -> StreamEvent:
        assert self._rotators, "it is not known how K is rotated"
        began = time.perf_counter()
        layers = self._geometry.layers_of(group) if layers is None else layers
        try:
            self._rotators[group].load(moved, layers.start, layers.stop)
        except RuntimeError as error:
            return Failed(CopyError(str(error)))
        num_bytes = bytes_moved(self._geometry, moved, layers, group)
        self._measured.append((num_bytes, time.perf_counter() - began))
        return Over()

    def save(self, pages: Pages, layers: range) -> StreamEvent:
        left_out = self._pages.save(pages, layers.start, layers.stop)
        return Failed(DoesNotFitError(frozenset(left_out))) if left_out else Over()

    def gather(self, pages: Pages, rows: Rows, layers: range) -> None:
        raise AssertionError("there is no write buffer")

    def drain(self, pages: Pages, rows: Rows, layers: range) -> StreamEvent:
        raise AssertionError("there is no write buffer")

    def model_waits(self, event: StreamEvent) -> None:
        event.done()

    def wait(self, event: StreamEvent) -> None:
        event.done()

    def waited_s(self) -> float:
        return 0.0

    def measured(self) -> list[tuple[int, float]]:
        measured, self._measured = self._measured, []
        return measured

    def close(self) -> None:
        """Nothing is in flight."""


class LoadsOnly:
    """The copies of a rank whose KV another rank stores (Geometry.replicas): its saves are over
    when they are begun. All else is the engine's.

    Args:
        num_rows: of the write buffers of ranks that save; this one has none.
    """

    def __init__(self, engine: CopyEngine, num_rows: int) -> None:
        self._engine = engine
        self.overlaps = engine.overlaps
        self.num_rows = num_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def mark(self) -> StreamEvent:
        return self._engine.mark()

    def load(self, pages: Pages, layers: range, after: StreamEvent | None = None) -> StreamEvent:
        return self._engine.load(pages, layers, after)

    def move(self, moved: Moved, layers: range | None = None, *, group: int = 0) -> StreamEvent:
        return self._engine.move(moved, layers, group=group)

    def save(self, pages: Pages, layers: range) -> StreamEvent:
        return Over()

    def gather(self, pages: Pages, rows: Rows, layers: range) -> None:
        """Nothing leaves."""

    def drain(self, pages: Pages, rows: Rows, layers: range) -> StreamEvent:
        return Over()

    def model_waits(self, event: StreamEvent) -> None:
        if not isinstance(event, Over):
            self._engine.model_waits(event)

    def wait(self, event: StreamEvent) -> None:
        if not isinstance(event, Over):
            self._engine.wait(event)

    def waited_s(self) -> float:
        return self._engine.waited_s()

    def measured(self) -> list[tuple[int, float]]:
        return self._engine.measured()

    def close(self) -> None:
        self._engine.close()


class KindCopier:
    """Native copiers of several kinds of pages as one of all; of its methods what theirs say."""

    def __init__(
        self, kinds: Sequence[Kind], copiers: Sequence[PageCopier | EncodedCopier]
    ) -> None:
        self._copiers = list(zip(kinds, copiers, strict=True))

    def load(self, copies: Pages, first_layer: int, stop_layer: int) -> None:
        for copier, layers in self._parts(first_layer, stop_layer):
            copier.load(copies, layers.start, layers.stop)

    def save(self, copies: Pages, first_layer: int, stop_layer: int) -> list[int]:
        left_out: list[int] = []
        for copier, layers in self._parts(first_layer, stop_layer):
            left_out += copier.save(copies, layers.start, layers.stop) or []
        return left_out

    def _parts(self, first: int, stop: int) -> list[tuple[PageCopier | EncodedCopier, range]]:
        check_layers(range(first, stop), self._copiers[-1][0].stop)
        found = [(copier, kind.within(range(first, stop))) for kind, copier in self._copiers]
        return [(copier, layers) for copier, layers in found if layers]


def check_layers(layers: range, num_layers: int) -> None:
    """Raise IndexError if one of them does not exist."""
    if not 0 <= layers.start <= layers.stop <= num_layers:
        raise IndexError(f"{layers} of {num_layers} layers: one of them does not exist")


def bytes_of(geometry: Geometry, layers: range) -> int:
    """Bytes that one block's pages in these layers have in a slot."""
    return sum(geometry.cells[layers.start : layers.stop])


def bytes_moved(geometry: Geometry, moved: Moved, layers: range, group: int) -> int:
    """Bytes of these tokens' KV in these layers of their group."""
    num_bytes = int(moved[:, 2].sum()) * bytes_of(geometry, layers)
    return num_bytes // geometry.groups[group].block_tokens


def page_copier(
    slots_base: int, num_slots: int, rank: int, geometry: Geometry, layouts: Sequence[LayerLayout]
) -> PageCopier | EncodedCopier | KindCopier:
    """The native copier of one rank's pages; of its arguments what CpuEngine says."""
    kinds = kinds_of(layouts)
    numbers = page_numbers(slots_base, num_slots, rank, geometry, layouts)
    shapes = [PageShape(**of_kind) for of_kind in numbers]
    copiers: Sequence[PageCopier | EncodedCopier]
    if geometry.is_encoded:
        cells = [geometry.cells[kind.first] for kind in kinds]
        copiers = [EncodedCopier(*of_kind) for of_kind in zip(shapes, cells, strict=True)]
    else:
        copiers = [PageCopier(shape) for shape in shapes]
    return copiers[0] if len(copiers) == 1 else KindCopier(kinds, copiers)


def page_rotator(
    slots_base: int,
    num_slots: int,
    rank: int,
    geometry: Geometry,
    layouts: Sequence[LayerLayout],
    group: int,
    rotation: Rotation,
) -> PageRotator | DecodedMoves:
    """The native copier of single tokens of one group, of pages of one kind; of its arguments what
    CpuEngine says."""
    block_tokens = geometry.groups[group].block_tokens
    turned = RotationShape(**rotation_numbers(rotation, block_tokens))
    if not geometry.is_encoded:
        (numbers,) = page_numbers(slots_base, num_slots, rank, geometry, layouts)
        return PageRotator(PageShape(**numbers), turned)
    chunk = DecodedChunk(geometry)
    decoder = page_copier(slots_base, num_slots, rank, geometry, chunk.layouts())
    (numbers,) = page_numbers(chunk.address, 1, 0, chunk.geometry, layouts)
    return DecodedMoves(chunk, decoder, PageRotator(PageShape(**numbers), turned), block_tokens)


def rotation_numbers(rotation: Rotation, block_tokens: int) -> dict[str, Any]:
    """Arguments of a native RotationShape."""
    return {
        "key": rotation.content.key.numbers(),
        "value": rotation.content.value.numbers(),
        "num_heads": rotation.num_heads,
        "head_dim": rotation.head_dim,
        "block_tokens": block_tokens,
        "dtype": rotation.dtype,
        "is_neox": rotation.rope.is_neox,
        "theta": rotation.rope.theta.tolist(),
    }


def page_numbers(
    slots_base: int, num_slots: int, rank: int, geometry: Geometry, layouts: Sequence[LayerLayout]
) -> list[dict[str, Any]]:
    """Arguments of a native PageShape for each kind of pages, in the order of kinds_of().

    To the native code the regions of a kind are all that there are. Where slots keep pages
    encoded, `layer_bytes` are those of the pages as the tensors have them.
    """
    assert tuple(layout.page_bytes for layout in layouts) == geometry.regions
    assert len({layout.num_blocks for layout in layouts}) == 1
    part = slots_base + geometry.part_at(rank)
    return [
        {
            "slots_base": part + geometry.region_at(kind.first),
            "num_slots": num_slots,
            "slot_bytes": geometry.slot_bytes,
            "layer_bytes": geometry.blocks_per_chunk * kind.page_bytes,
            "page_bytes": kind.page_bytes,
            "layer_bases": [layout.base for layout in kind.layouts],
            "num_blocks": kind.layouts[0].num_blocks,
            "block_stride": kind.layouts[0].block_stride,
            "run_offsets": list(kind.layouts[0].run_offsets),
            "run_bytes": kind.layouts[0].run_bytes,
        }
        for kind in kinds_of(layouts)
    ]
