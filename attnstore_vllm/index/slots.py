# SPDX-License-Identifier: Apache-2.0
"""The slots of each tier: which are free, and whose the others are.

A slot of NVMe, by its state:

    CLOSED  not of the store now: its part of the disk is not claimed
    FREE
    OWNED   of an entry of the index, and in the policy's order of departure unless it is pinned
    ADOPTED as OWNED, but in no order yet: recovery goes on, and nobody has used it
    GONE    its chunk was dropped, and a device request still touches it
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.eviction import EvictionPolicy
from attnstore_vllm.policy.pins import Pin, Pins
from attnstore_vllm.policy.returns import NO_RUN, Run

CLOSED: Final = 0
FREE: Final = 1
OWNED: Final = 2
ADOPTED: Final = 3
GONE: Final = 4


class DramSlots:
    """Few slots, of chunks that are objects: this is what keeps them alive.

    Two orders of departure: `clean` of what NVMe has too, `dirty` of what it has not. What is not
    READY, or is wanted or pinned, stands in neither.
    """

    def __init__(
        self, num_slots: int, clean: EvictionPolicy, dirty: EvictionPolicy, pins: Pins
    ) -> None:
        self.num_slots = num_slots
        self.clean = clean
        self.dirty = dirty
        self.pins = pins
        self.free = list(range(num_slots - 1, -1, -1))
        self.owned: dict[int, Chunk] = {}

    def give(self, chunk: Chunk) -> int:
        slot = self.free.pop()
        assert slot not in self.owned
        self.owned[slot] = chunk
        return slot

    def take_back(self, slot: int) -> None:
        self.place(self.owned.pop(slot), None)
        self.pins.remove(slot)
        self.free.append(slot)

    def place(self, chunk: Chunk, order: EvictionPolicy | None) -> None:
        """Put the chunk in one of the orders, or in none."""
        slot = chunk.dram_slot
        for other in (self.clean, self.dirty):
            if other is not order and slot in other:
                other.remove(slot)
        if order is not None and slot not in order:
            order.add(slot, chunk.run)

    def use(self, chunks: Sequence[Chunk], run: Run) -> None:
        """A run uses these, in the order of depth."""
        for chunk in chunks:
            chunk.run = run
        slots = [chunk.dram_slot for chunk in chunks if chunk.dram_slot >= 0]
        for order in (self.clean, self.dirty):
            order.use([slot for slot in slots if slot in order], run)


class NvmeSlots:
    """Up to `num_slots` slots in 13 bytes each. All are closed at first."""

    def __init__(self, num_slots: int, policy: EvictionPolicy, pins: Pins) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.pins = pins
        self._pinned_runs: dict[int, Run] = {}
        self.num_free = 0
        self.num_open = 0
        self.owner = array("I", [0]) * num_slots
        """The owner's entry in the index, of OWNED and ADOPTED slots."""
        self.state = bytearray(num_slots)
        self._lowest = 0  # no slot before it is free

    @property
    def num_used(self) -> int:
        return self.num_open - self.num_free

    def states(self) -> npt.NDArray[np.uint8]:
        """A view. No reference to it may be kept."""
        return np.frombuffer(self.state, np.uint8)

    def owners(self) -> npt.NDArray[np.uint32]:
        """A view. No reference to it may be kept."""
        return np.frombuffer(self.owner, np.uint32)

    def open(self, first: int, count: int) -> None:
        states = self.states()[first : first + count]
        assert len(states) == count
        assert not states.any()
        states[:] = FREE
        self.num_open += count
        self.num_free += count
        self._lowest = min(self._lowest, first)

    def give(self, entry: int, run: Run) -> int:
        """The lowest free slot: neighbours on the disk are written one after another."""
        slot = self.state.find(FREE, self._lowest)
        assert slot >= 0
        self._lowest = slot + 1
        self.num_free -= 1
        self.state[slot], self.owner[slot] = OWNED, entry
        self.policy.add(slot, run)
        return slot

    def use(self, slots: Sequence[int], run: Run) -> None:
        for slot in slots:
            if self.state[slot] == ADOPTED:
                self.state[slot] = OWNED
                self.policy.add(slot, run)
            if slot in self._pinned_runs:
                self._pinned_runs[slot] = run
        owned = [slot for slot in slots if self.state[slot] == OWNED]
        self.policy.use([slot for slot in owned if slot not in self._pinned_runs], run)

    def run_of(self, slot: int) -> Run | None:
        """The run that used the slot last, if that is remembered."""
        return self._pinned_runs.get(slot) or self.policy.run_of(slot)

    def pin(self, slot: int, pin: Pin) -> bool:
        """Take the slot out of the order of departure, if the share allows; see Pins.add()."""
        if self.state[slot] != OWNED or not self.pins.add(slot, pin, self.num_open):
            return False
        if slot not in self._pinned_runs:
            self._pinned_runs[slot] = self.policy.run_of(slot) or NO_RUN
            self.policy.remove(slot)
        return True

    def unpin(self, slot: int, run: Run) -> None:
        """Put the slot, whose pin has ended, back into the order of departure."""
        assert slot not in self.pins
        del self._pinned_runs[slot]
        self.policy.add(slot, run)

    def abandon(self, slot: int) -> None:
        """Its chunk was dropped: it has no owner, and is not free."""
        self._leave_policy(slot)
        self.state[slot] = GONE

    def take_back(self, slot: int) -> None:
        self._leave_policy(slot)
        self.state[slot] = FREE
        self.num_free += 1
        self._lowest = min(self._lowest, slot)

    def take_back_owned(self) -> None:
        """Free all slots that have an owner."""
        states = self.states()
        for slot in np.flatnonzero((states == OWNED) | (states == ADOPTED)).tolist():
            self.take_back(slot)

    def adopt(self, slots: npt.NDArray[np.uint32], entries: npt.NDArray[np.uint32]) -> None:
        """Give these free slots to entries, all at once."""
        states = self.states()
        assert np.all(states[slots] == FREE)
        states[slots] = ADOPTED
        self.owners()[slots] = entries
        self.num_free -= len(slots)

    def order(self, slots: npt.NDArray[np.int32], now: float) -> None:
        """Put those of these slots that are still ADOPTED before all others, oldest first."""
        states = self.states()
        slots = slots[states[slots] == ADOPTED]
        states[slots] = OWNED
        self.policy.add_oldest(slots, now)

    def _leave_policy(self, slot: int) -> None:
        assert self.state[slot] in (OWNED, ADOPTED, GONE)
        if self._pinned_runs.pop(slot, None) is not None:
            self.pins.remove(slot)
        elif self.state[slot] == OWNED:
            self.policy.remove(slot)

    def check_integrity(self) -> None:
        counts = np.bincount(self.states(), minlength=GONE + 1)
        assert counts[FREE] == self.num_free
        assert counts[CLOSED] == self.num_slots - self.num_open
        assert counts[OWNED] == len(self.policy) + len(self.pins)
        assert all(slot in self.pins for slot in self._pinned_runs)
        assert self.num_free + self.num_used == self.num_open
        assert self.state.find(FREE, 0, self._lowest) < 0
