# SPDX-License-Identifier: Apache-2.0
"""A GPU that is none, under the real C++: PyTorch's streams and events over the fake driver, which
carries them out late and in any interleaving (csrc/tests/fake_driver/streams.h).

It stands in for `torch` in the modules of CudaEngine. HBM is ordinary memory of which the fake is
told; what it is not told of, nothing on a stream may touch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from tests.fake_driver import driver

NOT_READY = 600
UNKNOWN = 999
KERNEL, BATCH = "cuLaunchKernel", "cuMemcpyBatchAsync"
"""The calls that copies are given to the device by."""
_DISABLE_TIMING = 2
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def check(result: int, call: str) -> None:
    """Raises RuntimeError, as PyTorch does."""
    if result == 0:
        return
    name = ctypes.c_char_p()
    driver().cuGetErrorName(result, ctypes.byref(name))
    raise RuntimeError(f"CUDA error: {call}: {(name.value or b'?').decode()}")


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        handle = ctypes.c_void_p()
        check(driver().cuStreamCreateWithPriority(ctypes.byref(handle), 1, 0), "cuStreamCreate")
        assert handle.value is not None
        self.cuda_stream = handle.value

    @property
    def pending(self) -> int:
        """How much was given to it and is not over; pages of one copy count as one."""
        return int(driver().fake_pending(self.cuda_stream))

    def run(self, work: Callable[[], object]) -> None:
        """What a kernel of the model's does, in the stream's order."""
        gpu = self.gpu

        def carry_out(_: object) -> None:
            try:
                work()
            except BaseException as error:
                gpu.errors.append(error)

        function = _HOST_FUNCTION(carry_out)
        gpu.functions.setdefault(gpu.process, []).append(function)
        check(driver().cuLaunchHostFunc(self.cuda_stream, function, None), "cuLaunchHostFunc")

    def record_event(self) -> Event:
        event = Event(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.handle:
            result = driver().cuStreamWaitEvent(self.cuda_stream, event.handle, 0)
            check(result, "cuStreamWaitEvent")

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        check(driver().cuStreamSynchronize(self.cuda_stream), "cuStreamSynchronize")
        self.gpu.raise_errors()


class Event:
    """Stands in for torch.cuda.Event: CUDA knows it when it is first recorded."""

    def __init__(self, gpu: FakeGpu, enable_timing: bool = False) -> None:
        self.gpu = gpu
        self.process = gpu.process
        self.flags = 0 if enable_timing else _DISABLE_TIMING
        self.handle = 0

    def __del__(self) -> None:
        if self.handle and FakeGpu.newest is self.gpu:
            with self.gpu.of(self.process):
                driver().cuEventDestroy_v2(self.handle)

    @property
    def cuda_event(self) -> int:
        return self.handle

    def record(self, stream: Stream | None = None) -> None:
        if not self.handle:
            handle = ctypes.c_void_p()
            check(driver().cuEventCreate(ctypes.byref(handle), self.flags), "cuEventCreate")
            self.handle = handle.value or 0
        stream = self.gpu.model if stream is None else stream
        check(driver().cuEventRecord(self.handle, stream.cuda_stream), "cuEventRecord")

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        if not self.handle:
            return True
        result = driver().cuEventQuery(self.handle)
        if result != NOT_READY:
            check(result, "cuEventQuery")
        return bool(result == 0)

    def synchronize(self) -> None:
        if self.handle:
            check(driver().cuEventSynchronize(self.handle), "cuEventSynchronize")
        self.gpu.raise_errors()

    def elapsed_time(self, end: Event) -> float:
        """A millisecond for each piece of work that was carried out between them."""
        found = ctypes.c_float()
        result = driver().cuEventElapsedTime(ctypes.byref(found), self.handle, end.handle)
        check(result, "cuEventElapsedTime")
        return found.value


class FakeGpu:
    """Alone in its process: another one forgets this one's streams and memory.

    It may be several, one for each process that there would be: use() says whose turn it is.
    """

    newest: ClassVar[FakeGpu | None] = None

    def __init__(self, seed: int = 0) -> None:
        driver().fake_reset(seed)
        FakeGpu.newest = self
        self.random = Random(seed)
        self.functions: dict[int, list[Any]] = {}
        """Of each process, what its streams may still call."""
        self.errors: list[BaseException] = []
        """Of what streams called."""
        check(driver().cuInit(0), "cuInit")
        self.process = 0
        self._models: dict[int, Stream] = {}
        self.use(0)

    def use(self, process: int) -> None:
        """From here on this is another process."""
        self.process = process
        driver().fake_use(process)
        if process in self._models:
            return
        context = ctypes.c_void_p()
        driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")
        self._models[process] = Stream(self)

    @contextmanager
    def of(self, process: int) -> Iterator[None]:
        driver().fake_use(process)
        try:
            yield
        finally:
            driver().fake_use(self.process)

    @property
    def model(self) -> Stream:
        """The model's stream."""
        return self._models[self.process]

    # ---- what tests tell it ------------------------------------------------------------

    def set(self, **options: int) -> None:
        """Args: options: csrc/tests/fake_driver/driver_api.h: fake_set."""
        for name, value in options.items():
            assert driver().fake_set(name.encode(), value), f"there is no option {name}"

    def fail(self, call: str, after: int = 0, result: int = UNKNOWN) -> None:
        """Calls whose names begin so go well so often, then one fails."""
        driver().fake_fail(call.encode(), after, result)

    def forgive(self) -> None:
        driver().fake_forgive()

    def damage(self, name: str) -> None:
        """What kernels or calls write whose names begin so is wrong from here on."""
        driver().fake_damage(name.encode())

    def hold(self, *tensors: torch.Tensor) -> None:
        """These tensors are in HBM."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            driver().fake_add_memory(storage.data_ptr(), storage.nbytes(), 1)

    def step(self) -> bool:
        """Carry out one piece; False if no stream can go on."""
        return bool(driver().fake_step())

    def count(self, call: str) -> int:
        """Calls whose names begin so."""
        return int(driver().fake_count(call.encode()))

    @property
    def uploads(self) -> int:
        """Tables that were brought to the device."""
        return self.count("cuMemcpyAsync") + self.count("cuMemcpyHtoDAsync_v2")

    @property
    def clock(self) -> int:
        return int(driver().fake_clock())

    @property
    def registered(self) -> int:
        return int(driver().fake_registered())

    def synchronize(self, device: object = None) -> None:
        check(driver().cuCtxSynchronize(), "cuCtxSynchronize")
        self.functions.pop(self.process, None)
        self.raise_errors()

    def raise_errors(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    # ---- torch -------------------------------------------------------------------------

    @contextmanager
    def _on_device(self, device: object) -> Iterator[None]:
        yield

    def _empty(
        self, shape: Any, dtype: torch.dtype, device: Any = None, pin_memory: bool = False
    ) -> torch.Tensor:
        """Its bytes are nobody's; its memory is gone as soon as nothing refers to it."""
        check(driver().fake_call(b"cuMemAlloc_v2"), "cuMemAlloc")
        size = torch.empty(shape, dtype=dtype, device="meta")
        memory = np.full(max(1, size.nbytes), 77, np.uint8)
        is_hbm = int(not pin_memory)
        driver().fake_add_memory(memory.ctypes.data, memory.nbytes, is_hbm)
        weakref.finalize(memory, self._forget, self.process, memory.ctypes.data, is_hbm)
        return torch.from_numpy(memory)[: size.nbytes].view(dtype).view(size.shape)

    def _forget(self, process: int, address: int, is_hbm: int) -> None:
        if FakeGpu.newest is self:
            with self.of(process):
                driver().fake_remove_memory(address, is_hbm)

    def _tensor(self, values: list[int], dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        made = self._empty(len(values), dtype)
        made[:] = torch.tensor(values, dtype=dtype)
        return made

    def torch(self) -> SimpleNamespace:
        """What stands in for the module torch."""
        cuda = SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            get_device_name=lambda device: "a fake",
            current_stream=lambda device=None: self.model,
            synchronize=self.synchronize,
            device=self._on_device,
            Stream=lambda device=None, priority=0: Stream(self),
            Event=lambda enable_timing=False: Event(self, enable_timing),
        )
        return SimpleNamespace(
            cuda=cuda,
            empty=self._empty,
            tensor=self._tensor,
            device=torch.device,
            uint8=torch.uint8,
            int64=torch.int64,
            __version__=torch.__version__,
        )
