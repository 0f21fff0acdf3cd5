# SPDX-License-Identifier: Apache-2.0
"""Stores over memory, and what must hold when a test ends; GPUs that are none."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from attnstore_lab.testing.devices import MemoryDevice
from tests.cuda_helpers import install
from tests.fake_gpu import FakeGpu
from tests.helpers import Rig, Rigs, found_slab, memory_rig


@pytest.fixture
def open_rig() -> Iterator[Rigs]:
    """Opens stores over new memory, or over the `image` that an earlier one left."""
    rigs: list[Rig] = []

    def open_rig(
        num_records: int = 16, dram_slots: int = 8, image: bytes | None = None, **options: Any
    ) -> tuple[Rig, MemoryDevice]:
        if image is None:
            rig = memory_rig(num_records, dram_slots, **options)
        else:
            device = MemoryDevice(len(image))
            device.image[:] = image
            rig = Rig(device, found_slab(image), dram_slots, options=options)
        rigs.append(rig)
        assert isinstance(rig.device, MemoryDevice)
        rig.device.settle()
        return rig, rig.device

    yield open_rig
    for rig in rigs:
        if rig.is_open:
            assert isinstance(rig.device, MemoryDevice)
            rig.device.release()
            rig.device.settle()
            rig.store.check_integrity()
            assert rig.store.residency.num_held() == 0
        rig.close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Under each CudaEngine of the test."""
    return install(monkeypatch)


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.cuda)])
def gpu(request: pytest.FixtureRequest) -> FakeGpu | None:
    """A fake, and None: a real one, where there is one."""
    found: FakeGpu | None = None
    if request.param == "fake":
        found = request.getfixturevalue("fake")
    return found


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """As on a terminal: a test run in the background may have SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
