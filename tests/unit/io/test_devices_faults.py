# SPDX-License-Identifier: Apache-2.0
"""The faults of the test doubles: each does what it says, and nothing else."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest
from xxhash import xxh3_128_digest

from attnstore_lab.testing.devices import (
    SECTOR_BYTES,
    Effect,
    FailingDevice,
    Fault,
    MemoryDevice,
    PowerLossDevice,
    SlowDevice,
)
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.device import Completion, IoRequest, Op, Seal
from tests.device_helpers import SIZE, buffer, contents, finish, finish_all, read, write

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


def test_what_is_held_can_be_cancelled_and_the_rest_goes_on() -> None:
    device = MemoryDevice(SIZE, hold=True)
    device.submit([write(i, 0, buffer(1, i)) for i in (1, 2, 3)])
    device.cancel([2, 77])
    assert [(c.tag, type(c.error)) for c in device.poll(0)] == [(2, DeviceError)]
    device.release()
    assert [(c.tag, c.error) for c in device.poll(0)] == [(1, None), (3, None)]
    device.submit([write(4, 0, buffer())])
    assert device.close(1)


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


def test_a_write_in_flight_is_sealed_before_any_of_it_can_survive() -> None:
    device = PowerLossDevice(SIZE, Random(3), hold=True)
    payload = buffer(1, 9)
    device.submit([write(i, i, buffer(), payload, seals=(Seal(1, 0),)) for i in range(0, 16, 2)])
    after = device.crash()
    headers = {bytes(after.image[i * SECTOR_BYTES :][:16]) for i in range(0, 16, 2)}
    assert headers == {bytes(16), xxh3_128_digest(payload)}


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
    ended = finish_all(device, read(1, 0, one, two, checksum=True))[1]
    assert ended == Completion(1, None, xxh3_128_digest(two)), "of the bytes as they came"
    assert ended.checksum != xxh3_128_digest(bytes(SECTOR_BYTES))
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
    lost = write(3, 5, buffer(), buffer(1, 7), seals=(Seal(1, 16),))
    device.inject(Fault(effect=Effect.LOSE, op=Op.WRITE))
    assert finish_all(device, lost)[3] == Completion(3, None, xxh3_128_digest(lost.buffers[1]))
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
    assert not device.close(1), "what was in flight never ends"


# ---- SlowDevice ------------------------------------------------------------------------


def test_completions_come_late() -> None:
    device = SlowDevice(MemoryDevice(SIZE), delay_s=0.05)
    started = time.monotonic()
    assert finish(device, write(1, 0, buffer())) == {1: None}
    assert time.monotonic() - started >= 0.05


def test_a_slower_disk_moves_so_many_bytes_a_second() -> None:
    device = SlowDevice(MemoryDevice(SIZE), bytes_per_s=2 * SECTOR_BYTES / 0.1)
    started = time.monotonic()
    device.submit([write(1, 0, buffer()), write(2, 1, buffer()), read(3, 2, buffer())])
    ended: dict[int, float] = {}
    while len(ended) < 3:
        ended |= {c.tag: time.monotonic() - started for c in device.poll(5)}
    assert ended[1] >= 0.05
    assert ended[2] >= 0.1, "one after another"
    assert 0.05 <= ended[3] < ended[2], "reads go beside writes"


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
    assert not device.close(0.02)
    assert 0.02 <= time.monotonic() - started < 1
