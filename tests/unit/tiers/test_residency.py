# SPDX-License-Identifier: Apache-2.0
"""Each transition of a chunk, and that no slot is given away while something touches it.

It is long since each transition of a chunk has its case here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import Run, Visit, unknown_run
from attnstore_vllm.store import lookup
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.types import NVME, StoreFailure
from tests.helpers import CHUNK_TOKENS, lru, name_of, num_dirty, sequence_of, tokens_of

CHECKSUM = b"c" * 16


def name(conversation: int, num_tokens: int = 16) -> ChunkName:
    return name_of(sequence_of(tokens_of(conversation, num_tokens)), 0)


class Checked(Residency):
    """A residency of 2 DRAM and 3 NVMe slots whose chunks go through whole moves at once."""

    def save(self, chunk_name: ChunkName) -> Chunk:
        chunk = self.begin_save(chunk_name)
        assert chunk is not None
        self.finish_save(chunk)
        return chunk

    def write_back(self) -> Chunk:
        chunk = self.begin_store(self.nvme)
        assert chunk is not None
        self.finish_store(self.nvme, chunk, CHECKSUM)
        return chunk

    def save_to_nvme(self, chunk_name: ChunkName) -> Chunk:
        chunk = self.save(chunk_name)
        assert self.write_back() is chunk
        return chunk


def checked(dram_slots: int, nvme_slots: int) -> Checked:
    residency = Checked(dram_slots, nvme_slots, lru, chunk_tokens=CHUNK_TOKENS)
    residency.nvme.open(0, nvme_slots)
    return residency


@pytest.fixture
def tiers() -> Iterator[Checked]:
    residency = checked(2, 3)
    yield residency
    residency.check_integrity()


def place(chunk: Chunk) -> tuple[State, State]:
    return chunk.dram.state, chunk.at(NVME).state


def push_out_of_dram(tiers: Checked) -> None:
    tiers.save(name(801))
    tiers.save(name(802))


# ---- saving ----------------------------------------------------------------------------


def test_a_save(tiers: Checked) -> None:
    chunk = tiers.begin_save(name(1))
    assert chunk is not None
    assert place(chunk) == (State.SAVING, State.ABSENT)
    assert chunk.dram.uses == 1
    assert not chunk.usable
    assert tiers.index.get(name(1).key) is chunk
    tiers.finish_save(chunk)
    assert place(chunk) == (State.READY, State.ABSENT)
    assert (chunk.dram.uses, chunk.usable) == (0, True)
    assert (num_dirty(tiers), tiers.dram.num_used, tiers.nvme.num_used) == (1, 1, 0)
    assert tiers.counts == {"saved": 1}


def test_what_is_stored_is_not_saved_again(tiers: Checked) -> None:
    chunk = tiers.save(name(1))
    assert tiers.begin_save(name(1)) is None
    tiers.save(name(2))
    tiers.use([chunk])  # as begin_save of a known chunk does
    assert tiers.begin_save(name(1)) is None
    assert tiers.dram.num_used == 2


def test_saving_a_known_chunk_makes_it_recently_used(tiers: Checked) -> None:
    first, second = tiers.save(name(1)), tiers.save(name(2))
    assert tiers.begin_save(name(1)) is None
    tiers.save(name(3))
    assert (first.dropped, second.dropped) == (False, True)


def test_a_request_that_asks_again_is_looked_at_anew_where_something_has_changed(
    tiers: Checked,
) -> None:
    chunk, other = tiers.save_to_nvme(name(1)), tiers.save(name(2))
    visit, another = Visit(0, unknown_run(1.0), unknown_run(1.0)), unknown_run(2.0)
    looked = lookup.Lookup(sequence_of(tokens_of(1, 16)))
    tiers.look_ahead.append("waits")

    def is_wanted_so() -> bool:
        return lookup.is_wanted_so(tiers, looked, 16, "waits", [Piece(chunk, 0, 16)], visit)

    def ask() -> None:
        tiers.use([chunk], visit.own)
        tiers.dram.want("waits", [chunk])

    assert not is_wanted_so()
    ask()
    assert is_wanted_so()
    assert not lookup.is_wanted_so(tiers, looked, 16, None, [Piece(chunk, 0, 16)], visit)
    assert not lookup.is_wanted_so(tiers, looked, 16, "waits", [Piece(other, 0, 16)], visit)
    tiers.use([chunk], another)  # it stands in the orders as another one's
    assert not is_wanted_so()
    ask()
    chunk.refused_by.add(NVME)  # a use gives it another chance
    assert not is_wanted_so()
    ask()
    assert is_wanted_so()
    tiers.leave_dram(chunk)  # to be fetched
    assert not is_wanted_so()


def test_a_save_without_room_is_dropped_and_counted(tiers: Checked) -> None:
    for number in (1, 2):
        tiers.begin_save(name(number))  # held: nothing can go
    assert tiers.begin_save(name(3)) is None
    assert tiers.counts == {"dropped": 1}
    assert tiers.index.get(name(3).key) is None


def test_a_state_takes_no_other_states_place(tiers: Checked) -> None:
    """Nor when it is computed again, while only NVMe has both."""

    def save(number: int, num_tokens: int) -> None:
        state = tiers.begin_save(name(number, num_tokens), again=True, is_alone=True)
        assert state is not None
        tiers.finish_save(state)

    for number, num_tokens in ((1, 8), (1, 16), (2, 16)):
        save(number, num_tokens)
        tiers.write_back()
    save(3, 16)
    save(1, 16)
    assert tiers.index.get(name(1, 8).key) is not None
    assert "superseded" not in tiers.counts


def test_a_longer_chunk_supersedes_its_tails(tiers: Checked) -> None:
    tail = tiers.save(name(1, 5))
    whole = tiers.save(name(1, 16))
    assert tail.dropped
    assert tiers.counts["superseded"] == 1
    assert (tiers.dram.num_used, tiers.index.get(tail.name.key)) == (1, None)
    assert tiers.begin_save(name(1, 5)) is None  # the longer one has all its tokens
    assert tiers.begin_store(tiers.nvme) is whole  # the tail is not written any more


def test_a_tail_stays_until_the_longer_chunk_is_ready(tiers: Checked) -> None:
    tail = tiers.save(name(1, 5))
    whole = tiers.begin_save(name(1, 16))
    assert whole is not None
    assert tail.usable
    tiers.finish_save(whole)
    assert tail.dropped


def test_a_tail_that_is_being_saved_is_not_superseded(tiers: Checked) -> None:
    tail = tiers.begin_save(name(1, 5))
    assert tail is not None
    tiers.save(name(1, 16))
    assert not tail.dropped
    tiers.finish_save(tail)
    assert tail.usable


def test_a_held_tail_keeps_its_slot_when_superseded(tiers: Checked) -> None:
    tail = tiers.save(name(1, 5))
    tiers.hold(tail)
    tiers.save(name(1, 16))
    assert tail.dropped
    assert tiers.dram.num_used == 2
    assert tiers.begin_save(name(2)) is not None  # the whole one goes, not the held tail
    assert place(tail)[0] is State.READY
    tiers.check_integrity()
    tiers.release(tail)
    assert (place(tail)[0], tiers.dram.num_used) == (State.ABSENT, 1)


# ---- eviction --------------------------------------------------------------------------


def test_capacity_is_never_exceeded(tiers: Checked) -> None:
    for number in range(20):
        tiers.save_to_nvme(name(number))
        assert tiers.dram.num_used <= 2
        assert tiers.nvme.num_used <= 3
        tiers.check_integrity()
    assert (tiers.dram.num_used, tiers.nvme.num_used) == (2, 3)


def test_evicting_a_clean_chunk_loses_nothing(tiers: Checked) -> None:
    chunk = tiers.save_to_nvme(name(1))
    push_out_of_dram(tiers)
    assert place(chunk) == (State.ABSENT, State.READY)
    assert chunk.usable and tiers.counts["lost"] == 0


def test_evicting_a_dirty_chunk_loses_it_and_counts(tiers: Checked) -> None:
    chunk = tiers.save(name(1))
    push_out_of_dram(tiers)
    assert chunk.dropped and tiers.counts["lost"] == 1
    assert tiers.index.get(name(1).key) is None


def test_a_clean_chunk_goes_before_an_older_dirty_one(tiers: Checked) -> None:
    dirty = tiers.save(name(1))
    clean = tiers.save(name(2))
    assert tiers.begin_store(tiers.nvme) is clean
    tiers.finish_store(tiers.nvme, clean, b"c" * 16)
    tiers.save(name(3))
    assert (dirty.dram.state, clean.dram.state) == (State.READY, State.ABSENT)


def test_a_held_chunk_is_never_evicted(tiers: Checked) -> None:
    held = tiers.save_to_nvme(name(1))
    tiers.hold(held)
    for number in range(2, 6):
        tiers.save(name(number))
        assert held.dram.state is State.READY
    tiers.release(held)
    tiers.use([tiers.save(name(7))])
    tiers.save(name(8))
    assert held.dram.state is State.ABSENT


def test_a_full_nvme_gives_up_its_oldest_whether_or_not_dram_has_it(tiers: Checked) -> None:
    chunks = [tiers.save_to_nvme(name(number)) for number in range(3)]
    # 0 was pushed out of DRAM and is on NVMe only; 1 and 2 are in both.
    assert [chunk.dram.state for chunk in chunks] == [State.ABSENT, State.READY, State.READY]
    tiers.use([chunks[0]])
    tiers.use([chunks[2]])
    tiers.save_to_nvme(name(4))  # evicts 1 from DRAM, then from NVMe
    assert [chunk.usable for chunk in chunks] == [True, False, True]
    assert tiers.counts["evicted_nvme"] == tiers.counts["lost"] == 1
    tiers.use([chunks[0]])
    tiers.save_to_nvme(name(5))  # evicts 4 or 2 from DRAM, and 2 from NVMe
    assert chunks[2].at(NVME).state is State.ABSENT
    assert tiers.counts["evicted_nvme"] == 2


def test_what_nvme_gave_up_is_not_written_again_and_is_lost_with_its_dram_slot() -> None:
    tiers = checked(2, 1)
    first = tiers.save_to_nvme(name(1))
    second = tiers.save_to_nvme(name(2))
    assert place(first) == (State.READY, State.ABSENT)
    assert tiers.begin_store(tiers.nvme) is None
    tiers.save(name(3))  # the oldest goes, though it is nowhere else: NVMe would not have it
    assert (first.usable, place(second)) == (False, (State.READY, State.READY))
    assert tiers.counts["lost"] == 1
    tiers.check_integrity()


def test_write_back_waits_while_no_nvme_slot_can_go(tiers: Checked) -> None:
    small = checked(3, 1)
    first, second = small.save(name(1)), small.save(name(2))
    assert small.begin_store(small.nvme) is second
    assert small.begin_store(small.nvme) is None  # the only slot is being written
    assert num_dirty(small) == 1
    small.finish_store(small.nvme, second, CHECKSUM)
    assert small.begin_store(small.nvme) is first
    assert second.at(NVME).state is State.ABSENT
    small.check_integrity()


# ---- write-back ------------------------------------------------------------------------


def test_a_write_back(tiers: Checked) -> None:
    chunk = tiers.save(name(1))
    assert tiers.begin_store(tiers.nvme) is chunk
    assert place(chunk) == (State.READY, State.WRITING)
    assert (chunk.dram.uses, chunk.at(NVME).uses) == (1, 1)
    assert chunk.usable  # a load may read the same bytes meanwhile
    tiers.finish_store(tiers.nvme, chunk, CHECKSUM)
    assert place(chunk) == (State.READY, State.READY)
    assert (chunk.dram.uses, chunk.at(NVME).uses, chunk.at(NVME).checksum) == (0, 0, CHECKSUM)
    assert tiers.begin_store(tiers.nvme) is None


def test_what_would_leave_last_is_written_first(tiers: Checked) -> None:
    first, second = tiers.save(name(1)), tiers.save(name(2))
    assert (tiers.begin_store(tiers.nvme), tiers.begin_store(tiers.nvme)) == (second, first)


def test_a_failed_write_back_leaves_the_chunk_in_dram(tiers: Checked) -> None:
    chunk = tiers.save(name(1))
    tiers.begin_store(tiers.nvme)
    tiers.finish_store(tiers.nvme, chunk, StoreFailure.FAILED)
    assert place(chunk) == (State.READY, State.ABSENT)
    assert chunk.usable
    assert tiers.nvme.num_used == 0
    assert tiers.counts["write_failed"] == 1
    assert tiers.begin_store(tiers.nvme) is None  # no retry without a limit


def test_what_is_being_written_is_not_evicted(tiers: Checked) -> None:
    chunk = tiers.save(name(1))
    tiers.begin_store(tiers.nvme)
    for number in (2, 3, 4):
        tiers.save(name(number))
    assert chunk.dram.state is State.READY


@pytest.mark.parametrize("outcome", [CHECKSUM, *StoreFailure])
def test_dropped_while_being_written(tiers: Checked, outcome: bytes | StoreFailure) -> None:
    chunk = tiers.save(name(1))
    tiers.begin_store(tiers.nvme)
    tiers.drop(chunk)
    assert tiers.index.get(name(1).key) is None
    assert (tiers.dram.num_used, tiers.nvme.num_used) == (
        1,
        1,
    )  # the device still reads and writes them
    tiers.check_integrity()
    again = tiers.save(name(1))
    assert again.dram.slot != chunk.dram.slot
    tiers.finish_store(tiers.nvme, chunk, outcome)
    assert place(chunk) == (State.ABSENT, State.ABSENT)
    assert (tiers.dram.num_used, tiers.nvme.num_used) == (1, 0)


# ---- prefetch --------------------------------------------------------------------------


def on_nvme_only(tiers: Checked) -> Chunk:
    chunk = tiers.save_to_nvme(name(1))
    push_out_of_dram(tiers)
    assert place(chunk) == (State.ABSENT, State.READY)
    return chunk


def test_a_prefetch(tiers: Checked) -> None:
    chunk = on_nvme_only(tiers)
    assert tiers.begin_fetch(chunk, tiers.nvme)
    assert place(chunk) == (State.READING, State.READY)
    assert (chunk.dram.uses, chunk.at(NVME).uses) == (1, 1)
    tiers.finish_fetch(chunk, verified=True)
    assert place(chunk) == (State.READY, State.READY)
    assert (chunk.dram.uses, chunk.at(NVME).uses, chunk.came_from) == (0, 0, NVME)


def test_bytes_that_are_not_verified_are_never_ready(tiers: Checked) -> None:
    chunk = on_nvme_only(tiers)
    assert tiers.begin_fetch(chunk, tiers.nvme)
    used = tiers.dram.num_used, tiers.nvme.num_used
    tiers.finish_fetch(chunk, verified=False)
    assert chunk.dropped
    assert place(chunk) == (State.ABSENT, State.ABSENT)
    assert (tiers.dram.num_used, tiers.nvme.num_used) == (used[0] - 1, used[1] - 1)


def test_a_prefetch_without_room_changes_nothing(tiers: Checked) -> None:
    chunk = on_nvme_only(tiers)
    for number in (801, 802):
        known = tiers.index.get(name(number).key)
        assert known is not None
        tiers.hold(known)
    assert not tiers.begin_fetch(chunk, tiers.nvme)
    assert place(chunk) == (State.ABSENT, State.READY)
    assert (chunk.dram.uses, chunk.at(NVME).uses) == (0, 0)
    assert tiers.index.get(name(1).key) is chunk


@pytest.mark.parametrize("verified", [True, False])
def test_dropped_while_being_read(tiers: Checked, verified: bool) -> None:
    chunk = on_nvme_only(tiers)
    assert tiers.begin_fetch(chunk, tiers.nvme)
    slots = chunk.dram.slot, chunk.at(NVME).slot
    tiers.drop(chunk)
    assert (chunk.dram.slot, chunk.at(NVME).slot) == slots
    tiers.check_integrity()
    tiers.finish_fetch(chunk, verified)
    assert place(chunk) == (State.ABSENT, State.ABSENT)
    assert not chunk.usable


def test_an_nvme_slot_that_is_being_read_is_not_given_away() -> None:
    tiers = checked(2, 1)
    chunk = tiers.save_to_nvme(name(1))
    tiers.save(name(2))
    tiers.save(name(3))
    assert tiers.begin_fetch(chunk, tiers.nvme)
    assert tiers.begin_store(tiers.nvme) is None
    tiers.finish_fetch(chunk, verified=True)
    assert tiers.begin_store(tiers.nvme) is not None
    tiers.check_integrity()


# ---- holding and dropping --------------------------------------------------------------


def test_only_ready_chunks_are_held(tiers: Checked) -> None:
    chunk = tiers.begin_save(name(1))
    assert chunk is not None
    with pytest.raises(AssertionError):
        tiers.hold(chunk)
    tiers.finish_save(chunk)
    tiers.drop(chunk)
    with pytest.raises(AssertionError):
        tiers.hold(chunk)
    with pytest.raises(AssertionError):
        tiers.release(chunk)


def test_a_chunk_that_was_dropped_while_held_goes_with_the_last_hold(tiers: Checked) -> None:
    chunk = tiers.save_to_nvme(name(1))
    tiers.hold(chunk)
    tiers.hold(chunk)
    tiers.drop(chunk)
    tiers.drop(chunk)
    tiers.release(chunk)
    assert tiers.dram.num_used == 1
    tiers.release(chunk)
    assert (tiers.dram.num_used, tiers.nvme.num_used) == (0, 0)


def test_dropped_while_being_saved(tiers: Checked) -> None:
    chunk = tiers.begin_save(name(1))
    assert chunk is not None
    tiers.drop_all()
    assert tiers.dram.num_used == 1  # the workers still write into it
    tiers.finish_save(chunk)
    assert (tiers.dram.num_used, num_dirty(tiers)) == (0, 0)
    assert tiers.counts["saved"] == 0


def test_drop_all(tiers: Checked) -> None:
    on_nvme_only(tiers)
    tiers.drop_all()
    assert len(tiers.index) == 0
    assert (tiers.dram.num_used, tiers.nvme.num_used, num_dirty(tiers)) == (0, 0, 0)


# ---- what is worth little --------------------------------------------------------------


def spare(number: int) -> tuple[ChunkName, Run]:
    return name(number), replace(unknown_run(0.0), priority=Priority.LOW_VALUE)


def test_what_is_worth_little_takes_free_slots_and_is_not_written(tiers: Checked) -> None:
    chunk = tiers.begin_save(*spare(1), low_value=True)
    assert chunk is not None
    tiers.finish_save(chunk)
    assert place(chunk) == (State.READY, State.ABSENT)
    assert tiers.begin_store(tiers.nvme) is None
    tiers.use([chunk])  # somebody needs it: now it is worth a write
    assert tiers.begin_store(tiers.nvme) is chunk
    tiers.finish_store(tiers.nvme, chunk, CHECKSUM)


def test_what_is_worth_little_pushes_nothing_else_out(tiers: Checked) -> None:
    clean, dirty = tiers.save_to_nvme(name(1)), tiers.save(name(2))
    assert tiers.begin_save(*spare(3), low_value=True) is None
    assert clean.dram.state is dirty.dram.state is State.READY
    assert "dropped" not in tiers.counts


def test_what_is_worth_little_gives_way_to_its_like(tiers: Checked) -> None:
    chunks = []
    for number in (1, 2, 3):
        chunk = tiers.begin_save(*spare(number), low_value=True)
        assert chunk is not None
        tiers.finish_save(chunk)
        chunks.append(chunk)
    assert [chunk.dropped for chunk in chunks] == [True, False, False]
    assert tiers.save(name(9)).dram.state is State.READY, "it gives way to all else"


def spare_if_room(tiers: Checked, number: int) -> Chunk:
    chunk = tiers.begin_save(*spare(number), low_value=True)
    assert chunk is not None
    chunk.written_if_room = True
    tiers.finish_save(chunk)
    return chunk


def test_what_is_worth_little_may_be_written_behind_all_else() -> None:
    tiers = checked(4, 4)
    chunk, other = spare_if_room(tiers, 1), tiers.save(name(2))
    assert tiers.write_back() is other
    assert tiers.write_back() is chunk
    assert tiers.begin_store(tiers.nvme) is None
    tiers.check_integrity()


def test_what_is_worth_little_is_written_while_there_is_much_room() -> None:
    tiers = checked(8, 8)
    for number in range(6):
        tiers.save_to_nvme(name(number))
    spare_if_room(tiers, 10)
    assert not tiers.writes_if_room(tiers.nvme)
    assert tiers.begin_store(tiers.nvme) is None
    assert tiers.nvme.num_free == 2


def test_what_is_worth_little_and_was_dropped_is_not_written() -> None:
    tiers = checked(4, 4)
    tiers.drop(spare_if_room(tiers, 1))
    assert tiers.begin_store(tiers.nvme) is None
    spare_if_room(tiers, 2)
    tiers.lose(tiers.nvme)
    assert not tiers.writes_if_room(tiers.nvme)


def test_what_is_learned_of_a_run_reaches_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    residency = Residency(4, 4, lru, chunk_tokens=CHUNK_TOKENS)
    told: list[tuple[int, Run]] = []
    monkeypatch.setattr(Departures, "rank", lambda order, run: told.append((id(order), run)))
    run = unknown_run(0.0)
    residency.rank(run)
    dram, nvme = residency.dram, residency.nvme
    orders = (dram.clean, dram.dirty, nvme.order, nvme.waiting)
    assert told == [(id(order), run) for order in orders]
