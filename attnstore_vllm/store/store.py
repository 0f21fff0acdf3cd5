# SPDX-License-Identifier: Apache-2.0
"""The tiered store: one owner of DRAM and the tiers behind it, on the scheduler side.

It is long since all that is done under its one lock stands here.

Two threads meet here, under one short lock that nobody holds across I/O:
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile

from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import SequenceKeys, marks_of
from attnstore_vllm.index.moved import MovedKv
from attnstore_vllm.index.prefix import GRAIN_TOKENS, Piece, has_come, no_ends, ready_run, settle
from attnstore_vllm.index.sections import Need, fit, proven, walk, walks
from attnstore_vllm.io.codec import Codec
from attnstore_vllm.io.device import Device
from attnstore_vllm.policy.eviction.departures import departures
from attnstore_vllm.policy.hit_curve import HitCurve, NewChunk
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import NO_TERMS, Run, Terms, Visit, answer, visit_of
from attnstore_vllm.store.announcer import Announcer, Teller
from attnstore_vllm.store.learning import learn_from, used_by
from attnstore_vllm.store.thread import StoreThread
from attnstore_vllm.tiers.context import Context, Figures, Pool, boot_seconds, unix_seconds
from attnstore_vllm.tiers.nvme.nvme_io import NvmeIo
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.tiers.remote_io import asking_of, is_asked
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.tiers.tier_io import MakeTier
from attnstore_vllm.types import DRAM, Clock, Event, Key

CHUNK_LOOKS_MAX = 8
RESET_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 3.0


def _is_ready(chunk: Chunk) -> bool:
    return chunk.dram.state is State.READY and not chunk.dropped


class Store:
    """See the module. All methods may be called from the scheduler's thread.

    Args:
        slab, device: of one file; the store owns both. io_depth: requests in flight there.
        io_deadline_s: a request that takes longer puts NVMe out of use for a while.
        daily_writes: bytes that may be written a day, or None.
        scrub_rate: bytes a second for reading cold records again, or None.
        eviction: attnstore, lru or fifo.
        ttl_s: after so long without use a chunk is not found; None: as long as there is room.
        pin_shares: of each tier's slots, those that can be pinned in all and by one tenant.
        moved: MovedKv's min_tokens and sinks.
        codec: of the file's records, if it has to know the model.
        more_tiers: behind NVMe, nearest first.
        needs: of the KV cache groups beside the spine, and of the spine if it needs less than all
            tokens; a hit ends where all have what they need.
        ahead: so many tokens behind it decide KV of a token too (drafts): a hit ends before those
            of which that is not known.
        teller: makes KV events, where routers want to know what the tiers have.
        clock, wall, threaded, grain: for tests: see Context, turn(), and see PrefixIndex.
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
        codec: Codec | None = None,
        more_tiers: Sequence[MakeTier] = (),
        needs: Sequence[Need] = (),
        ahead: int = 0,
        teller: Teller | None = None,
        clock: Clock = boot_seconds,
        wall: Clock = unix_seconds,
        threaded: bool = True,
        grain: int = GRAIN_TOKENS,
    ) -> None:
        self._estimator = ReturnEstimator()
        self._ttl_s = ttl_s
        order = partial(departures, eviction, estimator=self._estimator)
        self.residency = Residency(
            pool.num_slots,
            slab.records_max,
            order,
            grain=grain,
            chunk_tokens=slab.shape.chunk_tokens,
            seed=secrets.randbits(64),
            pin_shares=pin_shares,
            more=more_tiers,
        )
        self.num_slots = pool.num_slots
        self.loads_in_parts = False
        """Whether a waiting request may find more than DRAM has room for (scheduler/stages.py)."""
        self.ahead = ahead
        self.needs = tuple(replace(need, ahead=ahead) for need in needs)
        self.walks = walks(needs)
        """Whether no group has all tokens, so that the names alone are walked."""
        self._moved = MovedKv(
            self.residency.index,
            slab.shape.chunk_tokens,
            pool.num_slots + slab.records_max,
            min_tokens=moved[0],
            sinks=moved[1],
            seed=secrets.randbits(63),
        )
        self._curve = HitCurve.around(pool.num_slots, slab.shape.chunk_tokens)
        self._clock = clock
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._context = context = Context(
            self.residency, self._progress, pool, clock, self._moved, wall, ttl_s
        )
        self.announcer = Announcer(context, teller) if teller is not None else None
        nvme = NvmeIo(
            context, slab, device, io_depth, codec, deadline_s=io_deadline_s, scrub_rate=scrub_rate
        )
        pairs = zip(more_tiers, self.residency.behind[1:], strict=True)
        more = [make.io(context, tier) for make, tier in pairs]
        learn = partial(learn_from, context, self._estimator, self._curve)
        self.thread = StoreThread(context, [nvme, *more], daily_writes=daily_writes, learn=learn)
        self.asking = asking_of(context, more, self.thread.reader, has_groups=bool(needs))
        if threaded:
            self.thread.start()

    def turn(self) -> None:
        """One round of what our thread does. For simulations, without the thread."""
        self.thread.turn(0.0)

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
        whole = sequence.keys(0, num_tokens // sequence.chunk_tokens)  # costly, so before the lock
        keys = whole[: stop // sequence.chunk_tokens]
        marks = marks_of(keys)
        with self._lock:
            now = self.residency.now = self._clock()
            self._curve.news.append(used_by(sequence, marks, num_tokens))
            pieces = self._match(sequence, 0, stop, min_tokens, request_id)
            last_runs = self.residency.last_runs(pieces, sequence.chunk_tokens)
            visit = visit_of(self._estimator, last_runs, marks, num_tokens, now, terms, self._ttl_s)
            self._context.has_leases |= terms.ttl_s is not None
            self._want(request_id, pieces, visit, sequence, 0, stop)
            if terms.pin_s is not None:
                for piece in no_ends(pieces, self.residency.index.grain):
                    self.residency.pinning.pin(piece.chunk, now + terms.pin_s, now)
        if self.asking is not None:
            self.asking.look(sequence, pieces, 0, stop, request_id)
        self._read(pieces)
        if self._estimator.is_due:
            self.thread.wake()
        return pieces, visit

    def answered(self, visit: Visit, num_tokens: int) -> None:
        """The request of this visit has ended, with so many tokens of its own."""
        with self._lock:
            answer(visit.own, num_tokens, self._estimator)
            self.residency.rank(visit.own)

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
        sequence.keys(0, stop // sequence.chunk_tokens)  # the costly part, before the lock
        with self._lock:
            self.residency.now = self._clock()
            pieces = self._match(sequence, start, stop, min_tokens, request_id)
            self._want(request_id, pieces, visit, sequence, start, stop)
        if self.asking is not None:
            self.asking.look(sequence, pieces, start, stop, request_id)
        self._read(pieces)
        return pieces

    def _read(self, pieces: Sequence[Piece]) -> None:
        if State.ABSENT in [piece.chunk.dram.state for piece in pieces]:
            self.thread.reader.start()

    def _match(
        self,
        sequence: SequenceKeys,
        start: int,
        stop: int,
        min_tokens: int,
        request_id: str | None,
    ) -> list[Piece]:
        """Locked."""
        if self.walks:
            pieces = self._walk(sequence, start, stop, self._comes)
            is_enough = pieces and pieces[-1].stop - start >= min_tokens
            return pieces if is_enough and len(pieces) <= self.num_slots else []
        pieces = self.residency.index.match(sequence, start, stop)
        if sequence.finds_moved:
            pieces = self._moved.go_on(pieces, sequence, start, stop)
        if self._context.has_leases:
            pieces = self.residency.unexpired(pieces)
        if not all(io.health.reads.in_use and not io.tier.is_asked for io in self.thread.tiers):
            pieces = list(takewhile(lambda p: self._comes(p.chunk), pieces))
        waits = request_id is not None and request_id in self.residency.look_ahead
        if not (self.loads_in_parts and waits) or sequence.finds_moved:
            pieces = pieces[: self.num_slots]  # more can never be in DRAM at once
        pieces = settle(pieces, self.residency.index.grain)
        if self.ahead:
            pieces = proven(pieces, self.ahead, self.residency.index.grain)
        if pieces and pieces[-1].stop - start < min_tokens:
            return []
        if not self.needs:
            return pieces
        sequence.spine_stop = pieces[-1].stop if pieces else start
        sequence.short_of = set()
        pieces = self._fit(sequence, pieces, start, self._comes, sequence.short_of)
        is_enough = pieces and pieces[-1].stop - start >= min_tokens
        return pieces if is_enough and len(pieces) <= self.num_slots else []

    def _walk(
        self, sequence: SequenceKeys, start: int, stop: int, is_there: Callable[[Chunk], bool]
    ) -> list[Piece]:
        """Locked. What has expired is dropped, and another hit looked for."""
        while True:
            pieces = walk(self.residency.index, sequence, self.needs, start, stop, is_there)
            if not self._drops_expired(pieces):
                return pieces

    def _fit(
        self,
        sequence: SequenceKeys,
        spine: Sequence[Piece],
        start: int,
        is_there: Callable[[Chunk], bool],
        short: set[int] | None = None,
    ) -> list[Piece]:
        """Locked. As _walk(): what has expired of the spine is gone already."""
        while True:
            index, needs = self.residency.index, self.needs
            pieces = fit(index, sequence, needs, spine, start, is_there, short)
            if not self._drops_expired([piece for piece in pieces if piece.group]):
                return pieces

    def _drops_expired(self, pieces: list[Piece]) -> bool:
        """Locked. Whether some have expired, which are dropped."""
        return self._context.has_leases and len(self.residency.unexpired(pieces)) < len(pieces)

    def _comes(self, chunk: Chunk) -> bool:
        """Locked. Whether it is in DRAM, or a tier that answers is believed to have it."""
        is_ready = chunk.dram.state is State.READY
        return is_ready or self.thread.reader.can_bring(chunk)

    def _want(
        self,
        request_id: str | None,
        pieces: Sequence[Piece],
        visit: Visit | None,
        sequence: SequenceKeys,
        start: int,
        stop: int,
    ) -> None:
        """Locked."""
        residency, size = self.residency, sequence.chunk_tokens
        spine = [piece for piece in pieces if piece.group == 0]
        at = start if not spine else spine[-1].stop
        if at % size and spine:
            at = spine[-1].start
        if self.walks:  # the tail that it seems to have, be the window before it there or not
            at = max(start, sequence.spine_stop // size * size)
        ends = residency.index.ends_like(sequence, at // size, stop) if at < stop else []
        near = pieces[: self.num_slots]  # what is beyond is wanted once there may be room
        is_known = residency.is_wanted_so(request_id, near, visit)
        used = [] if is_known else no_ends(pieces, residency.index.grain)
        if visit is None:
            residency.renew([*(piece.chunk for piece in used), *ends])
        else:
            border = visit.num_shared * size
            own_ends, shared_ends = ([], ends) if at < border else (ends, [])
            shared = [p.chunk for p in used if p.start < border] + shared_ends
            own = [p.chunk for p in used if p.start >= border] + own_ends
            for chunks, run in ((shared, visit.shared), (own, visit.own)):
                residency.use(chunks, run)
            if is_known:
                residency.use_again(visit.shared, visit.own)
                return
        chunks = [piece.chunk for piece in near]
        if request_id is not None and request_id in residency.look_ahead:
            residency.dram.want(request_id, chunks)
        else:
            self.thread.reader.want(chunk for chunk in chunks if chunk.dram.state is State.ABSENT)

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
            if self.walks:
                assert start is not None, "a window begins behind what is in HBM"
                return self._hold_walked(pieces, sequence, start, stop) if pieces else []
            grain = self.residency.index.grain
            held, ends_anew = ready_run(pieces, sequence, stop, grain)
            if ends_anew and self.ahead:
                held = proven(held, self.ahead, grain)
            self.residency.hold(*[piece.chunk for piece in held])
            return held if not self.needs else self._hold_sections(held, sequence)

    def hold_again(self, pieces: Sequence[Piece]) -> bool:
        """Hold pieces that were held before, if all of them can be. Returns whether they are."""
        with self._lock:
            self.residency.now = self._clock()
            for piece in pieces:
                has_expired = self._context.has_leases and self.residency.has_expired(piece.chunk)
                if has_expired or not _is_ready(piece.chunk):
                    return False
            self.residency.hold(*(piece.chunk for piece in pieces))
            return True

    def _hold_walked(
        self, found: Sequence[Piece], sequence: SequenceKeys, start: int, stop: int
    ) -> list[Piece]:
        """Locked. Hold what was found, or else the farthest hit of which all is READY.

        A walk of what is READY passes a chunk that is not, even if another one ends there as well:
        so it may miss what was found, and nothing would be read that could change it.
        """
        pieces = list(found)
        if not all(_is_ready(piece.chunk) and piece.exact for piece in pieces):
            far = sequence.spine_stop
            pieces = self._walk(sequence, start, stop, _is_ready)
            sequence.spine_stop = far
        if not all(piece.exact for piece in pieces):  # tokens of what is READY are known
            return []
        self.residency.hold(*(piece.chunk for piece in pieces))
        return pieces

    def _hold_sections(self, spine: list[Piece], sequence: SequenceKeys) -> list[Piece]:
        """Locked. Hold the sections that go with these held pieces. What they do not back is let
        go."""
        start = spine[0].start if spine else 0
        fitting = self._fit(sequence, spine, start, _is_ready)
        kept = [piece for piece in fitting if piece.group == 0]
        sections = [piece for piece in fitting if piece.group]
        if not all(piece.exact for piece in sections):  # tokens of what is READY are known
            kept, sections, fitting = [], [], []
        self.residency.release(*(piece.chunk for piece in spine[len(kept) :]))
        self.residency.hold(*(piece.chunk for piece in sections))
        return fitting

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
        """A load in parts goes on with these: they are read before all that the queue wants, and
        kept. None: it is over. Cost: that of LookAhead.want().

        Args:
            name: no request's.
        """
        with self._lock:
            look_ahead, dram = self.residency.look_ahead, self.residency.dram
            if not chunks:
                dram.leave_queue(name)
                return
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
            tokens[tier] += piece.stop - start
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
        stays: bool = False,
        is_alone: bool = False,
        dram_only: bool = False,
        waits: bool = False,
        yields: bool = False,
    ) -> Chunk | None:
        """See Residency.begin_save.

        Args:
            pin_s: how long it is to be pinned, if it is stored and its tenant's share allows.
        """
        with self._lock:
            now = self.residency.now = self._clock()
            chunk = self.residency.begin_save(
                name,
                run,
                again=again,
                stays=stays,
                is_alone=is_alone,
                dram_only=dram_only,
                waits=waits,
                yields=yields,
            )
            if chunk is not None and not self.needs:  # else it may be another group's
                self._curve.news.append(NewChunk(name.key, name.parent, name.extra, name.tokens))
            if pin_s is not None:
                kept = chunk or self.residency.index.get(name.key)
                if kept is not None:
                    self.residency.pinning.pin(kept, now + pin_s, now)
            return chunk

    def has(self, name: ChunkName) -> bool:
        """Whether the chunk, or what extends it, is in some tier or on its way there."""
        with self._lock:
            index = self.residency.index
            return index.get(name.key) is not None or index.extends(name)

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
        """Let a chunk that stays (begin_save) go to the tiers behind after all, when nothing else
        is to be written and while they have much room. It leaves them before all else."""
        with self._lock:
            chunk.if_room = True

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
        self.thread.wake()

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Forget these chunks in all tiers, also those that are being saved."""
        with self._lock:
            for chunk in chunks:
                self.residency.drop(chunk)

    def drop_passed(self, chunks: Iterable[Chunk]) -> int:
        """A conversation has gone on beyond these sections. Forget those that only it has used,
        and return how many."""
        with self._lock:
            return self._supersede(filter(self.residency.is_own, chunks))

    def lower(self, chunks: Iterable[Chunk]) -> None:
        """Let these leave before most that is as old. What others use as well stays as it is."""
        with self._lock:
            self.residency.lower(list(filter(self.residency.is_own, chunks)))

    def drop_before(self, keys: SequenceKeys, stop: int, *, spares: bool) -> int:
        """A conversation has gone on beyond token `stop`. Forget what is its own (is_own) of one
        group before it, in CHUNK_LOOKS_MAX chunks. Returns how many. Cost: 45 us."""
        with self._lock:
            own, index = self.residency.own(spares=spares), self.residency.index
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
        asked: Sequence[SequenceKeys] = (),
    ) -> bool:
        """Wait until one of these runs, or of these answers, need not be waited for any more,
        `timeout_s` at most. Returns whether one need not.

        For steps that have nothing to compute: without it the engine core would spin on the
        processor that the I/O threads need.
        """
        with self._progress:
            return self._progress.wait_for(
                lambda: any(map(has_come, waiting)) or not all(map(is_asked, asked)), timeout_s
            )

    def reset(self) -> bool:
        """Drop every tier, also for the next process. Waits for a page write a segment and a
        sync, 5 s at most.

        Returns False if they could not be written: then records of before could come
        back after a restart, and the caller must say that the reset failed.
        """
        resets = self.thread.reset()
        with self._progress:
            self._moved.clear()
            return self.thread.wait_for(resets, RESET_DEADLINE_S)

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
            dram = self.residency.dram
            slot_bytes = self._context.pool.slot_bytes
            gauges = {
                ("held_bytes", DRAM): float(dram.num_used * slot_bytes),
                ("capacity_bytes", DRAM): float(dram.num_slots * slot_bytes),
            }
            gauges |= {("dram_curve_ratio", n): share for n, share in self._curve.by_times()}
            for io in self.thread.tiers:
                gauges |= io.gauges_now()
                gauges["dirty_bytes", io.tier.name] = float(len(io.tier.waiting) * slot_bytes)
            return gauges

    def is_idle(self) -> bool:
        """Nothing in flight, nothing held, and nothing to write to a tier that is in use."""
        with self._lock:
            return self.thread.is_idle() and self.residency.num_held() == 0

    def close(self) -> None:
        """Write back what is dirty, for CLOSE_DEADLINE_S at most; then stop."""
        self.thread.stop(CLOSE_DEADLINE_S)
        self._context.pool.close()
