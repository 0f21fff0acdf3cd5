# SPDX-License-Identifier: Apache-2.0
"""A tier behind NVMe, made of a dictionary: what a tier has to have, and nothing else.

It is an example for who makes another tier, and shows in the tests that nothing outside its file
and the list of tiers has to know of it. What ends does so in the next tick of the store's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.index.chunk import NOWHERE, Chunk, State
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.dram_tier import DramTier
from attnstore_vllm.tiers.health import Health
from attnstore_vllm.tiers.tier import TierBehind
from attnstore_vllm.tiers.tier_io import Loaded, Stored, TierIo

DEPTH = 4
"""Loads, and stores, at a time."""


class DictTier(TierBehind):
    """`owned` keeps its chunks alive; those that were dropped stay until nothing touches them."""

    def __init__(
        self,
        name: str,
        num_slots: int,
        order: Departures,
        waiting: Departures,
        dram: DramTier,
        look_ahead: LookAhead[Chunk],
    ) -> None:
        super().__init__(name, waiting, dram.pins, look_ahead)
        self.num_slots = num_slots
        self.order = order
        self.owned: dict[int, Chunk] = {}
        self._free = list(range(num_slots))

    @property
    def num_used(self) -> int:
        return len(self.owned)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def give(self, chunk: Chunk) -> int:
        slot = self._free.pop()
        self.owned[slot] = chunk
        self.order.add(slot, chunk.run)
        return slot

    def take_back(self, chunk: Chunk) -> None:
        slot = chunk.at(self.name).slot
        assert self.owned.pop(slot) is chunk
        self._leave_order(slot)
        self._free.append(slot)

    def abandon(self, chunk: Chunk) -> None:
        self._leave_order(chunk.at(self.name).slot)

    def _leave_order(self, slot: int) -> None:
        if slot in self.order:
            self.order.remove(slot)

    def written(self, chunk: Chunk) -> None:
        assert chunk.at(self.name).state is State.READY

    def live(self, slot: int) -> Chunk | None:
        return self.owned[slot]

    def use(self, chunks: Sequence[Chunk], run: Run) -> None:
        slots = [chunk.at(self.name).slot for chunk in chunks if self.name in chunk.behind]
        self.order.use([slot for slot in slots if slot in self.order], run)

    def check_integrity(self) -> None:
        assert len(self._free) + len(self.owned) == self.num_slots
        assert not set(self._free) & self.owned.keys()
        for slot, chunk in self.owned.items():
            assert chunk.at(self.name).slot == slot
            assert chunk.at(self.name) is not NOWHERE
            assert chunk.dropped != (slot in self.order)


class DictReset:
    """A dictionary is empty at once."""

    is_over = True
    succeeded = True


class QueuedIo(TierIo):
    """Loads and stores that wait in queues, and end in the next poll()."""

    context: Context

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loads: deque[Callable[[], None]] = deque()
        self.stores: deque[Callable[[], None]] = deque()

    @property
    def num_loading(self) -> int:
        return len(self.loads)

    @property
    def num_storing(self) -> int:
        return len(self.stores)

    @property
    def can_load(self) -> bool:
        return len(self.loads) < DEPTH

    @property
    def can_store(self) -> bool:
        return len(self.stores) < DEPTH

    def submit(self) -> None:
        self.context.wake()

    def poll(self, timeout_s: float) -> bool:
        with self.context.progress:
            begun = len(self.loads) + len(self.stores)
            for queue in (self.loads, self.stores):
                while queue:
                    queue.popleft()()
        return begun > 0

    def cancel(self) -> None:
        """What was begun is not done any more."""
        self.loads.clear()
        self.stores.clear()


class DictIo(QueuedIo):
    """Bytes by slot, beside the chunk's key and tokens, and the payload's checksum."""

    def __init__(self, context: Context, tier: TierBehind) -> None:
        super().__init__()
        self.context = context
        self.tier = tier
        self.record_bytes = context.pool.slot_bytes
        self.health = Health(
            tier.name, "a dictionary", context.progress, context.residency.counts, context.clock
        )
        self.records: dict[int, tuple[bytes, bytes, bytes]] = {}

    def begin_load(
        self, chunk: Chunk, payload: memoryview, done: Loaded, late: Callable[[], None]
    ) -> None:
        self.loads.append(partial(self._load, chunk, payload, done))

    def _load(self, chunk: Chunk, payload: memoryview, done: Loaded) -> None:
        copy = chunk.at(self.tier.name)
        key, tokens, found = self.records.get(copy.slot, (b"", b"", b""))
        where = f"{self.tier.name}, slot {copy.slot}"
        if key != chunk.name.key:
            done(CorruptRecordError(where, "key", chunk.name.key.hex(), key.hex()), b"")
            return
        digest = checksum(found)
        if digest != copy.checksum:
            done(CorruptRecordError(where, "payload", copy.checksum.hex(), digest.hex()), b"")
            return
        payload[:] = found
        done(None, tokens)

    def begin_store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        self.stores.append(partial(self._store, chunk, payload, done))

    def _store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        found = bytes(payload)
        name, slot = chunk.name, chunk.at(self.tier.name).slot
        self.records[slot] = bytes(name.key), name.tokens, found
        done(checksum(found))

    def reset(self) -> DictReset:
        self.records.clear()
        return DictReset()


class MakeDictTier:
    """For Store's `more_tiers`."""

    def __init__(self, num_slots: int, name: str = "dict") -> None:
        self.name = name
        self._num_slots = num_slots

    def tier(
        self, policy: Callable[[int], Departures], dram: DramTier, look_ahead: LookAhead[Chunk]
    ) -> DictTier:
        order = policy(self._num_slots)
        return DictTier(self.name, self._num_slots, order, policy(dram.num_slots), dram, look_ahead)

    def io(self, context: Context, tier: TierBehind) -> DictIo:
        return DictIo(context, tier)
