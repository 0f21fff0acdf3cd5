# SPDX-License-Identifier: Apache-2.0
"""The seam of a tier's bytes: how those of one tier behind DRAM are read, written and given up.

What is where is another seam (tiers/tier.py). A tier is both, made by a MakeTier; Store.__init__
lists them. A failure costs a chunk or the tier, and never the server: it is handed to `done`, and
noted in `health`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

from attnstore_vllm.errors import AttnStoreError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.cost import ReadCost
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.dram_tier import MakeTierBehind
from attnstore_vllm.tiers.health import Health
from attnstore_vllm.tiers.tier import TierBehind
from attnstore_vllm.types import Event, Flow, StoreFailure

Loaded = Callable[[AttnStoreError | None, bytes], None]
"""Called with the lock held, once: why the bytes are not those that were stored, or None; and the
chunk's tokens, which came up with them."""
Stored = Callable[[bytes | StoreFailure], None]
"""Called with the lock held, once: the payload's checksum, or why it was not written."""


IN_FLIGHT_S = 0.25
"""Seconds of transfers in flight. They hold slots of DRAM and cannot be called back: so no
more is begun than a tier has done in this time, and one transfer at least."""


class Reset(Protocol):
    """One reset of a tier. Read with the store's lock held."""

    @property
    def is_over(self) -> bool: ...
    @property
    def succeeded(self) -> bool: ...


class TierIo(ABC):
    """Methods marked *locked* are called with the store's lock held, the others without it.

    begin_load() and begin_store() note what is wanted; submit() sends it, and waits for nothing.
    """

    tier: TierBehind
    health: Health
    record_bytes: int
    """That a chunk takes in this tier."""
    flow_up, flow_down = Flow.PREFETCH, Flow.WRITE_BACK
    """The directions that the bytes of its loads and stores are counted as."""
    read_failed, corrupt = Event.READ_FAILED, Event.CORRUPT
    """Events of its failures: others than NVMe may have their own."""
    sums_payloads: bool = True
    """Its checksums are of payloads as they are in DRAM."""
    num_removing = 0
    """Locked. Removals of forget() that are not over: a stop waits for them."""

    def __init__(self) -> None:
        self.cost = ReadCost()
        """Locked. Of reads that follow each other."""
        self.write_cost = ReadCost()
        """Locked. Of writes that follow each other."""
        self.load_ended_at = self.store_ended_at = 0.0
        """Locked. On the store's clock."""
        self.gauges: dict[tuple[str, str], float] = {}
        """Locked. Values of this tier alone beside those that all have, as (name, label): value."""
        self.seconds: dict[str, deque[float]] = {}
        """Seconds of transfers that have ended, by the metric that shows them. Any thread."""

    @property
    @abstractmethod
    def num_loading(self) -> int:
        """Locked. Loads that have not ended."""

    @property
    @abstractmethod
    def num_storing(self) -> int:
        """Locked. Stores, and what goes before them, that have not ended."""

    @property
    @abstractmethod
    def can_load(self) -> bool:
        """Locked. Whether there is what one more load takes."""

    @property
    @abstractmethod
    def can_store(self) -> bool:
        """Locked. Whether there is what one more store takes."""

    @property
    def loads_last(self) -> bool:
        """Locked. Whether its loads take so long that no more should be begun before one ends."""
        return self.num_loading * (self.cost.mean_s or 0.0) >= IN_FLIGHT_S

    @property
    def stores_last(self) -> bool:
        """Locked. As loads_last, of stores."""
        return self.num_storing * (self.write_cost.mean_s or 0.0) >= IN_FLIGHT_S

    def gauges_now(self) -> dict[tuple[str, str], float]:
        """Locked. Values as they are now, as (name, label): value."""
        name = self.tier.name
        return {
            ("held_bytes", name): float(self.tier.num_used * self.record_bytes),
            ("capacity_bytes", name): float(self.tier.num_slots * self.record_bytes),
            (f"{name}_in_use", "reads"): float(self.health.reads.in_use),
            (f"{name}_in_use", "writes"): float(self.health.writes.in_use),
            **self.gauges,
        }

    @abstractmethod
    def begin_load(
        self, chunk: Chunk, payload: memoryview, done: Loaded, late: Callable[[], None]
    ) -> None:
        """Locked. Read the chunk into `payload`, which is its DRAM slot, and verify it.

        Args:
            late: called without the lock, once, if it takes too long; `done` still comes.
        """

    @abstractmethod
    def begin_store(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        """Locked. Write the chunk to its slot of this tier."""

    @abstractmethod
    def submit(self) -> None:
        """Send what was begun. From any thread."""

    def poll(self, timeout_s: float) -> bool:
        """Tell of what has ended, and return whether something has. A tier with threads of its own
        tells it there.

        Args:
            timeout_s: to wait for it at most. Only the first tier's is not 0.
        """
        return False

    @abstractmethod
    def reset(self) -> Reset:
        """Locked. All that this tier has is invalid, also for the next process. With submit()."""

    def forget(self, chunk: Chunk, failed: Callable[[], object]) -> None:  # noqa: B027 - not all can
        """Locked. The chunk is wrong, and about to be dropped: no later start may find it, nor any
        engine that shares the tier. With submit().

        Args:
            failed: called without the lock where the next start would find it.
        """

    def leave(self) -> None:  # noqa: B027 - most are this engine's alone
        """Locked. From now on nothing of this engine is shared with others, nor theirs with it."""

    def must_wait(self) -> bool:
        """Locked. Whether nothing can be stored before the tier has got more slots. Begins that."""
        return False

    def tick(self) -> None:  # noqa: B027 - not all do something
        """Do what the tier does by itself, at the beginning of each round of the store's thread."""

    def idle_tick(self) -> bool:
        """Do what it does while nothing is read. Returns whether it wants to be asked again
        soon."""
        return False

    @property
    def is_at_rest(self) -> bool:
        """Locked. Whether it does nothing by itself that has an end."""
        return True

    def wake(self) -> None:  # noqa: B027 - the first tier's alone waits
        """End a poll() that waits. From any thread."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask for the end of all that is under way."""

    def close(self, timeout_s: float) -> bool:
        """Returns False if something is still under way then."""
        return True


class MakeTier(MakeTierBehind, Protocol):
    """Makes one more tier, then what moves its bytes."""

    def io(self, context: Context, tier: TierBehind) -> TierIo: ...
