# SPDX-License-Identifier: Apache-2.0
"""Where every chunk is, and what may happen to it next.

It is long since all moves of a chunk keep the invariants below, which are checked together.

Invariants, checked by check_integrity():
- a slot belongs to at most one chunk; free slots + owned slots == capacity, in each tier;
- a chunk is in the index exactly when it is not dropped and some tier has or is getting it;
- a slot that a transfer or a device touches is not given away.

No I/O, no clock, no thread: the caller holds the lock and moves the bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from attnstore_vllm.index.chunk import NOWHERE, Chunk, ChunkName, InTier, State
from attnstore_vllm.index.prefix import GRAIN_TOKENS, Piece, PrefixIndex, in_place
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.eviction.rules import Gives, may_go_for_low_value
from attnstore_vllm.policy.lookahead import LAST, LookAhead, QueuePlace
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import JointRuns, Run, Visit, moved_run, unknown_run
from attnstore_vllm.tiers.announced import Announced
from attnstore_vllm.tiers.dram_tier import DramTier, MakeTierBehind
from attnstore_vllm.tiers.nvme.nvme_tier import NvmeTier
from attnstore_vllm.tiers.pinning import Pinning
from attnstore_vllm.tiers.tier import Pins, TierBehind, source_of
from attnstore_vllm.types import NVME, Event, StoreFailure

LOW_VALUE_PART = 4
"""Chunks that are worth little are written while one slot in so many is free."""
REFUSALS_MAX = 32
"""Chunks that one call of begin_store refuses at most."""
_EXPECTED_MAX = 1 << 22
"""Chunks for which the index makes room at once; beyond, its tables grow."""


class Residency:
    """The one owner of which chunk is where. `counts` holds events by name, for the metrics.

    It refers to each chunk that is in DRAM or in a transfer; what is on NVMe only is an entry.

    Args:
        nvme_slots: the most there can be; nvme.open() says which there are.
        policy: makes an order of departure for so many slots.
        seed, grain: see PrefixIndex.
        pin_shares: of each tier's slots, those that can be pinned in all and by one tenant.
        more: tiers behind NVMe, nearest first.
        make_nvme: NvmeTier, or what is made as it is.
    """

    def __init__(
        self,
        dram_slots: int,
        nvme_slots: int,
        policy: Callable[[int], Departures],
        *,
        chunk_tokens: int,
        seed: int = 0,
        grain: int = GRAIN_TOKENS,
        pin_shares: tuple[float, float] = (0.0, 0.0),
        more: Sequence[MakeTierBehind] = (),
        make_nvme: Callable[..., NvmeTier] = NvmeTier,
    ) -> None:
        expected = min(dram_slots + nvme_slots, _EXPECTED_MAX)
        self.index = PrefixIndex(chunk_tokens, seed, expected, grain)
        self.counts = Counter[str]()
        self.look_ahead = LookAhead[Chunk]()
        self.now = 0.0  # seconds; the caller sets it before what may need room
        self.first_written_tokens = 0
        """Tokens written behind DRAM that no record there had before."""
        self._joint = JointRuns()
        self.num_expired = 0
        """Chunks that look-ups found and dropped, since their ttl was over."""
        self.dram = DramTier(
            dram_slots, policy(dram_slots), policy(dram_slots), Pins(*pin_shares), self.look_ahead
        )
        self.nvme = make_nvme(
            nvme_slots,
            policy(nvme_slots),
            Pins(*pin_shares),
            self.index,
            waiting=policy(dram_slots),
            dram_pins=self.dram.pins,
            look_ahead=self.look_ahead,
        )
        self.behind: list[TierBehind] = [
            self.nvme,
            *(make.tier(policy, self.dram, self.look_ahead) for make in more),
        ]
        """All tiers behind DRAM, nearest first."""
        self.dram.behind = self.behind
        for tier in self.behind:
            tier.waiting.depth_of = self.dram.depth_of
        self._asked = {tier.name for tier in self.behind if tier.is_remote}
        self._tiers = [self.dram, *self.behind]
        behind = [order for tier in self.behind for order in tier.orders()]
        self._orders = [self.dram.clean, self.dram.dirty, *behind]
        """All in which a slot may stand."""
        self.pinning = Pinning(self._tiers, self.counts)
        self.on_trial: Callable[[str], bool] = lambda _: False
        """Whether what this tier has is no other's yet (store/trial.py)."""
        self.watch: Announced | None = None
        """Told of chunks that come to tiers and leave them, where routers want to know."""

    # ---- who uses what -----------------------------------------------------------------

    def use(self, chunks: Sequence[Chunk], run: Run | None = None) -> None:
        """Note that a request wants these, in the order of depth."""
        run = run or unknown_run(self.now)
        run.use(self.now)
        if chunks:
            self._move(chunks, run)

    def _move(self, chunks: Sequence[Chunk], run: Run) -> None:
        """They are of this run from now on."""
        for tier in self._tiers:
            tier.use(chunks, run)
        for behind in self.behind:
            if waiting := behind.waiting:
                waiting.use([chunk.dram.slot for chunk in chunks if chunk.dram.slot >= 0], run)
        has_ended = run.priority <= Priority.ENDED
        for chunk in chunks:
            if has_ended or (chunk.refused_by and chunk.copied_for is not run):
                chunk.refused_by.clear()
                self._refuse_if_not_wanted(chunk)
                self._place(chunk)

    def use_again(self, *runs: Run) -> None:
        """Note that requests want all that these runs were the last to use. Cost: O(tiers)."""
        for run in runs:
            run.use(self.now)
            for order in self._orders:
                order.use_again(run)

    def use_stored(self, names: Sequence[ChunkName], runs: Sequence[Run | None]) -> int:
        """How many of the leading chunks are in DRAM, and of these runs: their request has them in
        HBM too, so nothing is to be copied. It uses them again. Cost: a look at each."""
        used: list[Run] = []
        for name, run in zip(names, runs, strict=True):
            chunk = self.index.get(name.key)
            if run is None or chunk is None or chunk.run is not run or chunk.refused_by:
                break
            if chunk.dram.state is State.ABSENT or run.has_expired(self.now):
                break
            used.append(run)
        self.use_again(*dict.fromkeys(used))
        return len(used)

    def run_of(self, chunk: Chunk) -> Run:
        """The run that used the chunk last, as far as that is known."""
        if chunk.dram.state is State.ABSENT:
            for tier in self.behind:
                if tier.name in chunk.behind:
                    chunk.run = tier.run_of(chunk) or chunk.run
        return chunk.run

    def found_until(self, chunk: Chunk) -> float:
        """When its lease ends."""
        lease = self.run_of(chunk).lease
        return math.inf if lease is None else lease.expires

    def last_runs(self, pieces: Sequence[Piece], size: int, stop: int) -> list[Run]:
        """The run that used each of the leading chunks last, of `size` tokens, that end by `stop`.
        Those before a window count as its first. No tail: the request saves another chunk there."""
        spine = in_place(pieces)
        if spine and (spine[-1].chunk.name.end % size or spine[-1].chunk.name.end > stop):
            spine.pop()
        runs = [self.run_of(piece.chunk) for piece in spine]
        return spine[0].start // size * runs[:1] + runs if runs else []

    def use_moved(self, chunks: Sequence[Chunk], visit: Visit) -> None:
        """A request takes these to other positions. They stay of the conversations that they are
        of, which share them with it now."""
        for run, of_run in groupby(chunks, self.run_of):
            self.use([*of_run], moved_run(run, visit, self.now))

    def is_own(self, chunk: Chunk) -> bool:
        """Whether it is found, and one conversation alone has used it."""
        return not chunk.dropped and not self.run_of(chunk).is_shared

    def own(self, *, low_value: bool) -> Callable[[Chunk], bool]:
        """is_own(), of what no request has pinned; of what is worth little only with
        `low_value`."""
        return lambda chunk: (
            self.is_own(chunk)
            and (low_value or self.run_of(chunk).priority != Priority.LOW_VALUE)
            and self.pinning.of(chunk, self.now) is None
        )

    def make_low_priority(self, chunks: Sequence[Chunk]) -> None:
        """Let these leave before most that is as old. That is no use: another request may have used
        them last, and its lease is of more than these."""
        for run, of_run in groupby(self.drop_expired(chunks), self.run_of):
            low = run.copy(priority=min(run.priority, Priority.LOW))
            low.touch(self.now)
            self._move([*of_run], low)

    def rank(self, run: Run) -> None:
        """The kind of this run has changed. Cost: O(tiers)."""
        for order in self._orders:
            order.rank(run)

    def renew(self, chunks: Sequence[Chunk]) -> None:
        """A request for these, in the order of depth, may come soon. They stay of the runs that
        they are of, so that nothing else is believed of the conversation than before."""
        for run, of_run in groupby(reversed(chunks), self.run_of):
            self.use([*of_run][::-1], run.renewed(self.now))

    def unexpired(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces before the first whose chunk has expired. Drops what has expired: its lease
        has ended, and it is neither waited for nor pinned.

        Cost: a look at the run of each piece.
        """
        expired = [piece.chunk for piece in pieces if self.has_expired(piece.chunk)]
        kept: list[Piece] = []
        for piece in pieces:
            if piece.chunk in expired[:1]:
                break
            kept.append(piece)
        for chunk in expired:
            self._expire(chunk)
        return kept

    def drop_expired(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those of these that have not expired. Cost: a look at the run of each."""
        expired = {chunk for chunk in chunks if self.has_expired(chunk)}
        for chunk in expired:
            self._expire(chunk)
        return [chunk for chunk in chunks if chunk not in expired]

    def _expire(self, chunk: Chunk) -> None:
        self.counts[Event.EXPIRED] += 1
        self.num_expired += 1
        self.drop(chunk)

    def has_expired(self, chunk: Chunk) -> bool:
        return (
            self.run_of(chunk).has_expired(self.now)
            and chunk not in self.look_ahead.wanted_by
            and self.pinning.of(chunk, self.now) is None
        )

    # ---- HBM -> DRAM -------------------------------------------------------------------

    def begin_save(
        self,
        name: ChunkName,
        run: Run | None = None,
        *,
        again: bool = False,
        low_value: bool = False,
        is_alone: bool = False,
        dram_only: bool = False,
        waits: bool = False,
        yields: bool = False,
        num_more: int = 0,
    ) -> Chunk | None:
        """Give the chunk a DRAM slot that the workers fill. It is held until finish_save.

        Args:
            run: of the request that has computed it.
            again: the request has computed it though a tier behind may have it: DRAM takes it too.
            low_value: it is worth little: it takes no room from anything that is worth more, and is
                not written to the tiers behind before a request uses it.
            is_alone, dram_only: see Chunk.
            waits: the caller asks again where there is no room now.
            yields: nothing that would be lost makes room for it. Its request has ended: that it is
                saved is no use of it.
            num_more: chunks that are about to be saved so after it, and that no tier has.
        Returns None where nothing is to be copied: it, or what extends it, is stored already, or
        there is no room (counted as dropped if it is nowhere else, and no request waits for room).
        """
        if yields and run is not None and run.has_expired(self.now):
            return None
        known = self._known(name)
        if known is not None and low_value:
            return None  # another run may think more of it
        if known is not None:
            before = self.run_of(known)
            if not yields and (run is None or run.since >= before.since):
                # by one that came before it is no older
                self.use([known], run and self._joint.of(run, before, self.now))
            # It takes no room from what waits to be read or written, if it can be read in time.
            whose = None if self.dram.is_slow and not yields else LAST
            again |= known.behind.keys() <= self._asked  # others have it, or say so
            may_copy = again and known.dram.state is State.ABSENT
            if not may_copy or not self._make_room_in_dram(whose, known.run):
                return None
            known.name = name  # its tokens, which the tiers behind alone had
            self.look_ahead.has_come(known)
        elif not is_alone and self.index.extends(name):
            return None
        elif not (
            self._has_room_for_low_value()
            if low_value
            else self.dram.free or self._make_room_to_save(run, 1 + num_more, yields=yields)
        ):
            if not (low_value or waits):
                self.counts[Event.DROPPED] += 1
            return None
        chunk = known or Chunk(name, run=run or unknown_run(self.now))
        chunk.is_alone = is_alone  # a record of an early release does not say it
        chunk.dram_only = dram_only
        # A known one is used already, or of a later request. At this time: for the chunk before it.
        if known is None and not yields and chunk.run.used_at != self.now:
            chunk.run.use(self.now)
        self.dram.give(chunk, State.SAVING)
        if low_value:
            chunk.refused_by.update(tier.name for tier in self.behind)
        if known is None:
            self.index.add(chunk)
        else:
            self.pinning.spread(chunk, self.now)
        return chunk

    def _known(self, name: ChunkName) -> Chunk | None:
        """The stored chunk of this name. One that has expired is dropped: no look-up has met it,
        an answer was computed once more. That is no use of the old KV."""
        known = self.index.get(name.key)
        if known is not None and self.has_expired(known):
            self._expire(known)
            return None
        return known

    def finish_save(self, *chunks: Chunk) -> None:
        """All ranks have copied: the bytes are ready, and dirty until written back."""
        for chunk in chunks:
            assert chunk.dram.state is State.SAVING
            chunk.dram.state = State.READY
            chunk.brought_by = chunk.origin = ""  # a tier that had it may have other bytes
            self.dram.saved(chunk)
            self._refuse_if_not_wanted(chunk)
        self._place(*chunks)
        for chunk in chunks:
            if chunk.dropped:
                continue
            self.counts[Event.SAVED_AGAIN if chunk.behind else Event.SAVED] += 1
            for tail in self.index.extended_by(chunk.name) if not chunk.is_alone else ():
                if tail.behind:
                    chunk.repeats = max(chunk.repeats, tail.name.num_tokens)
                if tail.dram.state is not State.SAVING:
                    self._inherit(chunk, tail)
                    self.counts[Event.SUPERSEDED] += 1
                    self.drop(tail)
        self.release(*chunks)

    def _place(self, *chunks: Chunk) -> None:
        """The state of chunks that may be in DRAM has changed: may they leave, are they written?"""
        here = [chunk for chunk in chunks if chunk.dram.slot >= 0]
        for tier in self.behind if here else ():
            tier.place_in_dram(*here)
        self.dram.place(*here)
        if self.watch is not None:
            for chunk in chunks:
                if not chunk.dropped:
                    self.watch.at(chunk)

    def _refuse_if_not_wanted(self, chunk: Chunk) -> None:
        """Tiers behind do not get what has ended, nor what DRAM alone may have, nor what is on
        trial: so DRAM gives it up like what is clean."""
        if chunk.dram_only or self.is_on_trial(chunk) or chunk.run.priority <= Priority.ENDED:
            chunk.refused_by.update(tier.name for tier in self.behind)

    def is_on_trial(self, chunk: Chunk) -> bool:
        """Whether the tier is that its bytes came up from, or will, or that it was copied from."""
        return self.on_trial(source_of(chunk, self.behind)) or self.on_trial(chunk.origin)

    # ---- DRAM -> HBM -------------------------------------------------------------------

    def hold(self, *chunks: Chunk) -> None:
        """A transfer reads the chunks' DRAM slots from now on."""
        for chunk in chunks:
            assert chunk.dram.state is State.READY
            assert not chunk.dropped
            chunk.dram.uses += 1

    def release(self, *chunks: Chunk) -> None:
        for chunk in chunks:
            assert chunk.dram.uses > 0
            chunk.dram.uses -= 1
            if chunk.dropped:
                self._free_if_dropped(chunk)

    def has_room_for_copy(self, chunk: Chunk) -> bool:
        """Room for what DRAM has already. It takes none from what would have to be computed."""
        return self._make_room_in_dram(LAST, chunk.run)

    # ---- DRAM -> a tier behind ---------------------------------------------------------

    def begin_store(self, tier: TierBehind) -> Chunk | None:
        """The chunk to write next, with a slot of the tier; None if there is none, or no slot.

        What is worth most is written first: there may not be the time for all.
        """
        for _ in range(REFUSALS_MAX):
            slot = tier.waiting.last(self.now)
            chunk = self.dram.owned[slot] if slot is not None else self._spare(tier)
            if chunk is not None and not tier.may_have(chunk):
                chunk.refused_by.add(tier.name)  # it has got a ttl since it waits
                self._place(chunk)
                continue
            room = self._make_room_behind(tier, chunk) if chunk is not None else False
            if chunk is None or room is False:
                return None
            if room:
                break
            self.counts[Event.REFUSED] += 1
            chunk.refused_by.add(tier.name)
            self._place(chunk)
        else:
            return None
        assert not chunk.dram_only, "the tier would give back other bytes"
        chunk.behind[tier.name] = InTier(State.WRITING, tier.give(chunk), uses=1)
        self._place(chunk)
        self.pinning.spread(chunk, self.now)
        chunk.dram.uses += 1
        return chunk

    def writes_if_room(self, tier: TierBehind) -> bool:
        """Whether chunks that are worth little may be written there now."""
        num_slots = tier.num_free + tier.num_used
        return bool(tier.waiting_low_value) and tier.num_free * LOW_VALUE_PART > num_slots

    def _spare(self, tier: TierBehind) -> Chunk | None:
        """The next chunk that is worth little, while there is much room."""
        if not self.writes_if_room(tier):
            return None
        return self.dram.owned[next(iter(tier.waiting_low_value))]

    def finish_store(self, tier: TierBehind, chunk: Chunk, outcome: bytes | StoreFailure) -> None:
        """The write has ended, with the payload's checksum or without success."""
        copy = chunk.at(tier.name)
        assert copy.state is State.WRITING
        copy.uses -= 1
        if isinstance(outcome, StoreFailure):
            self.counts[outcome.value] += 1
            chunk.refused_by.add(tier.name)  # tried again when it is used again
            chunk.written_if_room = False
            self.leave(tier, chunk)
        else:
            is_first = not chunk.is_behind
            copy.state, copy.checksum = State.READY, outcome
            if not chunk.dropped:
                tier.written(chunk)
            self.counts[Event.WRITTEN] += 1
            if is_first:
                self.first_written_tokens += max(0, chunk.name.num_tokens - chunk.repeats)
        self._place(chunk)
        self.release(chunk)

    # ---- a tier behind -> DRAM ---------------------------------------------------------

    def begin_fetch(self, chunk: Chunk, tier: TierBehind, whose: QueuePlace | None = None) -> bool:
        """Give the chunk a DRAM slot to be read into; False if there is no room now.

        Args:
            tier: that has it READY, and is read.
            whose: the waiting request that wants it. What is wanted before it makes no room.
        """
        copy = chunk.at(tier.name)
        assert copy.state is State.READY
        assert chunk.dram.state is State.ABSENT
        assert not chunk.dropped
        copy.uses += 1  # before making room: its slot must not go meanwhile
        if not self._make_room_in_dram(whose):
            copy.uses -= 1
            return False
        self.run_of(chunk)
        self.dram.give(chunk, State.READING)
        chunk.came_from, chunk.brought_by = tier.name, tier.source_of(chunk)
        self.pinning.spread(chunk, self.now)
        self.look_ahead.has_come(chunk)
        return True

    def finish_fetch(self, chunk: Chunk, verified: bool) -> None:
        """The read has ended; `verified` says that the bytes are those that were written. Its
        tokens are known by then: they came up with the bytes, see PrefixIndex.learn()."""
        assert chunk.dram.state is State.READING
        chunk.at(chunk.came_from).uses -= 1
        chunk.dram.state = State.READY
        assert chunk.name.tokens or not verified
        if not verified:
            self.drop(chunk)
        elif chunk.came_from in self._asked and not chunk.dropped:
            self._copied(chunk)
        self._refuse_if_not_wanted(chunk)
        self._place(chunk)
        self.release(chunk)

    def _copied(self, chunk: Chunk) -> None:
        """Others keep it. Tiers behind get it once another request uses it here: else each of n
        engines would write what n engines have. As a saved one it takes the place of tails."""
        chunk.origin, chunk.copied_for = chunk.came_from, chunk.run
        chunk.refused_by.update(tier.name for tier in self.behind)
        for tail in self.index.extended_by(chunk.name):
            if tail.dram.state is not State.SAVING:
                self._inherit(chunk, tail)
                self.counts[Event.SUPERSEDED] += 1
                self.drop(tail)

    def _inherit(self, chunk: Chunk, tail: Chunk) -> None:
        """It is pinned in the tail's stead, but no longer than it would be found: what it has
        behind the tail is another request's, who may have asked for less."""
        self.pinning.inherit(chunk, tail, self.now, self.found_until(chunk))

    # ---- scrubbing ---------------------------------------------------------------------

    def begin_scrub(self, tier: TierBehind, chunk: Chunk) -> None:
        """The device reads the chunk's slot in this tier; the caller keeps the object."""
        chunk.at(tier.name).uses += 1

    def end_scrub(self, tier: TierBehind, chunk: Chunk) -> None:
        chunk.at(tier.name).uses -= 1
        self._free_if_dropped(chunk)

    # ---- leaving -----------------------------------------------------------------------

    def drop(self, chunk: Chunk) -> None:
        """Forget the chunk in all tiers. Its slots go back when no transfer touches them."""
        if not chunk.dropped:
            self._forget(chunk)
        self._free_if_dropped(chunk)

    def _forget(self, chunk: Chunk) -> None:
        chunk.dropped = True
        self.dram.lose(chunk)
        if chunk.dram is not NOWHERE:
            self._place(chunk)
        self.index.remove(chunk)
        if self.watch is not None:
            self.watch.gone(chunk.name.key)
        for tier in self.behind:
            if tier.name in chunk.behind:
                tier.abandon(chunk)

    def drop_all(self) -> None:
        """Forget everything (a weight update). Cost: the objects, and some ms a million."""
        for chunk in self.index.all_live():
            self.drop(chunk)
        for tier in self.behind:
            tier.forget_all_at_rest(keep=())
        if self.watch is not None:
            self.watch.clear()

    def lose(self, tier: TierBehind) -> None:
        """The tier is out of use: forget what only it has, and write nothing to it any more.

        A slot that a device touches now stays held for good: it may be touched much later.
        """
        tier.is_lost = True
        tier.waiting.clear()
        tier.waiting_low_value.clear()
        keep = []
        for chunk in self.index.all_live():
            copy = chunk.at(tier.name)
            is_read = chunk.dram.state is State.READING and chunk.came_from == tier.name
            others = [c for name, c in chunk.behind.items() if name != tier.name]
            is_elsewhere = any(c.state is State.READY for c in others)
            if is_read or (chunk.dram.state is State.ABSENT and not is_elsewhere):
                self.drop(chunk)
                continue
            keep.append(chunk)
            if copy.state is State.READY:
                self.leave(tier, chunk)
            elif copy.state is State.WRITING:
                tier.abandon(chunk)
            self.dram.place(chunk)
        tier.forget_all_at_rest(keep)
        if self.watch is not None and tier is self.nvme:
            self.watch.lose(NVME)

    # ---- room --------------------------------------------------------------------------

    def _make_room_in_dram(
        self,
        whose: QueuePlace | None = None,
        run: Run | None = None,
        since: float = math.inf,
        count: int = 1,
    ) -> bool:
        """A free slot; where one has to be freed, up to `count` that go by the same decision."""
        if whose is not None and self.dram.is_full_of_wanted(whose):
            farther = self.dram.farther(whose)
            victims, gives = [farther] if farther is not None else [], Gives.WANTED
        elif self.dram.free:
            return True
        else:
            self.pinning.end(self.now)
            victims, gives = self._dram_victims(whose, run, since, count)
        if not victims:
            return False
        self.counts[Event.GIVEN_UP] += gives is Gives.WANTED
        self.counts[Event.EVICTED_DRAM] += len(victims)
        self.leave_dram(*victims)
        return bool(self.dram.free)

    def _dram_victims(self, *asks: Any) -> tuple[list[Chunk], Gives]:
        """See DramTier.victims()."""
        return self.dram.victims(self.now, *asks)

    def _make_room_to_save(self, run: Run | None, count: int, *, yields: bool) -> bool:
        """Room for what no tier has. It is not taken from what else is nowhere, of the same request
        or of one that came later."""
        since = -math.inf if yields else math.inf if run is None else run.since
        return self._make_room_in_dram(since=since, count=count)

    def _has_room_for_low_value(self) -> bool:
        """Room for what is worth little: a free slot, or that of another such chunk."""
        if self.dram.free:
            return True
        victims, gives = self.dram.victims(self.now, LAST)
        if not victims or not may_go_for_low_value(victims[0].run, gives):
            return False
        self.counts[Event.EVICTED_DRAM] += 1
        self.leave_dram(*victims)
        return True

    def _make_room_behind(self, tier: TierBehind, chunk: Chunk) -> bool | None:
        """None: there is room, but what would have to go is worth more than this chunk.

        A chunk that DRAM has as well is then as one that was refused: it is not written again
        before it is used again, which would move the same bytes for ever in a small store.
        """
        if tier.has_room_for(chunk):
            return True
        self.pinning.end(self.now)
        slot, is_refused = tier.victim(chunk, self.now)
        if slot is None:
            return None if is_refused else False
        self.counts[tier.evicted] += 1
        victim = tier.live(slot)
        if victim is None:
            self.counts[Event.LOST] += 1
            if self.watch is not None and tier is self.nvme:
                self.watch.gone(self.nvme.key_at_rest(slot))
            tier.forget_at_rest(slot)
        else:
            victim.refused_by.add(tier.name)
            self.leave(tier, victim)
        return tier.num_free > 0

    def leave_dram(self, *chunks: Chunk) -> None:
        """The chunks, which no transfer touches, leave DRAM."""
        slots = [chunk.dram.slot for chunk in chunks]
        for tier in self.behind:
            tier.left_dram(*slots)
        self.dram.take_back(*chunks)
        for chunk in chunks:
            chunk.dram, chunk.came_from = NOWHERE, ""
            if chunk.is_behind and not chunk.dropped:
                self.look_ahead.has_gone(chunk)
                if self.watch is not None:
                    self.watch.at(chunk)
            elif not chunk.behind:
                self._forget_if_nowhere(chunk)

    def leave(self, tier: TierBehind, chunk: Chunk) -> None:
        """The chunk, which no transfer touches there, leaves a tier behind."""
        tier.take_back(chunk)
        del chunk.behind[tier.name]
        self._place(chunk)
        self._forget_if_nowhere(chunk)

    def _forget_if_nowhere(self, chunk: Chunk) -> None:
        if chunk.dram is NOWHERE and not (chunk.behind or chunk.dropped):
            self.counts[Event.LOST] += 1
            self._forget(chunk)

    def _free_if_dropped(self, chunk: Chunk) -> None:
        if not chunk.dropped or chunk.dram.uses:
            return
        if chunk.dram is not NOWHERE:
            self.leave_dram(chunk)
        for tier in self.behind:
            if tier.name in chunk.behind and not chunk.at(tier.name).uses:
                self.leave(tier, chunk)

    # ---- for tests ---------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert the invariants above. Cost: all chunks; for tests and idle moments."""
        for tier in self._tiers:
            tier.check_integrity()
        for chunk in self.index:
            assert not chunk.dropped
            assert chunk.dram is not NOWHERE or chunk.behind
            assert chunk.name.tokens or chunk.dram.state is not State.READY

    def num_held(self) -> int:
        """Chunks that a transfer holds now; zero when nothing is in flight."""
        return sum(chunk.dram.uses > 0 for chunk in self.dram.owned.values())
