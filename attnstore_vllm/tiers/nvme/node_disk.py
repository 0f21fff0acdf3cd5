# SPDX-License-Identifier: Apache-2.0
"""NVMe of a node that is not the first: it does what the first node orders, and knows no chunks.

    record = one page: "ATTNNODE" | stamp, 32 bytes | checksum of the payload, 16 bytes
             payload: the parts that this node's ranks have of a slot

    behind all records: one page more, which shows how the disk is

Record n belongs to record n of the first node, and is of use beside it alone. So there is no index
here and no recovery. The stamp names the first node's record: its place, its segment's generation,
the chunk's key and the checksum of what that node has of it; this node's number goes into it too,
since all get one stamp, and machines may change places. A read whose stamp is another says so,
and one whose payload has another checksum too. Either is a miss. A restart, another disk or a write
that never came costs a prefill, and no wrong byte.

Orders come with a step's plan, and results leave with its report. In between a thread of ours
waits for the disk.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from blake3 import blake3

from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import (
    AttnStoreError,
    CorruptRecordError,
    DeviceError,
    GoneError,
    MachineError,
)
from attnstore_vllm.io.choose import DeviceKind, open_device
from attnstore_vllm.io.device import CHECKSUM_BYTES, Completion, Op, Seal
from attnstore_vllm.own_files import NotOursError, open_own
from attnstore_vllm.tiers.nvme.disk_requests import DiskRequest, DiskRequests
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES

logger = logging.getLogger(__name__)

FILE_NAME: Final = "node.bin"
DEPTH: Final = 64
STAMP_BYTES: Final = 32
LOOK: Final = -1
"""In place of a slot: a look at the disk, at the page behind all records."""
MAGIC: Final = b"ATTNNODE"
CHECKSUM_AT: Final = len(MAGIC) + STAMP_BYTES
_SEALS: Final = (Seal(of=1, at=CHECKSUM_AT),)
_POLL_S: Final = 0.25


class NodeOrder(NamedTuple):
    """A read or a write that every node but the first is to do."""

    number: int
    op: Op
    """READ: the record into the slot; WRITE: the other way."""
    record: int
    slot: int
    """A slot of DRAM, or LOOK. The first node holds it until all results have come."""
    stamp: bytes


class NodeFailure(Enum):
    NO = "no"
    DEVICE = "device"
    CORRUPT = "corrupt"
    GONE = "gone"
    """The record is another one."""


class NodeResult(NamedTuple):
    """An order is over; or, with number 0, what the weights of this node are."""

    node: int
    number: int
    failed: NodeFailure = NodeFailure.NO
    text: str = ""
    errno: int = 0
    digest: bytes = b""

    def error(self) -> AttnStoreError | None:
        """The failure, as the first node takes it."""
        where = f"node {self.node}: {self.text}"
        match self.failed:
            case NodeFailure.NO:
                return None
            case NodeFailure.DEVICE:
                return DeviceError(where, self.errno)
            case NodeFailure.CORRUPT:
                return CorruptRecordError(where, "payload checksum", "the header's", "another")
            case NodeFailure.GONE:
                return GoneError(f"{where} is another one")


class Slots(Protocol):
    """The DRAM of this node: all parts of a slot, one behind the other."""

    num_slots: int
    slot_bytes: int

    @property
    def address(self) -> int: ...
    def slot(self, slot: int) -> memoryview: ...
    def close(self) -> None: ...


class NodeDisk:
    """See the module. The methods are called on the worker's thread.

    Args:
        pool: closed with this.
        directory: of the settings; the caller holds its lock.
        node: its number; the first node's is 0.
        weights: says their digest, once it is known.

    Raises: MachineError if the disk does not have the capacity or refuses the file; ConfigError.
    """

    def __init__(
        self,
        pool: Slots,
        directory: Path,
        capacity_bytes: int,
        io: DeviceKind,
        deadline_s: float,
        node: int,
        weights: Callable[[], bytes | None],
    ) -> None:
        self._pool, self._node, self._weights = pool, node, weights
        self._record_bytes = PAGE_BYTES + pool.slot_bytes
        self.num_records = max(0, capacity_bytes - PAGE_BYTES) // self._record_bytes
        self._path = directory / FILE_NAME
        _allocate(self._path, self.num_records * self._record_bytes + PAGE_BYTES)
        region = (pool.address, pool.num_slots * pool.slot_bytes)
        try:
            self._device, self.kind = open_device(self._path, DEPTH, io, [region])
        except DeviceError as error:
            raise MachineError(f"nvme.path: {error}; check the disk") from error
        self._requests = DiskRequests(self._device, deadline_s, time.monotonic)
        self._pages: list[memoryview] = []
        """Free ones: as many as were ever in flight."""
        self._results: deque[NodeResult] = deque()
        self._has_told = self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="attnstore", daemon=True)
        # A thread that comes back from native code while the interpreter ends aborts the process.
        self._at_exit = weakref.finalize(self._thread, self._end_with, os.getpid())
        self._thread.start()

    def begin(self, orders: Sequence[NodeOrder]) -> None:
        """Hand these to the disk; waits for nothing."""
        requests, is_out = [], not self._thread.is_alive()
        for order in orders:
            is_look = order.slot == LOOK
            if is_out:
                self._end(order, NodeFailure.DEVICE, "its thread has ended")
                continue
            if order.record >= self.num_records and not is_look:  # the first node's file is longer
                self._end(order, NodeFailure.GONE, f"record {order.record}: there is no such one")
                continue
            page = self._pages.pop() if self._pages else memoryview(mmap.mmap(-1, PAGE_BYTES))
            if order.op is Op.WRITE:
                page[:] = (MAGIC + self._own(order.stamp)).ljust(PAGE_BYTES, b"\0")
            record = self.num_records if is_look else order.record
            requests.append(
                DiskRequest(
                    order.op,
                    partial(self._done, order, page),
                    partial(logger.warning, "%s does not answer", self._path),
                    offset=record * self._record_bytes,
                    buffers=(page,) if is_look else (page, self._pool.slot(order.slot)),
                    seals=_SEALS if order.op is Op.WRITE and not is_look else (),
                    checksum=order.op is Op.READ and not is_look,
                )
            )
        self._requests.submit(requests)

    def take_results(self) -> list[NodeResult]:
        """Results of all orders that are over since the last call."""
        results = [self._results.popleft() for _ in range(len(self._results))]
        if not self._has_told and (digest := self._weights()) is not None:
            self._has_told = True
            results.append(NodeResult(self._node, 0, digest=digest))
        return results

    def close(self, timeout_s: float = 3.0) -> None:
        self._at_exit.detach()
        self._stop(timeout_s)
        if not self._device.close(timeout_s):
            logger.warning("%s still has requests in flight; they are not waited for", self._path)
        self._pool.close()

    def _stop(self, timeout_s: float) -> None:
        self._is_ending = True
        self._requests.cancel_all()
        self._device.wake()
        self._thread.join(timeout_s)

    def _end_with(self, pid: int) -> None:
        if os.getpid() == pid:  # a fork's child has no thread
            self._stop(0.5)

    def _done(self, order: NodeOrder, page: memoryview, completion: Completion) -> None:
        failed, text, code = NodeFailure.NO, "", 0
        if completion.error is not None:
            failed, text = NodeFailure.DEVICE, str(completion.error)
            code = completion.error.errno
        elif order.op is Op.READ and order.slot != LOOK:
            text = f"{self._path}, record {order.record}"
            stated = bytes(page[CHECKSUM_AT : CHECKSUM_AT + CHECKSUM_BYTES])
            if bytes(page[:CHECKSUM_AT]) != MAGIC + self._own(order.stamp):
                failed = NodeFailure.GONE
            elif stated != completion.checksum:
                failed = NodeFailure.CORRUPT
        self._pages.append(page)
        self._end(order, failed, text, code)

    def _own(self, stamp: bytes) -> bytes:
        """The stamp as of this node's part of the slot, which is what a record says."""
        part = self._node.to_bytes(8, "little") + self._pool.slot_bytes.to_bytes(8, "little")
        return blake3(stamp + part).digest()

    def _end(self, order: NodeOrder, failed: NodeFailure, text: str = "", code: int = 0) -> None:
        self._results.append(NodeResult(self._node, order.number, failed, text, code))

    def _run(self) -> None:
        """On our thread. An error of ours ends it: then orders fail, and what is in flight keeps
        its slots, since the device may still write to them."""
        while not self._is_ending:
            self._requests.run(_POLL_S)


def _allocate(path: Path, num_bytes: int) -> None:
    """Give the file its size and its blocks. Raises MachineError."""
    try:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, num_bytes)
            try:
                os.posix_fallocate(fd, 0, max(1, num_bytes))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        finally:
            os.close(fd)
    except NotOursError as error:
        raise MachineError(f"nvme.path: {error}") from error
    except OSError as error:
        raise MachineError(
            f"nvme.path: {path} cannot be made ready with nvme.capacity {format_size(num_bytes)}: "
            f"{error}; check the disk, or ask for less"
        ) from error
