# SPDX-License-Identifier: Apache-2.0
"""The tiered store: one owner of DRAM and the tiers behind it, on the scheduler side.

It is long since all that is done under its one lock stands here.

Two threads meet here, under one short lock that is never held across I/O:
- the scheduler's: looks up, holds, begins and finishes saves. Never waits, except where a
  method says so, and then with a deadline;
- ours (store/thread.py): finishes what the devices have completed, verifies, writes back. It
  works also while the engine core sleeps.

Bytes in DRAM come from HBM, or from a tier behind after their checksum was verified; nothing else
is ever READY.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from attnstore_vllm.config.settings import StoreConfig, TruncationConfig
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.index.chunk import Chunk, ChunkName, InTier, State
from attnstore_vllm.index.keys import SequenceKeys, marks_of
from attnstore_vllm.index.moved import MovedKv
from attnstore_vllm.index.prefix import Piece, has_come
from attnstore_vllm.index.sections import Need
from attnstore_vllm.io.device import Device
from attnstore_vllm.policy.eviction.departures import departures
from attnstore_vllm.policy.hit_curve import HitCurve, NewChunk
from attnstore_vllm.policy.kv_compare import Blocks
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import (
    NO_TERMS,
    Run,
    Terms,
    Visit,
    answer,
    end_some,
    unknown_run,
    visit_of,
)
from attnstore_vllm.store.announcer import Announcer, Teller
from attnstore_vllm.store.auditor import auditor_of
from attnstore_vllm.store.gauges import gauges_of
from attnstore_vllm.store.learning import learn_from, used_by
from attnstore_vllm.store.limited_residency import residency_with
from attnstore_vllm.store.lookup import Lookup, alike_of, is_ready, strategy_for, wholly_used
from attnstore_vllm.store.thread import StoreThread
from attnstore_vllm.tiers.context import NO_HARNESS, Context, Figures, Harness, Pool
from attnstore_vllm.tiers.nvme.nvme_io import NvmeIo
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.tiers.remote import RemoteLookup
from attnstore_vllm.tiers.remote_io import awaits_remote, remote_tiers_of
from attnstore_vllm.tiers.tier_io import MakeTier
from attnstore_vllm.types import DRAM, Event, Key

CHUNK_LOOKS_MAX = 8
RESET_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 3.0


class Store:
    """See the module. All methods may be called from the scheduler's thread.

    Args:
        slab, device: of one file; the store owns both.
        more_tiers: behind NVMe, nearest first.
        teller: makes KV events, where routers want to know what the tiers have.
        make_disk: makes what moves NVMe's bytes.
    """

    def __init__(
        self,
        pool: Pool,
        slab: Slab,
        device: Device,
        config: StoreConfig,
        engine: EngineFacts,
        *,
        more_tiers: Sequence[MakeTier] = (),
        teller: Teller | None = None,
        make_disk: Callable[..., NvmeIo] = NvmeIo,
        harness: Harness = NO_HARNESS,
    ) -> None:
        nvme, pinning, clock = config.nvme, config.pinning, harness.clock
        moved = config.truncation or TruncationConfig()
        self._estimator, self._ttl_s = ReturnEstimator(), config.ttl_s
        order = partial(departures, config.eviction, estimator=self._estimator)
        self.residency = residency_with(config.quotas, pool, slab)(
            pool.num_slots,
            slab.records_max,
            order,
            grain=engine.hit_tokens or harness.grain,
            chunk_tokens=slab.shape.chunk_tokens,
            seed=secrets.randbits(64),
            pin_shares=(0.0, 0.0) if pinning is None else pinning.shares,
            more=more_tiers,
        )
        self.num_slots, self.num_saves = pool.num_slots, 0
        """Slots of DRAM, and saves that were begun."""
        self.loads_in_parts = False
        """Whether a waiting request may find more than DRAM has room for (scheduler/stages.py)."""
        self._moved = MovedKv(
            self.residency.index,
            slab.shape.chunk_tokens,
            pool.num_slots + slab.records_max,
            min_tokens=moved.min_tokens,
            sinks=moved.sinks,
            seed=secrets.randbits(63),
            recompute=moved.recompute if moved.recompute_by == "first" else 0.0,
            recompute_last=moved.recompute_last,
        )
        self._curve = HitCurve.around(pool.num_slots, slab.shape.chunk_tokens)
        self._clock, self._lock = clock, threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._context = context = Context(
            self.residency, self._progress, pool, clock, self._moved, harness.wall, config.ttl_s
        )
        self.announcer = Announcer(context, teller) if teller is not None else None
        given, deadline_s = (slab, device, config.io_depth), nvme.io_deadline_ms / 1000
        scrub_rate = nvme.scrub_bytes_per_s
        disk = make_disk(context, *given, deadline_s=deadline_s, scrub_rate=scrub_rate)
        pairs = zip(more_tiers, self.residency.behind[1:], strict=True)
        more = [make.io(context, tier) for make, tier in pairs]
        learn = partial(learn_from, context, self._estimator, self._curve)
        tiers, namespace = [disk, *more], slab.shape.namespace
        self.audit = auditor_of(context, tiers, engine.comparisons, config, namespace)
        self.thread = StoreThread(
            context, tiers, self.audit, daily_writes=nvme.daily_writes_bytes, learn=learn
        )
        make = strategy_for(engine.needs)
        self.strategy = make(context, self.thread.tiers, engine.needs, engine.ahead)
        asked = more if self.strategy.asks_remote else ()
        self.remote = remote_tiers_of(context, asked, self.thread.reader)
        if harness.threaded:
            self.thread.start()

    @property
    def num_named(self) -> int:
        """Saves that were begun and chunks that others gave: KV that has come, by the weights that
        name it. Needs no lock."""
        return self.num_saves + self._context.num_copied

    @property
    def needs(self) -> Sequence[Need]:
        """See Strategy."""
        return self.strategy.needs

    @property
    def ahead(self) -> int:
        """See Strategy."""
        return self.strategy.ahead

    def tick(self) -> None:
        """One round of what our thread does. For simulations, without the thread."""
        self.thread.tick(0.0)

    # ---- looking up --------------------------------------------------------------------

    def arrive(
        self,
        request_id: str,
        lookup: Lookup,
        num_tokens: int,
        min_tokens: int = 1,
        terms: Terms = NO_TERMS,
    ) -> tuple[list[Piece], Visit]:
        """A request has come, and waits in the queue (see queue()). Looks up all of its prompt.

        Args:
            terms: what it asks for its KV.
        Returns: what find() does, and the visit that its chunks are used and saved under.
        """
        sequence, stop = lookup.keys, num_tokens - 1
        size, grain = sequence.chunk_tokens, self.residency.index.grain
        keys = sequence.keys(0, num_tokens // size)  # costly, so before the lock
        marks = marks_of(keys[: stop // size])
        with self._lock:
            now = self.residency.now = self._clock()
            self._curve.news.append(used_by(sequence, marks, num_tokens))
            pieces = self._match(lookup, 0, stop, min_tokens, request_id)
            used = wholly_used(pieces, lookup, stop, grain)
            last_runs = self.residency.last_runs(used, size, len(sequence.token_ids))
            visit = visit_of(
                self._estimator,
                last_runs,
                marks,
                num_tokens,
                now,
                terms,
                self._ttl_s,
                num_known=-(-pieces[-1].stop // size) if pieces else 0,
                alike=alike_of(lookup, pieces, used, self.residency),
            )
            self._context.has_leases |= terms.ttl_s is not None
            met = len(last_runs)
            self.strategy.want(lookup, pieces, 0, stop, request_id, visit, num_met=met)
            if terms.pin_s is not None:
                self._pin(used, now + terms.pin_s)
        if self.remote is not None:
            self.remote.look(lookup, pieces, 0, stop, request_id)
        self._read(pieces)
        if self._estimator.is_due:
            self.thread.wake()
        return pieces, visit

    def pin(self, pieces: Sequence[Piece], lookup: Lookup, stop: int, pin_s: float) -> None:
        """A request loads these, and wants its prompt, up to token `stop`, pinned for so long: they
        may have come since it did. Cost: a look at each."""
        pieces = [piece for piece in pieces if piece.start < stop]
        with self._lock:
            now = self.residency.now = self._clock()
            used = wholly_used(pieces, lookup, stop - 1, self.residency.index.grain)
            self._pin(used, now + pin_s)

    def _pin(self, pieces: Sequence[Piece], until: float) -> None:
        """Locked."""
        for piece in pieces:
            self.residency.pinning.pin(piece.chunk, until, self.residency.now)

    def unseen_run(self, terms: Terms) -> Run:
        """The run of what a request saves that arrive() was not said of, as there was no time. So
        whose conversation that is was not asked, and who begins as it does shares it."""
        with self._lock:
            ttls = [ttl for ttl in (self._ttl_s, terms.ttl_s) if ttl is not None]
            self._context.has_leases |= bool(ttls)
            run = unknown_run(self._clock(), min(ttls, default=None))
            return replace(run, is_shared=True, is_known=True, priority=terms.priority)

    def answered(self, run: Run, num_tokens: int, ending: Hashable = None) -> None:
        """The request whose own run this is has ended, with so many tokens of its own, `ending` the
        last of them."""
        with self._lock:
            answer(run, num_tokens, self._estimator, self._clock(), ending)
            self.residency.rank(run)

    def end(self, over: deque[Run], at_most: int) -> int:
        """The conversations of these runs have ended: they leave first. Takes one after another
        until so many are ranked. Returns how many were."""
        with self._lock:
            return end_some(over, at_most, self.residency.rank)

    def find(
        self,
        lookup: Lookup,
        start: int,
        stop: int,
        min_tokens: int = 1,
        *,
        request_id: str | None = None,
        visit: Visit | None = None,
    ) -> list[Piece]:
        """The longest run of stored KV for tokens [start, stop), and bring it up to DRAM.

        What lies on NVMe is queued for reading, before what farther requests want; nothing is
        waited for here. A run shorter than `min_tokens` is none: every chat shares its template's
        first tokens with every other, and that must neither read a chunk nor keep it.

        Args:
            request_id: of the waiting request that asks; None: one is likely to come, and what
                it will want is read after all that is waited for.
        """
        lookup.keys.keys(0, stop // lookup.keys.chunk_tokens)  # the costly part, before the lock
        with self._lock:
            self.residency.now = self._clock()
            pieces = self._match(lookup, start, stop, min_tokens, request_id)
            self.strategy.want(lookup, pieces, start, stop, request_id, visit)
        if self.remote is not None:
            self.remote.look(lookup, pieces, start, stop, request_id)
        self._read(pieces)
        return pieces

    def _read(self, pieces: Sequence[Piece]) -> None:
        if State.ABSENT in [piece.chunk.dram.state for piece in pieces]:
            self.thread.reader.start()

    def _match(
        self, lookup: Lookup, start: int, stop: int, min_tokens: int, request_id: str | None
    ) -> list[Piece]:
        """Locked."""
        waits = request_id is not None and request_id in self.residency.look_ahead
        in_parts = self.loads_in_parts and waits
        return self.strategy.match(lookup, start, stop, min_tokens, in_parts=in_parts)

    @contextmanager
    def queue(self) -> Iterator[LookAhead[Chunk]]:
        """The waiting queue, for requests that enter it. What one wants, find() says."""
        with self._lock:
            yield self.residency.look_ahead

    def leave_queue(self, request_ids: Iterable[str]) -> None:
        """These requests run, or have ended."""
        with self._lock:
            before = len(self.residency.look_ahead)
            for request_id in request_ids:
                self.residency.dram.leave_queue(request_id)
            left = len(self.residency.look_ahead)
            self.residency.dram.pace.left(before - left, left > 0, self._clock())

    def hold_ready(
        self, pieces: Sequence[Piece], sequence: SequenceKeys, stop: int, start: int | None = None
    ) -> list[Piece]:
        """Hold the leading pieces that are READY in DRAM, and return them.

        The last may end elsewhere than find() said, with tokens [.., stop) of the sequence
        wanted: what it said of a chunk whose tokens were on NVMe was provisional.

        Args:
            start: what is before is in HBM; None: as the first piece says.
        """
        with self._lock:
            return self.strategy.hold(pieces, sequence, start, stop) if pieces else []

    def hold_exactly(
        self, pieces: Sequence[Piece], sequence: SequenceKeys, start: int, stop: int
    ) -> list[Piece]:
        """Hold, and return, pieces that are READY in DRAM and back a hit of just the tokens
        [start, stop), which may end anywhere; none if there are no such pieces.

        Args:
            pieces: that are held for a longer hit; none: it is looked up.
        """
        with self._lock:
            self.residency.now = self._clock()
            return self.strategy.hold_exactly(pieces, sequence, start, stop)

    def hold_again(self, pieces: Sequence[Piece], rest: Sequence[Piece] = ()) -> bool:
        """Hold pieces again if all can be, and none of them and the `rest` has expired. Says so."""
        with self._lock:
            self.residency.now = self._clock()
            leased = [*pieces, *rest] if self._context.has_leases else ()
            if any(self.residency.has_expired(piece.chunk) for piece in leased):
                return False
            if not all(is_ready(piece.chunk) for piece in pieces):
                return False
            self.residency.hold(*(piece.chunk for piece in pieces))
            return True

    def answered_with(self, request_id: str, pieces: Sequence[Piece]) -> None:
        """A request that found these waits for nothing more. One that stands in the queue tells
        what has come in time when it leaves it."""
        with self._lock:
            if request_id not in self.residency.look_ahead:
                self.residency.dram.observe_reads([piece.chunk for piece in pieces])

    def has_missing(self, request_id: str) -> bool:
        """Whether a waiting request wants something that is not even on its way. Cost: a few us."""
        with self._lock:
            return self.residency.look_ahead.has_missing(request_id)

    def want_part(self, name: str, chunks: Sequence[Chunk]) -> None:
        """A load in parts, named as no request, goes on with these, but what has expired: they are
        read before all that the queue wants, and kept. None: it is over. Cost: LookAhead.want()."""
        with self._lock:
            look_ahead, dram = self.residency.look_ahead, self.residency.dram
            if not chunks:
                dram.leave_queue(name)
                return
            if self._context.has_leases:
                self.residency.now = self._clock()
                chunks = self.residency.drop_expired(chunks)
            if name not in look_ahead:
                look_ahead.insert(name, -math.inf, 0.0)
            dram.want(name, chunks)
        self.thread.reader.start()

    def read_s(self, num_reads: int) -> float | None:
        """Seconds that so many reads take from the nearest tier behind DRAM, if that is known."""
        with self._lock:
            cost = self.thread.tiers[0].cost
            return None if cost.mean_s is None else cost.seconds(num_reads)

    def disk_speeds(self) -> dict[str, float]:
        """Bytes a second of the nearest tier behind DRAM, each way, as far as that is known."""
        with self._lock:
            io = self.thread.tiers[0]
            costs = {"read": io.cost.mean_s, "write": io.write_cost.mean_s}
            return {way: io.record_bytes / s for way, s in costs.items() if s}

    def weigh_reads(self, computing_s: Callable[[int, int], float | None]) -> None:
        """Begin no read that a waiting request has nothing of: it would have computed before.

        Args:
            computing_s: see Reader.computing_s.
        """
        self.thread.reader.computing_s = computing_s
        self.thread.reader.needs_all = bool(self.needs)

    def arrivals(self, request_id: str, pieces: Sequence[Piece]) -> list[float] | None:
        """See Reader.arrivals."""
        with self._lock:
            return self.thread.reader.arrivals(request_id, [piece.chunk for piece in pieces])

    def release(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            self.residency.release(*chunks)

    def tiers(self, pieces: Sequence[Piece], start: int) -> Counter[str]:
        """Tokens from `start` on by the tier their KV was in when the request came. Those before a
        window, of which no KV is needed, count with its first."""
        tokens = Counter[str]()
        for piece in pieces:
            if piece.group:
                continue  # tokens of the spine, once more
            chunk = piece.chunk
            was_here = chunk.dram.state is State.READY and not chunk.came_from
            tier = DRAM if was_here else chunk.came_from or next(iter(chunk.behind), DRAM)
            tokens[tier] += piece.stop - (piece.start if piece.gap else start)
            start = piece.stop
        return tokens

    def loaded(self, chunks: Iterable[Chunk]) -> None:
        """The workers have copied the held chunks into HBM."""
        with self._lock:
            done = list(chunks)
            for chunk in done:
                chunk.came_from = ""
            self.residency.release(*done)

    # ---- saving ------------------------------------------------------------------------

    def begin_save(
        self,
        name: ChunkName,
        run: Run | None = None,
        pin_s: float | None = None,
        *,
        again: bool = False,
        low_value: bool = False,
        is_alone: bool = False,
        dram_only: bool = False,
        yields: bool = False,
    ) -> Chunk | None:
        """See Residency.begin_save. Also None as long as Auditor.has_removed.

        Args:
            pin_s: how long it is to be pinned, if it is stored and its tenant's share allows.
        """
        with self._lock:
            if self.audit is not None and self.audit.has_removed:
                return None
            self.residency.now = self._clock()
            chunk = self.residency.begin_save(
                name,
                run,
                again=again,
                low_value=low_value,
                is_alone=is_alone,
                dram_only=dram_only,
                yields=yields,
            )
            self._begun(name, chunk, pin_s, yields=yields)
            return chunk

    def begin_saves(
        self,
        names: Sequence[ChunkName],
        runs: Sequence[Run | None],
        *,
        again_from: int,
        pin_s: float | None,
        pin_stop: int,
        dram_only: bool,
        yields: bool,
    ) -> list[Chunk | None]:
        """begin_save() of chunks of one spine that follow each other, until one finds no room now:
        the caller asks again for that one, so it is not counted, nor in what is returned.

        Args:
            again_from, pin_stop: token from which `again` holds, and up to which `pin_s` does.
            dram_only, yields: see Residency.begin_save.
        """
        begun: list[Chunk | None] = []
        index = self.residency.index
        with self._lock:
            if self.audit is not None and self.audit.has_removed:
                return begun
            self.residency.now = self._clock()
            if pin_s is None and not yields:
                begun += [None] * self.residency.use_stored(names, runs)
                names, runs = names[len(begun) :], runs[len(begun) :]
            num_new = index.num_missing(names)
            for name, run in zip(names, runs, strict=True):
                chunk = self.residency.begin_save(
                    name,
                    run,
                    again=name.position >= again_from,
                    dram_only=dram_only,
                    waits=True,
                    yields=yields,
                    num_more=max(0, num_new - 1),
                )
                num_new -= chunk is not None
                of_prompt = pin_s if name.position < pin_stop else None
                self._begun(name, chunk, of_prompt, yields=yields)
                if chunk is None and index.get(name.key) is None and not index.extends(name):
                    break
                begun.append(chunk)
        return begun

    def _begun(
        self, name: ChunkName, chunk: Chunk | None, pin_s: float | None, *, yields: bool
    ) -> None:
        """Locked. A save was asked for; `chunk`: that is copied. One that is no use of it pins it
        no longer than it would be found."""
        if chunk is not None and not self.strategy.needs:  # else it may be another group's
            self._curve.news.append(NewChunk(name.key, name.parent, name.extra, name.tokens))
        self.num_saves += chunk is not None
        if pin_s is not None:
            kept, now = chunk or self.residency.index.get(name.key), self.residency.now
            if kept is not None:
                until = now + pin_s
                if yields:
                    until = min(until, self.residency.found_until(kept))
                self.residency.pinning.pin(kept, until, now)

    def begin_audit(
        self, hit: int, stored: Chunk, was: InTier, blocks: Blocks, group: int = 0, **how: Any
    ) -> Chunk | None:
        """See Auditor.begin. finish_saves() ends it, after drop() if the copy is none."""
        assert self.audit is not None
        with self._lock:
            self.residency.now = self._clock()
            return self.audit.begin(hit, stored, was, blocks, group, **how)

    @property
    def is_distrusted(self) -> bool:
        """Whether nothing of what is stored is to be served. Needs no lock."""
        return self.audit is not None and self.audit.is_stopped

    def num_stored(self, keys: Sequence[Key]) -> int:
        """How many chunks with these keys there are up to the last one that is stored.

        Cost: a look at each that is missing behind it.
        """
        with self._lock:
            number = len(keys)
            while number and self.residency.index.get(keys[number - 1]) is None:
                number -= 1
            return number

    def give_up(self, num_chunks: int) -> None:
        """So many chunks that waited for room are not saved."""
        with self._lock:
            self.residency.counts[Event.DROPPED] += num_chunks

    @property
    def num_openings(self) -> int:
        """See DramTier. Needs no lock."""
        return self.residency.dram.num_openings

    @property
    def is_writing(self) -> bool:
        """Whether something is to be written to a tier that is in use, and DRAM has room then."""
        with self._lock:
            return self.thread.has_writes()

    def wait_for_room(self, num_openings: int, timeout_s: float) -> None:
        """Wait until DRAM has had more openings than these, `timeout_s` at most: for steps that
        have nothing to compute (see wait_for_any)."""
        dram = self.residency.dram
        with self._progress:
            self._progress.wait_for(lambda: dram.num_openings != num_openings, timeout_s)

    def write_if_room(self, chunk: Chunk) -> None:
        """Let a chunk of low value go to the tiers behind after all, when nothing else
        is to be written and while they have much room. It leaves them before all else."""
        with self._lock:
            chunk.written_if_room = True

    def may_be_moved(
        self, name: ChunkName, domain: Key, native_from: int = 0, *, is_exact: bool = True
    ) -> None:
        """See MovedKv.note."""
        with self._lock:
            self._moved.note(name, domain, native_from, is_exact=is_exact)

    def finish_saves(self, chunks: Iterable[Chunk]) -> None:
        done = list(chunks)
        with self._lock:
            if self.audit is not None:
                self.audit.copied(done)
            self.residency.finish_save(*done)
        self.thread.wake()

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Forget these chunks in all tiers, also those that are being saved."""
        with self._lock:
            for chunk in chunks:
                if self.audit is not None:
                    self.audit.void(chunk)
                self.residency.drop(chunk)

    def drop_low_value(self, chunks: Iterable[Chunk], *, pinned: bool = False) -> int:
        """A conversation has gone on beyond these sections. Forget those that only it has used,
        the pinned ones if it says so, and return how many."""
        with self._lock:
            self.residency.now = self._clock()
            own = self.residency.is_own if pinned else self.residency.own(low_value=True)
            return self._supersede(filter(own, chunks))

    def make_low_priority(self, chunks: Iterable[Chunk]) -> None:
        """Let these leave before most that is as old. What others use as well stays as it is."""
        with self._lock:
            self.residency.now = self._clock()
            self.residency.make_low_priority(list(filter(self.residency.is_own, chunks)))

    def drop_before(self, keys: SequenceKeys, stop: int, *, low_value: bool) -> int:
        """A conversation has gone on beyond token `stop`. Forget what is its own (is_own) of one
        group before it, in CHUNK_LOOKS_MAX chunks. Returns how many. Cost: 45 us."""
        with self._lock:
            self.residency.now = self._clock()
            own, index = self.residency.own(low_value=low_value), self.residency.index
            return self._supersede(index.heads_before(keys, stop, CHUNK_LOOKS_MAX, own))

    def _supersede(self, chunks: Iterable[Chunk]) -> int:
        """Locked."""
        num_dropped = 0
        for chunk in chunks:
            self.residency.drop(chunk)
            num_dropped += 1
        self.residency.counts[Event.SUPERSEDED] += num_dropped
        return num_dropped

    # ---- the rest ----------------------------------------------------------------------

    def wait_for_any(
        self,
        waiting: Sequence[Sequence[Piece]],
        timeout_s: float,
        asked: Sequence[RemoteLookup] = (),
    ) -> bool:
        """Wait until one of these runs, or of these answers, need not be waited for any more,
        `timeout_s` at most. Returns whether one need not.

        For steps that have nothing to compute: without it the engine core would spin on the
        processor that the I/O threads need.
        """
        with self._progress:
            return self._progress.wait_for(
                lambda: any(map(has_come, waiting)) or not all(map(awaits_remote, asked)), timeout_s
            )

    def reset(self, *, keeps_aside: bool = False) -> bool:
        """Drop every tier, also for the next process. Waits for a page write a segment and a
        sync, 5 s at most. For keeps_aside see StoreThread.reset.

        Returns False if they could not be written: then records of before could come
        back after a restart, and the caller must say that the reset failed.
        """
        resets = self.thread.reset(keeps_aside=keeps_aside)
        with self._progress:
            self._moved.clear()
            return self.thread.wait_for(resets, RESET_DEADLINE_S)

    def renamed(self) -> None:
        """All that is saved from now on has other names: no request finds what there is."""
        with self._lock:
            if self.residency.watch is not None:
                self.residency.watch.clear()

    def figures(self) -> Figures:
        kept = [item for io in self.thread.tiers for item in io.seconds.items()]
        with self._lock:
            return Figures(
                dict(self.residency.counts),
                dict(self._context.moved_bytes),
                self.residency.first_written_tokens,
                {name: [times.popleft() for _ in range(len(times))] for name, times in kept},
            )

    def gauges(self) -> dict[tuple[str, str], float]:
        """Values as they are now, as (name, label): value."""
        with self._lock:
            return gauges_of(self._context, self._curve, self.thread.tiers)

    def is_idle(self) -> bool:
        """Nothing in flight, nothing held, and nothing to write to a tier that is in use."""
        with self._lock:
            return self.thread.is_idle() and self.residency.num_held() == 0

    def check_integrity(self) -> None:
        """For tests: assert what residency asserts, while the thread changes nothing."""
        with self._lock:
            self.residency.check_integrity()

    def close(self) -> None:
        """Write back what is dirty, for CLOSE_DEADLINE_S at most; then stop."""
        self.thread.stop(CLOSE_DEADLINE_S)
        self._context.pool.close()
