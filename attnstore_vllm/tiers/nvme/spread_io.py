# SPDX-License-Identifier: Apache-2.0
"""NVMe of an engine whose ranks are on several nodes: this is the first one's side.

A record is whole when every node has its part (node_disk.py). This node's part is a record as
always, with index, header and recovery. The others write theirs once this one is written, since
their stamp has its checksum. Reads run beside each other. A load is over when all have answered,
and brings a chunk only if all have it.

    begin_load -> own read, and an order -> ... results with a report -> done
    begin_store -> own write -> an order -> ... results with a report -> done

A disk of one node is out of use for all. A look at whether it works again is one at all of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from blake3 import blake3

from attnstore_vllm.errors import AttnStoreError, CorruptRecordError, DeviceError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.io.device import Op
from attnstore_vllm.tiers.nvme.node_disk import LOOK, STAMP_BYTES, NodeOrder, NodeResult
from attnstore_vllm.tiers.nvme.nvme_io import NvmeIo
from attnstore_vllm.tiers.tier_io import Loaded, Stored
from attnstore_vllm.types import NVME, StoreFailure

KEPT_S = 2.0
"""How long an engine without requests goes on stepping for writes that do not get on."""


@dataclass(slots=True)
class _Pending:
    """An order that not all have answered."""

    op: Op
    left: int
    """Answers to come: of a read, this node's too."""
    tell: Callable[[AttnStoreError | None, bytes], None]
    late: Callable[[], None]
    sent_in: int | None = None
    """The step that takes it there; None: it is not sent."""
    deadline: float = math.inf
    is_late: bool = False
    is_look: bool = False
    failure: AttnStoreError | None = None
    tokens: bytes = b""


