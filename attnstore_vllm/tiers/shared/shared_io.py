# SPDX-License-Identifier: Apache-2.0
"""The shared tier: chunks in a network store that several servers read and write.

It is long since questions, loads and stores share a child, its lanes and its health.

    look-up ends early -> EXIST of all that follows -> entries in the index
    load     GET into the bounce buffer -> copied into the slot of DRAM -> verified there
    store    EXIST -> header and payload copied into the bounce buffer -> PUT

The bounce buffer may be written by others at any time: a payload is verified where it was copied
to, and its digest taken where it was copied from. Nothing here runs on the scheduler's thread:
one thread asks, two load, two store, each with a lane of the child process. Of two, one copies and
verifies while the other's values are under way.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from attnstore_vllm.errors import AttnStoreError, CorruptRecordError, DeviceError, GoneError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.io.daemon_pool import DaemonPool
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.health import Health
from attnstore_vllm.tiers.noted_reset import NotedReset
from attnstore_vllm.tiers.remote import Ask, Found, RemoteLookup
from attnstore_vllm.tiers.remote_io import RemoteIo
from attnstore_vllm.tiers.shared import shared_generation as generations
from attnstore_vllm.tiers.shared.backend import FAILED, MISSING, WRONG_SIZE
from attnstore_vllm.tiers.shared.helper import Helper, LateError
from attnstore_vllm.tiers.shared.lanes import LaneOp, Lanes
from attnstore_vllm.tiers.shared.record import HEADER_BYTES, RecordNames, place_bytes
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.shared_tier import SharedTier
from attnstore_vllm.tiers.tier_io import Loaded, Stored
from attnstore_vllm.types import SHARED, Event, Flow, StoreFailure

logger = logging.getLogger(__name__)

ASK_LANE, LOAD_LANES, STORE_LANES = 0, (1, 2), (3, 4)
NUM_LANES = 5
LANE_BYTES = (8 << 20) + (64 << 10)
"""Four records of 2 MiB, with their headers."""
PLACES_MAX = 16
"""Places of a lane, if its memory has room for them."""
DEPTH = 32
"""Loads, and stores, that have not ended."""
LEASE_S = 8.0
"""Mooncake grants 10 s to what was asked for."""
LOOK_S = 2.0
"""Between two looks at the generation; they also show whether the store answers."""
ALONE_S = 5.0
"""A chunk whose get has failed is left alone for so long."""
ALONE_MAX = 4096
BANDWIDTH_BURST_S, DAILY_BURST_S = 1.0, 3600.0


class _LoadJob(NamedTuple):
    chunk: Chunk
    names: RecordNames | None
    """None: there is no generation."""
    name: bytes
    payload: memoryview
    done: Loaded


class _StoreJob(NamedTuple):
    chunk: Chunk
    names: RecordNames | None
    """None: there is no generation."""
    name: bytes
    payload: memoryview
    done: Stored


_Job = TypeVar("_Job", _LoadJob, _StoreJob)


class SharedIo(RemoteIo):
    """See the module.

    Args:
        settings: see Helper.
        keys: that all servers of the group have, or have none.
        where: the store's address, for the log.
        directory: that remembers which generations were left; None: for tests.
        tenants: those with a quota, by the operator's names.
        write_rates: bytes a second that may be written, by burst in seconds.
    """

    lease_s = LEASE_S
    flow_up, flow_down = Flow.FROM_SHARED, Flow.TO_SHARED
    read_failed, corrupt = Event.SHARED_READ_FAILED, Event.SHARED_CORRUPT

    def __init__(
        self,
        context: Context,
        tier: SharedTier,
        settings: Mapping[str, Any],
        *,
        keys: SharedKeys,
        namespace: bytes,
        where: str,
        deadline_s: float,
        directory: Path | None,
        tenants: Mapping[bytes, str],
        write_rates: Mapping[float, float | None],
    ) -> None:
        super().__init__(context, tier)
        self.tier: SharedTier = tier
        tier.clock = context.clock
        payload_bytes = context.pool.slot_bytes
        self.record_bytes = HEADER_BYTES + payload_bytes
        places = max(1, min(PLACES_MAX, LANE_BYTES // place_bytes(payload_bytes)))
        self.helper = Helper(settings, Lanes(payload_bytes, NUM_LANES, places))
        self.answer_deadline_s = self._deadline_s = deadline_s
        self.health = Health(
            "the shared tier",
            where,
            context.progress,
            context.residency.counts,
            context.clock,
            events=(Event.SHARED_LATE, Event.SHARED_OUT),
        )
        self._where = where
        self._tenants = tenants
        self.keys = keys
        self.sums_payloads = not keys.is_secret  # else its digests are no checksums
        self.namespace = namespace
        self.generation = (
            generations.load(directory, namespace)
            if directory is not None
            else generations.SharedGeneration()
        )
        self._directory = directory
        self._saved = self.generation.to_json()
        self._saving = threading.Lock()
        self._said_out: str | None = None
        self._said_forged = self._said_unsaved = False
        now = context.steady()
        self._budgets = [
            # A start adds nothing to a day's, nor lends of the next one's.
            Budget(rate, burst, empty_at=now if burst >= DAILY_BURST_S else None)
            for burst, rate in write_rates.items()
            if rate
        ]
        self._num_loading = self._num_storing = 0
        self._loads: deque[_LoadJob] = deque()
        self._stores: deque[_StoreJob] = deque()
        self._alone: OrderedDict[bytes, float] = OrderedDict()
        self._damaged: OrderedDict[bytes, None] = OrderedDict()
        """RecordNames whose record is to be written over."""
        self._put_here: OrderedDict[bytes, bytes] = OrderedDict()
        """Digests of payloads that this process has put, by name: what comes back so is its own."""
        self._look_at = 0.0
        self._is_looking = False
        self._asker = DaemonPool(1, "attnstore-shared-ask")
        self._loaders = [DaemonPool(1, f"attnstore-shared-load{lane}") for lane in LOAD_LANES]
        self._storers = [DaemonPool(1, f"attnstore-shared-store{lane}") for lane in STORE_LANES]
        self._next = 0

    # ---- what is under way -------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        return self._num_loading

    @property
    def num_storing(self) -> int:
        return self._num_storing

    @property
    def can_load(self) -> bool:
        return self._num_loading < DEPTH

    @property
    def can_store(self) -> bool:
        return self._num_storing < DEPTH

    @property
    def _usable(self) -> bytes | None:
        """The generation that this engine reads and writes; None: none, now or for good."""
        return None if self.has_left else self.generation.usable

    def leave(self) -> None:
        super().leave()
        self.tier.open_to(False)

    def _names(self) -> RecordNames | None:
        """Locked."""
        usable = self._usable
        return None if usable is None else RecordNames(self.namespace, usable, self.keys)

    def gauges_now(self) -> dict[tuple[str, str], float]:
        joined = self._usable is not None
        gauges = {
            (f"{SHARED}_in_use", "reads"): float(self.health.reads.in_use and joined),
            (f"{SHARED}_in_use", "writes"): float(self.health.writes.in_use and joined),
        }
        for tenant, (held, most) in self.tier.puts.held().items():
            label = f"{self._tenants[tenant]}|{SHARED}"
            gauges["tenant_held_bytes", label] = float(held * self.record_bytes)
            gauges["tenant_quota_bytes", label] = float(most * self.record_bytes)
        return gauges

    # ---- asking ------------------------------------------------------------------------

    def look_up(self, lookup: RemoteLookup, at: int, stop: int, request_id: str = "") -> Ask | None:
        if self._usable is None:
            return None
        return super().look_up(lookup, at, stop, request_id)

    def ask(self, ask: Ask) -> None:
        """The caller plans a step: what a question costs is spent on the tier's thread."""
        if ask.keys and self._alone.get(bytes(ask.keys[0]), 0.0) <= self.context.clock():
            self._asker.hand(self._ask, ask)
        else:  # no one waits for another thread to hear that nothing is asked for
            self._ask_nobody(ask)

    def _ask_nobody(self, ask: Ask) -> None:
        """Locked. That shows nothing of the store."""
        ask.is_over = True
        self.health.reads.forget_probe()
        self.context.progress.notify_all()

    def _wanted(self, ask: Ask) -> list[bytes]:
        """The names of what is asked for: none if nothing is to be asked any more."""
        with self.context.progress:
            names, now = self._names(), self.context.clock()
            if ask.is_over:
                return []
            while self._alone and next(iter(self._alone.values())) <= now:
                self._alone.popitem(last=False)
            keys = list(takewhile(self._is_asked_for, map(bytes, ask.keys)))
            if names is None or not keys:
                self._ask_nobody(ask)
                return []
        return [names.of(key, ask.tenant) for key in keys]

    def _is_asked_for(self, key: bytes) -> bool:
        return key not in self._alone and key not in self._wrong

    def _ask(self, ask: Ask) -> None:
        wanted = self._wanted(ask)
        if not wanted:
            return
        try:
            there = self.helper.numbers(ASK_LANE, LaneOp.EXIST, wanted, self._deadline_s)
        except DeviceError as error:
            self.fail(ask, error)
            self._note_end(error, "look-up")
            return
        count = len(list(takewhile(bool, there)))
        self.answer(ask, [Found(ask.name(number)) for number in range(count)])

    def _note_end(self, error: DeviceError, what: str) -> None:
        """A store or a child that hangs or died: the tier is left alone until it answers."""
        if isinstance(error, LateError) or not self.helper.is_running:
            self.health.note_hang(what)

    # ---- the shared tier -> DRAM -------------------------------------------------------

    def begin_load(
        self, chunk: Chunk, payload: memoryview, done: Loaded, late: Callable[[], None]
    ) -> None:
        names = self._names()
        name = _named(chunk, names)
        self._loads.append(_LoadJob(chunk, names, name, payload, done))
        self._num_loading += 1

    def submit(self) -> None:
        with self.context.progress:
            num_loads, num_stores = len(self._loads), len(self._stores)
        self._next = 1 - self._next
        for which in (self._next, 1 - self._next)[:num_loads]:
            self._loaders[which].submit(self._load_all, LOAD_LANES[which])
        for which in (self._next, 1 - self._next)[:num_stores]:
            self._storers[which].submit(self._store_all, STORE_LANES[which])

    def _load_all(self, lane: int) -> None:
        """On a thread that loads: what waits, some at a time, beside the other such thread."""
        while True:
            with self.context.progress:
                batch = self._some(self._loads)
            if not batch:
                return
            self._load(lane, batch)
            self.context.wake()

    def _some(self, jobs: deque[_Job]) -> list[_Job]:
        """Locked. A part of them. All parts are of one size, as far as they can be."""
        num_parts = max(1, -(-len(jobs) // self.helper.lanes.num_places))
        count = -(-len(jobs) // num_parts)
        return [jobs.popleft() for _ in range(count)]

    def _load(self, lane: int, batch: Sequence[_LoadJob]) -> None:
        try:
            if not all(load.name for load in batch):
                raise DeviceError("the shared tier is left: its generation is one of before")
            names = [load.name for load in batch]
            results = self.helper.numbers(lane, LaneOp.GET, names, self._deadline_s)
        except DeviceError as error:
            for load in batch:
                self._end_load(load, error)
            self._note_end(error, "read")
            return
        if all(result == FAILED for result in results):  # it said that it has them
            self.health.note_hang("read")
        come = {
            number: load
            for number, (load, result) in enumerate(zip(batch, results, strict=True))
            if result not in (FAILED, WRONG_SIZE, MISSING)
        }
        verified = self._take(lane, come)
        for number, (load, result) in enumerate(zip(batch, results, strict=True)):
            failure: AttnStoreError | None = verified.get(number)
            if result == FAILED:
                failure = DeviceError(f"{self._where} does not give a value")
            elif result == WRONG_SIZE:
                failure = CorruptRecordError(self._where, "size", self.record_bytes, "another")
            self._end_load(load, failure, is_missing=result == MISSING)

    def _take(
        self, lane: int, come: Mapping[int, _LoadJob]
    ) -> dict[int, CorruptRecordError | None]:
        """Copy the records out of the bounce buffer, and then verify the copies."""
        places = {n: self.helper.lanes.place(self.helper.buffer, lane, n) for n in come}
        headers = {number: bytes(place[:HEADER_BYTES]) for number, place in places.items()}
        digests = self.keys.copy_digests(
            [(load.payload, [places[number][HEADER_BYTES:]]) for number, load in come.items()]
        )
        found: dict[int, CorruptRecordError | None] = {}
        for (number, load), digest in zip(come.items(), digests, strict=True):
            found[number], size = None, len(load.payload)
            assert load.names is not None
            try:
                load.names.check(headers[number], load.name, load.chunk.name, size, digest)
            except CorruptRecordError as error:
                found[number] = error
                continue
            with self.context.progress:
                if self._put_here.get(load.name) == digest:
                    load.chunk.brought_by = ""  # see TierBehind.source_of()
        return found

    def _end_load(
        self, load: _LoadJob, failure: AttnStoreError | None, *, is_missing: bool = False
    ) -> None:
        context, key = self.context, bytes(load.chunk.name.key)
        with context.progress:
            self._num_loading -= 1
            if is_missing:  # evicted since it was asked for: nothing is wrong
                failure = GoneError(f"{self._where} has it no longer")
                self.tier.puts.gone(load.chunk.name.tenant, load.name, load.chunk.name.key)
            if failure is not None:
                _remember(self._alone, key, context.clock() + ALONE_S)
            if isinstance(failure, CorruptRecordError):
                _remember(self._damaged, load.name, None)
            load.done(failure, load.chunk.name.tokens)
        if not is_missing:
            self.health.note_read(failure)

    # ---- DRAM -> the shared tier -------------------------------------------------------

    def must_wait(self) -> bool:
        now = self.context.steady()
        if self._usable is None or not self.helper.is_running:
            return True
        return not all(budget.has(now, self.record_bytes) for budget in self._budgets)

    def begin_store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        names, now = self._names(), self.context.steady()
        for budget in self._budgets:
            budget.take(now, self.record_bytes)
        # Named now: what is in DRAM before a reset must not get a name of after it.
        name = _named(chunk, names)
        self._stores.append(_StoreJob(chunk, names, name, payload, done))
        self._num_storing += 1

    def _is_written_over(self, store: _StoreJob) -> bool:
        """Locked. Whether what is there under its name is none."""
        return store.name in self._damaged or bytes(store.chunk.name.key) in self._wrong

    def _store_all(self, lane: int) -> None:
        """On a thread that stores, beside the other one."""
        while True:
            with self.context.progress:
                batch = self._some(self._stores)
                damaged = {store.name for store in batch if self._is_written_over(store)}
            if not batch:
                return
            self._store(lane, batch, damaged)
            self.context.wake()

    def _store(self, lane: int, batch: Sequence[_StoreJob], damaged: set[bytes]) -> None:
        failure: DeviceError | None = None
        # While it waited it may have been dropped, as by an audit, or got a ttl: it is not sent.
        with self.context.progress:
            sent = [one for one in batch if not one.chunk.dropped and one.chunk.run.lease is None]
        sent = [] if self.has_left else sent
        over = [store for store in sent if store.name in damaged]
        new = [store for store in sent if store.name not in damaged]
        outcomes: dict[bytes, bytes | StoreFailure] = {}
        begun: list[_StoreJob] = []
        try:
            if not all(store.name for store in batch):
                raise DeviceError("the shared tier is left: its generation is one of before")
            names = [store.name for store in new]
            there = self.helper.numbers(lane, LaneOp.EXIST, names, self._deadline_s)
            outcomes |= {
                name: StoreFailure.IS_THERE
                for name, is_there in zip(names, there, strict=True)
                if is_there
            }
            new = [store for store in new if store.name not in outcomes]
            outcomes |= self._left_out(lane, [*new, *over], begun)
            new, over = (
                [store for store in stores if store.name not in outcomes] for stores in (new, over)
            )
            for op, stores in ((LaneOp.PUT, new), (LaneOp.OVERWRITE, over)):
                if stores:
                    outcomes |= self._put(lane, op, stores)
            if StoreFailure.NOT_SHARED in outcomes.values():
                failure = DeviceError(f"{self._where} does not take a value")
        except DeviceError as error:
            failure = error
        with self.context.progress:
            for store in begun:  # by name: those of the other lane are not its
                is_put = isinstance(outcomes.get(store.name), bytes)
                self.tier.puts.end(store.chunk.name.tenant, store.name, is_there=is_put)
            for store in batch:
                self._num_storing -= 1
                outcome = outcomes.get(store.name, StoreFailure.NOT_SHARED)
                if outcome in (StoreFailure.IS_THERE, StoreFailure.OVER_QUOTA):
                    for budget in self._budgets:
                        budget.give_back(self.record_bytes)
                elif not isinstance(outcome, StoreFailure) and store.name in damaged:
                    self._damaged.pop(store.name, None)
                    self._wrong.pop(bytes(store.chunk.name.key), None)
                if not isinstance(outcome, StoreFailure):
                    _remember(self._put_here, store.name, outcome)
                store.done(outcome)
        self.health.note_write(failure)
        if failure is not None:
            self._note_end(failure, "write")

    def _left_out(
        self, lane: int, stores: Sequence[_StoreJob], begun: list[_StoreJob]
    ) -> dict[bytes, StoreFailure]:
        """Those of these that quotas have no room for. What goes for the others is deleted before
        they are put, if the store lets us; else what is still there keeps its room. Raises
        DeviceError.

        Args:
            begun: gets those that have begun to count, also if this raises.
        """
        going: dict[bytes, _StoreJob] = {}
        with self.context.progress:
            now, left_out = self.context.clock(), dict[bytes, StoreFailure]()
            for store in stores:
                put, run = (store.chunk.name.key, store.name), store.chunk.run
                goes = self.tier.puts.begin(store.chunk.name.tenant, put, run, now)
                if goes is None:
                    left_out[store.name] = StoreFailure.OVER_QUOTA
                    continue
                begun.append(store)
                if goes:
                    going[goes] = store
        if not going:
            return left_out
        names = [*going]
        results = self.helper.numbers(lane, LaneOp.DELETE, names, self._deadline_s)
        kept = [name for name, result in zip(names, results, strict=True) if result]
        if kept:  # as of a user who may not delete
            there = self.helper.numbers(lane, LaneOp.EXIST, kept, self._deadline_s)
            kept = [name for name, is_there in zip(kept, there, strict=True) if is_there]
        with self.context.progress:
            for name, store in going.items():
                if name in kept:
                    left_out[store.name] = StoreFailure.OVER_QUOTA
                else:
                    self.tier.puts.deleted(store.chunk.name.tenant, store.name)
                    self._put_here.pop(name, None)
        return left_out

    def _put(
        self, lane: int, op: LaneOp, stores: Sequence[_StoreJob]
    ) -> dict[bytes, bytes | StoreFailure]:
        digests = []
        for number, store in enumerate(stores):
            place = self.helper.lanes.place(self.helper.buffer, lane, number)
            digest, size = self.keys.digest(store.payload), len(store.payload)
            assert store.names is not None
            place[:HEADER_BYTES] = store.names.header(store.name, store.chunk.name, size, digest)
            _copy(place[HEADER_BYTES:], store.payload)
            digests.append(digest)
        names = [store.name for store in stores]
        results = self.helper.numbers(lane, op, names, self._deadline_s)
        return {
            name: StoreFailure.NOT_SHARED if result else digest
            for name, result, digest in zip(names, results, digests, strict=True)
        }

    # ---- by itself ---------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        now, health = self.context.clock(), self.health
        with self.context.progress:
            self.tier.ripen(now)
            probes = [which.take_probe(now) for which in (health.reads, health.writes)]
            is_due = now >= self._look_at and health.reads.in_use
            if self._is_looking or not (any(probes) or is_due):
                return
            self._is_looking = True
        self._asker.submit(self._look)

    def _look(self) -> None:
        """See that a child runs, that the store answers, and which generation there is."""
        failure: DeviceError | None = None
        try:
            self.helper.start()
            self._see_generation()
        except DeviceError as error:
            failure = error
        with self.context.progress:
            self._is_looking = False
            self._look_at = self.context.clock() + LOOK_S
        if isinstance(failure, LateError):
            self.health.note_hang("look at the generation")
        else:
            self.health.note_look(failure)
        self.context.wake()

    def _see_generation(self) -> None:
        name = generations.name_of(self.namespace, self.keys)
        for attempt in range(4):
            value = self.helper.read(name, self._deadline_s)
            theirs = generations.decode(value or b"", name, self.keys)
            self._note_forged(value is not None and theirs is None)
            with self.context.progress:
                order = self.generation.see(theirs)
                why_out = self.generation.why_out
                # What it uses it must know after a restart too, so it is saved first.
                self.generation.is_unsaved |= self.generation.to_json() != self._saved
                self.tier.open_to(self._usable is not None)
            if order is None:
                break
            # What is too large to be read is nothing, and there all the same.
            is_there = value is not None or attempt > 0
            made = generations.encode(order, name, self.keys)
            self.helper.write(name, made, self._deadline_s, overwrite=is_there)
        if why_out is not None and why_out != self._said_out:
            logger.warning("the shared tier is not used: %s", why_out)
        self._said_out = why_out
        try:
            self.save_generation()
            self._said_unsaved = False
        except OSError as error:
            if not self._said_unsaved:
                logger.warning("the shared tier is not used: it cannot be noted: %s", error)
            self._said_unsaved = True

    def _note_forged(self, is_forged: bool) -> None:
        if is_forged:
            with self.context.progress:
                self.context.residency.counts[Event.SHARED_CORRUPT] += 1
        if is_forged and not self._said_forged:
            what = self.keys.not_ours
            logger.warning("the generation in %s is %s; it is written over", self._where, what)
        self._said_forged = is_forged

    def save_generation(self) -> bool:
        """Durable when it returns True, and then the generation may be used. Raises OSError.
        False: nothing is saved while NVMe may have KV of before a reset. A restart would share it
        as of after."""
        with self._saving:
            with self.context.progress:
                disk = self.context.disk_reset
                if disk is not None and not disk.succeeded:
                    return False
                text = self.generation.to_json()
            if self._directory is not None and text != self._saved:
                generations.save(self._directory, self.namespace, text)
            with self.context.progress:
                self._saved = text
                if text == self.generation.to_json():
                    self.generation.is_unsaved = False
                    self.tier.open_to(self._usable is not None)
        return True

    def _note_reset(self) -> None:
        """See NotedReset."""
        if not self.save_generation():
            raise OSError("another reset of NVMe has begun")

    def weights_seen(self, same: bool | None) -> None:
        self.generation.weights_seen(same)
        self.tier.open_to(self._usable is not None)
        self._look_at = 0.0
        self.context.wake()

    def reset(self) -> NotedReset:
        """Whether the store hears of it or not, this engine has left."""
        self.generation.reset()
        self.forget_asks()
        self.tier.open_to(False)
        self._alone.clear()
        self._damaged.clear()
        self._put_here.clear()
        self._look_at = 0.0
        return NotedReset(self.context, "the shared tier", self._note_reset)

    def cancel(self) -> None:
        self.helper.close()

    def close(self, timeout_s: float) -> bool:
        self.helper.close()
        for pool in (self._asker, *self._loaders, *self._storers):
            pool.shutdown()
        return True


def _named(chunk: Chunk, names: RecordNames | None) -> bytes:
    """Nothing while there is no generation."""
    return b"" if names is None else names.of(chunk.name.key, chunk.name.tenant)


def _copy(to: memoryview, of: memoryview) -> None:
    """In native code, without the GIL."""
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(of, np.uint8))


def _remember(table: OrderedDict[bytes, Any], key: bytes, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > ALONE_MAX:
        table.popitem(last=False)
