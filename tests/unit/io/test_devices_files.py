# SPDX-License-Identifier: Apache-2.0
"""Devices over real files: what a file system does to them, and which of them is chosen."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import logging
import os
import resource
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from random import Random

import numpy as np
import pytest
from xxhash import xxh3_128_digest

import attnstore_vllm._native as native
from attnstore_lab.testing.devices import SECTOR_BYTES
from attnstore_vllm.errors import ConfigError, DeviceError
from attnstore_vllm.io.aiofiles_device import AiofilesDevice
from attnstore_vllm.io.checksum import checksum, copy_checksums
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.io.device import Device
from attnstore_vllm.io.uring_device import UringDevice
from tests.device_helpers import (
    KINDS,
    SIZE,
    buffer,
    finish,
    finish_all,
    needs_uring,
    read,
    why_no_uring,
    write,
)

FILES = ["aiofiles", pytest.param("uring", marks=needs_uring)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    return path


@pytest.fixture(params=FILES)
def device(request: pytest.FixtureRequest, path: Path) -> Iterator[Device]:
    device = KINDS[request.param](path)
    yield device
    device.close(10)


@pytest.mark.parametrize("kind", [AiofilesDevice, pytest.param(UringDevice, marks=needs_uring)])
def test_a_file_that_is_not_there(
    tmp_path: Path, kind: type[AiofilesDevice] | type[UringDevice]
) -> None:
    with pytest.raises(DeviceError, match="absent"):
        kind(tmp_path / "absent", depth=1)


def test_a_file_that_shrinks_is_an_error_and_never_a_short_read(device: Device, path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(3 * SECTOR_BYTES)
    error = finish(device, read(1, 2, buffer(2), checksum=True))[1]
    assert error is not None
    assert f"{path} at byte 8192: read failed: [Errno 5]" in str(error)
    assert finish(device, read(2, 0, buffer(3))) == {2: None}


def test_a_write_that_is_refused_halfway(device: Device, path: Path) -> None:
    """The limit on a file's size first makes the transfer short, and then refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * SECTOR_BYTES, hard))
    try:
        error = finish(device, write(1, 2, buffer(2, 7)))[1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error is not None
    assert f"at byte 8192: write failed: [Errno {errno.EFBIG}]" in str(error)
    assert isinstance(error, DeviceError) and error.errno == errno.EFBIG
    assert path.read_bytes()[3 * SECTOR_BYTES :] == bytes(SIZE - 3 * SECTOR_BYTES)
    assert finish(device, write(2, 2, buffer(2, 7))) == {2: None}


def test_close_waits_for_what_is_in_flight(device: Device, path: Path) -> None:
    device.submit([write(i, i, buffer(1, i + 1)) for i in range(16)])
    assert device.close(10)
    assert len(device.poll(0)) <= 16, "the completions may be lost, and no more than that"
    assert path.read_bytes() == b"".join(bytes([i + 1]) * SECTOR_BYTES for i in range(16))


@contextmanager
def memory_that_hangs(num_bytes: int) -> Iterator[memoryview]:
    """Whoever touches it, the kernel included, waits until the block ends, deaf to signals."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(ctypes.c_long(323), ctypes.c_int(os.O_CLOEXEC))  # userfaultfd, on x86-64
    if fd < 0:
        pytest.skip(f"userfaultfd: {os.strerror(ctypes.get_errno())}")
    pages = mmap(-1, num_bytes, flags=0x22)  # private and anonymous
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    fcntl.ioctl(fd, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))  # UFFDIO_API
    missing = struct.pack("QQQQ", address, num_bytes, 1, 0)
    fcntl.ioctl(fd, 0xC020AA00, missing)  # UFFDIO_REGISTER
    try:
        yield memoryview(pages)
    finally:
        os.close(fd)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
def test_a_disk_that_hangs_is_left_behind(device: Device, path: Path) -> None:
    with memory_that_hangs(SECTOR_BYTES) as hanging:
        device.submit([read(1, 0, hanging)])
        device.submit([write(2 + i, 1 + i, buffer(1, 9)) for i in range(8)])
        device.submit([read(20 + i, 0, hanging) for i in range(8)])
        started = time.monotonic()
        assert not device.close(0.2)
        assert time.monotonic() - started < 5
        with pytest.raises(DeviceError):
            device.submit([read(99, 0, buffer())])
    for _ in range(1000):
        if device.close(0.02):  # it has come back: nobody needs to wait, but one may
            break
    else:
        pytest.fail("what was left behind never ended")


def test_a_device_whose_thread_has_ended_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours there must not leave the store waiting for completions for ever."""

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    device = AiofilesDevice(path, depth=1)
    monkeypatch.setattr(AiofilesDevice, "_move", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    device.submit([read(1, 0, buffer())])
    device._thread.join()
    with pytest.raises(DeviceError, match="has ended"):
        device.poll(0)
    with pytest.raises(DeviceError):
        device.submit([read(2, 0, buffer())])


# ---- io_uring only ---------------------------------------------------------------------


def region_of(pages: memoryview) -> tuple[int, int]:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages)), len(pages)


