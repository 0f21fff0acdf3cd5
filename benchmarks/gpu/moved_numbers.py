# SPDX-License-Identifier: Apache-2.0
"""Moves of tokens to other positions, in the layouts that vLLM has on GPUs: every number of every
block, those that nothing was moved to as well, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.engine import Rotation
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.page_content import ContentMap, Write, probe
from attnstore_vllm.transfer.plan import MovedRun, moved_table
from attnstore_vllm.transfer.rope import Rope
from benchmarks.gpu.rig import Row

LAYERS, BLOCKS, WITHIN, TOKENS = 2, 12, 4, 16
SLOTS = 3 + BLOCKS // WITHIN
"""The last ones are for looking at the blocks."""
SHIFTS = (0, 1, -7, -1000, 131_071)
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layout:
    """[blocks, ...] of `sizes(blocks, heads, dim)`, which lie in memory in `order`."""

    sizes: Callable[[int, int, int], tuple[int, ...]]
    order: tuple[int, ...]
    write: Write

    def tensor(self, blocks: int, heads: int, dim: int, **options: Any) -> torch.Tensor:
        sizes = self.sizes(blocks, heads, dim)
        stored = torch.zeros([sizes[axis] for axis in self.order], **options)
        return stored.permute([self.order.index(axis) for axis in range(len(sizes))])


def _write_together(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
    cache[0] = torch.cat((key, value), dim=2).transpose(0, 1)


def _write_apart(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
    cache[0, 0], cache[0, 1] = key, value


def _together(order: tuple[int, ...]) -> Layout:
    return Layout(lambda b, h, d: (b, h, TOKENS, 2 * d), order, _write_together)


LAYOUTS = {
    "heads before tokens": _together((0, 1, 2, 3)),
    "tokens before heads": _together((0, 2, 1, 3)),
    "heads before blocks": _together((1, 0, 2, 3)),
    "keys apart from values": Layout(
        lambda b, h, d: (b, 2, TOKENS, h, d), (1, 0, 2, 3, 4), _write_apart
    ),
}
SIZES = ((8, 128, 64), (2, 64, 16), (3, 80, 20), (1, 96, 7))
"""Heads, dims, pairs that turn."""
TYPES = (torch.bfloat16, torch.float16, torch.float32)


class Pages:
    """Blocks on the device, and what they should hold: [layer, block, elements] of bits."""

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        size: tuple[int, int, int],
        is_neox: bool,
        device: torch.device,
        seed: int,
    ) -> None:
        self._random = np.random.default_rng(seed)
        heads, dim, pairs = size
        rope = Rope(10_000.0 ** (-np.arange(pairs) / pairs), 2 * pairs, is_neox)
        content: ContentMap = probe(
            layout.write,
            layout.tensor(1, heads, dim, dtype=dtype),
            1,
            block_tokens=TOKENS,
            num_heads=heads,
            head_dim=dim,
        )
        self.dtype, self.dim, self.rope = dtype, dim, rope
        self.key = content.key.places(TOKENS, heads, dim)
        self.value = content.value.places(TOKENS, heads, dim)
        options = {"dtype": dtype, "device": device}
        self._kv = [layout.tensor(BLOCKS, heads, dim, **options) for _ in range(LAYERS)]
        layouts = [describe(f"layer {i}", kv, BLOCKS) for i, kv in enumerate(self._kv)]
        geometry = Geometry.uniform(1, LAYERS, TOKENS, layouts[0].page_bytes, WITHIN * TOKENS)
        self.slots = np.zeros((SLOTS, geometry.slot_bytes), np.uint8)
        name = str(dtype).removeprefix("torch.")
        self.engine = CudaEngine(
            self.slots.ctypes.data,
            SLOTS,
            0,
            geometry,
            layouts,
            device,
            0,
            rotations=[Rotation(rope, content, heads, dim, name)],
        )
        self.bits = np.int32 if dtype == torch.float32 else np.int16
        used = LAYERS * geometry.blocks_per_chunk * geometry.page_bytes
        # [slot, layer, block of the chunk, element]
        self.stored = self.slots.view(self.bits)[:, : used // np.dtype(self.bits).itemsize].reshape(
            SLOTS, LAYERS, WITHIN, -1
        )
        assert np.shares_memory(self.stored, self.slots)
        numbers = torch.from_numpy(self._random.normal(size=self.stored.shape)).to(dtype)
        self.stored[:] = numbers.view(getattr(torch, np.dtype(self.bits).name)).numpy()
        self._seen = np.array(
            [[SLOTS - BLOCKS // WITHIN + i // WITHIN, i % WITHIN, i] for i in range(BLOCKS)]
        )
        self.engine.wait(self.engine.load(self._seen, range(LAYERS)))
        self.wanted = self._look()

    def runs(self) -> list[MovedRun]:
        """Random ones, of whole blocks or parts of them."""
        found = []
        for block in self._random.permutation(BLOCKS)[: BLOCKS // 2]:
            at = int(self._random.integers(TOKENS)) if self._random.random() < 0.5 else 0
            while at < TOKENS:
                left = TOKENS - at
                count = (
                    left if self._random.random() < 0.5 else int(self._random.integers(1, left + 1))
                )
                slot = int(self._random.integers(SLOTS - BLOCKS // WITHIN))
                first = int(self._random.integers(WITHIN * TOKENS - count + 1))
                shift = int(self._random.choice(SHIFTS))
                found.append(MovedRun(slot, first, count, int(block), at, shift))
                at += count + int(self._random.integers(3))
        return found

    def is_right(self, runs: list[MovedRun]) -> bool:
        """Moves them; of what turns the rounded numbers that were found are right from then on."""
        self.engine.wait(self.engine.move(moved_table(runs), range(LAYERS)))
        found = self._look()
        is_right = True
        for layer, run in product(range(LAYERS), runs):
            for i in range(run.num_tokens):
                page, token = divmod(run.first + i, TOKENS)
                source = self.stored[run.slot, layer, page]
                target = self.wanted[layer, run.block_id]
                to = run.within + i
                target[self.value[to]] = source[self.value[token]]
                target[self.key[to]] = source[self.key[token]]
                turned = found[layer, run.block_id][self.key[to]]
                if run.shift:
                    is_right &= self._is_turned(source[self.key[token]], turned, run.shift)
                    places = self.key[to][:, : self.rope.rotary_dim]
                    target[places] = turned[:, : self.rope.rotary_dim]
        is_right &= np.array_equal(found, self.wanted)
        self.wanted = found
        return is_right

    def _is_turned(self, before: npt.NDArray[Any], after: npt.NDArray[Any], shift: int) -> bool:
        (one, two), found = self._pairs(before), self._pairs(after)
        angle, norm = shift * self.rope.theta, np.hypot(one, two)
        goals = (
            one * np.cos(angle) - two * np.sin(angle),
            two * np.cos(angle) + one * np.sin(angle),
        )
        # Half a unit of what is stored, at most that of the norm; and what float32 rounds.
        info = torch.finfo(self.dtype)
        off = 0.501 * info.eps * norm + 2.0**-22 * norm + info.tiny * info.eps
        return all(
            bool((np.abs(got - goal) <= off).all()) for got, goal in zip(found, goals, strict=True)
        )

    def _pairs(self, bits: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
        """First and second dims of the pairs of [heads, dims] of bits."""
        turning = bits[:, : self.rope.rotary_dim].copy()
        x = torch.from_numpy(turning).view(self.dtype).double().numpy()
        half = self.rope.rotary_dim // 2
        return (x[:, :half], x[:, half:]) if self.rope.is_neox else (x[:, ::2], x[:, 1::2])

    def _look(self) -> npt.NDArray[Any]:
        """All blocks as they are on the device: [layer, block, elements] of bits."""
        self.engine.wait(self.engine.save(self._seen, range(LAYERS)))
        chunks = self.stored[SLOTS - BLOCKS // WITHIN :]
        return chunks.transpose(1, 0, 2, 3).reshape(LAYERS, BLOCKS, -1).copy()


def measure(device: torch.device, rounds: int) -> list[Row]:
    wrong: list[str] = []
    moves = tokens = 0
    cases = product(LAYOUTS, TYPES, (True, False))
    for (seed, (name, dtype, is_neox)), number in product(enumerate(cases), range(rounds)):
        size = SIZES[(seed // 2 + number) % len(SIZES)]
        pages = Pages(LAYOUTS[name], dtype, size, is_neox, device, seed)
        case = f"{name}, {dtype}, {'NeoX' if is_neox else 'GPT-J'}, {size}"
        moves += 1
        if pages.engine.why_not_moved is not None:
            wrong.append(f"{case}: {pages.engine.why_not_moved}")
        else:
            runs = pages.runs()
            tokens += LAYERS * sum(run.num_tokens for run in runs)
            if not pages.is_right(runs):
                wrong.append(case)
        pages.engine.close()
    detail = f"{moves} moves of {tokens} tokens in {len(LAYOUTS)} layouts"
    if wrong:
        detail += f"; WRONG: {wrong[0]}"
    what = "moves whose every number is as float64 has it, parts of 1"
    right = 1 - len(wrong) / moves
    return [Row(what, "all", right, 1.0, detail=detail, is_wrong=bool(wrong))]
