# SPDX-License-Identifier: Apache-2.0
"""DRAM: few slots, of chunks that are objects. Who makes room when it is full is decided in
policy/eviction/rules.py; here is what that asks for.

It is long since the books of slots and the answers about them are one thing."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.policy.cost import QueuePace, ReadsInTime
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.eviction.rules import (
    KEPT_PART,
    KEPT_S,
    KEPT_SLOTS,
    For,
    Gives,
    comes_back,
    dram_gives_up,
    is_full_of_wanted,
    is_stuck,
    lag,
    may_be_lost,
)
from attnstore_vllm.policy.lookahead import LAST, LookAhead, QueuePlace
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.tier import Pin, Pins, Tier, TierBehind
from attnstore_vllm.types import DRAM


class DramTier(Tier):
    """`owned` is what keeps its chunks alive.

    Two orders of departure: `dirty` of what is nowhere else and waits to be written, or is being
    written; `clean` of the rest. What is not READY, or is wanted or pinned, stands in neither.
    """

    def __init__(
        self,
        num_slots: int,
        clean: Departures,
        dirty: Departures,
        pins: Pins,
        look_ahead: LookAhead[Chunk],
    ) -> None:
        self.name = DRAM
        self.num_slots = num_slots
        self.clean = clean
        self.dirty = dirty
        self.pins = pins
        self.free = list(range(num_slots - 1, -1, -1))
        self.owned: dict[int, Chunk] = {}
        self.depth_of = array("i", [0]) * num_slots
        """By slot, where its chunk ends in its prompt."""
        clean.depth_of = dirty.depth_of = self.depth_of
        self._order_of: dict[int, Departures] = {}
        """By slot; of those that stand in one."""
        self._left: dict[Chunk, None] = {}
        """No request waits for these any more, and they are not placed yet."""
        self._growing = Counter[Run]()
        """Runs of which chunks are being saved, and how many."""
        self._grows: dict[Chunk, Run] = {}
        self.writes_stalled = False
        """Nothing is being written, though the store's thread has just looked for what could be."""
        self.reads = ReadsInTime()
        self.pace = QueuePace()
        self._look_ahead = look_ahead
        self.on_pin_end: Callable[[Sequence[int], Run], None] = lambda slots, run: None
        """Told of slots whose pins have ended, which this run uses so."""
        self.behind: Sequence[TierBehind] = ()
        """All tiers behind. Set once they are made."""
        self._kept = _Kept(min(KEPT_SLOTS, num_slots // KEPT_PART))
        self.num_openings = 0
        """How often a slot became free, or what can be read again stood in `clean`: as long as this
        stays, a save that found no room finds none."""

    @property
    def num_used(self) -> int:
        return len(self.owned)

    @property
    def growing(self) -> Container[Run]:
        """Runs of which chunks are being saved."""
        return self._growing

    def may_go(self, slot: int) -> bool:
        """Whether nothing reads or fills the slot, no request waits for it and no pin keeps it."""
        return slot in self._order_of and not self.owned[slot].dram.uses

    def copy_of(self, chunk: Chunk) -> InTier:
        return chunk.dram

    def give(self, chunk: Chunk, state: State) -> None:
        """A free slot becomes the chunk's; one transfer uses it."""
        slot = self.free.pop()
        assert slot not in self.owned
        self.owned[slot] = chunk
        self.depth_of[slot] = chunk.name.position + chunk.name.num_tokens
        chunk.dram = InTier(state, slot, uses=1)
        if state is State.SAVING:
            self._grows[chunk] = chunk.run
            self._growing[chunk.run] += 1

    def saved(self, chunk: Chunk) -> None:
        """It is saved. Until then nothing before it in its run makes room for others."""
        run = self._grows.pop(chunk)
        self._growing[run] -= 1
        if not self._growing[run]:
            del self._growing[run]

    def take_back(self, *chunks: Chunk) -> None:
        leaving = defaultdict[Departures, list[int]](list)
        for chunk in chunks:
            slot = chunk.dram.slot
            assert self.owned.pop(slot) is chunk
            order = self._order_of.pop(slot, None)
            if order is not None:
                leaving[order].append(slot)
            if slot in self.pins:
                self.pins.remove(slot)
            self.free.append(slot)
        for order, slots in leaving.items():
            order.remove_all(slots)
        self.num_openings += len(chunks)

    def use(self, chunks: Sequence[Chunk], run: Run) -> None:
        for chunk in chunks:
            chunk.run = run
        slots = [chunk.dram.slot for chunk in chunks if chunk.dram.slot in self._order_of]
        if slots:
            self.clean.use(slots, run)
            self.dirty.use(slots, run)

    # ---- pins ----------------------------------------------------------------------------

    def pin(self, chunk: Chunk, pin: Pin) -> bool:
        accepted = self.pins.add(chunk.dram.slot, pin, self.num_slots)
        self.place(chunk)
        return accepted

    def unpin(self, chunk: Chunk) -> None:
        """The caller places the chunk."""
        self.pins.remove(chunk.dram.slot)

    def end_pins(self, now: float, renewed: Callable[[Run], Run]) -> None:
        for slot in self.pins.take_ended(now):
            chunk = self.owned[slot]
            chunk.run = renewed(chunk.run)
            self.place(chunk)
            self.on_pin_end([slot], chunk.run)

    # ---- who leaves ----------------------------------------------------------------------

    def place(self, *chunks: Chunk) -> None:
        new: list[tuple[Departures, Run, int]] = []
        for chunk in chunks:
            slot = chunk.dram.slot
            order = self._order_for(chunk) if slot >= 0 else None
            if slot in self._order_of:
                self._enter(chunk, order)
            elif order is not None:
                new.append((order, chunk.run, slot))
        for (order, run), found in groupby(new, itemgetter(0, 1)):
            slots = [slot for _, _, slot in found]
            order.add_all(slots, run)
            self._order_of.update(dict.fromkeys(slots, order))
            self.num_openings += len(slots)

    def place_left(self) -> None:
        """Place what the requests that began have left. Many begin in one step: who decides what
        leaves does it, and between steps the store's thread. Cost: a look at each chunk."""
        if self._left:
            left, self._left = self._left, {}
            self.place(*sorted(left, key=lambda chunk: chunk.run.since))  # as they were used

    def _order_for(self, chunk: Chunk) -> Departures | None:
        """Where a chunk stands that is here. None: it is not to leave now."""
        copy = chunk.dram
        stays = copy.state is not State.READY or chunk.dropped
        if stays or chunk in self._look_ahead.wanted_by or copy.slot in self.pins:
            return None
        return self.dirty if self._is_dirty(chunk) else self.clean

    def _is_dirty(self, chunk: Chunk) -> bool:
        if chunk.behind:
            return not chunk.is_behind
        slot = chunk.dram.slot
        for tier in self.behind:  # noqa: SIM110 - asked of every chunk of every request
            if tier.waits_for(slot):
                return True
        return False

    def _enter(self, chunk: Chunk, order: Departures | None) -> None:
        """Put a chunk that stands in one of the orders in another, or in none."""
        slot = chunk.dram.slot
        before = self._order_of[slot]
        if before is order:
            return
        run = before.run_of(slot) or chunk.run  # in some orders that of who filled the slot
        before.remove(slot)
        del self._order_of[slot]
        if order is not None:
            order.add(slot, run)
            self._order_of[slot] = order
            self.num_openings += 1

    def is_full_of_wanted(self, whose: QueuePlace) -> bool:
        """Whether a read for this request may only take the place of what farther ones want."""
        self.place_left()
        num_staying = len(self.owned) - len(self.clean) - len(self.dirty)
        return whose != self._look_ahead.first and is_full_of_wanted(num_staying, self.num_slots)

    def farther(self, whose: QueuePlace) -> Chunk | None:
        """A chunk that only requests beyond this one want, and that can be read again."""
        return self._look_ahead.farthest(whose, self._can_be_fetched_again)

    def outranked(self) -> Chunk | None:
        """A chunk that only requests of a worse priority than the next one's want."""
        return self._look_ahead.outranked(self._can_leave)

    def victims(
        self,
        now: float,
        whose: QueuePlace | None,
        run: Run | None = None,
        since: float = math.inf,
        count: int = 1,
    ) -> tuple[list[Chunk], Gives]:
        """Chunks to evict, by one decision of dram_gives_up(), and which these are; none if none
        can go. The caller asks again for what is missing of `count`.

        Args:
            whose: the waiting request that reads; LAST: none waits. None: for a save.
            run: of a chunk that is copied again.
            since: when the request came that a save is for; see may_be_lost().
        Cost: of 16 in a row from the same runs the first costs a pass over the orders.
        """
        self.place_left()
        growing = self._growing if whose is None else ()
        owned = self.owned
        keepers = () if self.is_slow else [t.name for t in self.behind if self._outlasts(t)]

        def can_go(slot: int) -> bool:
            chunk = owned[slot]
            if chunk.dram.uses:
                return False
            if may_be_lost(chunk.run, since, growing):
                return True
            for name in keepers:  # noqa: SIM110 - asked of many chunks
                if chunk.at(name).state is State.READY:
                    return True
            return False

        asks = (whose, run, since, self.clean.num_changes + self.dirty.num_changes)
        kept = self._kept
        slots = kept.take(asks, now, can_go, count)
        if slots:
            return [owned[slot] for slot in slots], kept.gives
        full = _Full(self, now, whose, run, can_go)
        gives = dram_gives_up(full, For.SAVE if whose is None else _WAITS[whose != LAST])
        victim = full.chunk(gives)
        if victim is None:
            return [], gives
        if kept.keep(asks, now, full, gives):
            slots = kept.take(asks, now, can_go, count)
        return [owned[slot] for slot in slots] or [victim], gives

    @property
    def late(self) -> float:
        """The share of reads that come too late."""
        return self.reads.late(lag(len(self.dirty), self.num_slots))

    @property
    def is_slow(self) -> bool:
        """Whether what leaves for the tiers behind is rather computed again than read in time."""
        return not comes_back(self.late)

    def behind_of(self, chunk: Chunk) -> Iterator[TierBehind]:
        """Tiers that can give it back, and keep more than DRAM does."""
        return (
            tier
            for tier in self.behind
            if chunk.at(tier.name).state is State.READY and self._outlasts(tier)
        )

    def _outlasts(self, tier: TierBehind) -> bool:
        """Whether the tier keeps more than DRAM does: a smaller one forgets sooner."""
        return tier.num_used + tier.num_free > self.num_slots

    def worth(self, chunk: Chunk, now: float) -> float:
        """See Order."""
        slot = chunk.dram.slot
        order = self._order_of.get(slot, self.clean)
        return order.worth(order.run_of(slot) or chunk.run, now)

    def _can_be_fetched_again(self, chunk: Chunk) -> bool:
        return chunk.is_behind and self._can_leave(chunk)

    def _can_leave(self, chunk: Chunk) -> bool:
        copy = chunk.dram
        return copy.state is State.READY and copy.uses == 0 and copy.slot not in self.pins

    # ---- the waiting queue ---------------------------------------------------------------

    def want(self, request_id: str, chunks: Sequence[Chunk]) -> None:
        """Note what a waiting request wants, in place of what it wanted before."""
        absent = [chunk for chunk in chunks if chunk.dram.state is State.ABSENT]
        new, unwanted = self._look_ahead.want(request_id, chunks, absent)
        leaving = defaultdict[Departures, list[int]](list)
        for chunk in new:
            copy = chunk.dram
            if copy.state is State.READY:
                chunk.came_from = ""  # for others, or too late for who wanted it: now it is here
            order = self._order_of.pop(copy.slot, None)
            if order is not None:
                leaving[order].append(copy.slot)
        for order, slots in leaving.items():  # what is wanted does not leave
            order.remove_all(slots)
        self._left.update(dict.fromkeys(unwanted))

    def leave_queue(self, request_id: str) -> None:
        """The request runs, or was aborted."""
        self.observe_reads(self._look_ahead.wants_of(request_id))
        self._left.update(dict.fromkeys(self._look_ahead.remove(request_id)))

    def observe_reads(self, chunks: Sequence[Chunk]) -> None:
        """A request runs that wanted these, in the order of depth: see what has come in time."""
        came = late = 0
        is_broken = False  # what has come behind a chunk that has not is of no use
        for chunk in chunks:
            is_here = chunk.dram.state is State.READY
            is_broken |= not is_here
            if chunk.came_from or not is_here:
                came, late = came + (not is_broken), late + is_broken
        if came or late:
            self.reads.observe(came, late)

    def lose(self, chunk: Chunk) -> None:
        """The chunk is not found any more."""
        if chunk.dram.slot >= 0:
            self.place(chunk)
        self._left.pop(chunk, None)
        for unwanted in self._look_ahead.lost(chunk):
            self.place(unwanted)

    def check_integrity(self) -> None:
        assert len(self.free) + len(self.owned) == self.num_slots
        assert not set(self.free) & self.owned.keys()
        for slot, chunk in self.owned.items():
            assert chunk.dram.slot == slot
            assert chunk.dram.state is not State.ABSENT
            uses = [chunk.dram.uses, *(copy.uses for copy in chunk.behind.values())]
            assert chunk.dropped <= (max(uses) > 0)
            assert not (slot in self.pins and slot in self._order_of)
            for order in (self.clean, self.dirty):
                stands_in = self._order_of.get(slot) is order
                assert stands_in == (slot in order)
        assert self._order_of.keys() <= self.owned.keys()
        for slot, order in self._order_of.items():
            assert self._is_dirty(self.owned[slot]) == (order is self.dirty)
        assert all(slot in self.owned for slot in self.pins)


_WAITS = {True: For.READ, False: For.COPY}


class _Full:
    """A full DRAM's answers for one decision: see policy/eviction/rules.py: Full."""

    def __init__(
        self,
        dram: DramTier,
        now: float,
        whose: QueuePlace | None,
        run: Run | None,
        can_go: Callable[[int], bool],
    ) -> None:
        self.dram, self._now, self._whose, self._run = dram, now, whose, run
        self._can_go = can_go
        self.num_dirty = len(dram.dirty)
        self.clean_chunk: Chunk | None = None
        self.dirty_chunk: Chunk | None = None
        self._rest: Chunk | None = None
        self._wanted: Chunk | None = None

    def chunk(self, gives: Gives) -> Chunk | None:
        """The chunk that this is. It was asked for before."""
        match gives:
            case Gives.CLEAN:
                return self.clean_chunk
            case Gives.DIRTY:
                return self.dirty_chunk
            case Gives.REST:
                return self._rest
            case Gives.WANTED:
                return self._wanted
        return None

    def clean(self) -> float | None:
        self.clean_chunk = self._of(self.dram.clean.victim(self._now, self._can_go))
        return self._worth(self.clean_chunk) if self.clean_chunk is not None else None

    def dirty(self) -> float:
        self.dirty_chunk = self._of(self.dram.dirty.victim(self._now, self._can_go))
        return self._worth(self.dirty_chunk) if self.dirty_chunk is not None else math.inf

    def num_rest(self) -> tuple[int, bool]:
        assert self.clean_chunk is not None
        dirty, run = self.dram.dirty, self.clean_chunk.run
        num_rest = dirty.num_of(run)
        if num_rest:
            rest = dirty.last_of(run, self._can_go)
            self._rest = self.dram.owned[rest[0]] if rest else None
        return num_rest, self._rest is not None

    def has_room_behind(self) -> bool:
        assert self.clean_chunk is not None
        return any(tier.num_free for tier in self.dram.behind_of(self.clean_chunk))

    def poorest_behind(self) -> Iterator[float | None]:
        assert self.clean_chunk is not None
        return (tier.poorest(self._now) for tier in self.dram.behind_of(self.clean_chunk))

    def late(self) -> float:
        return self.dram.late

    def late_reads(self) -> float:
        return self.dram.reads.late()

    def waited(self) -> float | None:
        self._wanted = (
            self.dram.outranked() if self._whose is None else self.dram.farther(self._whose)
        )
        return self._now - self._wanted.run.since if self._wanted is not None else None

    def again(self) -> float:
        return 0.0 if self._run is None else self.dram.dirty.worth(self._run, self._now)

    def is_stuck(self) -> bool:
        dram = self.dram
        return is_stuck(self.num_dirty, dram.num_slots, writes_stalled=dram.writes_stalled)

    def _of(self, slot: int | None) -> Chunk | None:
        return self.dram.owned[slot] if slot is not None else None

    def _worth(self, chunk: Chunk) -> float:
        return self.dram.worth(chunk, self._now)


class _Kept:
    """The last decision, as long as it is kept: the next slots of the same run go without another.
    One for which nothing clean could go is not kept.

    Args:
        slots: that one decision is for.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.gives = Gives.NOTHING
        self._asks: object = None
        self._at = -math.inf
        self._left = 0
        self._order: Departures | None = None
        self._run: Run | None = None

    def keep(self, asks: object, now: float, full: _Full, gives: Gives) -> bool:
        """Whether it is kept. Its first slot is the one that was decided on."""
        chunk, self._run = full.chunk(gives), None
        if chunk is None or full.clean_chunk is None:
            return False
        dram = full.dram
        self._order = dram.clean if gives is Gives.CLEAN else dram.dirty
        self._run = self._order.run_of(chunk.dram.slot)
        self.gives, self._asks, self._at, self._left = gives, asks, now, self._slots
        return self._run is not None

    def take(
        self, asks: object, now: float, can_go: Callable[[int], bool], count: int
    ) -> list[int]:
        """Slots that go now by the same decision, `count` at most; none: it is to be made anew."""
        if self._run is None or self._order is None or self._left <= 0 or asks != self._asks:
            return []
        if not self._at <= now <= self._at + KEPT_S:
            return []
        slots = self._order.last_of(self._run, can_go, min(count, self._left))
        self._left -= max(1, len(slots))
        return slots


class MakeTierBehind(Protocol):
    """Makes one more tier behind DRAM (tiers/tier.py)."""

    name: str

    def tier(
        self, policy: Callable[[int], Departures], dram: DramTier, look_ahead: LookAhead[Chunk]
    ) -> TierBehind: ...
