# SPDX-License-Identifier: Apache-2.0
"""Copies one block, all layers, by every way that CudaEngine has, and looks at the bytes; and moves
its tokens to other positions.

A build for another GPU, a driver that does not see the pool, or a layout that is not understood is
found here and not in an answer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnstore_vllm.errors import CopyError, UnsupportedError
from attnstore_vllm.transfer.cuda_methods import Method, only
from attnstore_vllm.transfer.engine import Pages, Rotation
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
    in_slot = _last_block(slots_base, num_slots, rank, g)
    before_rules = engine.rules
    try:
        engine.rules = only(Method.DMA)
        engine.wait(engine.save(pages, range(g.num_layers)))
        was = _copied(in_slot)
        for method in Method:
            if method is Method.BUFFER and not engine.read_buffer.size.num_spans:
                continue
            engine.rules = only(method)
            _check_method(engine, pages, in_slot, method)
        _fill(in_slot, was)
        engine.wait(engine.load(pages, range(g.num_layers)))
        _fill(in_slot, [np.zeros_like(page) for page in in_slot])
    except CopyError as error:
        raise UnsupportedError(
            f"this GPU cannot copy between its memory and the pool: {error}; the server runs "
            "without the store. `make gpu-check` says more"
        ) from error
    finally:
        engine.rules = before_rules


def _check_method(
    engine: CudaEngine, pages: Pages, in_slot: Sequence[Bytes], method: Method
) -> None:
    layers = range(len(in_slot))
    random = np.random.default_rng(len(method.value))
    wanted = [random.integers(0, 256, page.shape, np.uint8) for page in in_slot]
    _fill(in_slot, wanted)
    for layer in layers:  # as the forward pass has it
        engine.wait(engine.load(pages, range(layer, layer + 1)))
    for is_buffered in (False, True) if engine.num_rows else (False,):
        _fill(in_slot, [~page for page in wanted])
        if is_buffered:
            rows = np.array([engine.num_rows - 1], np.int64)
            engine.gather(pages, rows, layers)
            engine.wait(engine.drain(pages, rows, layers))
        else:
            engine.wait(engine.save(pages, layers))
        wrong = [layer for layer in layers if not np.array_equal(in_slot[layer], wanted[layer])]
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
    in_slot = _last_block(slots_base, num_slots, rank, g)
    layers = range(g.num_layers)
    # All tokens but the first go one place down, if there are several.
    count = max(1, block_tokens - 1)
    first = block_tokens - count
    last = g.blocks_per_chunk * block_tokens
    run = [num_slots - 1, last - count, count, num_blocks - 1, 0, SHIFT]
    before = _some_numbers(rotation.dtype, (g.num_layers, g.page_bytes))
    try:
        engine.wait(engine.save(pages, layers))
        was = _copied(in_slot)
        _fill(in_slot, list(before))
        engine.wait(engine.load(pages, layers))
        moved = engine.move(np.array([run], np.int64), group=group)
        why_not = None
        try:
            engine.wait(moved)
        except CopyError as error:
            why_not = f"this GPU cannot move KV to other positions: {error}"
        engine.wait(engine.save(pages, layers))
        found = _copied(in_slot)
        _fill(in_slot, was)
        engine.wait(engine.load(pages, layers))
        _fill(in_slot, [np.zeros_like(page) for page in in_slot])
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


def _last_block(slots_base: int, num_slots: int, rank: int, geometry: Geometry) -> list[Bytes]:
    """By layer, the page of the last block of the last slot, in place."""
    g = geometry
    part = slots_base + (num_slots - 1) * g.slot_bytes + g.part_at(rank)
    found = []
    for layer, page_bytes in enumerate(g.regions):
        at = part + g.region_at(layer) + (g.blocks_per_chunk - 1) * page_bytes
        found.append(np.ctypeslib.as_array((ctypes.c_uint8 * page_bytes).from_address(at)))
    return found


def _copied(pages: Sequence[Bytes]) -> list[Bytes]:
    return [page.copy() for page in pages]


def _fill(pages: Sequence[Bytes], content: Sequence[Bytes]) -> None:
    for page, new in zip(pages, content, strict=True):
        page[:] = new
