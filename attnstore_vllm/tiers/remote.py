# SPDX-License-Identifier: Apache-2.0
"""A remote tier: what it has is known by asking it, and for a while only.

Others put chunks there and take them away. So an entry is hearsay with a lease. While the lease
lasts, or a waiting request wants the chunk, a look-up finds it, and the load that follows verifies
it. A load that fails drops the entry: the tokens are computed. Nothing is evicted there by us.

A look-up asks whether the lease lasts (believes()), so it ends on time. The heap of ends only frees
what has ended, some entries a tick.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from attnstore_vllm.index.chunk import Chunk, ChunkName, InTier, State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.moved import Movable, MovedKv
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lazy_heap import LazyHeap
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.policy.visits import unknown_run
from attnstore_vllm.tiers.dram_tier import DramTier
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.tiers.tier import TierBehind
from attnstore_vllm.types import Clock, Event, Key

ENDED_MAX = 64
"""Leases that one look ends, or finds renewed."""
LOOK_AGAIN_S = 1.0
"""An entry that is read or waited for when its lease ends stays for so long, and then again."""
CHUNKS_MAX = 1024
"""Chunks of one question; a longer run is found in parts."""
WRITTEN_LEASE_S = 60.0
"""How long what we have written there is taken to be there."""


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk that a tier says it has."""

    name: ChunkName
    checksum: bytes = b""
    """The payload's, if the tier says it."""
    movable: Movable | None = None
    """It was found for its tokens alone, which the request has at another place."""


@dataclass(eq=False)
class RemoteLookup:
    """A request's look-ups in tiers that must be asked. From the scheduler's thread."""

    keys: SequenceKeys
    tenant: bytes = field(default=bytes(32), kw_only=True)
    """The request's (tenant_hash)."""
    may_ask: bool = field(default=False, kw_only=True)
    """These tiers may be asked for it (remote_io.py)."""
    finds_moved: bool = field(default=False, kw_only=True)
    """KV of these tokens at other positions will do too, where there is no better."""
    asked: tuple[Ask, ...] = field(default=(), init=False)
    """The last questions, one a tier."""
    asked_at: float = field(default=-math.inf, init=False)
    """When these were asked, on the store's clock."""


