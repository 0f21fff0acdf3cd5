# SPDX-License-Identifier: Apache-2.0
"""A remote tier, made of a dictionary that others may fill and empty as well.

It is an example for who makes another such tier. Answers and loads end in the next tick of the
store's thread, or as `faults` say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from attnstore_lab.testing.dict_tier import DictReset, QueuedIo
from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.dram_tier import DramTier
from attnstore_vllm.tiers.health import Health
from attnstore_vllm.tiers.remote import Ask, Found, RemoteTier
from attnstore_vllm.tiers.remote_io import RemoteIo
from attnstore_vllm.tiers.tier import TierBehind
from attnstore_vllm.tiers.tier_io import Loaded, Stored


@dataclass(slots=True)
class Others:
    """Records of others: by key the name, the payload and its checksum."""

    records: dict[bytes, tuple[ChunkName, bytes, bytes]] = field(default_factory=dict)
    is_silent: bool = False
    """Questions are not answered now, but may be later."""

    def put(self, name: ChunkName, payload: bytes, digest: bytes | None = None) -> None:
        """Args: digest: that the payload is said to have."""
        self.records[bytes(name.key)] = name, payload, digest or checksum(payload)


class RemoteDictIo(QueuedIo, RemoteIo):
    answer_deadline_s = 0.05
    lease_s = 1.0

    def __init__(self, context: Context, tier: RemoteTier, others: Others) -> None:
        super().__init__(context, tier)
        self.record_bytes = context.pool.slot_bytes
        self.health = Health(
            tier.name, "a dictionary", context.progress, context.residency.counts, context.clock
        )
        self.others = others
        self.num_asked = 0
        self._asks: deque[Ask] = deque()

    def ask(self, ask: Ask) -> None:
        self.num_asked += 1
        self._asks.append(ask)
        self.context.wake()

    def begin_load(
        self, chunk: Chunk, payload: memoryview, done: Loaded, late: Callable[[], None]
    ) -> None:
        self.loads.append(partial(self._load, chunk, payload, done))

    def begin_store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        self.stores.append(partial(self._store, chunk, payload, done))

    def poll(self, timeout_s: float) -> bool:
        while self._asks and not self.others.is_silent:
            ask = self._asks.popleft()
            self.answer(ask, self._found(ask))
        return super().poll(timeout_s)

    def _found(self, ask: Ask) -> list[Found]:
        found = []
        for number, key in enumerate(ask.keys):
            record = self.others.records.get(bytes(key))
            if record is None:
                break
            found.append(Found(ask.name(number), record[2]))
        return found

    def _load(self, chunk: Chunk, payload: memoryview, done: Loaded) -> None:
        name, found, digest = self.others.records.get(bytes(chunk.name.key), (None, b"", b"none"))
        if name is None or checksum(found) != digest:
            done(CorruptRecordError(self.tier.name, "payload", digest, checksum(found)), b"")
            return
        payload[:] = found
        done(None, name.tokens)

    def _store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        self.others.put(chunk.name, bytes(payload))
        done(checksum(payload))

    def reset(self) -> DictReset:
        """All that others have is of another generation from now on: here, it is gone."""
        self.forget_asks()
        self._asks.clear()
        self.others.records.clear()
        return DictReset()

    def cancel(self) -> None:
        self._asks.clear()
        super().cancel()


class MakeRemoteDict:
    """For Store's `more_tiers`."""

    def __init__(
        self,
        others: Others,
        num_slots: int = 64,
        name: str = "asked",
        *,
        takes_writes: bool = False,
    ) -> None:
        self.name = name
        self._takes_writes = takes_writes
        self.others = others
        self._num_slots = num_slots

    def tier(
        self, policy: Callable[[int], Departures], dram: DramTier, look_ahead: LookAhead[Chunk]
    ) -> RemoteTier:
        return RemoteTier(
            self.name, self._num_slots, policy, dram, look_ahead, takes_writes=self._takes_writes
        )

    def io(self, context: Context, tier: TierBehind) -> RemoteDictIo:
        assert isinstance(tier, RemoteTier)
        return RemoteDictIo(context, tier, self.others)
