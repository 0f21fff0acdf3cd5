# SPDX-License-Identifier: Apache-2.0
"""The contract of a Device, kept by the real ones and the doubles alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_128_digest

from attnstore_lab.testing.devices import SECTOR_BYTES
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io.device import Completion, Device, IoRequest, Op, Seal
from tests.device_helpers import (
    KINDS,
    SIZE,
    buffer,
    contents,
    finish,
    finish_all,
    read,
    wait_for,
    why_no_uring,
    write,
)

LARGE_SECTORS = 2048  # 8 MiB: more than one piece, and more than is hashed in passing


def make(kind: str, path: Path, num_sectors: int) -> Device:
    if kind == "uring" and (reason := why_no_uring()):
        pytest.skip(reason)
    path.write_bytes(bytes(num_sectors * SECTOR_BYTES))
    return KINDS[kind](path)


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Device]:
    device = make(request.param, tmp_path / "file", 16)
    yield device
    assert device.close(10)


@pytest.fixture(params=KINDS)
def large(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Device]:
    device = make(request.param, tmp_path / "file", LARGE_SECTORS)
    yield device
    assert device.close(10)


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


def random_fill(random: Random, num_sectors: int) -> memoryview:
    filled = buffer(num_sectors)
    filled[:] = random.randbytes(len(filled))
    return filled


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_against_a_bytearray(large: Device, seed: int) -> None:
    """Batches of requests that do not touch each other, many in flight, small and large."""
    random = Random(seed)
    model = bytearray(large.size_bytes)
    for _ in range(12):
        cuts = sorted(random.sample(range(1, LARGE_SECTORS), random.choice((1, 5, 40))))
        requests, wanted, images = [], {}, {}
        for tag, (at, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
            split = random.randint(1, end - at)
            sizes = [size for size in (split, end - at - split) if size]
            where = slice(at * SECTOR_BYTES, end * SECTOR_BYTES)
            if random.random() < 0.5:
                request = read(tag, at, *map(buffer, sizes), checksum=random.random() < 0.7)
                images[tag] = bytes(model[where])
                last = images[tag][-sizes[-1] * SECTOR_BYTES :]
                wanted[tag] = xxh3_128_digest(last) if request.checksum else b""
            else:
                buffers = [random_fill(random, size) for size in sizes]
                place = random.randrange(SECTOR_BYTES - 16)
                sealed = len(buffers) == 2 and random.random() < 0.7
                seals = (Seal(1, place),) if sealed else ()
                if sealed:
                    buffers[0][place : place + 16] = bytes(16)
                request = write(tag, at, *buffers, seals=seals)
                wanted[tag] = xxh3_128_digest(buffers[-1]) if sealed else b""
                model[where] = b"".join(map(bytes, buffers))
                if sealed:
                    start = at * SECTOR_BYTES + place
                    model[start : start + 16] = wanted[tag]
            requests.append(request)
        ended = finish_all(large, *requests)
        assert ended == {tag: Completion(tag, None, digest) for tag, digest in wanted.items()}
        for tag, image in images.items():
            assert b"".join(map(bytes, requests[tag].buffers)) == image
    whole = buffer(LARGE_SECTORS)
    assert finish(large, read(1, 0, whole)) == {1: None}
    assert bytes(whole) == model


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_strided_buffers_are_read_from_their_places(large: Device, stride: int) -> None:
    """As recovery reads headers: one page of each record, many records in one request."""
    data = random_fill(Random(stride), 40)
    finish(large, write(1, 0, data))
    buffers = [buffer() for _ in range(7)]
    (done,) = finish_all(large, read(2, 3, *buffers, checksum=True, stride=stride)).values()
    assert done.error is None
    for i, found in enumerate(buffers):
        at = (3 + i * stride) * SECTOR_BYTES
        assert found == data[at : at + SECTOR_BYTES]
    assert done.checksum == xxh3_128_digest(buffers[-1])


def test_seals_are_carried_out_in_their_order(large: Device) -> None:
    """The second covers the first: so a header's own checksum can cover its payload's."""
    header, payload = buffer(1, 0), buffer(700, 5)
    header[0:8] = b"a header"
    request = write(1, 2, header, payload, seals=(Seal(1, 100), Seal(0, 200)))
    first = xxh3_128_digest(payload)
    wanted = bytearray(header)
    wanted[100:116] = first
    wanted[200:216] = xxh3_128_digest(bytes(wanted))
    assert finish_all(large, request) == {1: Completion(1, None, first)}
    assert bytes(header) == wanted
    assert contents(large, 2, 701) == bytes(wanted) + bytes(payload)


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
    assert device.close(10)
    with pytest.raises(DeviceError):
        device.submit([read(1, 0, buffer())])
    device.cancel([1])
    assert device.close(10)


@pytest.mark.parametrize("at", [1, 16 * SECTOR_BYTES, 15 * SECTOR_BYTES + 1, -SECTOR_BYTES])
def test_what_is_not_aligned_or_not_inside_is_our_bug(device: Device, at: int) -> None:
    with pytest.raises(AssertionError):
        device.submit([IoRequest(1, Op.READ, at, (buffer(),))])


def test_other_bugs_of_ours(device: Device) -> None:
    for wrong in (
        read(1, 0, buffer()[:100]),
        read(1, 15, buffer(2)),
        IoRequest(1, Op.READ, 0, (buffer(),), (Seal(0, 0),)),
        IoRequest(1, Op.WRITE, 0, (buffer(),), (Seal(1, 0),)),
        IoRequest(1, Op.WRITE, 0, (buffer(),), checksum=True),
        IoRequest(1, Op.READ, 0, (), checksum=True),
    ):
        with pytest.raises(AssertionError):
            device.submit([wrong])
    assert finish(device, read(1, 0, buffer())) == {1: None}, "it is well, and the tag is free"


def test_many_threads_submit(device: Device) -> None:
    """Any thread submits; one polls."""
    buffers = [buffer(1, i + 1) for i in range(12)]

    def submit(number: int) -> None:
        for i in range(number, 12, 3):
            device.submit([write(i, i, buffers[i])])

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    ended = wait_for(device, 12)
    for thread in threads:
        thread.join()
    assert {completion.error for completion in ended} == {None}
    assert contents(device, 0, 12) == b"".join(map(bytes, buffers))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_cancelled_ends_exactly_once(large: Device, seed: int) -> None:
    random = Random(seed)
    buffers = {tag: random_fill(random, 300) for tag in range(40)}
    seals = (Seal(0, 0),)
    for filled in buffers.values():
        filled[:16] = bytes(16)
    large.submit([write(t, t % 6 * 300, b, seals=seals) for t, b in buffers.items() if t < 20])
    large.submit([read(t, 0, b, checksum=True) for t, b in buffers.items() if t >= 20])
    large.cancel(random.sample(range(40), 15))
    large.cancel([*random.sample(range(40), 15), 12345])
    ended = wait_for(large, 40)
    assert sorted(completion.tag for completion in ended) == list(range(40))
    for completion in ended:
        assert (completion.error is None) == bool(completion.checksum)
    large.cancel(list(range(40)))
    assert large.poll(0.01) == []
    assert finish(large, read(3, 0, buffer())) == {3: None}, "an old cancellation hit a new request"
