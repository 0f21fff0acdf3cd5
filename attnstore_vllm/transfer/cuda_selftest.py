# SPDX-License-Identifier: Apache-2.0
"""Copies one block, all layers, by every way that CudaEngine has, and looks at the bytes; and moves
its tokens to other positions.

A build for another GPU, a driver that does not see the pool, or a layout that is not understood is
found here and not in an answer. So is a kernel that encodes or decodes otherwise than the
processor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnstore_vllm.errors import CopyError, UnsupportedError
from attnstore_vllm.transfer.cuda_methods import Method, only
from attnstore_vllm.transfer.encoded import DecodedChunk
from attnstore_vllm.transfer.engine import Pages, Rotation, page_copier
from attnstore_vllm.transfer.geometry import Geometry

if TYPE_CHECKING:
    from attnstore_vllm.transfer.cuda_engine import CudaEngine

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

SHIFT = -1000
"""Positions that K is moved by."""
EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-18}
"""How far off K may be, in parts of its pair's norm: roundings, twice over."""


def check_engine(
    engine: CudaEngine,
    geometry: Geometry,
    slots_base: int,
    num_slots: int,
    rank: int,
    num_blocks: int,
) -> None:
    """Use the last block of the last slot, and the last block and row. The block is given back as
    it was, the slot is zero after it. Raises UnsupportedError."""
    g = geometry
    pages = np.array([[num_slots - 1, g.blocks_per_chunk - 1, num_blocks - 1]], np.int64)
    in_slot = _LastBlock(g, slots_base, num_slots, rank)
    before_rules = engine.rules
    try:
        engine.rules = only(Method.DMA)
        engine.wait(engine.save(pages, range(g.num_layers)))
        was = in_slot.read()
        for method in Method:
            if method is Method.BUFFER and not engine.read_buffer.size.num_spans:
                continue
            engine.rules = only(method)
            _check_method(engine, pages, in_slot, method)
        in_slot.write(was)
        engine.wait(engine.load(pages, range(g.num_layers)))
        in_slot.clear()
    except CopyError as error:
        raise UnsupportedError(
            f"this GPU cannot copy between its memory and the pool: {error}; the server runs "
            "without the store. `make gpu-check` says more"
        ) from error
    finally:
        engine.rules = before_rules


def _check_method(engine: CudaEngine, pages: Pages, in_slot: _LastBlock, method: Method) -> None:
    layers = range(in_slot.num_layers)
    wanted = in_slot.some_content(len(method.value))
    in_slot.write(wanted)
    for layer in layers:  # as the forward pass has it
        engine.wait(engine.load(pages, range(layer, layer + 1)))
    for is_buffered in (False, True) if engine.num_rows else (False,):
        in_slot.write([~page for page in wanted])
        if is_buffered:
            rows = np.array([engine.num_rows - 1], np.int64)
            engine.gather(pages, rows, layers)
            engine.wait(engine.drain(pages, rows, layers))
        else:
            engine.wait(engine.save(pages, layers))
        found = in_slot.read()
        wrong = [layer for layer in layers if not np.array_equal(found[layer], wanted[layer])]
        if wrong:
            way = "through the write buffer" if is_buffered else "directly"
            raise UnsupportedError(
                f"a block that was loaded and saved {way} by {method.value} came back with other "
                f"bytes in the layers {wrong}; AttnStore cannot be used on this machine"
            )


def check_moves(
    engine: CudaEngine,
    rotation: Rotation,
    group: int,
    geometry: Geometry,
    slots_base: int,
    num_slots: int,
    rank: int,
    num_blocks: int,
) -> str | None:
    """Why KV of a group cannot be moved on this machine, None if it can. Uses what check_engine()
    uses, and leaves it alike. Raises UnsupportedError if nothing can be copied after it."""
    g, block_tokens = geometry, geometry.groups[group].block_tokens
    pages = np.array([[num_slots - 1, g.blocks_per_chunk - 1, num_blocks - 1]], np.int64)
    in_slot = _LastBlock(g, slots_base, num_slots, rank)
    layers = range(g.num_layers)
    # All tokens but the first go one place down, if there are several.
    count = max(1, block_tokens - 1)
    first = block_tokens - count
    last = g.blocks_per_chunk * block_tokens
    run = [num_slots - 1, last - count, count, num_blocks - 1, 0, SHIFT]
    before = _some_numbers(rotation.dtype, (g.num_layers, g.page_bytes))
    try:
        engine.wait(engine.save(pages, layers))
        was = in_slot.read()
        in_slot.write(list(before))
        engine.wait(engine.load(pages, layers))
        moved = engine.move(np.array([run], np.int64), group=group)
        why_not = None
        try:
            engine.wait(moved)
        except CopyError as error:
            why_not = f"this GPU cannot move KV to other positions: {error}"
        engine.wait(engine.save(pages, layers))
        found = in_slot.read()
        in_slot.write(was)
        engine.wait(engine.load(pages, layers))
        in_slot.clear()
    except CopyError as error:
        raise UnsupportedError(f"this GPU does not copy since KV was moved: {error}") from error
    if why_not is not None:
        return why_not
    wrong = [
        layer
        for layer in g.layers_of(group)
        if not _is_moved(rotation, block_tokens, first, before[layer], found[layer])
    ]
    if wrong:
        return f"KV that was moved to other positions on this GPU is wrong in the layers {wrong}"
    return None


