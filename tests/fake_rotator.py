# SPDX-License-Identifier: Apache-2.0
"""What stands in for the native PageRotator: moves of tokens on the streams of tests/fake_cuda.py.

A move is as many pieces as it has runs and layers, and its table is read when they are carried out.
Its arithmetic is its own, in float64.
"""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from tests.fake_cuda import FakeGpu

Array = npt.NDArray[np.int64]


class MoveTable:
    """The runs, as they were given. The native one has other numbers in it."""

    def __init__(self, moved: Array) -> None:
        self.words = np.concatenate((moved.ravel(), np.zeros(moved.size % 2, np.int64)))
        self.num_runs = len(moved)
        self.num_tokens = int(moved[:, 2].sum())


class PageRotator:
    """Args: slots_offset: how far the device's addresses of the slots are from the host's."""

    def __init__(
        self, gpu: FakeGpu, slots_offset: int, pages: SimpleNamespace, rotation: SimpleNamespace,
        *, kernels: object, arrays: int,
    ) -> None:  # fmt: skip
        self.gpu = gpu
        s = self.shape = SimpleNamespace(**vars(pages), **vars(rotation))
        self.slots_base = s.slots_base - slots_offset
        self.damage = False
        """What it moves from here on is wrong."""
        at = (ctypes.c_int64 * len(s.layer_bases)).from_address(arrays)
        assert list(at) == s.layer_bases
        self.dtype = getattr(torch, s.dtype)
        self.bits = np.int32 if s.dtype == "float32" else np.int16
        self.item = np.dtype(self.bits).itemsize
        if 2 * s.num_heads * s.head_dim * s.block_tokens * self.item != s.page_bytes:
            raise ValueError("K and V of the heads, tokens and dims are not a page")
        self.key, self.value = (self._places(side) for side in (s.key, s.value))

    def check(self, moved: Array, first_layer: int, stop_layer: int) -> None:
        s = self.shape
        tokens = s.block_tokens
        slot, first, count, block, within, _ = moved.T
        in_chunk = s.layer_bytes // s.page_bytes * tokens
        good = bool(
            (
                (slot >= 0) & (slot < s.num_slots) & (count > 0) & (first >= 0)
                & (first + count <= in_chunk) & (block >= 0) & (block < s.num_blocks)
                & (within >= 0) & (within + count <= tokens)
            ).all()
        )  # fmt: skip
        if not (good and 0 <= first_layer <= stop_layer <= len(s.layer_bases)):
            raise IndexError("one of them does not exist")
        places = [
            (b, w + i)
            for b, w, n in zip(block.tolist(), within.tolist(), count.tolist(), strict=True)
            for i in range(n)
        ]
        if len(set(places)) != len(places):
            raise IndexError("a token is named twice")

    def table(self, moved: Array) -> MoveTable:
        self.check(moved, 0, 0)
        return MoveTable(moved)

    def load(
        self, table: MoveTable, first_layer: int, stop_layer: int,
        table_device: int, table_host: int, thread_blocks: int, stream: int,
    ) -> None:  # fmt: skip
        self.gpu.fail_if_told("move")
        assert thread_blocks > 0
        assert table_device % 16 == 0
        self.gpu.moved.append(("MOVE", "kernel"))
        queue, count = self.gpu.streams[stream - 1], table.words.size
        if table_host:
            self.gpu.uploads += 1
            queue.run(lambda: ctypes.memmove(table_device, table_host, 8 * count))

        def run_of_table(i: int, layer: int) -> None:
            words = np.array((ctypes.c_int64 * count).from_address(table_device))
            run = words[6 * i : 6 * i + 6].copy()
            self.check(run[None], layer, layer + 1)  # else a table was read that was not there
            self._move(run, layer)

        for layer in range(first_layer, stop_layer):
            for i in range(table.num_runs):
                queue.run(partial(run_of_table, i, layer))

    def _move(self, run: Array, layer: int) -> None:
        s = self.shape
        slot, first, count, block, within, shift = (int(number) for number in run)
        target = s.layer_bases[layer] + block * s.block_stride
        for i in range(count):
            page, token = divmod(first + i, s.block_tokens)
            source = self.slots_base + slot * s.slot_bytes + layer * s.layer_bytes
            source += page * s.page_bytes
            key = self._read(source, self.key[token])
            self._write(target, self.key[within + i], self._turned(key, shift))
            self._write(target, self.value[within + i], self._read(source, self.value[token]))

    def _turned(self, key: npt.NDArray[Any], shift: int) -> npt.NDArray[Any]:
        """[heads, dims] of bits."""
        pairs = len(self.shape.theta)
        if shift == 0 or not pairs:
            return key
        x = torch.from_numpy(key[:, : 2 * pairs].copy()).view(self.dtype).double().numpy()
        one, two = (x[:, :pairs], x[:, pairs:])
        if not self.shape.is_neox:
            one, two = x[:, ::2], x[:, 1::2]
        y = (one + 1j * two) * np.exp(1j * shift * np.array(self.shape.theta))
        both = np.concatenate((y.real, y.imag), axis=1)
        if not self.shape.is_neox:
            both = np.stack((y.real, y.imag), axis=2).reshape(both.shape)
        if self.damage:
            both[0, 0] += 1.0
        turned = key.copy()
        rounded = torch.from_numpy(both).to(self.dtype)
        turned[:, : 2 * pairs] = rounded.view(getattr(torch, np.dtype(self.bits).name)).numpy()
        return turned

    def _places(self, numbers: tuple[int, ...]) -> Array:
        """[tokens, heads, dims]: offsets in a page, in elements."""
        base, head_step, group, outer, inner, dim_group, dim_outer, dim_inner = numbers
        s = self.shape
        token, head, dim = np.ogrid[: s.block_tokens, : s.num_heads, : s.head_dim]
        in_token = token // group * outer + token % group * inner
        in_dim = dim // dim_group * dim_outer + dim % dim_group * dim_inner
        return np.asarray(base + head * head_step + in_token + in_dim, np.int64)

    def _read(self, page: int, places: Array) -> npt.NDArray[Any]:
        return self._memory(page, self.shape.page_bytes)[places]

    def _write(self, block: int, places: Array, bits: npt.NDArray[Any]) -> None:
        s = self.shape
        runs, within = np.divmod(places * self.item, s.run_bytes)
        memory = self._memory(block, max(s.run_offsets) + s.run_bytes)
        memory[(np.array(s.run_offsets)[runs] + within) // self.item] = bits

    def _memory(self, address: int, num_bytes: int) -> npt.NDArray[Any]:
        owner = (ctypes.c_uint8 * num_bytes).from_address(address)
        return np.ctypeslib.as_array(owner).view(self.bits)
