# SPDX-License-Identifier: Apache-2.0
"""DRAM: few slots, of chunks that are objects. Who makes room when it is full: what nobody waits
for first, then the farthest in the queue."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.policy.cost import QueuePace, ReadsInTime
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lookahead import LAST, LookAhead, Order
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.tier import Pin, Pins, Tier, TierBehind
from attnstore_vllm.types import DRAM

SAVES_PART = 8
"""One slot in so many is kept for what is saved and not yet written, or saves would push out what
was read for the requests at the window's end, to be read again."""

WAIT_MIN_S = 1e-3
USUAL_DIRTY = 4
"""So many are on their way to a disk that keeps up."""
DIRTY_PART = 2
"""When more than one slot in so many is dirty and nothing is written, reads may take what is
nowhere else."""


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
        """Nobody waits for these any more, and they are not placed yet."""
        self._growing = Counter[Run]()
        """Runs of which chunks are being saved, and how many."""
        self._grows: dict[Chunk, Run] = {}
        self.writes_stalled = False
        """Nothing is being written, though the store's thread has just looked for what could be."""
        self.reads = ReadsInTime()
        self.pace = QueuePace()
        self._look_ahead = look_ahead
        self.behind: Sequence[TierBehind] = ()
        """All tiers behind. Set once they are made."""
        self.num_openings = 0
        """How often a slot became free, or what can be read again stood in `clean`: as long as this
        stays, a save that found no room finds none."""

    @property
    def num_used(self) -> int:
        return len(self.owned)

    def copy_of(self, chunk: Chunk) -> InTier:
        return chunk.dram

    def give(self, chunk: Chunk, state: State) -> None:
        """A free slot becomes the chunk's; one transfer uses it."""
        slot = self.free.pop()
        assert slot not in self.owned
        self.owned[slot] = chunk
        self.depth_of[slot] = chunk.name.end
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

    def take_back(self, chunk: Chunk) -> None:
        slot = chunk.dram.slot
        assert self.owned.pop(slot) is chunk
        self._enter(chunk, None)
        self.pins.remove(slot)
        self.free.append(slot)
        self.num_openings += 1

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

    # ---- who leaves ----------------------------------------------------------------------

    def place(self, chunk: Chunk) -> None:
        if chunk.dram.state is not State.ABSENT:
            self._enter(chunk, self._order_for(chunk))

    def place_left(self) -> None:
        """Place what the requests that began have left. Many begin in one step: who decides what
        leaves does it, and between steps the store's thread. Cost: a look at each chunk."""
        if not self._left:
            return
        left, self._left = self._left, {}
        slots_of: dict[tuple[Departures, Run], list[int]] = {}
        for chunk in left:
            slot = chunk.dram.slot
            order = self._order_for(chunk) if slot not in self._order_of else None
            if order is None:
                self.place(chunk)
                continue
            slots_of.setdefault((order, chunk.run), []).append(slot)
            self._order_of[slot] = order
            self.num_openings += 1
        by_age = sorted(slots_of.items(), key=lambda found: found[0][1].since)
        for (order, run), slots in by_age:  # who was used meanwhile is the newest
            order.add_all(slots, run)

    def _order_for(self, chunk: Chunk) -> Departures | None:
        """Where a chunk stands that is here. None: it is not to leave now."""
        copy = chunk.dram
        stays = copy.state is not State.READY or chunk.dropped
        if stays or chunk in self._look_ahead.wanted_by or copy.slot in self.pins:
            return None
        return self.dirty if self._is_dirty(chunk) else self.clean

    def _is_dirty(self, chunk: Chunk) -> bool:
        if chunk.is_behind:
            return False
        slot = chunk.dram.slot
        return bool(chunk.behind) or any(tier.waits_for(slot) for tier in self.behind)

    def _enter(self, chunk: Chunk, order: Departures | None) -> None:
        """Put the chunk in one of the orders, or in none."""
        slot = chunk.dram.slot
        before, run = self._order_of.get(slot), chunk.run
        if before is order:
            return
        if before is not None:
            run = before.run_of(slot) or run  # in some orders that of who filled the slot
            before.remove(slot)
            del self._order_of[slot]
        if order is not None:
            order.add(slot, run)
            self._order_of[slot] = order
            self.num_openings += 1

    def is_full_of_wanted(self, whose: Order) -> bool:
        """Whether a read for this request may only take the place of what farther ones want."""
        self.place_left()
        num_staying = len(self.owned) - len(self.clean) - len(self.dirty)
        limit = self.num_slots - self.num_slots // SAVES_PART
        return num_staying >= limit and whose != self._look_ahead.first

    def farther(self, whose: Order | None) -> Chunk | None:
        """A chunk that only requests beyond this one want, and that can be read again."""
        return self._look_ahead.farthest(whose, self._can_be_fetched_again)

    def victim(
        self,
        now: float,
        whose: Order | None,
        run: Run | None = None,
        since: float = math.inf,
    ) -> tuple[Chunk | None, bool]:
        """The chunk to evict, or None if none can go; and whether somebody waits for it.

        First what nobody waits for and a tier behind has too, or has refused; then what only
        requests beyond `whose` wait for and can be read again. What is to be written yet would be
        lost: it goes for a save alone (`whose` is None), which brings what nobody has; for what a
        request waits for only if most is dirty and nothing is written: else it would wait for
        nothing.

        It also goes before any of these if less is lost with it (_risk). So is what a tier behind
        has, and is saved for `run`. Of a run the beginning is written first, and what is dirty of
        it is nothing without that.

        Args:
            since: when the request came that a save is for. What is lost with its slot must be of
                a request that came before, and of which nothing is being saved: else a prompt
                would push out its own beginning, and two that grow each other's.
        """
        self.place_left()
        growing = self._growing if whose is None else ()

        def can_go(slot: int) -> bool:
            chunk = self.owned[slot]
            if chunk.dram.uses:
                return False
            return (chunk.run.since < since and chunk.run not in growing) or chunk.is_behind

        slot = self.clean.victim(now, can_go)
        clean = self.owned[slot] if slot is not None else None
        if clean is not None:
            if not len(self.dirty):
                return clean, False  # nothing else can go
            if not self.late and self._has_room_behind(clean):
                return clean, False  # nothing is lost with it
        dirty = self.dirty.victim(now, can_go)
        loss = self._worth(self.owned[dirty], now) if dirty is not None else math.inf
        if clean is not None:
            return self._poorer(clean, dirty, loss, now, can_go), False
        late, wanted = self.reads.late(), self.farther(whose)
        if wanted is not None:
            # It has waited since then, and is taken to wait as long again.
            is_less = loss < late / max(now - wanted.run.since, WAIT_MIN_S)
            if is_less and dirty is not None:
                return self.owned[dirty], False
            return wanted, True
        if run is not None and dirty is not None and loss < late * self.dirty.worth(run, now):
            return self.owned[dirty], False
        is_stuck = self.writes_stalled and len(self.dirty) > self.num_slots // DIRTY_PART
        if dirty is not None and (whose is None or (is_stuck and whose != LAST)):
            return self.owned[dirty], False
        return None, False

    @property
    def late(self) -> float:
        """The share of reads that come too late. A disk that cannot keep up with saves is taken for
        one that cannot with reads, before some were seen."""
        num_late = max(0, len(self.dirty) - USUAL_DIRTY)
        return self.reads.late(min(1.0, DIRTY_PART * num_late / self.num_slots))

    def _poorer(
        self,
        clean: Chunk,
        dirty: int | None,
        loss: float,
        now: float,
        can_go: Callable[[int], bool],
    ) -> Chunk:
        """The chunk to evict: this one, this dirty slot's, or the last of what is dirty behind
        this one. What lies behind a chunk is nothing without it, so it is lost with it.

        Args:
            loss: what the dirty one is worth.
        """
        worth, behind_it = self._worth(clean, now), self.dirty.num_of(clean.run)
        if worth <= loss and not behind_it:
            return clean  # no risk makes it more
        risked = self._risk(clean, min(loss, worth), now) * worth
        if behind_it:
            risked *= 1 + behind_it
            slot = self.dirty.last_of(clean.run, can_go)
            if slot is not None and worth < min(loss, risked):
                return self.owned[slot]
        return self.owned[dirty] if dirty is not None and loss < risked else clean

    def _risk(self, chunk: Chunk, loss: float, now: float) -> float:
        """The part of a chunk's worth that is lost if it leaves DRAM, and not what is dirty and has
        a worth of `loss`.

        What can be read again is lost as often as reads come late. It is lost for good where the
        tiers that have it are smaller than DRAM, or keep nothing that is worth so little: such a
        tier forgets sooner than DRAM does, and newer chunks are about to push it out.
        """
        if not chunk.is_behind:
            return 1.0
        for tier in self._behind(chunk):
            poorest = tier.poorest(now)
            if poorest is None or poorest < loss:
                return self.late
        return 1.0

    def _has_room_behind(self, chunk: Chunk) -> bool:
        """Whether a tier that can give the chunk back pushes nothing out yet."""
        return any(tier.num_free for tier in self._behind(chunk))

    def _behind(self, chunk: Chunk) -> Iterator[TierBehind]:
        """Tiers that can give it back, and keep more than DRAM does."""
        return (
            tier
            for tier in self.behind
            if chunk.at(tier.name).state is State.READY
            and tier.num_used + tier.num_free > self.num_slots
        )

    def _worth(self, chunk: Chunk, now: float) -> float:
        slot = chunk.dram.slot
        order = self._order_of.get(slot, self.clean)
        return order.worth(order.run_of(slot) or chunk.run, now)

    def _can_be_fetched_again(self, chunk: Chunk) -> bool:
        copy = chunk.dram
        is_ready = copy.state is State.READY and chunk.is_behind
        return is_ready and copy.uses == 0 and copy.slot not in self.pins

    # ---- the waiting queue ---------------------------------------------------------------

    def want(self, request_id: str, chunks: Sequence[Chunk]) -> None:
        """Note what a waiting request wants, in place of what it wanted before."""
        absent = [chunk for chunk in chunks if chunk.dram.state is State.ABSENT]
        new, unwanted = self._look_ahead.want(request_id, chunks, absent)
        for chunk in new:
            if chunk.dram.state is State.READY:
                chunk.came_from = ""  # for others, or too late for who wanted it: now it is here
        for chunk in (*new, *unwanted):
            self.place(chunk)

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


class MakeTierBehind(Protocol):
    """Makes one more tier behind DRAM (tiers/tier.py)."""

    name: str

    def tier(
        self, policy: Callable[[int], Departures], dram: DramTier, look_ahead: LookAhead[Chunk]
    ) -> TierBehind: ...
