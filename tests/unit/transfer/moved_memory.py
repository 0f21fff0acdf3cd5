# SPDX-License-Identifier: Apache-2.0
"""KV tensors of several layouts, a pool, and the native rotator over them; for tests.

Where K and V of a block are is said here by views of torch, independently of content.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.page_content import ContentMap, probe
from attnstore_vllm.transfer.plan import MovedRun, moved_table
from tests.native_shapes import rotator

Blocks = torch.Tensor
View = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""K and V of one block (a slice of a layer's tensor), as [heads, t1, t0, d1, d0] views."""

LAYERS, BLOCKS, SLOTS, CHUNK_BLOCKS = 2, 7, 3, 2


@dataclass(frozen=True)
class Layout:
    name: str
    order: tuple[int, ...]
    """Physical order of the logical [layer, block, head, token, content]; of `apart`
    [layer, block, K or V, token, head, dim]."""
    view: View
    is_apart: bool = False

    def tensor(
        self, layers: int, blocks: int, heads: int, tokens: int, dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[layers, blocks, ...] of zeros with the layout's strides."""
        shape = [layers, blocks, heads, tokens, 2 * dim]
        if self.is_apart:
            shape = [layers, blocks, 2, tokens, heads, dim]
        stored = torch.zeros([shape[axis] for axis in self.order], dtype=dtype)
        return stored.permute([self.order.index(axis) for axis in range(len(shape))])


def _plain(block: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    split = block.unflatten(1, (1, -1))
    return split[..., :dim].unsqueeze(3), split[..., dim:].unsqueeze(3)


def _apart(block: torch.Tensor, _dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    by_head = block.transpose(1, 2)[:, :, None, :, None]
    return by_head[0], by_head[1]


def _vec(block: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens = block.shape[:2]
    key, value = block.reshape(heads, 2, -1).unbind(1)
    key = key.view(heads, 1, dim, tokens).transpose(2, 3).unsqueeze(3)
    return key, value.view(heads, 1, tokens, 1, dim)


def _amx(block: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens = block.shape[:2]
    key, value = block.reshape(heads, 2, -1).unbind(1)
    key = key.view(heads, tokens // 16, dim // 2, 16, 2).permute(0, 1, 3, 2, 4)
    return key, value.view(heads, dim // 16, tokens // 2, 16, 2).permute(0, 2, 4, 1, 3)


def _odd(block: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 4 tokens by 8 dims, as no kernel has them."""
    heads, tokens = block.shape[:2]
    both = block.reshape(heads, tokens // 4, 2 * dim // 8, 4, 8).permute(0, 1, 3, 2, 4)
    return both[..., : dim // 8, :], both[..., dim // 8 :, :]


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("LBHNC", (0, 1, 2, 3, 4), _plain),
        Layout("LBNHC", (0, 1, 3, 2, 4), _plain),
        Layout("LHBNC", (0, 2, 1, 3, 4), _plain),
        Layout("BLHNC", (1, 0, 2, 3, 4), _plain),
        Layout("BLNHC", (1, 0, 3, 2, 4), _plain),
        Layout("BHLNC", (1, 2, 0, 3, 4), _plain),
        Layout("tokens outside", (3, 0, 1, 2, 4), _plain),  # a run is a token's
        Layout("K and V apart", (0, 2, 1, 3, 4, 5), _apart, is_apart=True),
        Layout("vec", (0, 1, 2, 3, 4), _vec),
        Layout("AMX", (0, 1, 2, 3, 4), _amx),
        Layout("odd groups", (0, 1, 2, 3, 4), _odd),
    )
}


def put(view: torch.Tensor, plain: torch.Tensor) -> None:
    """Write [tokens, heads, dim] through a view."""
    heads, t1, t0, d1, d0 = view.shape
    view.copy_(plain.transpose(0, 1).reshape(heads, t1, t0, d1, d0))


def get(view: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] of a view."""
    return view.flatten(3, 4).flatten(1, 2).transpose(0, 1)


def content_map(
    layout: Layout, tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> ContentMap:
    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        for view, plain in zip(layout.view(cache[0], dim), (key, value), strict=True):
            put(view, plain)

    cache = layout.tensor(1, 2, heads, tokens, dim, dtype)[0]
    return probe(write, cache, 2, block_tokens=tokens, num_heads=heads, head_dim=dim)


class Loads(Protocol):
    """What moves tokens: the native rotator, or something like it."""

    def load(self, moved: npt.NDArray[np.int64], first_layer: int, stop_layer: int) -> None: ...


class MovedMemory:
    """Slots and blocks full of random numbers.

    Args:
        theta: radians a position; twice as many dims turn.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        *,
        theta: Sequence[float],
        is_neox: bool = True,
        block_tokens: int = 16,
        heads: int = 2,
        dim: int = 32,
        seed: int = 0,
    ) -> None:
        self.layout, self.block_tokens, self.heads, self.dim = layout, block_tokens, heads, dim
        self.theta, self.is_neox = np.asarray(theta, np.float64), is_neox
        self.generator = torch.Generator().manual_seed(seed)
        shape = (LAYERS, BLOCKS, heads, block_tokens, dim, dtype)
        self.kv = layout.tensor(*shape)
        # What a slot holds: so many blocks of tensors of the same layout, run after run.
        self.stored = layout.tensor(LAYERS, SLOTS * CHUNK_BLOCKS, *shape[2:])
        for kv in (self.kv, self.stored):
            kv.copy_(torch.randn(kv.shape, generator=self.generator))
        layers = [describe("layer", kv, BLOCKS) for kv in self.kv]
        page_bytes = layers[0].page_bytes
        self.slots = self._fill_slots(page_bytes)
        content = self.content = content_map(layout, block_tokens, heads, dim, dtype)
        self.arguments = {
            "slots_base": self.slots.ctypes.data,
            "num_slots": SLOTS,
            "slot_bytes": self.slots.shape[1],
            "layer_bytes": CHUNK_BLOCKS * page_bytes,
            "page_bytes": page_bytes,
            "layer_bases": [layer.base for layer in layers],
            "num_blocks": BLOCKS,
            "block_stride": layers[0].block_stride,
            "run_offsets": list(layers[0].run_offsets),
            "run_bytes": layers[0].run_bytes,
            "key": content.key.numbers(),
            "value": content.value.numbers(),
            "num_heads": heads,
            "head_dim": dim,
            "block_tokens": block_tokens,
            "dtype": str(dtype).removeprefix("torch."),
            "is_neox": is_neox,
            "theta": list(theta),
        }
        self.native: Loads = rotator(self.arguments)

    def _fill_slots(self, page_bytes: int) -> npt.NDArray[np.uint8]:
        slots = np.zeros((SLOTS, LAYERS * CHUNK_BLOCKS * page_bytes + 64), np.uint8)
        for layer, kv in enumerate(self.stored):
            layout = describe("stored", kv, SLOTS * CHUNK_BLOCKS)
            item = kv.element_size()
            for page in range(SLOTS * CHUNK_BLOCKS):
                start = (page * layout.block_stride) // item + kv.storage_offset()
                runs = [
                    kv.as_strided((layout.run_bytes // item,), (1,), start + at // item)
                    for at in layout.run_offsets
                ]
                raw = torch.cat(runs).view(torch.uint8).numpy()
                at = (layer * CHUNK_BLOCKS + page % CHUNK_BLOCKS) * page_bytes
                slots[page // CHUNK_BLOCKS, at : at + page_bytes] = raw
        return slots

    def plain(self, kv: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all blocks: [blocks, tokens, heads, dim] both; copies."""
        sides = [[get(view) for view in self.layout.view(block, self.dim)] for block in kv[layer]]
        key, value = zip(*sides, strict=True)
        return torch.stack(key), torch.stack(value)

    def some_runs(self, rng: np.random.Generator, shifts: Sequence[int]) -> list[MovedRun]:
        """Random ones: neighbours in a block from anywhere, with gaps or without."""
        runs = []
        blocks = rng.permutation(BLOCKS)[: int(rng.integers(1, BLOCKS))]
        for block in blocks:
            at = int(rng.integers(self.block_tokens)) if rng.random() < 0.5 else 0
            while at < self.block_tokens:
                left = self.block_tokens - at
                count = left if rng.random() < 0.4 else int(rng.integers(1, left + 1))
                slot = int(rng.integers(SLOTS))
                first = int(rng.integers(CHUNK_BLOCKS * self.block_tokens - count + 1))
                shift = int(rng.choice(np.array(shifts)))
                runs.append(MovedRun(slot, first, count, int(block), at, shift))
                at += count + (int(rng.integers(4)) if rng.random() < 0.3 else 0)
        return [runs[i] for i in rng.permutation(len(runs))]

    def check(self, runs: Sequence[MovedRun], layers: range = range(LAYERS)) -> None:
        """Move natively; everything must be as float64 has it, also what is not to be moved."""
        before = [self.plain(self.kv, layer) for layer in range(LAYERS)]
        self.native.load(moved_table(runs), layers.start, layers.stop)
        for layer in range(LAYERS):
            key, value = (side.to(torch.float64).numpy() for side in before[layer])
            allowed = np.zeros_like(key)
            if layer in layers:
                stored = [side.to(torch.float64).numpy() for side in self.plain(self.stored, layer)]
                # [slot, token, ...]
                keys, values = (side.reshape(SLOTS, -1, self.heads, self.dim) for side in stored)
                for run in runs:
                    source = slice(run.first, run.first + run.num_tokens)
                    target = slice(run.within, run.within + run.num_tokens)
                    turned, rounding = self.turned(keys[run.slot, source], run.shift)
                    key[run.block_id, target] = turned
                    allowed[run.block_id, target] = rounding
                    value[run.block_id, target] = values[run.slot, source]
            found_key, found_value = self.plain(self.kv, layer)
            assert np.array_equal(found_value.to(torch.float64).numpy(), value)
            off = np.abs(found_key.to(torch.float64).numpy() - key)
            assert (off <= allowed).all(), np.argwhere(off > allowed)[:4]

    def turned(
        self, key: npt.NDArray[np.float64], shift: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """[tokens, heads, dim] both: K rotated in float64, and how far off a rounding may be."""
        if shift == 0:
            return key, np.zeros_like(key)
        turned, rounding = key.copy(), np.zeros_like(key)
        pairs = len(self.theta)
        for pair in range(pairs):
            one, two = (pair, pair + pairs) if self.is_neox else (2 * pair, 2 * pair + 1)
            x = key[..., one] + 1j * key[..., two]
            y = x * np.exp(1j * shift * self.theta[pair])
            turned[..., one], turned[..., two] = y.real, y.imag
            for dim in (one, two):
                half = ulp(turned[..., dim], self.kv.dtype) / 2
                rounding[..., dim] = half * (1 + 2.0**-20) + 3 * 2.0**-24 * np.abs(x)
        return turned, rounding


def ulp(value: npt.NDArray[np.float64], dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """The distance of neighbours around these values."""
    info = torch.finfo(dtype)
    lowest = math.log2(info.tiny)
    exponent = np.floor(np.log2(np.maximum(np.abs(value), info.tiny)))
    # On the edge to the next power of two a value may be rounded up to it: that is half of its own.
    return np.exp2(np.maximum(exponent, lowest)) * info.eps
