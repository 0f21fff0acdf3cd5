# SPDX-License-Identifier: Apache-2.0
"""The seam of a tier: what residency.py needs of each, and what they share.

A tier says which slots are free, whose the others are, and who leaves next. It moves no
bytes: tiers/tier_io.py is the seam for that. DRAM (dram_tier.py) stands before all others, since
HBM is copied from and to it alone. The tiers behind it are a list, nearest first: NVMe
(nvme/nvme_tier.py), and others that are made of TierBehind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.eviction.rules import Gives, behind_gives_up
from attnstore_vllm.policy.lazy_heap import LazyHeap
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.types import Event

ENDED_MAX = 64
"""Pins that one look ends."""


@dataclass(frozen=True, slots=True)
class Pin:
    tenant: bytes
    until: float


class Pins(dict[int, Pin]):
    """The pins of one tier, by slot. Changed by its own methods alone. Cost of each call:
    O(log pins), amortized.

    All pins together, and those of each tenant, have a share of the tier's slots. A pin beyond it
    is refused, so no tenant can take another's room, or more of it than the operator has allowed.
    """

    def __init__(self, share: float = 0.0, tenant_share: float = 0.0) -> None:
        super().__init__()
        self._share = share
        self._tenant_share = tenant_share
        self._per_tenant: Counter[bytes] = Counter()
        self._ends = LazyHeap[int](self._end_of)

    def add(self, slot: int, pin: Pin, num_slots: int) -> bool:
        """Pin the slot, or let its pin last longer. False: it would be beyond the share.

        Args:
            num_slots: that the tier has now.
        """
        before = self.get(slot)
        if before is not None:
            if before.until >= pin.until:
                return True
            pin = Pin(before.tenant, pin.until)
        else:
            if len(self) >= int(self._share * num_slots):
                return False
            if self._per_tenant[pin.tenant] >= int(self._tenant_share * num_slots):
                return False
            self._per_tenant[pin.tenant] += 1
        self[slot] = pin
        if before is None:  # else it lasts longer, which the heap finds
            self._ends.push(pin.until, slot)
        return True

    def remove(self, slot: int) -> None:
        """The slot is pinned no longer, if it was."""
        pin = self.pop(slot, None)
        if pin is not None:
            self._per_tenant[pin.tenant] -= 1
            if not self._per_tenant[pin.tenant]:
                del self._per_tenant[pin.tenant]

    def take_ended(self, now: float) -> list[int]:
        """Slots whose pin has ended, ENDED_MAX at most; they are pinned no longer."""
        ended = self._ends.take(now, ENDED_MAX)
        for slot in ended:
            self.remove(slot)
        return ended

    def _end_of(self, slot: int) -> float | None:
        pin = self.get(slot)
        return pin.until if pin is not None else None


class Tier(ABC):
    """One tier. A chunk has at most one slot in it."""

    name: str
    num_slots: int
    """The most there can be."""
    pins: Pins

    @property
    @abstractmethod
    def num_used(self) -> int:
        """Slots that are not free."""

    @abstractmethod
    def copy_of(self, chunk: Chunk) -> InTier:
        """The chunk's bytes here; NOWHERE if there are none."""

    @abstractmethod
    def use(self, chunks: Sequence[Chunk], run: Run) -> None:
        """A run uses those of these chunks that are here, in the order of depth."""

    @abstractmethod
    def pin(self, chunk: Chunk, pin: Pin) -> bool:
        """Keep the chunk in no order of departure, if its tenant's share allows."""

    @abstractmethod
    def unpin(self, chunk: Chunk) -> None:
        """Take the chunk's pin away, if it has one."""

    @abstractmethod
    def end_pins(self, now: float, renewed: Callable[[Run], Run]) -> None:
        """Let go what is pinned no longer, as if its run had used it now. Cost: bounded."""

    @abstractmethod
    def place(self, chunk: Chunk) -> None:
        """Said whenever the state of a chunk that may be here has changed."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert what always holds. Cost: all slots; for tests and idle moments."""