def _is_moved(
    rotation: Rotation, block_tokens: int, first: int, before: Bytes, after: Bytes
) -> bool:
    """Whether tokens [first, block_tokens) of a page are moved to its beginning, and no others."""
    size = (block_tokens, rotation.num_heads, rotation.head_dim)
    keys, values = (side.places(*size) for side in (rotation.content.key, rotation.content.value))
    count = block_tokens - first
    item = np.uint32 if rotation.dtype == "float32" else np.uint16
    wanted, found = before.view(item).copy(), after.view(item)
    wanted[values[:count]] = before.view(item)[values[first:]]
    turned = rotation.rope.rotary_dim
    wanted[keys[:count, :, turned:]] = before.view(item)[keys[first:, :, turned:]]
    places = keys[:count, :, :turned]
    x = _as_float64(rotation.dtype, before.view(item)[keys[first:, :, :turned]])
    y = _as_float64(rotation.dtype, found[places])
    one, two = _pairs(rotation, x)
    norm, angle = np.hypot(one, two), SHIFT * rotation.rope.theta
    goals = (
        one * np.cos(angle) - two * np.sin(angle),
        two * np.cos(angle) + one * np.sin(angle),
    )
    for turned_dims, goal in zip(_pairs(rotation, y), goals, strict=True):
        if not bool((np.abs(turned_dims - goal) <= EPSILON[rotation.dtype] * norm).all()):
            return False
    wanted[places] = found[places]
    return np.array_equal(wanted, found)


def _pairs(rotation: Rotation, x: Floats) -> tuple[Floats, Floats]:
    """First and second dims of the pairs; [tokens, heads, dims that turn] is given."""
    if rotation.rope.is_neox:
        half = rotation.rope.rotary_dim // 2
        return x[..., :half], x[..., half:]
    return x[..., ::2], x[..., 1::2]


def _some_numbers(dtype: str, shape: tuple[int, ...]) -> Bytes:
    """Bytes of random numbers from -2 to 2, about."""
    random = np.random.default_rng(len(dtype))
    floats = random.uniform(-2, 2, (shape[0], shape[1] // (4 if dtype == "float32" else 2)))
    if dtype == "bfloat16":
        high = floats.astype(np.float32).view(np.uint32) >> 16
        return high.astype(np.uint16).view(np.uint8)
    return floats.astype(dtype).view(np.uint8)


def _as_float64(dtype: str, bits: npt.NDArray[Any]) -> Floats:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(dtype).astype(np.float64)


class _LastBlock:
    """The last block of the last slot, in the host's memory: its pages, layer by layer, decoded
    where slots keep them encoded."""

    def __init__(self, geometry: Geometry, slots_base: int, num_slots: int, rank: int) -> None:
        g, block = geometry, geometry.blocks_per_chunk - 1
        self.num_layers = g.num_layers
        self._regions = g.regions
        part = slots_base + (num_slots - 1) * g.slot_bytes + g.part_at(rank)
        self._cells = [
            _bytes_at(part + g.region_at(layer) + block * cell_bytes, cell_bytes)
            for layer, cell_bytes in enumerate(g.cells)
        ]
        self._codes = None
        self._pages = self._cells
        if g.is_encoded:
            chunk = DecodedChunk(g)
            self._pages = [
                _bytes_at(layout.base + block * layout.block_stride, layout.page_bytes)
                for layout in chunk.layouts()
            ]
            self._chunk = chunk
            self._codes = page_copier(slots_base, num_slots, rank, g, chunk.layouts())
            self._place = np.array([[num_slots - 1, block, block]], np.int64)

    def some_content(self, seed: int) -> list[Bytes]:
        """Random bytes; or numbers, of which cells have room for few exponents."""
        random = np.random.default_rng(seed)
        if self._codes is None:
            return [random.integers(0, 256, size, np.uint8) for size in self._regions]
        floats = [random.standard_normal(size // 2).astype(np.float32) for size in self._regions]
        return [
            (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for numbers in floats
        ]

    def write(self, content: Sequence[Bytes]) -> None:
        for page, new in zip(self._pages, content, strict=True):
            page[:] = new
        if self._codes is not None and self._codes.save(self._place, 0, self.num_layers):
            raise CopyError("what the block had does not fit in its cells")

    def read(self) -> list[Bytes]:
        """Copies. Raises CopyError where cells have not the bytes that a processor would write."""
        if self._codes is None:
            return [page.copy() for page in self._pages]
        was = [cell.copy() for cell in self._cells]
        try:
            self._codes.load(self._place, 0, self.num_layers)
        except RuntimeError as error:
            raise CopyError(f"a kernel has written a page that is none: {error}") from error
        found = [page.copy() for page in self._pages]
        self.write(found)
        if not all(map(np.array_equal, was, self._cells)):
            raise CopyError("a kernel has encoded a page otherwise than a processor does")
        return found

    def clear(self) -> None:
        for cell in self._cells:
            cell[:] = 0


def _bytes_at(address: int, num_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
