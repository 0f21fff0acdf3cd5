# SPDX-License-Identifier: Apache-2.0
"""The tiered store: one owner of DRAM and NVMe, on the scheduler side.

Two threads meet here, under one short lock that nobody holds across I/O:
- the scheduler's: looks up, holds, begins and finishes saves. Never waits, except where a
  method says so, and then with a deadline;
- ours (store/keeper.py): finishes what the device has completed, verifies, writes back. It
  works also while the engine core sleeps.

Bytes in DRAM come from HBM, or from NVMe after their checksum was verified; nothing else is
ever READY.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile

from attnstore_vllm.index.chunk import Chunk, ChunkName, Dram
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.leases import renew, unexpired
from attnstore_vllm.index.moved import MovedKv
from attnstore_vllm.index.prefix import Piece, confirm, has_come, settle
from attnstore_vllm.index.residency import Residency
from attnstore_vllm.index.stops import GRAIN_TOKENS
from attnstore_vllm.io.device import Device
from attnstore_vllm.policy.by_return import ByReturn, Visit, visit_of
from attnstore_vllm.policy.eviction import EvictionPolicy, Fifo, Lru
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.policy.returns import NO_TERMS, ReturnEstimator, Run, Terms
from attnstore_vllm.store.context import Context, Pool
from attnstore_vllm.store.flights import Flights
from attnstore_vllm.store.keeper import Keeper
from attnstore_vllm.store.slab import Slab
from attnstore_vllm.types import Flow, Key, Tier

RESET_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 3.0


class Store:
    """See the module. All methods may be called from the scheduler's thread.

    Args:
        slab, device: of one file; the store owns both from now on.
        io_depth: requests in flight on the device, half of them writes.
        io_deadline_s: a request that takes longer puts NVMe out of use for a while.
        daily_writes: bytes that may be written a day, or None.
        scrub_rate: bytes a second for reading cold records again, or None.
        eviction: attnstore, lru or fifo.
        ttl_s: after so long without use a chunk is not found; None: as long as there is room.
        pin_shares: of each tier's slots, those that can be pinned in all and by one tenant.
        moved: MovedKv's min_tokens and sinks.
        clock, threaded, grain: for tests: a time of their own, turn(), and see PrefixIndex.
    """

    def __init__(
        self,
        pool: Pool,
        slab: Slab,
        device: Device,
        io_depth: int,
        *,
        io_deadline_s: float = 5.0,
        daily_writes: int | None = None,
        scrub_rate: int | None = None,
        eviction: str = "attnstore",
        ttl_s: float | None = None,
        pin_shares: tuple[float, float] = (0.0, 0.0),
        moved: tuple[int, int] = (64, 0),
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
        grain: int = GRAIN_TOKENS,
    ) -> None:
        self._estimator = ReturnEstimator()
        self._ttl_s = ttl_s
        self._has_leases = ttl_s is not None
        """Whether anything may expire: what costs nothing where nobody asks for it."""
        self.residency = Residency(
            pool.num_slots, slab.records_max, partial(self._policy, eviction), grain=grain,
            chunk_tokens=slab.shape.chunk_tokens, seed=secrets.randbits(64), pin_shares=pin_shares,
        )  # fmt: skip
        self._pieces_max = pool.num_slots
        self._moved = MovedKv(
            self.residency.index, slab.shape.chunk_tokens, pool.num_slots + slab.records_max,
            min_tokens=moved[0], sinks=moved[1], seed=secrets.randbits(63),
        )  # fmt: skip
        self._clock = clock
        for segment in slab.fresh:
            records = slab.records_of(segment)
            self.residency.open_nvme_slots(records.start, len(records))
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._pool = pool
        self._slab = slab
        flights = Flights(device, io_deadline_s, clock)
        self._context = Context(self.residency, self._progress, pool, slab, flights, clock)
        self._keeper = Keeper(
            self._context, device, io_depth, daily_writes=daily_writes, scrub_rate=scrub_rate,
            learn=self._learn,
        )  # fmt: skip
        if threaded:
            self._keeper.start()

    def _policy(self, eviction: str, num_slots: int) -> EvictionPolicy:
        if eviction == "attnstore":
            return ByReturn(num_slots, self._estimator, self._ttl_s)
        return {"lru": Lru, "fifo": Fifo}[eviction](num_slots)

    def turn(self) -> None:
        """One round of what our thread does. For simulations, without the thread."""
        self._keeper.turn(0.0)

    def _learn(self) -> None:
        """On our thread. The table is fitted beside the scheduler, and put in place at once."""
        if not self._estimator.is_due:
            return
        with self._lock:
            seen = self._estimator.seen(self._clock())
        fit = seen.fit()
        with self._lock:
            self._estimator.learn(fit)

    # ---- looking up --------------------------------------------------------------------

    def arrive(
        self,
        request_id: str,
        sequence: SequenceKeys,
        num_tokens: int,
        min_tokens: int = 1,
        terms: Terms = NO_TERMS,
    ) -> tuple[list[Piece], Visit]:
        """A request has come, and waits in the queue (see queue()). Looks up all of its prompt.

        Args:
            terms: what it asks for its KV.
        Returns: what find() does, and the visit that its chunks are used and saved under.
        """
        stop = num_tokens - 1
        sequence.hash_up_to(stop)  # the costly part, before the lock
        whole = stop // sequence.chunk_tokens
        marks = [int.from_bytes(key[:8], "big") for key in sequence.keys(0, whole)]
        with self._lock:
            now = self.residency.now = self._clock()
            pieces = self._match(sequence, 0, stop, min_tokens)
            last_runs = [self.residency.run_of(piece.chunk) for piece in pieces]
            visit = visit_of(self._estimator, last_runs, marks, num_tokens, now, terms, self._ttl_s)
            self._has_leases |= terms.ttl_s is not None
            self._want(request_id, pieces, visit, sequence.chunk_tokens)
            if terms.pin_s is not None:
                for piece in self._without_ends(pieces):
                    self.residency.pinning.pin(piece.chunk, now + terms.pin_s, now)
        self._read(pieces)
        if self._estimator.is_due:
            self._keeper.wake()
        return pieces, visit

    def find(
        self,
        sequence: SequenceKeys,
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
        sequence.hash_up_to(stop)
        with self._lock:
            self.residency.now = self._clock()
            pieces = self._match(sequence, start, stop, min_tokens)
            self._want(request_id, pieces, visit, sequence.chunk_tokens)
        self._read(pieces)
        return pieces

    def _read(self, pieces: Sequence[Piece]) -> None:
        if any(piece.chunk.dram is Dram.ABSENT for piece in pieces):
            self._keeper.reader.start()

    def _match(self, sequence: SequenceKeys, start: int, stop: int, min_tokens: int) -> list[Piece]:
        """Locked."""
        pieces = self.residency.index.match(sequence, start, stop)
        if sequence.finds_moved:
            pieces = self._moved.go_on(pieces, sequence, start, stop)
        if self._has_leases:
            pieces = unexpired(self.residency, pieces)
        if pieces and pieces[-1].stop - start < min_tokens:
            return []
        if not self._context.reads.in_use:
            pieces = list(takewhile(lambda p: p.chunk.dram is Dram.READY, pieces))
        pieces = pieces[: self._pieces_max]  # more can never be in DRAM at once
        return settle(pieces, self.residency.index.grain)

    def _want(
        self,
        request_id: str | None,
        pieces: Sequence[Piece],
        visit: Visit | None,
        chunk_tokens: int,
    ) -> None:
        """Locked."""
        residency = self.residency
        used = self._without_ends(pieces)
        if visit is None:
            renew(residency, [piece.chunk for piece in used])
        else:
            border = visit.num_shared * chunk_tokens
            residency.use([p.chunk for p in used if p.start < border], visit.shared)
            residency.use([p.chunk for p in used if p.start >= border], visit.own)
        chunks = [piece.chunk for piece in pieces]
        if request_id is not None and request_id in residency.look_ahead:
            residency.room.want(request_id, chunks)
        else:
            self._keeper.reader.want(chunk for chunk in chunks if chunk.dram is Dram.ABSENT)

    def _without_ends(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those whose use may be seen by what becomes of them. Not a tail with an end: a request
        that has its end would renew it, and who has planted it would know (index/stops.py)."""
        grain = self.residency.index.grain
        return [piece for piece in pieces if piece.chunk.name.num_tokens % grain == 0]

    @contextmanager
    def queue(self) -> Iterator[LookAhead]:
        """The waiting queue, for requests that enter it. What one wants, find() says."""
        with self._lock:
            yield self.residency.look_ahead

    def leave_queue(self, request_ids: Iterable[str]) -> None:
        """These requests run, or have ended."""
        with self._lock:
            for request_id in request_ids:
                self.residency.room.leave_queue(request_id)

    def hold_ready(self, pieces: Sequence[Piece], sequence: SequenceKeys, stop: int) -> list[Piece]:
        """Hold the leading pieces that are READY in DRAM, and return them.

        The last may end elsewhere than find() said, with tokens [.., stop) of the sequence
        wanted: what it said of a chunk whose tokens were on NVMe was provisional.
        """
        held: list[Piece] = []
        with self._lock:
            for piece in pieces:
                if piece.chunk.dram is not Dram.READY or piece.chunk.dropped:
                    break
                confirmed = confirm(piece, sequence, stop, held[-1].stop if held else piece.start)
                if confirmed is None:
                    break
                self.residency.hold(piece.chunk)
                held.append(confirmed)
            kept = settle(held, self.residency.index.grain)
            for piece in held[len(kept) :]:
                self.residency.release(piece.chunk)
        return kept

    def is_hungry(self, request_id: str) -> bool:
        """Whether a waiting request wants something that is not even on its way. Cost: a few us."""
        with self._lock:
            return self.residency.look_ahead.is_hungry(request_id)

    def arrivals(self, request_id: str, pieces: Sequence[Piece]) -> list[float] | None:
        """See Reader.arrivals."""
        with self._lock:
            return self._keeper.reader.arrivals(request_id, [piece.chunk for piece in pieces])

    def release(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                self.residency.release(chunk)

    def tiers(self, pieces: Sequence[Piece]) -> dict[Tier, int]:
        """Tokens by the tier their KV was in when the request came."""
        was_here = total = 0
        for piece in pieces:
            num_tokens = piece.stop - piece.start
            total += num_tokens
            if piece.chunk.dram is Dram.READY and not piece.chunk.from_nvme:
                was_here += num_tokens
        return {Tier.DRAM: was_here, Tier.NVME: total - was_here}

    def loaded(self, chunks: Iterable[Chunk]) -> None:
        """The workers have copied the held chunks into HBM."""
        with self._lock:
            for chunk in chunks:
                chunk.from_nvme = False
                self.residency.release(chunk)

    # ---- saving ------------------------------------------------------------------------

    def begin_save(
        self,
        name: ChunkName,
        run: Run | None = None,
        pin_s: float | None = None,
        *,
        again: bool = False,
    ) -> Chunk | None:
        """See Residency.begin_save.

        Args:
            pin_s: how long it is to be pinned, if it is stored and its tenant's share allows.
        """
        with self._lock:
            now = self.residency.now = self._clock()
            chunk = self.residency.begin_save(name, run, again=again)
            if pin_s is not None:
                kept = chunk or self.residency.index.get(name.key)
                if kept is not None:
                    self.residency.pinning.pin(kept, now + pin_s, now)
            return chunk

    def may_be_moved(
        self, name: ChunkName, domain: Key, native_from: int = 0, *, is_exact: bool = True
    ) -> None:
        """See MovedKv.note."""
        with self._lock:
            self._moved.note(name, domain, native_from, is_exact=is_exact)

    def finish_saves(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                self.residency.finish_save(chunk)
        self._keeper.wake()

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Forget these chunks in all tiers, also those that are being saved."""
        with self._lock:
            for chunk in chunks:
                self.residency.drop(chunk)

    # ---- the rest ----------------------------------------------------------------------

    def wait_for_any(self, waiting: Sequence[Sequence[Piece]], timeout_s: float) -> None:
        """Wait until one of these runs need not be waited for any more, `timeout_s` at most.

        For steps that have nothing to compute: without it the engine core would spin on the
        processor that the I/O threads need.
        """
        with self._progress:
            self._progress.wait_for(lambda: any(map(has_come, waiting)), timeout_s)

    def reset(self) -> bool:
        """Drop every tier, also for the next process. Waits for a page write a segment and a
        sync, 5 s at most.

        Returns False if they could not be written: then records of before could come
        back after a restart, and the caller must say that the reset failed.
        """
        reset = self._keeper.reset()
        with self._progress:
            self._moved.clear()
            self._progress.wait_for(lambda: reset.is_over or self._keeper.is_out, RESET_DEADLINE_S)
            return reset.succeeded

    def counts(self) -> dict[str, int]:
        """Events since the start, by name."""
        with self._lock:
            return dict(self.residency.counts)

    def moved_bytes(self) -> dict[Flow, int]:
        """Bytes moved between DRAM and NVMe since the start."""
        with self._lock:
            return dict(self._context.moved_bytes)

    def first_written_tokens(self) -> int:
        """Tokens written to NVMe that were not there before."""
        with self._lock:
            return self.residency.first_written_tokens

    def gauges(self) -> dict[tuple[str, str], float]:
        """What is now, as (name, label): value."""
        recovery = self._keeper.recovery
        with self._lock:
            return {
                ("held_bytes", Tier.DRAM.value): self.residency.dram_used * self._pool.slot_bytes,
                ("held_bytes", Tier.NVME.value): self.residency.nvme_used * self._slab.record_bytes,
                ("nvme_in_use", "reads"): float(self._context.reads.in_use),
                ("nvme_in_use", "writes"): float(self._context.writes.in_use),
                ("recovery", "seconds"): recovery.seconds,
                ("recovery", "records"): recovery.num_records if recovery.is_over else 0,
                ("recovery", "chunks"): recovery.found,
            }

    def is_idle(self) -> bool:
        """Nothing dirty, nothing in flight, nothing held."""
        with self._lock:
            return self._keeper.is_idle() and self.residency.num_held() == 0

    def close(self) -> None:
        """Write back what is dirty, for CLOSE_DEADLINE_S at most; then stop."""
        self._keeper.stop(CLOSE_DEADLINE_S)
        self._pool.close()
