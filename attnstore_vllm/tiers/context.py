# SPDX-License-Identifier: Apache-2.0
"""Things that the parts of the store share: the residency, the lock, DRAM's slots and the clock."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from attnstore_vllm.index.moved import MovedKv
from attnstore_vllm.index.prefix import GRAIN_TOKENS
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.types import Clock, Flow

if TYPE_CHECKING:
    from attnstore_vllm.tiers.reader import Reader
    from attnstore_vllm.tiers.tier_io import Reset


def boot_seconds() -> float:
    """The monotonic clock stands still while the machine is suspended, and a time to live would be
    longer by that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def unix_seconds() -> float:
    """For Context.wall."""
    return time.time()


STEP_S = 1.0
"""The wall clock is ahead if it is so by more."""
LOOK_S = 0.1
"""The wall clock is looked at so often: the scheduler's thread asks many times a step."""


class StoreClock:
    """For Context.clock: seconds since the machine's start, and all that the wall clock has been
    put ahead by. A machine without a clock of its own is told the time after the start, a paused
    one after it goes on: what was stored is so much older. A clock that is set back changes
    nothing. What puts it ahead again counts: it may be the end of a pause, or put the clock right.
    From any thread.
    """

    def __init__(self, boot: Clock = boot_seconds, wall: Clock = unix_seconds) -> None:
        self._boot, self._wall = boot, wall
        self._looking = threading.Lock()
        now = boot()
        self._lowest = wall() - now
        """The least that the wall clock was ahead of the other since it was put ahead last. At
        most: a thread may be stopped between the two."""
        self._ahead = self._look_at = 0.0

    def __call__(self) -> float:
        now = self._boot()
        if now >= self._look_at:
            if self._looking.acquire(blocking=False):  # what is found is added once
                self._look()
                self._looking.release()
            self._look_at = now + LOOK_S
        return now + self._ahead

    def steady(self) -> float:
        """Seconds since the machine's start alone. For what there is so much of in a time: the wall
        clock may be put ahead by time that has not passed."""
        return self._boot()

    def look(self) -> None:
        """The next call tells of all that the wall clock has been put ahead by till now."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        before, wall, after = self._boot(), self._wall(), self._boot()
        at_least, at_most = wall - after, wall - before
        if at_least > self._lowest + STEP_S:
            self._ahead += at_least - self._lowest
            self._lowest = at_least
        self._lowest = min(self._lowest, at_most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """The parts of a store that tests and simulations choose. A server takes them as they are."""

    clock: Clock = field(default_factory=StoreClock)
    """Context.clock."""
    wall: Clock = unix_seconds
    """Context.wall."""
    threaded: bool = True
    """The store has its own thread; else tick() does the same, a round a call."""
    grain: int = GRAIN_TOKENS
    """Where hits may end: see PrefixIndex."""


NO_HARNESS: Final = Harness()


class Pool(Protocol):
    """The DRAM tier's slots: transfer/pool.py, or a simulation's."""

    num_slots: int
    slot_bytes: int

    def slot(self, slot: int) -> memoryview: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Context:
    residency: Residency
    progress: threading.Condition
    """The store's one lock; it is notified when something has ended."""
    pool: Pool
    clock: Clock
    """Seconds since the machine's start, those included that it was asleep (StoreClock)."""
    moved: MovedKv
    wall: Clock = unix_seconds
    """Unix time, seconds: what is compared with times in files. It may be set back."""
    ttl_s: float | None = None
    """After so long without use a chunk is not found; None: only by its own request's terms."""
    has_leases: bool = field(init=False)
    """Whether anything may expire: no look-up pays for it where no request asks for it."""
    moved_bytes: Counter[Flow] = field(default_factory=Counter)
    num_copied: int = 0
    """Chunks that came from others (remote.py), by the names that they have here."""
    found: Callable[[memoryview, int], None] | None = None
    """Told of the headers that recovery enters, and of how many bytes one has."""
    announce: Callable[[bool], bool] | None = None
    """Makes KV events, if routers want them. Told whether recovery is over; says whether it is to
    be called again before long."""
    wake: Callable[[], None] = lambda: None
    """Ends the wait of the store's thread. From any thread."""
    disk_reset: Reset | None = None
    """Locked. The last reset of NVMe. Before it has succeeded a restart may find KV of before."""
    reader: Reader = field(init=False)
    """Brings up from the tiers behind; there once the store is made."""

    def __post_init__(self) -> None:
        self.has_leases = self.ttl_s is not None

    def steady(self) -> float:
        """See StoreClock. For budgets."""
        return self.clock.steady() if isinstance(self.clock, StoreClock) else self.clock()

    def clock_and_wall(self) -> tuple[float, float]:
        """For what is told of a time in a file: by what the wall clock was put ahead is in both."""
        wall = self.wall()
        if isinstance(self.clock, StoreClock):  # not that of a test
            self.clock.look()
        return self.clock(), wall


class Figures(NamedTuple):
    """The store's figures at one moment."""

    counts: dict[str, int]
    """Events since the start, by name."""
    moved_bytes: dict[Flow, int]
    """Bytes moved between DRAM and NVMe since the start."""
    first_written_tokens: int
    """Tokens written to NVMe that were not there before."""
    seconds: dict[str, list[float]]
    """Seconds of transfers that have ended since the last call, by the metric that shows them: each
    is told once. Of more than are kept (disk_requests.py: TIMES_KEPT) the newest."""
