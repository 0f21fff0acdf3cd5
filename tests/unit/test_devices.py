# SPDX-License-Identifier: Apache-2.0
"""The contract of a Device, kept by the real one and the doubles; and the faults of the doubles."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from random import Random

import pytest

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.aiofiles_device import AiofilesDevice
from attnstore_vllm.io.device import Completion, Device, IoRequest, Op
from attnstore_vllm.testing.devices import (
    SECTOR_BYTES,
    Effect,
    FailingDevice,
    Fault,
    MemoryDevice,
    PowerLossDevice,
    SlowDevice,
)

SIZE = 16 * SECTOR_BYTES
KINDS: dict[str, Callable[[Path], Device]] = {
    "memory": lambda _: MemoryDevice(SIZE),
    "power loss": lambda _: PowerLossDevice(SIZE, Random(1)),
    "failing": lambda _: FailingDevice(MemoryDevice(SIZE)),
    "slow": lambda _: SlowDevice(MemoryDevice(SIZE), delay_s=0.001),
    "aiofiles": lambda path: AiofilesDevice(path, depth=3),
}


def buffer(num_sectors: int = 1, fill: int = 0) -> memoryview:
    """Aligned, as O_DIRECT wants it."""
    pages = mmap(-1, num_sectors * SECTOR_BYTES)
    pages[:] = bytes([fill]) * len(pages)
    return memoryview(pages)


def write(tag: int, sector: int, *buffers: memoryview) -> IoRequest:
    return IoRequest(tag, Op.WRITE, sector * SECTOR_BYTES, buffers)


def read(tag: int, sector: int, *buffers: memoryview) -> IoRequest:
    return IoRequest(tag, Op.READ, sector * SECTOR_BYTES, buffers)


def finish(device: Device, *requests: IoRequest) -> dict[int, DeviceError | None]:
    """Submit, and wait for all of them."""
    device.submit(requests)
    ended: list[Completion] = []
    deadline = time.monotonic() + 10
    while len(ended) < len(requests):
        assert time.monotonic() < deadline
        ended += device.poll(0.1)
    assert sorted(c.tag for c in ended) == sorted(r.tag for r in requests)
    return {completion.tag: completion.error for completion in ended}


def contents(device: Device, sector: int, num_sectors: int = 1) -> bytes:
    into = buffer(num_sectors)
    assert finish(device, read(999, sector, into)) == {999: None}
    return bytes(into)


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Device]:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    device = KINDS[request.param](path)
    yield device
    device.close()


# ---- the contract ----------------------------------------------------------------------


def test_bytes_written_are_bytes_read(device: Device) -> None:
    assert device.size_bytes == SIZE
    requests = [write(i, 3 * i, buffer(1, i + 1), buffer(2, i + 101)) for i in range(5)]
    assert finish(device, *requests) == dict.fromkeys(range(5))
    assert finish(device, IoRequest(7, Op.SYNC)) == {7: None}
    for i in range(5):
        wanted = bytes([i + 1]) * SECTOR_BYTES + bytes([i + 101]) * 2 * SECTOR_BYTES
        one, two = buffer(2), buffer(1)
        assert finish(device, read(1, 3 * i, one, two)) == {1: None}
        assert bytes(one) + bytes(two) == wanted
    assert contents(device, 15) == bytes(SECTOR_BYTES)


def test_a_wake_ends_the_poll_that_waits_or_the_next(device: Device) -> None:
    device.wake()
    started = time.monotonic()
    assert device.poll(30) == []
    waker = threading.Timer(0.05, device.wake)
    waker.start()
    assert device.poll(30) == []
    assert time.monotonic() - started < 10
    waker.join()


def test_a_poll_without_a_timeout_returns_at_once(device: Device) -> None:
    assert device.poll(0) == []
    started = time.monotonic()
    assert device.poll(0.02) == []
    assert time.monotonic() - started >= 0.015


def test_a_closed_device_takes_nothing_and_closes_twice(device: Device) -> None:
    device.close()
    with pytest.raises(DeviceError):
        device.submit([read(1, 0, buffer())])
    device.close()


@pytest.mark.parametrize("at", [1, 16 * SECTOR_BYTES, 15 * SECTOR_BYTES + 1])
def test_what_is_not_aligned_or_not_inside_is_our_bug(device: Device, at: int) -> None:
    with pytest.raises(AssertionError):
        device.submit([IoRequest(1, Op.READ, at, (buffer(),))])


def test_many_threads_submit(device: Device) -> None:
    """Any thread submits; one polls."""
    buffers = [buffer(1, i + 1) for i in range(12)]

    def submit(number: int) -> None:
        for i in range(number, 12, 3):
            device.submit([write(i, i, buffers[i])])

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    ended: list[Completion] = []
    while len(ended) < 12:
        ended += device.poll(1)
    for thread in threads:
        thread.join()
    assert {completion.error for completion in ended} == {None}
    assert contents(device, 0, 12) == b"".join(map(bytes, buffers))


# ---- the real device -------------------------------------------------------------------


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="absent"):
        AiofilesDevice(tmp_path / "absent", depth=1)


def test_a_file_that_shrinks_is_an_error_and_never_a_short_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    device = AiofilesDevice(path, depth=1)
    with path.open("r+b") as file:
        file.truncate(3 * SECTOR_BYTES)
    error = finish(device, read(1, 2, buffer(2)))[1]
    assert error is not None
    assert "at byte 8192: read failed" in str(error)
    assert finish(device, read(2, 0, buffer(3))) == {2: None}
    device.close()


def test_close_waits_for_what_is_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    device = AiofilesDevice(path, depth=2)
    device.submit([write(i, i, buffer(1, i + 1)) for i in range(16)])
    device.close()
    assert path.read_bytes() == b"".join(bytes([i + 1]) * SECTOR_BYTES for i in range(16))


def test_a_device_whose_thread_has_ended_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours there must not leave the store waiting for completions for ever."""

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    device = AiofilesDevice(path, depth=1)
    monkeypatch.setattr(AiofilesDevice, "_move", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    device.submit([read(1, 0, buffer())])
    device._thread.join()
    with pytest.raises(DeviceError, match="has ended"):
        device.poll(0)
    with pytest.raises(DeviceError):
        device.submit([read(2, 0, buffer())])


# ---- MemoryDevice ----------------------------------------------------------------------


def test_held_requests_end_in_the_order_of_the_steps() -> None:
    device = MemoryDevice(SIZE, hold=True)
    device.submit([write(i, 0, buffer(1, i)) for i in (1, 2, 3)])
    assert device.poll(0) == []
    device.step(1)
    device.step()
    assert [request.tag for request in device.pending] == [3]
    assert [completion.tag for completion in device.poll(0)] == [2, 1]
    assert device.image[0] == 1
    device.release()
    assert device.image[0] == 3
    device.submit([write(4, 0, buffer(1, 4))])
    assert [completion.tag for completion in device.poll(0)] == [3, 4]


def test_settle_waits_until_the_poller_has_nothing_to_do() -> None:
    device = MemoryDevice(SIZE)
    handled: list[int] = []

    def poll() -> None:
        while 99 not in handled:
            for completion in device.poll(0.01):
                if completion.tag < 5:  # each completion leads to the next request
                    device.submit([write(completion.tag + 1, 0, buffer())])
                handled.append(completion.tag)

    poller = threading.Thread(target=poll)
    poller.start()
    device.submit([write(1, 0, buffer())])
    device.settle()
    assert handled == [1, 2, 3, 4, 5]
    device.submit([write(99, 0, buffer())])
    poller.join()


# ---- PowerLossDevice -------------------------------------------------------------------


def test_what_was_synced_survives() -> None:
    device = PowerLossDevice(SIZE, Random(1))
    finish(device, write(1, 0, buffer(8, 1)))
    finish(device, IoRequest(2, Op.SYNC))
    finish(device, write(3, 8, buffer(8, 2)))
    assert contents(device, 0, 16) == bytes([1]) * 8 * SECTOR_BYTES + bytes([2]) * 8 * SECTOR_BYTES
    after = device.crash()
    assert contents(after, 0, 8) == bytes([1]) * 8 * SECTOR_BYTES
    survived = [contents(after, sector)[0] for sector in range(8, 16)]
    assert set(survived) == {0, 2}, "a die that always falls on one side tears nothing"


def test_a_sector_survives_whole_or_not_at_all_and_by_the_seed() -> None:
    def survivors(seed: int) -> bytes:
        device = PowerLossDevice(SIZE, Random(seed), hold=True)
        device.submit([write(i, i, buffer(1, i + 1)) for i in range(16)])
        device.step()
        after = device.crash()
        for sector in range(16):
            assert after.image[sector * SECTOR_BYTES :][:SECTOR_BYTES] in (
                bytes(SECTOR_BYTES),
                bytes([sector + 1]) * SECTOR_BYTES,
            )
        return bytes(after.image)

    assert survivors(1) == survivors(1)
    assert survivors(1) != survivors(2)


def test_the_old_disk_answers_errors_after_the_crash() -> None:
    device = PowerLossDevice(SIZE, Random(1), hold=True)
    device.submit([write(1, 0, buffer())])
    device.crash()
    ended = device.poll(0)
    assert [(completion.tag, type(completion.error)) for completion in ended] == [(1, DeviceError)]
    with pytest.raises(DeviceError, match="power was lost"):
        device.submit([write(2, 0, buffer())])


# ---- FailingDevice ---------------------------------------------------------------------


def test_requests_fail_by_op_by_number_and_by_place() -> None:
    at = range(4 * SECTOR_BYTES, 5 * SECTOR_BYTES)
    device = FailingDevice(
        MemoryDevice(SIZE),
        Fault(effect=Effect.FAIL, op=Op.WRITE, nth=1),
        Fault(effect=Effect.FAIL, offsets=at),
    )
    for tag, sector, fails in ((1, 0, False), (2, 0, True), (3, 0, False), (4, 3, True)):
        error = finish(device, write(tag, sector, buffer(2)))[tag]
        assert (error is not None) == fails
    assert finish(device, read(5, 5, buffer())) == {5: None}
    error = finish(device, read(6, 4, buffer()))[6]
    assert error is not None
    assert "injected at byte 16384: read failed" in str(error)
    device.inject(Fault(effect=Effect.FAIL, op=Op.SYNC))
    assert finish(device, IoRequest(7, Op.SYNC))[7] is not None


def test_a_failed_write_writes_nothing() -> None:
    device = FailingDevice(MemoryDevice(SIZE), Fault(effect=Effect.FAIL, op=Op.WRITE))
    finish(device, write(1, 0, buffer(1, 5)))
    assert contents(device, 0) == bytes(SECTOR_BYTES)


def test_one_bit_of_a_read_is_flipped() -> None:
    bit = SECTOR_BYTES * 8 + 3
    device = FailingDevice(MemoryDevice(SIZE), Fault(effect=Effect.FLIP, nth=0, bit=bit))
    one, two = buffer(), buffer()
    assert finish(device, read(1, 0, one, two)) == {1: None}
    assert bytes(one) == bytes(SECTOR_BYTES)
    assert bytes(two) == b"\x08" + bytes(SECTOR_BYTES - 1)
    assert contents(device, 0, 2) == bytes(2 * SECTOR_BYTES)


def test_a_misplaced_and_a_lost_write_are_reported_as_done() -> None:
    device = FailingDevice(
        MemoryDevice(SIZE),
        Fault(effect=Effect.MISPLACE, op=Op.WRITE, nth=0, shift_bytes=2 * SECTOR_BYTES),
        Fault(effect=Effect.LOSE, op=Op.WRITE, nth=1),
    )
    assert finish(device, write(1, 1, buffer(1, 5))) == {1: None}
    assert finish(device, write(2, 4, buffer(1, 6))) == {2: None}
    found = [contents(device, sector)[0] for sector in range(6)]
    assert found == [0, 0, 0, 5, 0, 0]


def test_a_dead_device_raises_and_never_answers() -> None:
    inner = MemoryDevice(SIZE, hold=True)
    device = FailingDevice(inner)
    device.submit([read(1, 0, buffer())])
    device.die()
    inner.release()
    with pytest.raises(DeviceError):
        device.poll(0)
    with pytest.raises(DeviceError):
        device.submit([read(2, 0, buffer())])
    device.close()


# ---- SlowDevice ------------------------------------------------------------------------


def test_completions_come_late() -> None:
    device = SlowDevice(MemoryDevice(SIZE), delay_s=0.05)
    started = time.monotonic()
    assert finish(device, write(1, 0, buffer())) == {1: None}
    assert time.monotonic() - started >= 0.05


def test_completions_wait_for_the_release() -> None:
    device = SlowDevice(MemoryDevice(SIZE))
    device.hang()
    device.submit([write(1, 0, buffer())])
    assert device.poll(0.02) == []
    device.release()
    assert [completion.tag for completion in device.poll(5)] == [1]


def test_a_device_that_hangs_can_be_closed() -> None:
    device = SlowDevice(MemoryDevice(SIZE))
    device.hang()
    device.submit([write(1, 0, buffer())])
    started = time.monotonic()
    device.close()
    assert time.monotonic() - started < 1
