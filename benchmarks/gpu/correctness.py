# SPDX-License-Identifier: Apache-2.0
"""Every copy, by every method, in layouts of many kinds: every byte of HBM and of the pool, those
that nothing was copied to as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.cuda_methods import Method, Rules, only
from attnstore_vllm.transfer.cuda_read_buffer import ReadSize
from attnstore_vllm.transfer.engine import Pages
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import describe
from benchmarks.gpu.rig import Row

LAYERS, BLOCKS, WITHIN, SLOTS, ROWS = 3, 40, 4, 9, 12
Bytes = npt.NDArray[np.uint8]
View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """`view` makes [layers, blocks, ...] of a tensor of this shape."""

    shape: tuple[int, ...]
    view: View
    dtype: torch.dtype = torch.bfloat16


LAYOUTS = {
    "one run": Layout((LAYERS, BLOCKS, 2, 16, 2, 64), lambda kv: kv),
    "heads before tokens": Layout((LAYERS, BLOCKS, 2, 2, 16, 64), lambda kv: kv.transpose(-2, -3)),
    "keys apart from values": Layout((LAYERS, 2, BLOCKS, 16, 2, 64), lambda kv: kv.transpose(1, 2)),
    "a run a head": Layout((LAYERS, 4, BLOCKS, 16, 64), lambda kv: kv.transpose(1, 2)),
    "a gap after each block": Layout((LAYERS, BLOCKS, 9, 64), lambda kv: kv[:, :, :8]),
    "gaps of 4 bytes": Layout((LAYERS, BLOCKS, 16, 34), lambda kv: kv[:, :, :, :32]),
    "odd bytes": Layout(
        (LAYERS, 3, BLOCKS, 7, 9), lambda kv: kv.transpose(1, 2)[..., :7], torch.uint8
    ),
    "all layers of a block together": Layout(
        (BLOCKS, LAYERS, 16, 128), lambda kv: kv.transpose(0, 1)
    ),
}
WAYS: dict[str, Rules] = {
    "DMA": only(Method.DMA),
    "read buffer": only(Method.BUFFER),
    "kernel": only(Method.KERNEL),
    "kernel on 1 SM": only(Method.KERNEL, 1),
}


@dataclass(slots=True)
class Found:
    copies: int = 0
    num_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


class Twin:
    """One layout on the device, and the same on the host, where a copy is a line of NumPy."""

    def __init__(self, layout: Layout, device: torch.device, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._host = torch.zeros(layout.shape, dtype=layout.dtype)
        raw = self._host.view(torch.uint8)
        raw.copy_(torch.from_numpy(self._random.integers(0, 256, raw.shape, np.uint8)))
        self._there = self._host.to(device)
        # [layers, blocks, ...], the rest in the order of addresses
        self._on_host = _by_address(layout.view(self._host))
        seen = layout.view(self._there)
        layouts = [describe(f"layer {i}", one, BLOCKS) for i, one in enumerate(seen)]
        self.page_bytes = layouts[0].page_bytes
        geometry = Geometry.uniform(1, LAYERS, 1, self.page_bytes, WITHIN)
        self.slots = np.zeros((SLOTS, geometry.slot_bytes), np.uint8)
        size = ReadSize(3, -(-2 * self.page_bytes // 16) * 16)  # so that loads go round
        self.engine = CudaEngine(
            self.slots.ctypes.data, SLOTS, 0, geometry, layouts, device, ROWS, read_size=size
        )
        used = LAYERS * WITHIN * self.page_bytes
        self.slots[:] = self._random.integers(0, 256, self.slots.shape, np.uint8)
        self.pool = self.slots.copy()  # as it should be
        self.pool_pages = self.pool[:, :used].reshape(SLOTS, LAYERS, WITHIN, self.page_bytes)
        assert np.shares_memory(self.pool_pages, self.pool)

    def pages(self) -> Pages:
        count = int(self._random.integers(1, ROWS + 1))
        places = self._random.permutation(SLOTS * WITHIN)[:count]
        blocks = self._random.permutation(BLOCKS)[:count]
        return np.stack([places // WITHIN, places % WITHIN, blocks], axis=1)

    def layers(self) -> range:
        first = int(self._random.integers(LAYERS))
        return range(first, int(self._random.integers(first, LAYERS)) + 1)

    def rows(self, count: int) -> npt.NDArray[np.int64]:
        return self._random.permutation(ROWS)[:count]

    def page(self, layer: int, block: int) -> Bytes:
        one = self._on_host[layer, block].contiguous().view(torch.uint8)
        return np.asarray(one.numpy()).ravel()

    def set_page(self, layer: int, block: int, page: Bytes) -> None:
        target = self._on_host[layer, block]
        target.copy_(torch.from_numpy(page.copy()).view(target.dtype).view(target.shape))

    def is_right(self) -> bool:
        torch.cuda.synchronize()
        there, host = (
            one.contiguous().view(torch.uint8) for one in (self._there.cpu(), self._host)
        )
        return torch.equal(there, host) and np.array_equal(self.slots, self.pool)


def measure(device: torch.device, rounds: int) -> list[Row]:
    found = Found()
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        for way, rules in WAYS.items():
            twin = Twin(layout, device, number)
            twin.engine.rules = rules
            for _ in range(rounds):
                for move in (_save, _load, _through_rows):
                    move(twin, found)
                    if not twin.is_right():
                        found.wrong.append(f"{name}, {way}, {move.__name__.strip('_')}")
            twin.engine.close()
    right = 1 - len(found.wrong) / max(1, found.copies)
    detail = f"{found.copies} copies of {found.num_bytes >> 20} MiB in {len(LAYOUTS)} layouts"
    if found.wrong:
        detail += f"; WRONG: {found.wrong[0]}"
    what = "copies whose every byte is right, parts of 1"
    return [Row(what, "all", right, 1.0, detail=detail, is_wrong=bool(found.wrong))]


def _save(twin: Twin, found: Found) -> None:
    pages, layers = twin.pages(), twin.layers()
    twin.engine.wait(twin.engine.save(pages, layers))
    _expect_saved(twin, pages, layers, found)


def _through_rows(twin: Twin, found: Found) -> None:
    pages, layers = twin.pages(), twin.layers()
    rows = twin.rows(len(pages))
    twin.engine.gather(pages, rows, layers)
    twin.engine.wait(twin.engine.drain(pages, rows, layers))
    _expect_saved(twin, pages, layers, found)


def _load(twin: Twin, found: Found) -> None:
    pages, layers = twin.pages(), twin.layers()
    twin.engine.wait(twin.engine.load(pages, layers))
    for slot, within, block in pages:
        for layer in layers:
            twin.set_page(layer, block, twin.pool_pages[slot, layer, within])
    _count(twin, pages, layers, found)


def _expect_saved(twin: Twin, pages: Pages, layers: range, found: Found) -> None:
    for slot, within, block in pages:
        for layer in layers:
            twin.pool_pages[slot, layer, within] = twin.page(layer, block)
    _count(twin, pages, layers, found)


def _count(twin: Twin, pages: Pages, layers: range, found: Found) -> None:
    found.copies += 1
    found.num_bytes += len(pages) * len(layers) * twin.page_bytes


def _by_address(kv: torch.Tensor) -> torch.Tensor:
    inner = sorted(range(2, kv.dim()), key=kv.stride, reverse=True)
    return kv.permute(0, 1, *inner)
