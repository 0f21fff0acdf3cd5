# SPDX-License-Identifier: Apache-2.0
"""As much of CUDA as CudaEngine uses, on a machine without it: streams that are carried out late
and in any interleaving that their events allow, and copies that read what is there when they are
carried out. It stands in for `torch` and for the module _native_cuda.

Nothing runs before somebody waits or step() is called; then a die with a seed says which stream
goes on. A copy is as many pieces as it has pages, so others come between them.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.fake_rotator import PageRotator

DEVICE_OFFSET = 1 << 40
"""What the device adds to an address of page-locked memory."""
Array = npt.NDArray[np.int64]


class Copy(Enum):
    LOAD = ("slot", "block")
    SAVE = ("block", "slot")
    GATHER = ("block", "row")
    DRAIN = ("row", "slot")


class Stream:
    """Work in order. A piece says whether it could be carried out now."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.work: deque[Callable[[], bool]] = deque()
        gpu.streams.append(self)
        self.cuda_stream = len(gpu.streams)

    def run(self, work: Callable[[], object]) -> None:
        def carry_out() -> bool:
            work()
            return True

        self.work.append(carry_out)
        if self.gpu.is_eager:
            self.gpu.run_until(lambda: not self.work)

    def record_event(self) -> Event:
        event = Event(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        number = event.recorded
        self.work.append(lambda: event.reached >= number)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.work)


class Event:
    def __init__(self, gpu: FakeGpu, enable_timing: bool = False) -> None:
        self.gpu = gpu
        self.has_timing = enable_timing
        self.recorded = 0
        self.reached = 0
        self.at = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded

        def reach() -> None:
            self.reached, self.at = number, self.gpu.clock

        stream.run(reach)

    def query(self) -> bool:
        self.gpu.fail_if_told("query")
        return self.reached >= self.recorded

    def synchronize(self) -> None:
        self.gpu.fail_if_told("synchronize")
        self.gpu.run_until(lambda: self.reached >= self.recorded)

    def elapsed_time(self, end: Event) -> float:
        assert self.has_timing and end.has_timing
        assert self.query() and end.query()
        return float(end.at - self.at)


class FakeGpu:
    """`clock` counts the pieces that were carried out; elapsed times are in them, as ms."""

    def __init__(self, seed: int = 0) -> None:
        self.is_eager = False
        """Everything is carried out when it is given to a stream: for callers that compute with
        tensors themselves, and so on no stream."""
        self.streams: list[Stream] = []
        self.clock = 0
        self.uploads = 0
        self.waits_for_all = 0
        self.moved: list[tuple[str, str]] = []
        """How each copy was made, in the order in which they were begun."""
        self.registered: dict[int, int] = {}
        self.failing: dict[str, int] = {}
        """How often a call of this name goes well before it fails, once."""
        self.random = Random(seed)
        self.model = Stream(self)

    def step(self) -> bool:
        """Carry out one piece; False if no stream can go on."""
        ready = [stream for stream in self.streams if stream.work]
        self.random.shuffle(ready)
        for stream in ready:
            if stream.work[0]():
                stream.work.popleft()
                self.clock += 1
                return True
        return False

    def run_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self.step(), "the streams wait for each other"

    def synchronize(self, device: object = None) -> None:
        self.waits_for_all += 1
        self.run_until(lambda: not any(stream.work for stream in self.streams))

    def fail_if_told(self, call: str) -> None:
        if call in self.failing:
            self.failing[call] -= 1
            if self.failing[call] < 0:
                del self.failing[call]
                raise RuntimeError(f"CUDA error: {call} failed because the test says so")

    @contextmanager
    def _on_device(self, device: object) -> Iterator[None]:
        yield

    def torch(self) -> SimpleNamespace:
        """What stands in for the module torch."""
        cuda = SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            current_stream=lambda device=None: self.model,
            synchronize=self.synchronize,
            device=self._on_device,
            Stream=lambda device=None, priority=0: Stream(self),
            Event=lambda enable_timing=False: Event(self, enable_timing),
        )

        def empty(
            shape: Any, dtype: torch.dtype, device: Any = None, pin_memory: bool = False
        ) -> Any:
            self.fail_if_told("empty")
            return torch.full(torch.empty(shape, device="meta").shape, 77, dtype=dtype)

        def tensor(values: list[int], dtype: torch.dtype, device: Any = None) -> Any:
            return torch.tensor(values, dtype=dtype)

        return SimpleNamespace(
            cuda=cuda, empty=empty, tensor=tensor, device=torch.device, uint8=torch.uint8,
            int64=torch.int64, __version__=torch.__version__,
        )  # fmt: skip

    def native(self) -> SimpleNamespace:
        """What stands in for the module _native_cuda."""

        def register_host(address: int, num_bytes: int, device: int) -> int:
            self.fail_if_told("register_host")
            assert address not in self.registered
            self.registered[address] = num_bytes
            return address + DEVICE_OFFSET

        def unregister_host(address: int, device: int) -> None:
            self.fail_if_told("unregister_host")
            del self.registered[address]

        return SimpleNamespace(
            Copy=Copy, capability=lambda device: (9, 0), driver_version=lambda: 13000,
            Kernels=lambda device, images: SimpleNamespace(image=0),
            register_host=register_host, unregister_host=unregister_host,
            PageShape=page_shape, RotationShape=SimpleNamespace,
            PageCopier=partial(PageCopier, self),
            PageRotator=partial(PageRotator, self, DEVICE_OFFSET),
        )  # fmt: skip


