# SPDX-License-Identifier: Apache-2.0
"""Page-locking of the pool, over the fake driver: piece by piece, and what is refused."""

from __future__ import annotations

import os
import re
from itertools import count
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer import cuda_pool, page_tables
from attnstore_vllm.transfer.pool import SharedPool
from tests.cuda_helpers import CudaRig
from tests.engine_helpers import ALL, ORDERS, SLOTS, Rig, table
from tests.fake_gpu import FakeGpu


def slot_bytes() -> int:
    return Rig(ORDERS[0], None).geometry.slot_bytes


@pytest.fixture
def locks_two_slots(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A driver that refuses more in one call, as real ones refuse some hundred GiB."""
    monkeypatch.setattr(cuda_pool, "LOCK_AT_ONCE_BYTES", 2 * slot_bytes() + 1)
    fake.set(register_max=2 * slot_bytes())
    return fake


def test_a_pool_is_locked_some_slots_at_a_time(locks_two_slots: FakeGpu) -> None:
    rig = CudaRig(locks_two_slots)
    before = rig.hbm()
    for slot in range(SLOTS):
        rig.save(table((slot, 0, slot)))
    assert all(np.array_equal(rig.pages[slot, :, 0], before[:, slot]) for slot in range(SLOTS))
    assert locks_two_slots.registered
    rig.engine.close()
    assert not locks_two_slots.registered


def mapped_bytes(address: int) -> int:
    """Of the mapping that this address is in: what this process has page table entries for."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", words[0]):
            first, end = (int(part, 16) for part in words[0].split("-"))
            inside = first <= address < end
        elif inside and words[0] == "Rss:":
            return int(words[1]) << 10
    raise AssertionError(f"{address:#x} is not mapped")


def test_pages_are_mapped_before_they_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking maps them one by one, some ten times as slowly."""
    monkeypatch.setattr(page_tables, "LARGE_PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(cuda_pool, "LOCK_AT_ONCE_BYTES", 2 << 20)
    pool = SharedPool(f"attnstore-map-{os.getpid()}", 8, 1 << 20, num_ranks=1, member=0)
    seen: list[tuple[int, int]] = []

    def register_host(address: int, num_bytes: int, device: int) -> int:
        locked = address + num_bytes - pool.address
        seen.append((locked, mapped_bytes(pool.address)))
        return address

    native = ModuleType("native")
    vars(native).update(register_host=register_host, unregister_host=lambda *_: None)
    assert mapped_bytes(pool.address) < 1 << 20
    locked = cuda_pool.LockedPool(native, 0, pool.address, 8, 1 << 20)
    assert [end for end, _ in seen] == [2 << 20, 4 << 20, 6 << 20, 8 << 20]
    assert all(mapped >= end for end, mapped in seen), seen
    locked.close()
    pool.close()


def test_no_call_locks_slots_of_two_files(fake: FakeGpu) -> None:
    fake.set(register_max=4 * slot_bytes())
    with pytest.raises(UnsupportedError, match=r"CUDA_ERROR_INVALID_VALUE.*takes no more memory"):
        CudaRig(fake)
    rig = CudaRig(fake, borders=(3,))
    rig.save(table((2, 0, 1), (3, 0, 4)))
    assert np.array_equal(rig.pages[[2, 3], :, 0], rig.hbm()[:, [1, 4]].swapaxes(0, 1))
    rig.engine.close()
    assert not fake.registered


def test_what_the_driver_refuses_is_done_without(
    locks_two_slots: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with the slots that are locked; others do not exist for it."""
    locks_two_slots.set(register_total=4 * slot_bytes())
    rig = CudaRig(locks_two_slots, num_rows=0)
    assert rig.cuda.num_slots == 4 and "goes on with these" in caplog.text
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text and "ulimit -l unlimited" in caplog.text
    rig.save(table((3, 0, 1)))
    assert np.array_equal(rig.pages[3, :, 0], rig.hbm()[:, 1])
    with pytest.raises(IndexError):
        rig.engine.save(table((4, 0, 1)), ALL)
    rig.engine.close()
    assert not locks_two_slots.registered


def test_a_refused_call_is_tried_with_less(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_pool, "LOCK_AT_LEAST_BYTES", slot_bytes())
    fake.set(register_max=slot_bytes())
    rig = CudaRig(fake)
    assert rig.cuda.num_slots == SLOTS and "dram" not in caplog.text
    rig.engine.close()


def test_page_locking_ends_when_its_time_is_over(
    locks_two_slots: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = count(0.0, 0.6 * cuda_pool.DEADLINE_S)  # after two calls it is over
    monkeypatch.setattr("attnstore_vllm.transfer.cuda_pool.monotonic", lambda: next(times))
    rig = CudaRig(locks_two_slots)
    assert rig.cuda.num_slots == 2 and "may take 120 s" in caplog.text
    rig.engine.close()


def test_progress_is_logged_where_it_takes_seconds(
    locks_two_slots: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "attnstore_vllm.transfer.cuda_pool")
    size = SLOTS * slot_bytes()
    for worth_saying, lines in ((size + 1, 0), (size, -(-SLOTS // 2))):
        monkeypatch.setattr(cuda_pool, "WORTH_SAYING_BYTES", worth_saying)
        CudaRig(locks_two_slots).engine.close()
        assert len([line for line in caplog.messages if "page-locked" in line]) == lines
    total = format_size(size)
    assert f"page-locked {format_size(2 * slot_bytes())} of {total} for the GPU" in caplog.messages
    assert f"page-locked {total} of {total} for the GPU" in caplog.messages


def test_slots_that_are_not_kept_are_none() -> None:
    name = f"attnstore-keep-{os.getpid()}"
    pool = SharedPool(name, 6, 4096, num_ranks=1, member=0)
    pool.keep(3)
    assert pool.num_slots == 3
    with pytest.raises(AssertionError):
        pool.slot(3)
    pool.close()


def test_too_few_slots_are_let_go(
    locks_two_slots: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_pool, "SLOTS_MIN", 3)
    locks_two_slots.set(register_total=3 * slot_bytes())
    with pytest.raises(UnsupportedError, match=r"of dram's .* are page-locked: .* refuses more"):
        CudaRig(locks_two_slots)
    assert not locks_two_slots.registered


def test_a_device_that_sees_the_slots_apart_is_refused(locks_two_slots: FakeGpu) -> None:
    locks_two_slots.set(scattered=1)
    with pytest.raises(UnsupportedError, match="slot 2 of the pool"):
        CudaRig(locks_two_slots)
    assert not locks_two_slots.registered
