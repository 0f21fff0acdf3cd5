# SPDX-License-Identifier: Apache-2.0
"""A tier that simulated servers share: its own room and order (LRU), a network in virtual time.

    a request comes -> its whole chunks are looked up -> what others wrote is known to this server
    DRAM -> written, unless another has written it -> found by all, until it leaves

What the tier has is in each server's index as far as it has asked. The look-up takes no time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from attnstore_vllm.index.chunk import Chunk, ChunkName, InTier, State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.io.device import CHECKSUM_BYTES, Op
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.dram_tier import DramTier
from attnstore_vllm.tiers.health import Health
from attnstore_vllm.tiers.tier import TierBehind
from attnstore_vllm.tiers.tier_io import Loaded, Stored, TierIo
from attnstore_vllm.types import Key, StoreFailure

NAME = "shared"
_CHECKSUM = bytes(CHECKSUM_BYTES)
_MANY_SLOTS = 1 << 30
"""What a server knows of the tier has no limit of their own: the tier has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Bytes and bytes a second, each way."""

    capacity: int
    """The room of the shared tier; 0: there is none."""
    link: float
    """The speed between one host and the tier; 0: there is none."""
    bandwidth: float = float("inf")
    """The speed of the tier, for all hosts together."""
    latency_s: float = 0.001
    """Seconds that each transfer takes beside that."""

    @property
    def is_there(self) -> bool:
        return self.capacity > 0 and self.link > 0 and self.bandwidth > 0


class SharedStore:
    """The tier itself, which all servers see.

    Args:
        record_bytes: of a chunk.
    """

    def __init__(self, network: Network, record_bytes: int, chunk_tokens: int) -> None:
        self.network = network
        self.record_bytes = record_bytes
        self.chunk_tokens = chunk_tokens
        self.num_slots = network.capacity // record_bytes
        self.num_moved = {Op.READ: 0, Op.WRITE: 0}
        self._free_at = {Op.READ: 0.0, Op.WRITE: 0.0}
        self._kept: OrderedDict[Key, tuple[ChunkName, list[HostTier]]] = OrderedDict()
        """By key, the one unused for longest first; with the servers that know of it."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def find(self, keys: Sequence[Key]) -> list[ChunkName]:
        """The leading chunks that are here. They are used: the first of a prompt stays longest."""
        names = []
        for key in keys:
            if key not in self._kept:
                break
            names.append(self._kept[key][0])
        for name in reversed(names):
            self._kept.move_to_end(name.key)
        return names

    def knows(self, key: Key, tier: HostTier) -> None:
        """This server is to be told when the chunk leaves."""
        self._kept[key][1].append(tier)

    def put(self, name: ChunkName) -> None:
        """The chunk is written. What is unused for longest makes room."""
        if not self.num_slots:
            return
        while name.key not in self._kept and len(self._kept) >= self.num_slots:
            key, (_, knowing) = self._kept.popitem(last=False)
            for tier in knowing:
                tier.has_left(key)
        self._kept.setdefault(name.key, (name, []))
        self._kept.move_to_end(name.key)

    def pass_through(self, op: Op, now: float) -> float:
        """When the tier has done its part of a transfer that begins now."""
        seconds = self.record_bytes / self.network.bandwidth
        self._free_at[op] = max(now, self._free_at[op]) + seconds
        self.num_moved[op] += 1
        return self._free_at[op]


class HostTier(TierBehind):
    """What one server knows to be in the shared tier. It has no order of its own: in the tier, what
    was looked up last stays longest."""

    def __init__(
        self,
        shared: SharedStore,
        policy: Callable[[int], Departures],
        dram: DramTier,
        look_ahead: LookAhead[Chunk],
    ) -> None:
        super().__init__(NAME, policy(dram.num_slots), dram.pins, look_ahead)
        self.num_slots = _MANY_SLOTS
        self.order = policy(1)
        self.gone: Callable[[Chunk], None]
        """Told of a chunk that has left; HostIo says what then happens."""
        self._shared = shared
        self._owned: dict[int, Chunk] = {}
        self._by_key: dict[Key, Chunk] = {}
        self._numbers = count()

    @property
    def num_used(self) -> int:
        return len(self._owned)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._owned)

    def give(self, chunk: Chunk) -> int:
        slot = next(self._numbers)
        self._owned[slot] = chunk
        return slot

    def take_back(self, chunk: Chunk) -> None:
        assert self._owned.pop(chunk.at(NAME).slot) is chunk
        self.abandon(chunk)

    def abandon(self, chunk: Chunk) -> None:
        if self._by_key.get(chunk.name.key) is chunk:
            del self._by_key[chunk.name.key]

    def written(self, chunk: Chunk) -> None:
        self.knows(chunk)

    def knows(self, chunk: Chunk) -> None:
        """The chunk is READY here for this server, until it has left."""
        self._by_key[chunk.name.key] = chunk
        self._shared.knows(chunk.name.key, self)

    def has_left(self, key: Key) -> None:
        chunk = self._by_key.get(key)
        if chunk is not None and chunk.at(NAME).uses == 0:  # else HostIo sees it afterwards
            self.gone(chunk)

    def live(self, slot: int) -> Chunk | None:
        return self._owned[slot]

    def check_integrity(self) -> None:
        for slot, chunk in self._owned.items():
            assert chunk.at(NAME).slot == slot
        for key, chunk in self._by_key.items():
            assert chunk.name.key == key
            assert chunk.at(NAME).uses or key in self._shared


