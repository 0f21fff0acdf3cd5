# SPDX-License-Identifier: Apache-2.0
"""The shared tier: which of what is in DRAM is to be written there, and when.

Whole chunks alone, since the asker can name no others. Written when a conversation pauses, or at
the second use, of most worth first (Departures), within a budget (tier_io.py). What came from there
is not written there again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.policy.own_puts import OwnPuts
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.tiers.dram_tier import DramTier
from attnstore_vllm.tiers.remote import RemoteTier
from attnstore_vllm.types import SHARED, Clock, Event

ENTRIES_MAX = 1 << 16
"""Chunks of the tier that are known at a time. They take no memory but their names."""
PAUSE_S = 0.5
"""A chunk that was saved so long ago is one that its conversation leaves behind."""
RIPE_MAX = 256
"""Chunks that one look lets be written."""


def no_clock() -> float:
    """Nothing is said of a tier before its clock is set."""
    raise AssertionError("the tier has no clock yet")


class SharedTier(RemoteTier):
    """See the module.

    Args:
        chunk_tokens: of a whole chunk.
        put_quotas: by tenant, the records that it may have there of this server's. None: as many
            as it likes.
    """

    evicted = Event.EVICTED_SHARED

    def __init__(
        self,
        policy: Callable[[int], Departures],
        dram: DramTier,
        look_ahead: LookAhead[Chunk],
        *,
        chunk_tokens: int,
        pause_s: float = PAUSE_S,
        put_quotas: Mapping[bytes, int] | None = None,
    ) -> None:
        super().__init__(SHARED, ENTRIES_MAX, policy, dram, look_ahead, takes_writes=True)
        self._dram = dram
        self._chunk_tokens = chunk_tokens
        self.clock: Clock = no_clock
        """The store's, which ripen() is told the time of. Set with what moves the tier's bytes."""
        self._pause_s = pause_s
        self.puts = OwnPuts(put_quotas or {}, policy)
        self.is_open = False
        """Whether it may be written to: open_to()."""
        self._pausing: dict[int, float] = {}
        """Slots of DRAM that are not written yet, and since when: the oldest first."""
        self._used: dict[int, None] = {}
        """Those of them that need not pause any longer."""

    def orders(self) -> list[Departures]:
        return [*super().orders(), *self.puts.orders()]

    def place_in_dram(self, *chunks: Chunk) -> None:
        for chunk in chunks:
            slot = chunk.dram.slot
            if not self._may_wait(chunk):
                self.left_dram(slot)
            elif slot not in self._pausing:
                if slot in self.waiting:
                    super().place_in_dram(chunk)
                else:
                    self._pausing[slot] = self.clock()

    def _may_wait(self, chunk: Chunk) -> bool:
        return (
            self.is_open
            and chunk.dram.state is State.READY
            and not (chunk.dropped or self.is_lost)
            and chunk.name.num_tokens == self._chunk_tokens
            and SHARED not in chunk.behind
            and SHARED not in chunk.refused_by
            and chunk.origin != SHARED
        )

    def waits_for(self, slot: int) -> bool:
        return slot in self._pausing or super().waits_for(slot)

    def left_dram(self, *slots: int) -> None:
        for slot in slots:
            self._pausing.pop(slot, None)
            self._used.pop(slot, None)
        super().left_dram(*slots)

    def use(self, chunks: Sequence[Chunk], run: Run) -> None:
        """A second use: others are likely to want it too. ripen() goes on with it, on the store's
        thread: what a request that begins costs the scheduler's is time of each step."""
        if chunks:  # of one tenant, as all that a request finds is
            self.puts.use(chunks[0].name.tenant, (chunk.name.key for chunk in chunks), run)
        for chunk in chunks:
            if chunk.dram.slot in self._pausing and chunk.dram.state is State.READY:
                self._used[chunk.dram.slot] = None

    def ripen(self, now: float) -> None:
        """Locked by the caller. Let what was used again or has paused be written. Cost: bounded."""
        for _ in range(RIPE_MAX):
            slot = next(iter(self._used or self._pausing), None)
            if slot is None:
                return
            if slot not in self._used and self._pausing[slot] + self._pause_s > now:
                return
            self._ripen(slot)

    def _ripen(self, slot: int) -> None:
        del self._pausing[slot]
        self._used.pop(slot, None)
        chunk = self._dram.owned.get(slot)
        if chunk is not None:
            super().place_in_dram(chunk)
            self._dram.place(chunk)

    def open_to(self, is_open: bool) -> None:
        """Whether it may be written to. What waits is forgotten where it may not."""
        was_open, self.is_open = self.is_open, is_open
        if was_open and not is_open:
            self._pausing.clear()
            self._used.clear()
            self.waiting.clear()
            self.waiting_low_value.clear()
            for chunk in self._dram.owned.values():
                self._dram.place(chunk)
