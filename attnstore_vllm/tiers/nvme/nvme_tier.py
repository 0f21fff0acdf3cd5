# SPDX-License-Identifier: Apache-2.0
"""NVMe: many slots, in 14 bytes each. What is here and nowhere else is an entry of the index.

A slot, by its state:

    CLOSED  not of the store now: its part of the disk is not claimed
    FREE
    OWNED   of an entry of the index, and in the policy's order of departure unless it is pinned
    ADOPTED as OWNED, but in no order yet: recovery goes on, and it was not used
    GONE    its chunk was dropped, and a device request still touches it

Recovery enters what it found a batch of header pages at a time. Left out, with their slots still
free, are records whose chunk is known to this process or from a newer record, and tails of which
another record holds all tokens, unless they are states. Of those tails some stay, whose longer
chunk came in an earlier batch: they cost a slot each until they are evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.policy.visits import NO_RUN, Run, left_by
from attnstore_vllm.tiers.tier import Pin, Pins, TierBehind
from attnstore_vllm.types import NVME, Key

CLOSED: Final = 0
FREE: Final = 1
OWNED: Final = 2
ADOPTED: Final = 3
GONE: Final = 4


class Adopted(NamedTuple):
    """How many records were entered and left out, and how many entered ones were superseded."""

    entered: int
    left_out: int
    superseded: int


class NvmeTier(TierBehind):
    """All slots are closed at first."""

    def __init__(
        self,
        num_slots: int,
        order: Departures,
        pins: Pins,
        index: PrefixIndex,
        *,
        waiting: Departures,
        dram_pins: Pins,
        look_ahead: LookAhead[Chunk],
    ) -> None:
        super().__init__(NVME, waiting, dram_pins, look_ahead)
        self.num_slots = num_slots
        self.order = order
        self.pins = pins
        self.num_open = 0
        self.owner = array("I", [0]) * num_slots
        """The owner's entry in the index, of OWNED and ADOPTED slots."""
        self.state = bytearray(num_slots)
        self.is_found = bytearray(num_slots)
        """1: recovery has entered what is there. What this process has written has 0."""
        self._index = index
        self._pinned_runs: dict[int, Run] = {}
        self._ends: npt.NDArray[np.float64] | None = None
        """While recovery goes on: when what is in each ADOPTED slot expires. None: nothing does."""
        self._num_free = 0
        self._lowest = 0  # no slot before it is free

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_open - self._num_free

    def states(self) -> npt.NDArray[np.uint8]:
        """A view. No reference to it may be kept."""
        return np.frombuffer(self.state, np.uint8)

    def owners(self) -> npt.NDArray[np.uint32]:
        """A view. No reference to it may be kept."""
        return np.frombuffer(self.owner, np.uint32)

    def open(self, first: int, count: int) -> None:
        """Slots [first, first + count) can be used from now on, and are free."""
        states = self.states()[first : first + count]
        assert len(states) == count
        assert not states.any()
        states[:] = FREE
        self.num_open += count
        self._num_free += count
        self._lowest = min(self._lowest, first)

    def give(self, chunk: Chunk) -> int:
        """The lowest free slot: neighbours on the disk are written one after another."""
        slot = self.state.find(FREE, self._lowest)
        assert slot >= 0
        self._lowest = slot + 1
        self._num_free -= 1
        self.state[slot], self.owner[slot] = OWNED, chunk.entry
        self.is_found[slot] = 0
        self.order.add(slot, chunk.run)
        return slot

    def take_back(self, chunk: Chunk) -> None:
        self._take_back(chunk.at(NVME).slot)
        if not chunk.dropped:
            self._index.unbind(chunk)

    def _take_back(self, slot: int) -> None:
        self._leave_order(slot)
        self.state[slot] = FREE
        self._num_free += 1
        self._lowest = min(self._lowest, slot)

    def abandon(self, chunk: Chunk) -> None:
        slot = chunk.at(NVME).slot
        self._leave_order(slot)
        self.state[slot] = GONE

    def source_of(self, chunk: Chunk) -> str:
        return self.name if self.is_found[chunk.at(NVME).slot] else ""

    def written(self, chunk: Chunk) -> None:
        self._index.bind(chunk)

    def live(self, slot: int) -> Chunk | None:
        return self._index.live(self.owner[slot])

    def key_at_rest(self, slot: int) -> Key:
        """The owner of a slot that is at rest."""
        return Key(self._index.entries.record(self.owner[slot])[0])

    def forget_at_rest(self, slot: int) -> None:
        self._index.remove_entry(self.owner[slot])
        self._take_back(slot)

    def forget_all_at_rest(self, keep: Iterable[Chunk]) -> None:
        states = self.states()
        for slot in np.flatnonzero((states == OWNED) | (states == ADOPTED)).tolist():
            self._take_back(slot)
        self._index.clear(keep)

    def cold_chunk(self, slot: int) -> Chunk | None:
        """The chunk that is in this slot and nowhere else, and that nothing touches."""
        if self.state[slot] not in (OWNED, ADOPTED):
            return None
        chunk = self._index.chunk(self.owner[slot])
        is_here_alone = chunk.dram.state is State.ABSENT and len(chunk.behind) == 1
        return chunk if is_here_alone and chunk.at(NVME).uses == 0 else None

    # ---- runs and pins -------------------------------------------------------------------

    def use(self, chunks: Sequence[Chunk], run: Run) -> None:
        state, pinned = self.state, self._pinned_runs
        slots = [chunk.behind[NVME].slot for chunk in chunks if NVME in chunk.behind]
        owned: list[int] = []
        for slot in slots:
            if state[slot] == ADOPTED:
                state[slot] = OWNED
                self.order.add(slot, run)
            if slot in pinned:
                pinned[slot] = run
            elif state[slot] == OWNED:
                owned.append(slot)
        self.order.use(owned, run)

    def run_of(self, chunk: Chunk) -> Run | None:
        slot = chunk.at(NVME).slot
        return self._run_of(slot) if slot >= 0 else None

    def _run_of(self, slot: int) -> Run | None:
        run = self._pinned_runs.get(slot) or self.order.run_of(slot)
        if run is None and self._ends is not None and self.state[slot] == ADOPTED:
            return left_by(float(self._ends[slot]))
        return run

    def pin(self, chunk: Chunk, pin: Pin) -> bool:
        slot = chunk.at(NVME).slot
        if self.state[slot] != OWNED or not self.pins.add(slot, pin, self.num_open):
            return False
        if slot not in self._pinned_runs:
            self._pinned_runs[slot] = self.order.run_of(slot) or NO_RUN
            self.order.remove(slot)
        return True

    def unpin(self, chunk: Chunk) -> None:
        slot = chunk.at(NVME).slot
        if slot in self.pins:
            self.pins.remove(slot)
            self._come_back(slot, chunk.run)

    def end_pins(self, now: float, renewed: Callable[[Run], Run]) -> None:
        for slot in self.pins.take_ended(now):
            run = renewed(self._pinned_runs[slot])
            chunk = self.live(slot)
            if chunk is not None:
                chunk.run = run  # so that who waits for it sees that its run is another's
            self._come_back(slot, run)

    def _come_back(self, slot: int, run: Run) -> None:
        """The slot's pin has ended: it stands in the order of departure again."""
        del self._pinned_runs[slot]
        self.order.add(slot, run)

    def _leave_order(self, slot: int) -> None:
        assert self.state[slot] in (OWNED, ADOPTED, GONE)
        if self._pinned_runs.pop(slot, None) is not None:
            self.pins.remove(slot)
        elif self.state[slot] == OWNED:
            self.order.remove(slot)

    # ---- recovery ------------------------------------------------------------------------

    def adopt(
        self,
        headers: memoryview,
        slots: npt.NDArray[np.uint32],
        header_bytes: int,
        ends: npt.NDArray[np.float64] | None = None,
    ) -> Adopted:
        """Enter a batch of records.

        Args:
            headers: one valid header page of format version 2 a slot, one after another.
            ends: [len(slots)] when each expires that is not used till then; infinite: never.
                None: none does.
        Cost: about 3 us a record.
        """
        if ends is not None:
            if self._ends is None:
                self._ends = np.full(self.num_slots, np.inf)
            self._ends[slots] = ends
        usable = self.states()[slots] == FREE
        num_taken = int((~usable).sum())
        if num_taken:
            pages = np.frombuffer(headers, np.uint8)[: len(slots) * header_bytes]
            headers = memoryview(pages.reshape(len(slots), header_bytes)[usable].tobytes())
        bound, entries, freed, entered, left_out, superseded = self._index.adopt(
            headers, slots[usable], header_bytes
        )
        states = self.states()
        assert np.all(states[bound] == FREE)
        states[bound] = ADOPTED
        np.frombuffer(self.is_found, np.uint8)[bound] = 1
        self.owners()[bound] = entries
        self._num_free -= len(bound)
        for slot in freed.tolist():
            self._take_back(slot)
        return Adopted(entered, left_out + num_taken, superseded)

    def adopted(self) -> npt.NDArray[np.int32]:
        """The adopted slots that were not used since, in the order they were written in.

        Needs no lock, on the only thread that adopts and evicts: what others remove meanwhile has
        a place in the order and none when it is used (all_adopted). Cost: about 0.2 s a million.
        """
        slots = np.flatnonzero(self.states() == ADOPTED).astype(np.int32)
        sequences = self._index.sequences(self.owners()[slots])
        return slots[np.argsort(sequences, kind="stable")]

    def all_adopted(self, slots: npt.NDArray[np.int32], now: float) -> None:
        """All is read: what was adopted and not used since is evicted first, oldest first.

        Args:
            slots: what adopted() returned.
        """
        states = self.states()
        slots = slots[states[slots] == ADOPTED]
        states[slots] = OWNED
        self.order.add_oldest(slots, now, None if self._ends is None else self._ends[slots])
        self._ends = None

    def check_integrity(self) -> None:
        counts = np.bincount(self.states(), minlength=GONE + 1)
        assert counts[FREE] == self._num_free
        assert counts[CLOSED] == self.num_slots - self.num_open
        assert counts[OWNED] == len(self.order) + len(self.pins)
        assert all(slot in self.pins for slot in self._pinned_runs)
        assert self.state.find(FREE, 0, self._lowest) < 0
        owners = 0
        for slot in range(self.num_slots):
            if self.state[slot] in (OWNED, ADOPTED):
                owners += 1
                copy = self._index.chunk(self.owner[slot]).at(NVME)
                assert copy.slot == slot
                assert copy.state is not State.ABSENT
        if not self.is_lost:
            owners -= sum(NVME in chunk.behind for chunk in self._index)
        assert owners == 0