@needs_uring
@pytest.mark.parametrize("limit", [0, 512 * 1024])
def test_regions_are_pinned_where_the_limit_allows_it(path: Path, limit: int) -> None:
    """Buffers in a region, beside it, across its end, and half in it: all are served."""
    program = f"""
import resource
from ctypes import CDLL
from pathlib import Path
from attnstore_vllm.io.uring_device import UringDevice
from tests.device_helpers import SECTOR_BYTES, buffer, finish, read, write
from tests.unit.io.test_devices_files import region_of
if {limit}:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))
    CDLL(None).setuid(65534)  # whom the limit holds for
pool = buffer(8, 1)
large = buffer(512)
far, near = region_of(large), (region_of(pool)[0], 4 * SECTOR_BYTES)
device = UringDevice(Path({str(path)!r}), 4, regions=[far, near])
print(device.has_regions)
outside = buffer(1, 2)
pieces = [(pool[:8192],), (pool[8192:28672],), (outside,), (pool[4096:8192], outside)]
for tag, buffers in enumerate(pieces):
    assert finish(device, write(tag, 5, *buffers)) == {{tag: None}}
    wanted = b"".join(map(bytes, buffers))
    for one in buffers:
        one[:] = bytes(len(one))
    assert finish(device, read(tag, 5, *buffers)) == {{tag: None}}
    assert b"".join(map(bytes, buffers)) == wanted
assert device.close(10)
"""
    for parent in (path.parent, *path.parent.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o711)
    if limit:
        os.chown(path, 65534, -1)
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    if limit or os.geteuid() == 0:  # else it depends on the limit that we run under
        assert answer.stdout.split() == [str(not limit)]


@needs_uring
def test_a_full_disk_is_reported() -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    device = native.Uring(fd=fd, depth=2, regions=[], piece_bytes=4096, num_hash_threads=1)
    assert device.submit([(7, 1, 0, (buffer(3),), (), False, 0)])
    assert device.poll(10) == [(7, errno.ENOSPC, os.strerror(errno.ENOSPC), b"")]
    assert device.close(10)


@needs_uring
def test_a_read_that_waits_is_cancelled_by_the_kernel() -> None:
    """The other requests of its queue are dropped before the kernel has seen them."""
    reader, writer = os.pipe()
    device = native.Uring(fd=reader, depth=1, regions=[], piece_bytes=4096, num_hash_threads=1)
    into = [buffer(2) for _ in range(3)]
    assert device.submit([(tag, 0, 0, (into[tag],), (), False, 0) for tag in range(3)])
    assert device.poll(0.05) == []
    device.cancel([2, 0])
    ended: list[tuple[int, int, str, bytes]] = []
    while len(ended) < 2:
        ended += device.poll(10)
    assert sorted((tag, code) for tag, code, _, _ in ended) == [
        (0, errno.ECANCELED),
        (2, errno.ECANCELED),
    ]
    started = time.monotonic()
    assert device.close(0.05), "the kernel has given all back"
    assert time.monotonic() - started < 5
    os.close(writer)


@needs_uring
def test_an_unaligned_address_is_our_bug(path: Path) -> None:
    device = UringDevice(path, depth=1)
    with pytest.raises(AssertionError):
        device.submit([read(1, 0, buffer(2)[100 : 100 + SECTOR_BYTES])])
    assert device.close(10)


@needs_uring
def test_a_tag_in_flight_is_our_bug(path: Path) -> None:
    device = UringDevice(path, depth=1)
    with pytest.raises(AssertionError):
        device.submit([read(1, 0, buffer()), read(1, 0, buffer())])
    assert finish(device, read(1, 0, buffer())) == {1: None}
    assert device.close(10)


@needs_uring
def test_a_device_that_nobody_closed_ends_with_its_last_name(path: Path) -> None:
    for _ in range(20):
        device = UringDevice(path, depth=2)
        device.submit([read(i, 0, buffer(16)) for i in range(8)])
        del device