class TierBehind(Tier):
    """A tier that DRAM is written back to and read from.

    Args:
        waiting: an order of departure of DRAM's slots.
        dram_pins: what is pinned there is admitted here.
    """

    order: Departures
    """Who leaves next, by slot. What is pinned stands in none."""
    evicted = Event.EVICTED_NVME
    """The event when a chunk gives its place here to another."""
    is_remote = False
    """Only by asking it is known what it has (remote.py)."""

    def __init__(
        self, name: str, waiting: Departures, dram_pins: Pins, look_ahead: LookAhead[Chunk]
    ) -> None:
        self.name = name
        self.pins = Pins()
        """Empty where pins are kept in the tiers before it alone."""
        self.is_lost = False
        """Out of use for good: nothing comes here any more."""
        self.waiting = waiting
        """Slots of DRAM whose chunks are to be written here. What would leave last goes first."""
        self.waiting_low_value: dict[int, None] = {}
        """Slots of what is worth little: written when nothing else is, while there is much room."""
        self._dram_pins = dram_pins
        self._look_ahead = look_ahead

    def orders(self) -> list[Departures]:
        """Those that a slot may stand in. Who waits is noted in each, step after step."""
        return [self.order, self.waiting]

    def copy_of(self, chunk: Chunk) -> InTier:
        return chunk.at(self.name)

    @property
    @abstractmethod
    def num_free(self) -> int: ...

    @abstractmethod
    def give(self, chunk: Chunk) -> int:
        """A free slot, which is the chunk's from now on."""

    @abstractmethod
    def take_back(self, chunk: Chunk) -> None:
        """The chunk's slot is free."""

    @abstractmethod
    def abandon(self, chunk: Chunk) -> None:
        """The chunk is not found any more, but its slot is not free before take_back()."""

    def source_of(self, chunk: Chunk) -> str:
        """Whose KV it has here: the tier's name, since it may be another process's; empty: this
        process has written it. What is its own says nothing of the rest (store/trial.py)."""
        return self.name

    @abstractmethod
    def written(self, chunk: Chunk) -> None:
        """The chunk is READY here, and in the index."""

    @abstractmethod
    def live(self, slot: int) -> Chunk | None:
        """The owner of the slot. None: it is at rest, an entry of the index and no object."""

    def forget_at_rest(self, slot: int) -> None:
        """The slot is free, and its owner, which is at rest, is not found any more."""
        raise NotImplementedError(f"{self.name} keeps no chunk that is no object")

    def forget_all_at_rest(self, keep: Iterable[Chunk]) -> None:
        """No chunk that is no object is found any more.

        Args:
            keep: all objects that stay in the index.
        """

    def run_of(self, chunk: Chunk) -> Run | None:
        """The run that used the chunk last, if it is remembered here and not in the chunk."""
        return None

    def place(self, chunk: Chunk) -> None:
        """Nothing depends on what other tiers have of the chunk."""

    # ---- uses and pins: what a tier without an order of its own need not say --------------

    def use(self, chunks: Sequence[Chunk], run: Run) -> None:
        """Uses change nothing: who leaves is not ours to say."""

    def pin(self, chunk: Chunk, pin: Pin) -> bool:
        """No chunk is pinned here."""
        return False

    def unpin(self, chunk: Chunk) -> None:
        """None was."""

    def end_pins(self, now: float, renewed: Callable[[Run], Run]) -> None:
        """None ends."""

    # ---- what waits in DRAM ----------------------------------------------------------------

    def place_in_dram(self, *chunks: Chunk) -> None:
        """These wait for being written here, or do not any more. They have slots of DRAM."""
        new: list[Chunk] = []
        for chunk in chunks:
            is_here = chunk.dram.state is State.READY and not (chunk.dropped or self.is_lost)
            may_wait, slot = is_here and self.name not in chunk.behind, chunk.dram.slot
            waits = may_wait and self.name not in chunk.refused_by
            if not waits:
                self.left_dram(slot)
            elif slot not in self.waiting:
                new.append(chunk)
            if may_wait and not waits and chunk.written_if_room:
                self.waiting_low_value[slot] = None
            else:
                self.waiting_low_value.pop(slot, None)
        for run, of_run in groupby(new, attrgetter("run")):
            self.waiting.add_all([chunk.dram.slot for chunk in of_run], run)

    def may_have(self, chunk: Chunk) -> bool:
        """Whether the chunk may be written here."""
        return True

    def believes(self, slot: int, now: float) -> bool:
        """Whether what it is said to have in this slot is taken to be there."""
        return True

    def waits_for(self, slot: int) -> bool:
        """Whether what this slot of DRAM has is to be written here."""
        return slot in self.waiting

    def left_dram(self, *slots: int) -> None:
        """Nothing waits in these slots of DRAM."""
        if self.waiting_low_value:
            for slot in slots:
                self.waiting_low_value.pop(slot, None)
        self.waiting.remove_all([slot for slot in slots if slot in self.waiting])

    # ---- room ----------------------------------------------------------------------------

    def has_room_for(self, chunk: Chunk) -> bool:
        """Whether the chunk may have a slot before another gives one up."""
        return self.num_free > 0

    def victim(self, chunk: Chunk, now: float) -> tuple[int | None, bool]:
        """The slot to free for a chunk, by behind_gives_up(); None if none can go; and then,
        whether it is refused."""
        slot = self.order.victim(now, self._can_go)
        gives = self._gives_up(self.order, slot, chunk, now, lambda: self._farthest() is not None)
        if gives is Gives.WANTED:
            return self._farthest(), False
        return slot if gives is Gives.CLEAN else None, gives is Gives.REFUSED

    def _gives_up(
        self,
        order: Departures,
        slot: int | None,
        chunk: Chunk,
        now: float,
        has_wanted: Callable[[], bool],
    ) -> Gives:
        """See behind_gives_up(). Args: slot: that this order would give up for the chunk."""
        return behind_gives_up(
            is_wanted=chunk in self._look_ahead.wanted_by or chunk.dram.slot in self._dram_pins,
            has_idle=slot is not None,
            has_wanted=has_wanted,
            is_own=lambda: slot is not None and order.run_of(slot) is chunk.run,
            is_admitted=lambda: slot is not None and order.admits(chunk.run, slot, now),
        )

    def poorest(self, now: float) -> float | None:
        """The worth of what goes next; None where nothing has to. Cost: that of the order."""
        slot = self.order.victim(now, self._can_go) if not self.num_free else None
        run = self.order.run_of(slot) if slot is not None else None
        return self.order.worth(run, now) if run is not None else None

    def _can_go(self, slot: int) -> bool:
        chunk = self.live(slot)
        return chunk is None or (self._is_idle(chunk) and chunk not in self._look_ahead.wanted_by)

    def _farthest(self) -> int | None:
        chunk = self._look_ahead.farthest_of_all(self._can_leave)
        return chunk.at(self.name).slot if chunk is not None else None

    def _can_leave(self, chunk: Chunk) -> bool:
        is_pinned = chunk.at(self.name).slot in self.pins
        return self._is_idle(chunk) and not chunk.dropped and not is_pinned

    def _is_idle(self, chunk: Chunk) -> bool:
        copy = chunk.at(self.name)
        return copy.uses == 0 and copy.state is State.READY


def source_of(chunk: Chunk, behind: Iterable[TierBehind]) -> str:
    """The tier that its bytes came up from, or will, where another process has written them;
    empty: this one has computed them."""
    if chunk.dram.state is not State.ABSENT:
        return chunk.brought_by
    return next((tier.source_of(chunk) for tier in behind if tier.name in chunk.behind), "")
