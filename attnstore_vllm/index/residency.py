# SPDX-License-Identifier: Apache-2.0
"""Where every chunk is, and what may happen to it next.

Invariants, checked by check_integrity():
- a slot belongs to at most one chunk; free slots + owned slots == capacity, in each tier;
- a chunk is in the index exactly when it is not dropped and some tier has or is getting it;
- a held chunk's DRAM slot, and a slot that the device reads or writes, is not given away.

No I/O, no clock, no thread: the caller holds the lock and moves the bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable

from attnstore_vllm.index.chunk import Chunk, ChunkName, Dram, Nvme
from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.policy.eviction import EvictionPolicy


class _Slots:
    """The slots of one tier and the policy that says whose goes next."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.free = list(range(num_slots - 1, -1, -1))
        self.owned: dict[int, Chunk] = {}

    def give(self, chunk: Chunk) -> int:
        slot = self.free.pop()
        assert slot not in self.owned
        self.owned[slot] = chunk
        self.policy.add(chunk)
        return slot

    def take_back(self, slot: int) -> None:
        chunk = self.owned.pop(slot)
        self.policy.remove(chunk)
        self.free.append(slot)


class Residency:
    """The one owner of which chunk is where. `counts` holds events by name, for the metrics."""

    def __init__(
        self, dram_slots: int, nvme_slots: int, dram_policy: EvictionPolicy,
        nvme_policy: EvictionPolicy,
    ) -> None:  # fmt: skip
        self.index = PrefixIndex()
        self.counts: Counter[str] = Counter()
        self._dram = _Slots(dram_slots, dram_policy)
        self._nvme = _Slots(nvme_slots, nvme_policy)
        self._dirty: deque[Chunk] = deque()
        self._nvme_lost = False

    @property
    def dram_used(self) -> int:
        return len(self._dram.owned)

    @property
    def nvme_used(self) -> int:
        return len(self._nvme.owned)

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    def use(self, chunk: Chunk) -> None:
        """Note that a request wants the chunk."""
        if chunk.dram is not Dram.ABSENT:
            self._dram.policy.use(chunk)
        if chunk.nvme is not Nvme.ABSENT:
            self._nvme.policy.use(chunk)

    # ---- HBM -> DRAM -------------------------------------------------------------------

    def begin_save(self, name: ChunkName) -> Chunk | None:
        """Give the chunk a DRAM slot that the workers fill. It is held until finish_save.

        Returns None where nothing is to be copied: the chunk, or one that holds all its tokens,
        is stored already, or there is no room (counted as dropped).
        """
        known = self.index.get(name.key)
        if known is not None:
            self.use(known)
            return None
        if self.index.extends(name):
            return None
        if not self._make_room_in_dram():
            self.counts["dropped"] += 1
            return None
        chunk = Chunk(name)
        chunk.dram_slot = self._dram.give(chunk)
        chunk.dram = Dram.SAVING
        chunk.holds = 1
        self.index.add(chunk)
        return chunk

    def finish_save(self, chunk: Chunk) -> None:
        """All ranks have copied: the bytes are ready, and dirty until written back."""
        assert chunk.dram is Dram.SAVING
        chunk.dram = Dram.READY
        if not chunk.dropped:
            self.counts["saved"] += 1
            if not self._nvme_lost:
                self._dirty.append(chunk)
            for tail in self.index.extended_by(chunk.name):
                if tail.dram is not Dram.SAVING:
                    self.counts["superseded"] += 1
                    self.drop(tail)
        self.release(chunk)

    # ---- DRAM -> HBM -------------------------------------------------------------------

    def hold(self, chunk: Chunk) -> None:
        """A transfer reads the chunk's DRAM slot from now on."""
        assert chunk.dram is Dram.READY
        assert not chunk.dropped
        chunk.holds += 1

    def release(self, chunk: Chunk) -> None:
        assert chunk.holds > 0
        chunk.holds -= 1
        self._free_if_dropped(chunk)

    # ---- DRAM -> NVMe ------------------------------------------------------------------

    def begin_write_back(self) -> Chunk | None:
        """The chunk to write next, oldest first, with an NVMe slot; None if there is none."""
        while self._dirty:
            chunk = self._dirty.popleft()
            if chunk.dropped or chunk.dram is not Dram.READY or chunk.nvme is not Nvme.ABSENT:
                continue
            if not self._make_room_on_nvme():
                self._dirty.appendleft(chunk)
                return None
            chunk.nvme_slot = self._nvme.give(chunk)
            chunk.nvme = Nvme.WRITING
            chunk.holds += 1
            chunk.reads += 1
            return chunk
        return None

    def finish_write_back(self, chunk: Chunk, checksum: bytes | None) -> None:
        """The write has ended; `checksum` is the payload's, or None if the write failed."""
        assert chunk.nvme is Nvme.WRITING
        chunk.reads -= 1
        if checksum is None:
            self.counts["write_failed"] += 1
            self._leave_nvme(chunk)
        else:
            chunk.nvme = Nvme.READY
            chunk.checksum = checksum
            self.counts["written"] += 1
        self.release(chunk)

    # ---- NVMe -> DRAM ------------------------------------------------------------------

    def begin_prefetch(self, chunk: Chunk) -> bool:
        """Give the chunk a DRAM slot to be read into; False if there is no room now."""
        assert chunk.nvme is Nvme.READY
        assert chunk.dram is Dram.ABSENT
        assert not chunk.dropped
        chunk.reads += 1  # before making room: its NVMe slot must not go meanwhile
        if not self._make_room_in_dram():
            chunk.reads -= 1
            return False
        chunk.dram_slot = self._dram.give(chunk)
        chunk.dram = Dram.READING
        chunk.holds += 1
        return True

    def finish_prefetch(self, chunk: Chunk, verified: bool) -> None:
        """The read has ended; `verified` says that the bytes are those that were written."""
        assert chunk.dram is Dram.READING
        chunk.reads -= 1
        chunk.dram = Dram.READY
        chunk.from_nvme = True
        if not verified:
            self.drop(chunk)
        self.release(chunk)

    # ---- leaving -----------------------------------------------------------------------

    def drop(self, chunk: Chunk) -> None:
        """Forget the chunk in all tiers. Its slots go back when no transfer touches them."""
        if not chunk.dropped:
            chunk.dropped = True
            self.index.remove(chunk)
        self._free_if_dropped(chunk)

    def drop_all(self) -> None:
        """Forget everything (a weight update)."""
        for chunk in list(self.index):
            self.drop(chunk)
        self._dirty.clear()

    def lose_nvme(self) -> None:
        """The NVMe tier is out of use: forget what only it has, and write nothing back any more.

        A slot that the device touches now stays held for good: it may be touched much later.
        """
        self._nvme_lost = True
        self._dirty.clear()
        for chunk in list(self.index):
            if chunk.dram in (Dram.ABSENT, Dram.READING):
                self.drop(chunk)
            elif chunk.nvme is Nvme.READY:
                self._leave_nvme(chunk)

    def adopt(self, records: Iterable[tuple[int, ChunkName, bytes]]) -> int:
        """Enter what recovery found, as (NVMe slot, name, payload checksum), oldest first.

        A record is left out, and its slot stays free, where its chunk is known already or
        another record holds all its tokens. Returns how many were entered.
        """
        taken: set[int] = set()
        for slot, name, checksum in records:
            if slot in self._nvme.owned or self.index.get(name.key) or self.index.extends(name):
                continue
            for tail in self.index.extended_by(name):
                if tail.nvme_slot in taken and tail.dram is Dram.ABSENT:
                    taken.remove(tail.nvme_slot)
                    self._nvme.policy.remove(tail)
                    del self._nvme.owned[tail.nvme_slot]
                    tail.dropped = True
                    self.index.remove(tail)
            chunk = Chunk(name, nvme=Nvme.READY, nvme_slot=slot, checksum=checksum)
            self._nvme.owned[slot] = chunk
            self._nvme.policy.add(chunk)
            self.index.add(chunk)
            taken.add(slot)
        self._nvme.free = [slot for slot in self._nvme.free if slot not in taken]
        return len(taken)

    def _make_room_in_dram(self) -> bool:
        if self._dram.free:
            return True
        victim = self._dram.policy.victim(_dram_can_go, _is_clean)
        if victim is None:
            return False
        assert isinstance(victim, Chunk)
        self.counts["evicted_dram"] += 1
        self._leave_dram(victim)
        return bool(self._dram.free)

    def _make_room_on_nvme(self) -> bool:
        if self._nvme.free:
            return True
        victim = self._nvme.policy.victim(_nvme_can_go, _is_in_dram)
        if victim is None:
            return False
        assert isinstance(victim, Chunk)
        self.counts["evicted_nvme"] += 1
        self._leave_nvme(victim)
        return bool(self._nvme.free)

    def _leave_dram(self, chunk: Chunk) -> None:
        self._dram.take_back(chunk.dram_slot)
        chunk.dram, chunk.dram_slot = Dram.ABSENT, -1
        chunk.from_nvme = False
        self._forget_if_nowhere(chunk)

    def _leave_nvme(self, chunk: Chunk) -> None:
        self._nvme.take_back(chunk.nvme_slot)
        chunk.nvme, chunk.nvme_slot, chunk.checksum = Nvme.ABSENT, -1, b""
        self._forget_if_nowhere(chunk)

    def _forget_if_nowhere(self, chunk: Chunk) -> None:
        if chunk.dram is Dram.ABSENT and chunk.nvme is Nvme.ABSENT and not chunk.dropped:
            if chunk.holds == 0:
                self.counts["lost"] += 1
            chunk.dropped = True
            self.index.remove(chunk)

    def _free_if_dropped(self, chunk: Chunk) -> None:
        if not chunk.dropped or chunk.holds:
            return
        if chunk.dram is not Dram.ABSENT:
            self._leave_dram(chunk)
        if chunk.nvme is not Nvme.ABSENT and not chunk.reads:
            self._leave_nvme(chunk)

    def check_integrity(self) -> None:
        """Assert the invariants above. Cost: all chunks; for tests and idle moments."""
        for tier in (self._dram, self._nvme):
            assert len(tier.free) + len(tier.owned) == tier.num_slots
            assert not set(tier.free) & tier.owned.keys()
        for slot, chunk in self._dram.owned.items():
            assert chunk.dram_slot == slot
            assert chunk.dram is not Dram.ABSENT
        for slot, chunk in self._nvme.owned.items():
            assert chunk.nvme_slot == slot
            assert chunk.nvme is not Nvme.ABSENT
        for chunk in self.index:
            assert not chunk.dropped
            assert chunk.dram is not Dram.ABSENT or chunk.nvme is not Nvme.ABSENT
        for chunk in (*self._dram.owned.values(), *self._nvme.owned.values()):
            assert chunk.dropped <= (chunk.holds > 0 or chunk.reads > 0)

    def num_held(self) -> int:
        """Chunks that a transfer holds now; zero when nothing is in flight."""
        return sum(chunk.holds > 0 for chunk in self._dram.owned.values())


def _dram_can_go(chunk: Hashable) -> bool:
    assert isinstance(chunk, Chunk)
    return chunk.holds == 0 and chunk.dram is Dram.READY


def _nvme_can_go(chunk: Hashable) -> bool:
    assert isinstance(chunk, Chunk)
    return chunk.reads == 0 and chunk.nvme is Nvme.READY


def _is_clean(chunk: Hashable) -> bool:
    assert isinstance(chunk, Chunk)
    return chunk.nvme is Nvme.READY


def _is_in_dram(chunk: Hashable) -> bool:
    assert isinstance(chunk, Chunk)
    return chunk.dram is Dram.READY