class SpreadIo(NvmeIo):
    """See the module. Methods marked *locked* are called with the store's lock held.

    Args:
        others: nodes beside this one.
        digests: of the weights of each of them, as it has told: filled here.
    """

    def __init__(
        self,
        *given: Any,
        others: int,
        digests: dict[int, bytes],
        deadline_s: float,
        **more: Any,
    ) -> None:
        super().__init__(*given, deadline_s=deadline_s, **more)
        self._others, self._digests, self.deadline_s = others, digests, deadline_s
        self._numbers = itertools.count(1)
        self._orders: list[NodeOrder] = []
        self._answers: dict[int, _Pending] = {}
        self._num_open = Counter[Op]()
        self._looks: dict[Op, int] = {}
        """Numbers of the looks that are under way."""
        self._looked: list[tuple[Op, AttnStoreError | None]] = []
        """Those that are over, and are not noted yet."""
        self._num_waiting, self._moved_at = 0, self._context.clock()

    # ---- what is under way -------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        return self._num_open[Op.READ]

    @property
    def num_storing(self) -> int:
        return super().num_storing + self._num_open[Op.WRITE]

    @property
    def can_load(self) -> bool:
        return super().can_load and self._num_open[Op.READ] < self._depths[0]

    @property
    def can_store(self) -> bool:
        return super().can_store and self._num_open[Op.WRITE] < self._depths[1]

    def is_busy(self) -> bool:
        """Whether the engine must go on stepping, since orders and results travel with steps."""
        with self._context.progress:
            now, waiting = self._context.clock(), len(self.tier.waiting)
            if waiting != self._num_waiting:
                self._num_waiting, self._moved_at = waiting, now
            has_work = waiting or self.num_storing or len(self._digests) < self._others
            # One that is late may never be answered: it keeps no engine awake.
            is_sent = any(
                found.sent_in is not None and not found.is_late for found in self._answers.values()
            )
            return (
                bool(self._orders) or is_sent or (bool(has_work) and now < self._moved_at + KEPT_S)
            )

    # ---- with each step ----------------------------------------------------------------

    def take_orders(self, step: int) -> Sequence[NodeOrder]:
        """The orders that the plan of this step takes to the other nodes."""
        with self._context.progress:
            orders, self._orders = self._orders, []
            for order in orders:
                self._answers[order.number].sent_in = step
            return orders

    def on_results(self, results: Sequence[NodeResult], step: int) -> None:
        """Takes results that the report of this step has brought from the other nodes."""
        if not results and not self._answers:
            return
        failures: list[AttnStoreError] = []
        with self._context.progress:
            now = self._context.clock()
            for result in results:
                if not result.number:
                    self._digests[result.node] = result.digest
                    continue
                failure = result.error()
                is_look = self._answers[result.number].is_look
                self._answered(result.number, failure, b"")
                if failure is not None and not is_look:
                    failures.append(failure)
            late = self._take_late(now, step)
            self._moved_at = now if results else self._moved_at
            self._context.progress.notify_all()
        for failure in failures:
            if isinstance(failure, CorruptRecordError):
                self.health.note_read(failure)
            elif isinstance(failure, DeviceError):  # successes here say nothing of that node
                self.health.note_look(failure)
        for found in late:
            found.late()
            self.health.note_hang(found.op.value)
        self._note_looks()
        self.wake()

    def _take_late(self, now: float, step: int) -> list[_Pending]:
        """Locked. Late is what a report does not have: while no step runs none can come. Reports
        of steps before the order's say nothing, however long those took: the time counts from the
        first that could have had it."""
        late: list[_Pending] = []
        for found in self._answers.values():
            if found.is_late or found.sent_in is None or found.sent_in > step:
                continue
            found.deadline = min(found.deadline, now + self.deadline_s)
            if found.deadline < now:
                found.is_late = True
                late.append(found)
        return late

    def _begin(self, op: Op, record: int, slot: int, stamp: bytes, found: _Pending) -> int:
        """Locked."""
        number = next(self._numbers)
        self._answers[number] = found
        self._num_open[op] += not found.is_look
        self._orders.append(NodeOrder(number, op, record, slot, stamp))
        return number

    def _answered(self, number: int, failure: AttnStoreError | None, tokens: bytes) -> None:
        """Locked."""
        found = self._answers[number]
        found.left -= 1
        found.failure = found.failure or failure
        found.tokens = found.tokens or tokens
        assert found.left >= 0
        if not found.left:
            del self._answers[number]
            self._num_open[found.op] -= not found.is_look
            found.tell(found.failure, found.tokens)

    # ---- looks at disks that are out of use --------------------------------------------

    def _send_probe(self, op: Op) -> None:
        with self._context.progress:
            if op in self._looks:  # a disk that hangs gets no more of them
                (self.health.reads if op is Op.READ else self.health.writes).forget_probe()
                return
            left = 1 + self._others
            found = _Pending(op, left, partial(self._end_look, op), lambda: None, is_look=True)
            self._looks[op] = self._begin(op, 0, LOOK, bytes(STAMP_BYTES), found)
        super()._send_probe(op)

    def _probed(self, op: Op, failure: AttnStoreError | None) -> None:
        with self._context.progress:
            self._answered(self._looks[op], failure, b"")
        self._note_looks()

    def _end_look(self, op: Op, failure: AttnStoreError | None, _: bytes) -> None:
        """Locked."""
        del self._looks[op]
        self._looked.append((op, failure))

    def _note_looks(self) -> None:
        with self._context.progress:
            looked, self._looked = self._looked, []
        for op, failure in looked:
            super()._probed(op, failure)

    # ---- loads and stores --------------------------------------------------------------

    def begin_load(
        self, chunk: Chunk, payload: memoryview, done: Loaded, late: Callable[[], None]
    ) -> None:
        record, copy = chunk.at(NVME).slot, chunk.at(NVME)
        told = [late]

        def once() -> None:
            while told:
                told.pop()()

        stamp = self._stamp(record, self._generation(record), chunk, copy.checksum)
        found = _Pending(Op.READ, 1 + self._others, done, once)
        number = self._begin(Op.READ, record, chunk.dram.slot, stamp, found)
        super().begin_load(chunk, payload, partial(self._answered, number), once)

    def begin_store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        record, slot = chunk.at(NVME).slot, chunk.dram.slot
        stamp = partial(self._stamp, record, self._generation(record), chunk)

        def stored_here(outcome: bytes | StoreFailure) -> None:
            if isinstance(outcome, StoreFailure):
                done(outcome)
                return

            def tell(failure: AttnStoreError | None, _: bytes) -> None:
                done(outcome if failure is None else StoreFailure.FAILED)

            found = _Pending(Op.WRITE, self._others, tell, lambda: None)
            self._begin(Op.WRITE, record, slot, stamp(outcome), found)

        super().begin_store(chunk, payload, stored_here)

    def _generation(self, record: int) -> bytes:
        return self._disk.slab.segment(record).generation

    def _stamp(self, record: int, generation: bytes, chunk: Chunk, checksum: bytes) -> bytes:
        """Names this node's record to the others."""
        named = record.to_bytes(8, "little") + generation + chunk.name.key + checksum
        return blake3(named).digest()