class HostReset:
    """No simulated server is reset."""

    is_over = True
    succeeded = True


class HostIo(TierIo):
    """One server's transfers, one after the other each way: as fast as its link and the tier."""

    def __init__(self, context: Context, tier: HostTier, shared: SharedStore, depth: int) -> None:
        super().__init__()
        self.tier: HostTier = tier
        self.record_bytes = shared.record_bytes
        self.health = Health(
            NAME, "simulated", context.progress, context.residency.counts, context.clock
        )
        self._context = context
        self._shared = shared
        self._depth = depth
        self._free_at = {Op.READ: 0.0, Op.WRITE: 0.0}
        self._open: list[tuple[float, int, Op, Callable[[], None]]] = []
        self._number = 0
        self._num = {Op.READ: 0, Op.WRITE: 0}
        self._num_ended = 0
        tier.gone = self._gone

    @property
    def next_end(self) -> float:
        return self._open[0][0] if self._open else float("inf")

    def take_ended(self) -> int:
        """How many transfers have ended since this was asked before."""
        ended, self._num_ended = self._num_ended, 0
        return ended

    def look_up(self, sequence: SequenceKeys, stop: int) -> None:
        """A request has come: what others have written of tokens [0, stop) is known from now on."""
        index = self._context.residency.index
        for name in self._shared.find(sequence.keys(0, stop // self._shared.chunk_tokens)):
            if index.get(name.key) is None:
                chunk = Chunk(name)
                chunk.behind[NAME] = InTier(State.READY, self.tier.give(chunk), _CHECKSUM)
                index.add(chunk)
                self.tier.knows(chunk)

    def _gone(self, chunk: Chunk) -> None:
        assert chunk.at(self.tier.name).uses == 0
        chunk.refused_by.add(self.tier.name)  # else a small tier would be written for ever
        self._context.residency.leave(self.tier, chunk)

    # ---- the seam ------------------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        return self._num[Op.READ]

    @property
    def num_storing(self) -> int:
        return self._num[Op.WRITE]

    @property
    def can_load(self) -> bool:
        return self.num_loading < self._depth

    @property
    def can_store(self) -> bool:
        return self.num_storing < self._depth

    def begin_load(
        self, chunk: Chunk, payload: memoryview, done: Loaded, late: Callable[[], None]
    ) -> None:
        self._begin(Op.READ, self._moved_at(Op.READ), lambda: self._loaded(chunk, done))

    def _loaded(self, chunk: Chunk, done: Loaded) -> None:
        done(None, chunk.name.tokens)
        if NAME in chunk.behind and not chunk.dropped and chunk.name.key not in self._shared:
            self._gone(chunk)

    def begin_store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        name = chunk.name
        is_whole = name.num_tokens == self._shared.chunk_tokens
        if not is_whole:  # others look up whole chunks
            self._begin(Op.WRITE, self._context.clock(), lambda: done(StoreFailure.DOES_NOT_FIT))
            return
        is_there = name.key in self._shared
        end = self._context.clock() if is_there else self._moved_at(Op.WRITE)
        self._begin(Op.WRITE, end, lambda: self._stored(name, done))

    def _stored(self, name: ChunkName, done: Stored) -> None:
        self._shared.put(name)
        done(_CHECKSUM if name.key in self._shared else StoreFailure.DOES_NOT_FIT)

    def _moved_at(self, op: Op) -> float:
        """When a transfer that begins now has ended."""
        now, network = self._context.clock(), self._shared.network
        self._free_at[op] = max(now, self._free_at[op]) + self.record_bytes / network.link
        return max(self._free_at[op], self._shared.pass_through(op, now)) + network.latency_s

    def _begin(self, op: Op, end: float, then: Callable[[], None]) -> None:
        self._num[op] += 1
        self._number += 1
        heapq.heappush(self._open, (end, self._number, op, then))

    def submit(self) -> None:
        """Nothing is left to do: it is under way."""

    def poll(self, timeout_s: float) -> bool:
        ended = 0
        with self._context.progress:
            while self._open and self._open[0][0] <= self._context.clock():
                _, _, op, then = heapq.heappop(self._open)
                self._num[op] -= 1
                then()
                ended += 1
        self._num_ended += ended
        return ended > 0

    def reset(self) -> HostReset:
        return HostReset()

    def cancel(self) -> None:
        """Nothing can be cancelled."""


class MakeHostTier:
    """For the `more_tiers` of one server."""

    name = NAME

    def __init__(self, shared: SharedStore, depth: int) -> None:
        self._shared = shared
        self._depth = depth
        self.made: HostIo

    def tier(
        self, policy: Callable[[int], Departures], dram: DramTier, look_ahead: LookAhead[Chunk]
    ) -> HostTier:
        return HostTier(self._shared, policy, dram, look_ahead)

    def io(self, context: Context, tier: TierBehind) -> HostIo:
        assert isinstance(tier, HostTier)
        self.made = HostIo(context, tier, self._shared, self._depth)
        return self.made