class Ask:
    """One question: what comes next of this sequence, from chunk `first` on, have you?

    A tier may read it on any thread: what of a sequence is hashed does not change.
    """

    __slots__ = (
        "asked_at",
        "at",
        "clock",
        "finds_moved",
        "first",
        "is_over",
        "keys",
        "request_id",
        "sequence",
        "stop",
        "tenant",
        "until",
    )

    def __init__(
        self,
        lookup: RemoteLookup,
        at: int,
        stop: int,
        clock: Clock,
        request_id: str = "",
    ) -> None:
        self.sequence = sequence = lookup.keys
        self.tenant, self.finds_moved = lookup.tenant, lookup.finds_moved
        size = sequence.chunk_tokens
        self.request_id = request_id
        """If it waits in the queue, what is found is read for it at once."""
        self.at = at
        """The token up to which KV is stored here."""
        self.stop = stop
        self.first = at // size
        self.keys: list[Key] = sequence.keys(self.first, stop // size)[:CHUNKS_MAX]
        """Those of the whole chunks."""
        self.clock = clock
        self.asked_at = self.until = clock()
        """The request does not wait longer; an answer is welcome later too."""
        self.is_over = False
        """Locked. It was answered, or is not to be any more."""

    def name(self, number: int) -> ChunkName:
        """The name of the whole chunk keys[number]."""
        return self.sequence.name(self.first + number, self.tenant)

    def part(self, number: int) -> tuple[Key, bytes, bytes]:
        """The parent, the extra and the tokens of chunk keys[number], or of the one behind all."""
        return self.sequence.part(self.first + number, self.stop)


class RemoteTier(TierBehind):
    """See the module.

    Args:
        num_slots: entries that there can be; no memory and no disk of ours stands behind them.
        policy: makes an order of departure for so many slots.
        takes_writes: chunks are written there as well.
    """

    is_remote = True

    def __init__(
        self,
        name: str,
        num_slots: int,
        policy: Callable[[int], Departures],
        dram: DramTier,
        look_ahead: LookAhead[Chunk],
        *,
        takes_writes: bool,
    ) -> None:
        super().__init__(name, policy(dram.num_slots), dram.pins, look_ahead)
        self.num_slots = num_slots
        self.takes_writes = takes_writes
        self.order = policy(0)  # leases say who leaves
        self.owned: dict[int, Chunk] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._until: dict[int, float] = {}
        self.ends = LazyHeap[int](self._until.get)
        self._fresh: dict[int, None] = {}  # written, and without a lease until the next look

    def orders(self) -> list[Departures]:
        return [self.waiting]

    @property
    def num_used(self) -> int:
        return len(self.owned)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def give(self, chunk: Chunk) -> int:
        slot = self._free.pop()
        self.owned[slot] = chunk
        return slot

    def take_back(self, chunk: Chunk) -> None:
        slot = chunk.at(self.name).slot
        assert self.owned.pop(slot) is chunk
        self._until.pop(slot, None)
        self._fresh.pop(slot, None)
        self._free.append(slot)

    def abandon(self, chunk: Chunk) -> None:
        self._until.pop(chunk.at(self.name).slot, None)

    def written(self, chunk: Chunk) -> None:
        self._fresh[chunk.at(self.name).slot] = None

    def lease(self, slot: int, until: float) -> None:
        """The entry is believed until then; what was believed longer stays so."""
        if until <= self._until.get(slot, until - 1):
            return
        is_new = slot not in self._until
        self._until[slot] = until
        if is_new:  # else it lasts longer, which the heap finds
            self.ends.push(until, slot)

    def believes(self, slot: int, now: float) -> bool:
        """Whether its lease lasts. What was just written has one from the next look on."""
        until = self._until.get(slot)
        return until > now if until is not None else slot in self._fresh

    def has_ended(self, now: float) -> bool:
        """Whether ended() has more to look at. Cost: O(1)."""
        return self.ends.is_due(now)

    def ended(self, now: float) -> list[Chunk]:
        """Chunks that are not believed to be there any more, ENDED_MAX at most. Cost: O(log
        entries) each."""
        for slot in self._fresh:
            if slot in self.owned and not self.owned[slot].dropped:
                self.lease(slot, now + WRITTEN_LEASE_S)
        self._fresh.clear()
        found: list[Chunk] = []
        for slot in self.ends.take(now, ENDED_MAX):
            if self._can_go(slot):
                found.append(self.owned[slot])
            else:
                self._until[slot] = now + LOOK_AGAIN_S
                self.ends.push(self._until[slot], slot)
        return found

    def victim(self, chunk: Chunk, now: float) -> tuple[int | None, bool]:
        """Among the first few: the entry whose lease ends first. It is forgotten, not evicted."""
        return self.ends.find(self._can_go, ENDED_MAX), False

    def may_have(self, chunk: Chunk) -> bool:
        """Chunks that came from here, or that end at a time, are not written back."""
        return chunk.origin != self.name and chunk.run.lease is None

    def place_in_dram(self, *chunks: Chunk) -> None:
        if not self.takes_writes:
            return
        super().place_in_dram(*filter(self.may_have, chunks))
        for chunk in chunks:
            if not self.may_have(chunk):
                self.left_dram(chunk.dram.slot)

    def live(self, slot: int) -> Chunk | None:
        return self.owned[slot]

    def check_integrity(self) -> None:
        assert len(self._free) + len(self.owned) == self.num_slots
        assert not set(self._free) & self.owned.keys()
        assert self._until.keys() <= self.owned.keys()
        for slot, chunk in self.owned.items():
            copy = chunk.at(self.name)
            assert copy.slot == slot
            assert copy.state is not State.ABSENT
            has_lease = slot in self._until or slot in self._fresh
            assert chunk.dropped or has_lease == (copy.state is State.READY)


def enter(
    residency: Residency,
    tier: RemoteTier,
    found: Found,
    until: float,
    ttl_s: float | None = None,
) -> Chunk | None:
    """The tier says that it has the chunk: look-ups find it until then. None: it is not entered,
    since it or what extends it is known here, or there is no room.

    Args:
        ttl_s: of the whole server. It counts for a copy, too, that no request came to use.
    """
    name = found.name
    known = residency.index.get(name.key)
    if known is not None:
        if tier.name in known.behind and not known.dropped:
            tier.lease(known.at(tier.name).slot, until)
        return None
    if tier.is_lost or not tier.num_free or residency.index.extends(name):
        return None
    chunk = Chunk(name, run=unknown_run(residency.now, ttl_s))
    residency.index.add(chunk)
    slot = tier.give(chunk)
    chunk.behind[tier.name] = InTier(State.READY, slot, found.checksum)
    tier.lease(slot, until)
    residency.counts[Event.FOUND] += 1
    return chunk


def is_believed(residency: Residency, chunk: Chunk) -> bool:
    """Whether some tier is taken to have it: where it is known by asking alone, while the lease
    lasts or a waiting request wants it."""
    return (
        chunk.dram.state is not State.ABSENT
        or chunk in residency.look_ahead.wanted_by
        or any(
            tier.name in chunk.behind and tier.believes(chunk.at(tier.name).slot, residency.now)
            for tier in residency.behind
        )
    )


def end_leases(residency: Residency, tier: RemoteTier, moved: MovedKv) -> None:
    """Forget what is not believed to be there any more. Cost: bounded."""
    for chunk in tier.ended(residency.now):
        chunk.refused_by.add(tier.name)  # it is not written there once more for that
        residency.leave(tier, chunk)
        if residency.index.get(chunk.name.key) is None:
            moved.forget(chunk.name.key)  # else it takes the place of what is ours
