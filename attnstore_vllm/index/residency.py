# SPDX-License-Identifier: Apache-2.0
"""Where every chunk is, and what may happen to it next.

Invariants, checked by check_integrity():
- a slot belongs to at most one chunk; free slots + owned slots == capacity, in each tier;
- a chunk is in the index exactly when it is not dropped and some tier has or is getting it;
- a held chunk's DRAM slot, and a slot that the device reads or writes, is not given away.

No I/O, no clock, no thread: the caller holds the lock and moves the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from attnstore_vllm.index.adoption import Adoption
from attnstore_vllm.index.chunk import Chunk, ChunkName, Dram, Nvme
from attnstore_vllm.index.dirty import DirtyQueue
from attnstore_vllm.index.integrity import check_integrity
from attnstore_vllm.index.pinning import Pinning
from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.index.room import DramRoom, NvmeRoom
from attnstore_vllm.index.slots import ADOPTED, OWNED, DramSlots, NvmeSlots
from attnstore_vllm.index.stops import GRAIN_TOKENS
from attnstore_vllm.policy.eviction import EvictionPolicy
from attnstore_vllm.policy.lookahead import LAST, LookAhead, Order
from attnstore_vllm.policy.pins import Pins
from attnstore_vllm.policy.returns import Run, unknown_run

REFUSALS_MAX = 32
"""Chunks that one call of begin_write_back refuses at most."""
_EXPECTED_MAX = 1 << 22
"""Chunks for which the index makes room at once; beyond, its tables grow."""


class Residency:
    """The one owner of which chunk is where. `counts` holds events by name, for the metrics.

    It refers to each chunk that is in DRAM or in a transfer; what is on NVMe only is an entry.

    Args:
        nvme_slots: the most there can be; open_nvme_slots() says which there are.
        policy: makes an order of departure for so many slots.
        seed, grain: see PrefixIndex.
        pin_shares: of each tier's slots, those that can be pinned in all and by one tenant.
    """

    def __init__(
        self, dram_slots: int, nvme_slots: int, policy: Callable[[int], EvictionPolicy], *,
        chunk_tokens: int, seed: int = 0, grain: int = GRAIN_TOKENS,
        pin_shares: tuple[float, float] = (0.0, 0.0),
    ) -> None:  # fmt: skip
        expected = min(dram_slots + nvme_slots, _EXPECTED_MAX)
        self.index = PrefixIndex(chunk_tokens, seed, expected, grain)
        self.counts = Counter[str]()
        self.look_ahead = LookAhead()
        self.now = 0.0  # seconds; the caller sets it before what may need room
        self.first_written_tokens = 0
        """Tokens written to NVMe that no record there had before."""
        orders = [policy(num_slots) for num_slots in (dram_slots, dram_slots, nvme_slots)]
        self._dram = DramSlots(dram_slots, orders[0], orders[1], Pins(*pin_shares))
        self._nvme = NvmeSlots(nvme_slots, orders[2], Pins(*pin_shares))
        self.room = DramRoom(self._dram, self.look_ahead)
        self.pinning = Pinning(self._dram, self._nvme, self.room, self.counts)
        self._nvme_room = NvmeRoom(self._nvme, self._dram.pins, self.index, self.look_ahead)
        self.adoption = Adoption(self.index, self._nvme)
        self._dirty = DirtyQueue(dram_slots)
        self._nvme_lost = False

    @property
    def dram_used(self) -> int:
        return len(self._dram.owned)

    @property
    def nvme_used(self) -> int:
        return self._nvme.num_used

    @property
    def needs_nvme_slots(self) -> bool:
        """Whether the next write-back would have to evict from NVMe."""
        return self._nvme.num_free == 0

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    def open_nvme_slots(self, first: int, count: int) -> None:
        """Slots [first, first + count) can be used from now on, and are free."""
        self._nvme.open(first, count)

    def use(self, chunks: Sequence[Chunk], run: Run | None = None) -> None:
        """Note that a request wants these, in the order of depth."""
        run = run or unknown_run(self.now)
        run.use(self.now)
        self._dram.use(chunks, run)
        self._nvme.use([c.nvme_slot for c in chunks if c.nvme is not Nvme.ABSENT], run)
        for chunk in chunks:
            if chunk.refused:  # worth another look
                chunk.refused = False
                self.room.place(chunk)
                if chunk.dram is Dram.READY and not self._nvme_lost:
                    self._dirty.add(chunk)

    def run_of(self, chunk: Chunk) -> Run:
        """The run that used the chunk last, as far as that is known."""
        if chunk.dram is Dram.ABSENT and chunk.nvme is not Nvme.ABSENT:
            chunk.run = self._nvme.run_of(chunk.nvme_slot) or chunk.run
        return chunk.run

    # ---- HBM -> DRAM -------------------------------------------------------------------

    def begin_save(
        self, name: ChunkName, run: Run | None = None, *, again: bool = False
    ) -> Chunk | None:
        """Give the chunk a DRAM slot that the workers fill. It is held until finish_save.

        Args:
            run: of the request that has computed it.
            again: the request has computed it though NVMe may have it: DRAM takes it as well.
        Returns None where nothing is to be copied: it, or what extends it, is stored already, or
        there is no room (counted as dropped if it is nowhere else).
        """
        known = self.index.get(name.key)
        if known is not None:
            self.use([known], run)
            # It takes no room from what waits to be read or written: it can be read again.
            if not again or known.dram is not Dram.ABSENT or not self._make_room_in_dram(LAST):
                return None
            known.name = name  # its tokens, which NVMe alone had
            self.look_ahead.has_come(known)
        elif self.index.extends(name):
            return None
        elif not self._make_room_in_dram():
            self.counts["dropped"] += 1
            return None
        chunk = known or Chunk(name, run=run or unknown_run(self.now))
        chunk.run.use(self.now)
        chunk.dram_slot = self._dram.give(chunk)
        chunk.dram = Dram.SAVING
        chunk.holds += 1
        if known is None:
            self.index.add(chunk)
        self.pinning.spread(chunk, self.now)
        return chunk

    def finish_save(self, chunk: Chunk) -> None:
        """All ranks have copied: the bytes are ready, and dirty until written back."""
        assert chunk.dram is Dram.SAVING
        chunk.dram = Dram.READY
        self.room.place(chunk)
        if not chunk.dropped:
            self.counts["saved" if chunk.nvme is Nvme.ABSENT else "saved_again"] += 1
            if chunk.nvme is Nvme.ABSENT and not (chunk.refused or self._nvme_lost):
                self._dirty.add(chunk)
            for tail in self.index.extended_by(chunk.name):
                if tail.nvme is not Nvme.ABSENT:
                    chunk.repeats = max(chunk.repeats, tail.name.num_tokens)
                if tail.dram is not Dram.SAVING:
                    self.pinning.inherit(chunk, tail, self.now)
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

    def begin_write_back(self, *, newest_first: bool = False) -> Chunk | None:
        """The chunk to write next, with an NVMe slot; None if there is none, or no slot.

        Oldest first; at shutdown, which may not have the time for all, `newest_first`.
        """
        for _ in range(REFUSALS_MAX):
            chunk = self._dirty.next(newest_first=newest_first)
            room = self._make_room_on_nvme(chunk) if chunk is not None else False
            if chunk is None or room is False:
                return None
            self._dirty.remove(chunk)
            if room:
                break
            self.counts["refused"] += 1
            chunk.refused = True
            self.room.place(chunk)
        else:
            return None
        chunk.nvme_slot = self._nvme.give(chunk.entry, chunk.run)
        chunk.nvme = Nvme.WRITING
        self.pinning.spread(chunk, self.now)
        chunk.holds += 1
        chunk.reads += 1
        return chunk

    def finish_write_back(self, chunk: Chunk, checksum: bytes | None) -> None:
        """The write has ended; `checksum` is the payload's, or None if the write failed."""
        assert chunk.nvme is Nvme.WRITING
        chunk.reads -= 1
        if checksum is None:
            self.counts["write_failed"] += 1
            chunk.refused = True  # tried again when it is used again; until then it may go
            self._leave_nvme(chunk)
        else:
            chunk.nvme = Nvme.READY
            chunk.checksum = checksum
            if not chunk.dropped:
                self.index.bind(chunk)
            self.counts["written"] += 1
            self.first_written_tokens += max(0, chunk.name.num_tokens - chunk.repeats)
        self.room.place(chunk)
        self.release(chunk)

    # ---- NVMe -> DRAM ------------------------------------------------------------------

    def begin_prefetch(self, chunk: Chunk, whose: Order | None = None) -> bool:
        """Give the chunk a DRAM slot to be read into; False if there is no room now.

        Args:
            whose: the waiting request that wants it. What is wanted before it makes no room.
        """
        assert chunk.nvme is Nvme.READY
        assert chunk.dram is Dram.ABSENT
        assert not chunk.dropped
        chunk.reads += 1  # before making room: its NVMe slot must not go meanwhile
        if not self._make_room_in_dram(whose):
            chunk.reads -= 1
            return False
        self.run_of(chunk)
        chunk.dram_slot = self._dram.give(chunk)
        chunk.dram = Dram.READING
        self.pinning.spread(chunk, self.now)
        chunk.holds += 1
        self.look_ahead.has_come(chunk)
        return True

    def finish_prefetch(self, chunk: Chunk, verified: bool) -> None:
        """The read has ended; `verified` says that the bytes are those that were written.

        Its tokens are known by then: they came up with the bytes, see PrefixIndex.learn().
        """
        assert chunk.dram is Dram.READING
        chunk.reads -= 1
        chunk.dram = Dram.READY
        chunk.from_nvme = True
        assert chunk.name.tokens or not verified
        if not verified:
            self.drop(chunk)
        self.room.place(chunk)
        self.release(chunk)

    # ---- scrubbing ---------------------------------------------------------------------

    def cold_chunk(self, slot: int) -> Chunk | None:
        """The chunk that is in this NVMe slot and nowhere else, and that nothing touches."""
        if self._nvme.state[slot] not in (OWNED, ADOPTED):
            return None
        chunk = self.index.chunk(self._nvme.owner[slot])
        return chunk if chunk.dram is Dram.ABSENT and chunk.reads == 0 else None

    def begin_scrub(self, chunk: Chunk) -> None:
        """The device reads the chunk's NVMe slot; the caller keeps the object."""
        chunk.reads += 1

    def end_scrub(self, chunk: Chunk) -> None:
        chunk.reads -= 1
        self._free_if_dropped(chunk)

    # ---- leaving -----------------------------------------------------------------------

    def drop(self, chunk: Chunk) -> None:
        """Forget the chunk in all tiers. Its slots go back when no transfer touches them."""
        if not chunk.dropped:
            self._forget(chunk)
        self._free_if_dropped(chunk)

    def _forget(self, chunk: Chunk) -> None:
        chunk.dropped = True
        self.room.lose(chunk)
        self.index.remove(chunk)
        if chunk.nvme is not Nvme.ABSENT:
            self._nvme.abandon(chunk.nvme_slot)

    def drop_all(self) -> None:
        """Forget everything (a weight update). Cost: the objects, and some ms a million."""
        for chunk in self.index.all_live():
            self.drop(chunk)
        self._forget_entries(keep=[])
        self._dirty.clear()

    def _forget_entries(self, keep: list[Chunk]) -> None:
        """Forget all that is no object. No object but these is in the index."""
        self._nvme.take_back_owned()
        self.index.clear(keep)

    def lose_nvme(self) -> None:
        """The NVMe tier is out of use: forget what only it has, and write nothing back any more.

        A slot that the device touches now stays held for good: it may be touched much later.
        """
        self._nvme_lost = True
        self._dirty.clear()
        keep = []
        for chunk in self.index.all_live():
            if chunk.dram in (Dram.ABSENT, Dram.READING):
                self.drop(chunk)
                continue
            keep.append(chunk)
            if chunk.nvme is Nvme.READY:
                self._leave_nvme(chunk)
            elif chunk.nvme is Nvme.WRITING:
                self._nvme.abandon(chunk.nvme_slot)
        self._forget_entries(keep)

    # ---- room --------------------------------------------------------------------------

    def _make_room_in_dram(self, whose: Order | None = None) -> bool:
        if whose is not None and self.room.is_full_of_wanted(whose):
            victim, is_wanted = self.room.farther(whose), True
        elif self._dram.free:
            return True
        else:
            self.pinning.end(self.now)
            victim, is_wanted = self.room.victim(self.now, whose)
        if victim is None:
            return False
        self.counts["given_up"] += is_wanted
        self.counts["evicted_dram"] += 1
        self._leave_dram(victim)
        return bool(self._dram.free)

    def _make_room_on_nvme(self, chunk: Chunk) -> bool | None:
        """None: there is room, but what would have to go is worth more than this chunk.

        A chunk that DRAM has as well is then as one that was refused: it is not written again
        before it is used again, which would move the same bytes for ever in a small store.
        """
        if self._nvme.num_free:
            return True
        self.pinning.end(self.now)
        slot, is_refused = self._nvme_room.victim(chunk, self.now)
        if slot is None:
            return None if is_refused else False
        self.counts["evicted_nvme"] += 1
        victim = self.index.live(self._nvme.owner[slot])
        if victim is None:  # it is an entry and no object now
            self.counts["lost"] += 1
            self.index.remove_entry(self._nvme.owner[slot])
            self._nvme.take_back(slot)
        else:
            victim.refused = True
            self._leave_nvme(victim)
        return self._nvme.num_free > 0

    def _leave_dram(self, chunk: Chunk) -> None:
        self._dram.take_back(chunk.dram_slot)
        chunk.dram, chunk.dram_slot = Dram.ABSENT, -1
        chunk.from_nvme = False
        if chunk.nvme is Nvme.READY and not chunk.dropped:
            self.look_ahead.has_gone(chunk)
        self._forget_if_nowhere(chunk)

    def _leave_nvme(self, chunk: Chunk) -> None:
        self._nvme.take_back(chunk.nvme_slot)
        if not chunk.dropped:
            self.index.unbind(chunk)
        chunk.nvme, chunk.nvme_slot, chunk.checksum = Nvme.ABSENT, -1, b""
        self.room.place(chunk)
        self._forget_if_nowhere(chunk)

    def _forget_if_nowhere(self, chunk: Chunk) -> None:
        if chunk.dram is Dram.ABSENT and chunk.nvme is Nvme.ABSENT and not chunk.dropped:
            if chunk.holds == 0:
                self.counts["lost"] += 1
            self._forget(chunk)

    def _free_if_dropped(self, chunk: Chunk) -> None:
        if not chunk.dropped or chunk.holds:
            return
        if chunk.dram is not Dram.ABSENT:
            self._leave_dram(chunk)
        if chunk.nvme is not Nvme.ABSENT and not chunk.reads:
            self._leave_nvme(chunk)

    def check_integrity(self) -> None:
        """Assert the invariants above. Cost: all chunks; for tests and idle moments."""
        check_integrity(self.index, self._dram, self._nvme, nvme_lost=self._nvme_lost)

    def num_held(self) -> int:
        """Chunks that a transfer holds now; zero when nothing is in flight."""
        return sum(chunk.holds > 0 for chunk in self._dram.owned.values())