def page_shape(**numbers: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"rows_base": 0, "num_rows": 0, **numbers})


class PageCopier:
    """Its arithmetic is its own, so that the other is not measured by itself."""

    def __init__(
        self, gpu: FakeGpu, pages: SimpleNamespace, *, kernels: object, arrays: int
    ) -> None:
        self.gpu = gpu
        self.shape = pages
        self.damage = False
        """The next bytes that arrive in a slot are wrong."""
        at = (ctypes.c_int64 * len(pages.layer_bases)).from_address(arrays)
        assert list(at) == pages.layer_bases

    def count_runs(self, move: Copy, copies: Array, rows: Array) -> int:
        self._check(move, copies, rows, 0, 0)
        ends: list[tuple[int, int]] = []
        count = 0
        for i in range(len(copies)):
            for source, target in self._runs(move, copies[i], _row(rows, i), 0):
                count += (source, target) not in ends[-1:]
                ends.append((source + self.shape.run_bytes, target + self.shape.run_bytes))
        return count

    def by_kernel(
        self, move: Copy, copies: Array, rows: Array, first: int, stop: int,
        table_device: int, table_host: int, thread_blocks: int, stream: int,
    ) -> None:  # fmt: skip
        self._check(move, copies, rows, first, stop)
        self.gpu.fail_if_told("by_kernel")
        assert thread_blocks > 0
        count, has_rows = len(copies), "row" in move.value
        num_bytes = 8 * count * (4 if has_rows else 3)
        self.gpu.moved.append((move.name, "kernel"))
        queue = self.gpu.streams[stream - 1]
        if table_host:
            self.gpu.uploads += 1
            queue.run(lambda: ctypes.memmove(table_device, table_host, num_bytes))

        def read_table() -> Array:
            words = np.array((ctypes.c_int64 * (num_bytes // 8)).from_address(table_device))
            places = words[: 3 * count].reshape(-1, 3)
            ids = words[3 * count :] if has_rows else np.zeros(count, np.int64)
            return np.concatenate((places, ids[:, None]), axis=1)

        for layer in range(first, stop):
            for i in range(count):
                queue.run(partial(self._copy_of_table, move, read_table, i, layer))

    def by_dma(
        self, move: Copy, copies: Array, rows: Array, first: int, stop: int, stream: int
    ) -> None:
        self._check(move, copies, rows, first, stop)
        self.gpu.fail_if_told("by_dma")
        self.gpu.moved.append((move.name, "dma"))
        queue = self.gpu.streams[stream - 1]
        pieces = [(i, layer) for layer in range(first, stop) for i in range(len(copies))]
        self.gpu.random.shuffle(pieces)  # of one batch any may come first
        for i, layer in pieces:
            slot, within, block = (int(number) for number in copies[i])
            queue.run(partial(self._copy, move, slot, within, block, _row(rows, i), layer))

    def _copy_of_table(
        self, move: Copy, read_table: Callable[[], Array], i: int, layer: int
    ) -> None:
        slot, within, block, row = (int(number) for number in read_table()[i])
        s = self.shape
        limits = (s.num_slots, s.layer_bytes // s.page_bytes, s.num_blocks, max(1, s.num_rows))
        for number, limit in zip((slot, within, block, row), limits, strict=True):
            assert 0 <= number < limit, "the kernel has read a table that was not there"
        self._copy(move, slot, within, block, row, layer)

    def _copy(self, move: Copy, slot: int, within: int, block: int, row: int, layer: int) -> None:
        for source, target in self._runs(move, np.array([slot, within, block]), row, layer):
            ctypes.memmove(target, source, self.shape.run_bytes)
            if self.damage and move in (Copy.SAVE, Copy.DRAIN):
                ctypes.memset(target, 0, 1)

    def _runs(self, move: Copy, copy: Array, row: int, layer: int) -> list[tuple[int, int]]:
        s, (slot, within, block) = self.shape, (int(number) for number in copy)
        runs = []
        for run, offset in enumerate(s.run_offsets):
            page = {
                "block": s.layer_bases[layer] + block * s.block_stride + offset,
                "slot": s.slots_base - DEVICE_OFFSET + slot * s.slot_bytes
                + layer * s.layer_bytes + within * s.page_bytes + run * s.run_bytes,
                "row": s.rows_base + (layer * s.num_rows + int(row)) * s.page_bytes
                + run * s.run_bytes,
            }  # fmt: skip
            runs.append((page[move.value[0]], page[move.value[1]]))
        return runs

    def _check(self, move: Copy, copies: Array, rows: Array, first: int, stop: int) -> None:
        s = self.shape
        limits = [s.num_slots, s.layer_bytes // s.page_bytes, s.num_blocks]
        good = bool(((copies >= 0) & (copies < limits)).all())
        good &= 0 <= first <= stop <= len(s.layer_bases)
        if "row" in move.value:
            good &= len(rows) == len(copies) and bool(((rows >= 0) & (rows < s.num_rows)).all())
        if not good:
            raise IndexError("one of them does not exist")


def _row(rows: Array, i: int) -> int:
    return int(rows[i]) if len(rows) else 0