@pytest.mark.skipif(not hasattr(native, "page_checksums"), reason="built without xxhash.h")
def test_checksums_of_pages() -> None:
    whole = memoryview(Random(1).randbytes(40 * 512))
    pages = np.frombuffer(whole, np.uint8)
    for page_bytes in (512, 4096):
        for zero_at in (0, 77, page_bytes - 16):
            wanted = pages.copy().reshape(-1, page_bytes)
            wanted[:, zero_at : zero_at + 16] = 0
            sums = native.page_checksums(whole, page_bytes, zero_at)
            assert sums == b"".join(xxh3_128_digest(row.tobytes()) for row in wanted)
    assert native.page_checksums(b"", 4096, 0) == b""
    for wrong in ((whole, 4095, 0), (whole, 4096, 4081), (whole, 0, 0), (whole[::2], 512, 0)):
        with pytest.raises(ValueError, match=r"page|contiguous"):
            native.page_checksums(*wrong)


# ---- which one is chosen ---------------------------------------------------------------


@needs_uring
def test_io_uring_is_the_first_choice(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device, description = open_device(path, 2, "auto")
    assert isinstance(device, UringDevice)
    assert description == "io_uring, O_DIRECT"
    assert not caplog.records
    device.close(10)


def test_aiofiles_by_name(path: Path) -> None:
    device, description = open_device(path, 2, "aiofiles")
    assert isinstance(device, AiofilesDevice)
    assert description in ("aiofiles, O_DIRECT", "aiofiles, through the page cache")
    device.close(10)


@pytest.mark.parametrize("why", ["liburing", "O_DIRECT"])
def test_without_io_uring_threads_serve_and_it_is_said_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    if why == "liburing":
        monkeypatch.setattr(native, "has_uring", False)
    else:
        if why_no_uring():
            pytest.skip(why_no_uring())
        monkeypatch.delattr(os, "O_DIRECT")
    with caplog.at_level(logging.INFO):
        device, _ = open_device(path, 2, "auto")
    assert isinstance(device, AiofilesDevice)
    assert len(caplog.records) == 1
    assert why in caplog.text
    assert finish_all(device, read(1, 0, buffer()))[1].error is None
    device.close(10)
    with pytest.raises(ConfigError, match=why):
        open_device(path, 2, "uring")


FORBIDDEN = """
import ctypes, logging, struct, sys
from pathlib import Path
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.io.checksum import checksum, copy_checksums
from attnstore_vllm.io.choose import open_device
from tests.device_helpers import buffer, finish, read
logging.basicConfig(format="LOG %(message)s")
libc = ctypes.CDLL(None, use_errno=True)
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
rules = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert libc.prctl(22, 2, rules, 0, 0) == 0, ctypes.get_errno()  # io_uring_setup: EPERM
path = Path(sys.argv[1])
device, description = open_device(path, 2, "auto")
assert finish(device, read(1, 0, buffer())) == {1: None}
assert device.close(10)
try:
    open_device(path, 2, "uring")
except ConfigError as error:
    print(description, "|", error)
"""


@needs_uring
def test_io_uring_forbidden_by_the_kernel(path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, str(path)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("LOG ") == 1
    assert "served by threads" in answer.stderr and "not permitted" in answer.stderr
    description, _, error = answer.stdout.partition("|")
    assert "aiofiles" in description
    assert "the kernel refuses io_uring" in error


@pytest.mark.parametrize("is_native", [True, False])
def test_copies_have_the_checksums_of_what_has_come(
    monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    if not is_native:
        monkeypatch.delattr(native, "copy_checksums", raising=False)
    elif not hasattr(native, "copy_checksums"):
        pytest.skip("built without xxhash.h")
    of = [memoryview(os.urandom(size)) for size in (4096, 100, 0, 7, 500_001, 300_000)]
    to = [memoryview(bytearray(size)) for size in (4196, 7, 800_001)]
    digests = copy_checksums([(to[0], of[:2]), (to[1], of[2:4]), (to[2], of[4:])])
    wanted = [bytes(of[0]) + bytes(of[1]), bytes(of[3]), bytes(of[4]) + bytes(of[5])]
    assert [bytes(copy) for copy in to] == wanted
    assert digests == [checksum(data) for data in wanted]
    assert copy_checksums([]) == []
    with pytest.raises((ValueError, AssertionError)):
        copy_checksums([(to[0], of[:1])])
    with pytest.raises((BufferError, ValueError, TypeError)):
        copy_checksums([(memoryview(b"read only"), [memoryview(b"nine byte")])])


def test_a_checksum_is_of_the_copy_whatever_becomes_of_what_is_copied() -> None:
    of, to = bytearray(3 << 20), memoryview(bytearray(3 << 20))
    is_over = threading.Event()

    def write() -> None:
        for number in itertools.cycle(range(256)):
            if is_over.is_set():
                return
            of[:] = bytes([number]) * len(of)

    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write)
        try:
            for _ in range(50):
                assert copy_checksums([(to, [memoryview(of)])]) == [checksum(to)]
        finally:
            is_over.set()
        writing.result()
