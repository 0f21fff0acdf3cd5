# SPDX-License-Identifier: Apache-2.0
"""Who makes room in a full tier, and for whom: the order of departure, chunk by chunk.

It is long since each rule of who leaves has its case, over one small store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.policy.eviction.by_return import by_return as by_return_order
from attnstore_vllm.policy.eviction.departures import Departures, departures
from attnstore_vllm.policy.eviction.lru import Lru
from attnstore_vllm.policy.eviction.rules import KEPT_PART, KEPT_S, KEPT_SLOTS
from attnstore_vllm.policy.lookahead import LAST
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import Run, unknown_run
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.types import NVME, StoreFailure
from tests.helpers import CHUNK_TOKENS, lru, name_of, num_dirty, sequence_of, tokens_of

CHECKSUM = b"c" * 16
SLOTS = 4


def name(number: int) -> ChunkName:
    return name_of(sequence_of(tokens_of(number, 16)), 0)


class Tiers(Residency):
    """A residency of SLOTS DRAM slots and three times as many of NVMe, a second older each time."""

    def tick(self) -> None:
        self.now += 10.0

    def save(self, number: int) -> Chunk:
        self.tick()
        chunk = self.begin_save(name(number))
        assert chunk is not None
        self.finish_save(chunk)
        return chunk

    def clean(self, number: int) -> Chunk:
        chunk = self.save(number)
        written = self.begin_store(self.nvme)
        assert written is chunk
        self.finish_store(self.nvme, chunk, CHECKSUM)
        return chunk

    def cold(self, number: int) -> Chunk:
        """On NVMe only. The caller keeps it, or it becomes an entry."""
        chunk = self.clean(number)
        self.leave_dram(chunk)
        return chunk

    def wait(self, request_id: str, *chunks: Chunk) -> None:
        self.look_ahead.append(request_id)
        self.dram.want(request_id, chunks)

    def fetch(self) -> Chunk | None:
        found = self.look_ahead.next_to_fetch()
        if found is None:
            return None
        chunk, whose = found
        assert isinstance(chunk, Chunk)
        if not self.begin_fetch(chunk, self.nvme, whose):
            return None
        assert self.index.learn(chunk, tokens_of_chunk[chunk.name.key])
        self.finish_fetch(chunk, True)
        return chunk


tokens_of_chunk = {name(n).key: name(n).tokens for n in range(40)}


def by_return(num_slots: int) -> Departures:
    return departures("attnstore", num_slots, ReturnEstimator())


@pytest.fixture(params=[lru, by_return])
def tiers(request: pytest.FixtureRequest) -> Iterator[Tiers]:
    policy: Callable[[int], Departures] = request.param
    tiers = Tiers(SLOTS, 3 * SLOTS, policy, chunk_tokens=CHUNK_TOKENS)
    tiers.nvme.open(0, 3 * SLOTS)
    yield tiers
    tiers.check_integrity()


def test_a_read_takes_what_is_clean_and_unwanted_and_the_oldest_of_it(tiers: Tiers) -> None:
    cold = tiers.cold(0)
    clean = [tiers.clean(1), tiers.clean(2)]
    dirty = [tiers.save(3), tiers.save(4)]
    tiers.wait("a", cold)
    assert tiers.fetch() is cold
    assert [chunk.dram.state for chunk in (*clean, *dirty)] == [State.ABSENT, *[State.READY] * 3]


def test_the_deepest_of_a_run_leaves_first_whichever_was_written_first(tiers: Tiers) -> None:
    """The first is written for long, and the others are refused meanwhile. It comes last into the
    order of what may leave, and all behind it are nothing without it."""
    sequence, run = sequence_of(tokens_of(1, SLOTS * CHUNK_TOKENS)), unknown_run(0.0)
    saved = [tiers.begin_save(name_of(sequence, index), run) for index in range(SLOTS)]
    chunks = [chunk for chunk in saved if chunk is not None]
    for chunk in chunks:
        tiers.finish_save(chunk)
    assert [tiers.begin_store(tiers.nvme) for _ in range(SLOTS)] == chunks
    for chunk in chunks[1:]:
        tiers.finish_store(tiers.nvme, chunk, StoreFailure.FAILED)
    tiers.finish_store(tiers.nvme, chunks[0], CHECKSUM)
    left = []
    for number in range(20, 20 + SLOTS):
        here = [chunk for chunk in chunks if chunk.dram.slot >= 0]
        tiers.save(number)
        left += [chunks.index(chunk) for chunk in here if chunk.dram.slot < 0]
    assert left == [*reversed(range(SLOTS))]


def test_a_read_does_not_take_what_is_nowhere_else(tiers: Tiers) -> None:
    cold = [tiers.cold(n) for n in range(3)]
    tiers.wait("a", *cold[:2])
    assert [tiers.fetch() for _ in range(2)] == cold[:2]
    dirty = [tiers.save(n) for n in range(3, 5)]
    tiers.wait("b", cold[2])
    assert tiers.fetch() is None
    written = tiers.begin_store(tiers.nvme)
    assert written is dirty[1]
    tiers.finish_store(tiers.nvme, written, CHECKSUM)
    assert tiers.fetch() is cold[2]
    assert tiers.counts["lost"] == 0


def test_what_is_nowhere_else_makes_room_first_if_reads_come_late(tiers: Tiers) -> None:
    """A disk that is too slow must not keep what is worth little in DRAM."""
    dirty = tiers.save(0)
    clean = [tiers.clean(n) for n in (1, 2)]
    cold = tiers.cold(4)
    newer = tiers.save(5)
    for number in range(400):
        request = f"late {number}"
        tiers.wait(request, cold)
        tiers.dram.leave_queue(request)
    assert tiers.dram.late > 0.9
    tiers.wait("a", cold)
    assert tiers.fetch() is cold
    assert [dirty.dropped, newer.dropped] == [True, False]
    assert all(chunk.dram.state is State.READY for chunk in clean)


def test_what_somebody_waits_for_stays_if_reads_come_late(tiers: Tiers) -> None:
    dirty = tiers.save(0)
    wanted = [tiers.clean(n) for n in range(1, SLOTS)]
    tiers.wait("far", *wanted)
    tiers.dram.reads.observe(0, 10_000)
    tiers.save(9)
    assert dirty.dropped
    assert all(chunk.dram.state is State.READY for chunk in wanted)


def test_of_a_run_what_is_not_written_goes_before_its_beginning_if_reads_come_late(
    tiers: Tiers,
) -> None:
    """Without the beginning it would be of no use."""
    run = unknown_run(tiers.now)
    written, deeper = tiers.clean(0), tiers.save(1)
    tiers.use([written, deeper], run)
    others = [tiers.save(2), tiers.save(3)]
    tiers.dram.reads.observe(0, 10_000)
    tiers.save(4)
    assert [chunk.dram.state for chunk in (written, *others)] == [State.READY] * 3
    assert deeper.dropped


@pytest.mark.parametrize("reads_are_late", [False, True])
def test_a_prompt_keeps_its_written_beginning_if_reads_come_late(
    tiers: Tiers, reads_are_late: bool
) -> None:
    """The rest would be nothing without it: who comes next would rather compute all."""
    sequence, run = sequence_of(tokens_of(1, 5 * CHUNK_TOKENS)), unknown_run(0.0)
    begun = [tiers.begin_save(name_of(sequence, index), run) for index in range(SLOTS)]
    first = begun[0]
    assert first is not None
    tiers.finish_save(first)
    assert tiers.begin_store(tiers.nvme) is first
    tiers.finish_store(tiers.nvme, first, CHECKSUM)
    if reads_are_late:
        tiers.dram.reads.observe(0, 10_000)
    last = tiers.begin_save(name_of(sequence, SLOTS), run)
    assert (last is None, first.dram.state is State.READY) == (reads_are_late, reads_are_late)
    for chunk in (*begun[1:], last):
        if chunk is not None:
            tiers.finish_save(chunk)


@pytest.mark.parametrize("reads_are_late", [False, True])
def test_what_was_computed_again_takes_room_as_new_kv_does_if_reads_come_late(
    tiers: Tiers, reads_are_late: bool
) -> None:
    """Else a prompt whose beginning has left is computed whole at each of its turns."""
    tiers.cold(0)
    dirty = [tiers.save(n) for n in range(1, 1 + SLOTS)]
    if reads_are_late:
        tiers.dram.reads.observe(0, 10_000)
    assert tiers.begin_save(name(0), again=True, yields=True) is None, "its request has ended"
    copy = tiers.begin_save(name(0), again=True)
    assert (copy is not None, dirty[0].dropped) == (reads_are_late, reads_are_late)
    if copy is not None:
        tiers.finish_save(copy)


def test_what_came_too_late_for_one_request_is_not_in_time_for_the_next(tiers: Tiers) -> None:
    cold = tiers.cold(0)
    tiers.wait("first", cold)
    assert tiers.begin_fetch(cold, tiers.nvme, LAST)
    tiers.dram.leave_queue("first")
    late = tiers.dram.late
    assert late > 0
    assert tiers.index.learn(cold, tokens_of_chunk[cold.name.key])
    tiers.finish_fetch(cold, True)
    tiers.wait("second", cold)
    tiers.dram.leave_queue("second")
    assert tiers.dram.reads.late() == late


def test_a_read_takes_it_when_nothing_is_written(tiers: Tiers) -> None:
    """Else requests would wait for a read that never gets room."""
    cold = tiers.cold(0)
    dirty = [tiers.save(n) for n in range(1, 5)]
    tiers.wait("a", cold)
    assert tiers.fetch() is None
    tiers.dram.writes_stalled = True
    assert not tiers.begin_fetch(cold, tiers.nvme, LAST), "nobody waits for it"
    assert tiers.begin_save(name(0), again=True) is None
    assert tiers.fetch() is cold
    assert [chunk.dropped for chunk in dirty] == [True, False, False, False]


def test_what_could_not_be_written_makes_room_and_is_tried_again_when_it_is_used(
    tiers: Tiers,
) -> None:
    chunk = tiers.save(0)
    for _ in range(2):
        assert tiers.begin_store(tiers.nvme) is chunk
        tiers.finish_store(tiers.nvme, chunk, StoreFailure.FAILED)
        assert (num_dirty(tiers), chunk.dram.state) == (0, State.READY)
        tiers.use([chunk])
        assert num_dirty(tiers) == 1
    assert tiers.begin_store(tiers.nvme) is chunk
    tiers.finish_store(tiers.nvme, chunk, StoreFailure.FAILED)
    cold = tiers.cold(1)
    for number in range(2, 5):
        tiers.clean(number)
    tiers.wait("a", cold)
    assert tiers.fetch() is cold
    assert chunk.dropped


def test_what_has_ended_makes_room_before_what_is_clean_and_is_not_written(tiers: Tiers) -> None:
    """Before it ended it was as dirty as the rest; if somebody comes back it is so again."""
    tiers.clean(1)
    over = tiers.save(2)
    tiers.use([over], replace(unknown_run(tiers.now), priority=Priority.ENDED))
    tiers.clean(3)
    tiers.clean(4)
    tiers.save(5)
    assert over.dropped
    again = tiers.save(6)
    tiers.use([again], replace(unknown_run(tiers.now), priority=Priority.ENDED))
    assert again.refused_by == {NVME}
    tiers.use([again])
    assert not again.refused_by
    tiers.leave_dram(again)
    last = tiers.begin_save(name(7), replace(unknown_run(tiers.now), priority=Priority.ENDED))
    assert last is not None
    tiers.finish_save(last)
    assert last.refused_by == {NVME}


def test_what_was_computed_though_nvme_has_it_is_in_dram_again(tiers: Tiers) -> None:
    chunk = tiers.cold(0)
    tiers.wait("a", chunk)
    assert tiers.begin_save(name(0)) is None, "it was in HBM"
    assert tiers.begin_save(name(0), again=True) is chunk
    assert tiers.look_ahead.next_to_fetch() is None, "nobody reads it now"
    assert tiers.begin_save(name(0), again=True) is None, "it is on its way"
    tiers.finish_save(chunk)
    assert (chunk.dram.state, chunk.at(NVME).state, chunk.name.tokens) == (
        State.READY,
        State.READY,
        name(0).tokens,
    )
    assert (num_dirty(tiers), tiers.counts["saved_again"]) == (0, 1)
    tiers.dram.leave_queue("a")
    tiers.dram.place_left()
    for number in range(1, 1 + SLOTS):
        tiers.clean(number)
    assert (chunk.dram.state, chunk.at(NVME).state) == (State.ABSENT, State.READY)


def test_what_begun_requests_leave_is_placed_by_who_decides_what_leaves(tiers: Tiers) -> None:
    chunks = [tiers.clean(number) for number in range(SLOTS)]
    for number, chunk in enumerate(chunks):
        tiers.wait(str(number), chunk)
    for number in range(SLOTS):
        tiers.dram.leave_queue(str(number))
    assert len(tiers.dram.clean) == 0, "a step in which many begin has none of that work"
    tiers.use(chunks[:1])
    tiers.save(SLOTS)
    assert len(tiers.dram.clean) == SLOTS - 1
    assert [chunk.dram.state is State.ABSENT for chunk in chunks].count(True) == 1
    assert chunks[0].dram.state is State.READY, "it was used again since"


def test_what_is_wanted_again_or_goes_before_it_is_placed_stands_in_no_order(tiers: Tiers) -> None:
    wanted, gone, held = (tiers.clean(number) for number in range(3))
    tiers.wait("a", wanted, gone, held)
    tiers.dram.leave_queue("a")
    tiers.wait("b", wanted)
    tiers.drop(gone)
    tiers.hold(held)
    tiers.dram.place_left()
    slots = [slot for slot in range(SLOTS) if slot in tiers.dram.clean]
    assert slots == [held.dram.slot]
    assert (gone.dram.state, wanted.dram.state) == (State.ABSENT, State.READY)
    for number in range(3, 3 + SLOTS):
        tiers.begin_save(name(number))
    assert held.dram.state is State.READY, "a transfer reads it"
    tiers.release(held)


def test_what_can_be_read_again_takes_no_room_from_what_is_dirty_or_wanted(tiers: Tiers) -> None:
    cold = [tiers.cold(n) for n in range(3)]
    tiers.wait("a", *cold[:2])
    assert [tiers.fetch() for _ in range(2)] == cold[:2]
    tiers.save(3)
    tiers.save(4)
    assert tiers.begin_save(name(2), again=True) is None
    assert tiers.counts["dropped"] == 0


def test_it_may_lose_its_place_on_nvme_while_it_is_copied() -> None:
    tiers = Tiers(SLOTS, 1, lru, chunk_tokens=CHUNK_TOKENS)
    tiers.nvme.open(0, 1)
    chunk = tiers.cold(0)
    assert tiers.begin_save(name(0), again=True) is chunk
    other = tiers.clean(1)
    assert (chunk.at(NVME).state, other.at(NVME).state) == (State.ABSENT, State.READY)
    tiers.use([chunk])
    assert num_dirty(tiers) == 0, "its bytes are not there yet"
    tiers.finish_save(chunk)
    assert (chunk.dram.state, num_dirty(tiers)) == (State.READY, 1)
    tiers.check_integrity()


def test_a_read_takes_from_farther_requests_and_from_none_nearer(tiers: Tiers) -> None:
    cold = [tiers.cold(n) for n in range(6)]
    tiers.wait("near", *cold[:2])
    tiers.wait("far", *cold[2:4])
    assert [tiers.fetch() for _ in range(4)] == cold[:4]
    tiers.wait("last", *cold[4:])
    assert tiers.fetch() is None
    tiers.look_ahead.prepend(["first"])
    tiers.dram.want("first", cold[4:5])
    assert tiers.fetch() is cold[4]
    assert [chunk.dram.state for chunk in cold[:4]] == [State.READY] * 3 + [State.ABSENT]
    assert tiers.counts["given_up"] == 1


def test_what_was_given_up_is_fetched_again_when_there_is_room(tiers: Tiers) -> None:
    cold = [tiers.cold(n) for n in range(5)]
    tiers.wait("near", *cold[:2])
    tiers.wait("far", *cold[2:4])
    assert [tiers.fetch() for _ in range(4)] == cold[:4]
    tiers.look_ahead.prepend(["first"])
    tiers.dram.want("first", cold[4:])
    assert tiers.fetch() is cold[4]
    tiers.dram.leave_queue("first")
    assert tiers.fetch() is cold[3]
    assert cold[4].dram.state is State.ABSENT


def test_a_save_takes_nothing_that_a_request_waits_for(tiers: Tiers) -> None:
    cold = tiers.cold(0)
    dirty = [tiers.save(n) for n in range(1, 4)]
    tiers.wait("a", cold)
    assert tiers.fetch() is cold
    tiers.save(5)
    assert cold.dram.state is State.READY
    assert [chunk.dropped for chunk in dirty] == [True, False, False]
    assert tiers.counts["lost"] == 1


@pytest.mark.parametrize("is_behind", [True, False], ids=["on NVMe", "nowhere else"])
def test_a_save_takes_what_waits_behind_a_better_priority(tiers: Tiers, is_behind: bool) -> None:
    """Else one client's requests, which are never reached, keep all of DRAM."""
    make = tiers.clean if is_behind else tiers.save
    wanted = [make(n) for n in range(SLOTS)]
    tiers.look_ahead.insert("next", 0, 1.0)
    tiers.look_ahead.insert("never", 7, 0.0)
    tiers.dram.want("never", wanted)
    for number in range(20, 24):
        tiers.save(number)
    assert [chunk.dram.state is State.READY for chunk in wanted] == [False] * SLOTS
    tiers.look_ahead.remove("next")
    tiers.dram.want("never", [])


def test_a_save_takes_what_can_be_read_again_before_what_cannot(tiers: Tiers) -> None:
    clean = tiers.clean(0)
    dirty = [tiers.save(n) for n in range(1, 4)]
    tiers.save(5)
    assert (clean.dram.state, clean.at(NVME).state) == (State.ABSENT, State.READY)
    tiers.save(6)
    assert [chunk.dropped for chunk in dirty] == [True, False, False]
    assert tiers.counts["lost"] == 1


def test_an_eighth_of_dram_is_kept_for_saves_from_all_but_the_nearest() -> None:
    tiers = Tiers(16, 48, lru, chunk_tokens=CHUNK_TOKENS)
    tiers.nvme.open(0, 48)
    cold = [tiers.cold(n) for n in range(18)]
    tiers.wait("near", *cold[:2])
    tiers.wait("far", *cold[2:])
    while tiers.fetch():
        pass
    assert tiers.dram.num_used == 14
    tiers.dram.leave_queue("near")  # its chunks may go now
    while tiers.fetch():
        pass
    assert tiers.dram.num_used == 16, "it is the nearest itself"
    assert all(chunk.dram.state is State.READY for chunk in cold[2:])


def test_a_hint_takes_no_room_from_whoever_waits(tiers: Tiers) -> None:
    cold = [tiers.cold(n) for n in range(5)]
    tiers.wait("a", *cold[:4])
    while tiers.fetch():
        pass
    assert not tiers.begin_fetch(cold[4], tiers.nvme, LAST)


def test_a_chunk_that_runs_or_is_aborted_for_is_evicted_again(tiers: Tiers) -> None:
    clean = [tiers.clean(n) for n in range(4)]
    tiers.wait("a", clean[0], clean[1])
    tiers.save(10)
    assert clean[2].dram.state is State.ABSENT
    tiers.dram.leave_queue("a")
    tiers.dram.leave_queue("a")
    tiers.save(11)
    assert [chunk.dram.state is State.READY for chunk in clean].count(False) == 2


def test_nvme_keeps_what_is_waited_for_as_long_as_there_is_anything_else(tiers: Tiers) -> None:
    cold = [tiers.cold(n) for n in range(3 * SLOTS)]
    tiers.wait("a", *cold[1:])
    tiers.clean(20)
    assert cold[0].dropped
    assert not any(chunk.dropped for chunk in cold[1:])
    tiers.dram.want("a", cold[1:])
    newest = tiers.begin_save(name(21))
    assert newest is not None
    tiers.finish_save(newest)
    assert tiers.begin_store(tiers.nvme) is newest
    assert sum(chunk.dropped for chunk in cold[1:]) <= 1
    tiers.finish_store(tiers.nvme, newest, CHECKSUM)


def test_what_is_dropped_while_it_is_wanted_is_wanted_no_more(tiers: Tiers) -> None:
    clean = [tiers.clean(n) for n in range(2)]
    tiers.wait("a", *clean)
    tiers.drop(clean[0])
    tiers.drop_all()
    assert tiers.look_ahead.next_to_fetch() is None
    assert tiers.dram.num_used == tiers.nvme.num_used == 0
    tiers.dram.leave_queue("a")


class Stingy(Lru[Run]):
    """Nothing is worth a slot that somebody has."""

    def admits(self, key: Run, over: Run, now: float) -> bool:
        return False


def stingy(num_slots: int) -> Departures:
    return Departures(num_slots, Stingy(lambda run: run.priority))


@pytest.fixture
def full() -> Iterator[Tiers]:
    """NVMe has no free slot, and gives none for what comes."""
    tiers = Tiers(SLOTS, 3 * SLOTS, stingy, chunk_tokens=CHUNK_TOKENS)
    tiers.nvme.open(0, 3 * SLOTS)
    for number in range(3 * SLOTS):
        tiers.cold(number)
    yield tiers
    tiers.check_integrity()


def test_what_is_worth_less_than_all_that_nvme_has_is_not_written(full: Tiers) -> None:
    refused = [full.save(20), full.save(21)]
    assert full.begin_store(full.nvme) is None
    assert (num_dirty(full), full.counts["refused"], full.counts["evicted_nvme"]) == (0, 2, 0)
    assert all(chunk.dram.state is State.READY for chunk in refused)
    full.use([refused[1]], None)
    assert num_dirty(full) == 1  # it is asked for: worth another look
    assert full.begin_store(full.nvme) is None
    assert full.counts["refused"] == 3


def test_what_was_refused_makes_room_for_reads(full: Tiers) -> None:
    for number in range(20, 20 + SLOTS):
        full.save(number)
    assert full.begin_store(full.nvme) is None
    cold = full.index.get(name(3).key)
    assert cold is not None
    full.wait("a", cold)
    assert full.fetch() is cold
    assert full.counts["lost"] == 1


def test_what_is_waited_for_is_written_whatever_it_is_worth(full: Tiers) -> None:
    wanted = full.save(20)
    full.wait("a", wanted)
    assert full.begin_store(full.nvme) is wanted
    assert full.counts["evicted_nvme"] == 1
    full.finish_store(full.nvme, wanted, CHECKSUM)


def test_when_all_of_nvme_is_waited_for_the_farthest_goes(tiers: Tiers) -> None:
    cold = [tiers.cold(n) for n in range(3 * SLOTS)]
    tiers.wait("near", *cold[4:])
    tiers.wait("far", *cold[:4])
    tiers.save(20)
    assert tiers.begin_store(tiers.nvme) is None  # nobody waits for that one
    assert tiers.counts["refused"] == 1
    wanted = tiers.save(21)
    tiers.wait("first", wanted)
    assert tiers.begin_store(tiers.nvme) is wanted
    assert [chunk.dropped for chunk in cold] == [False] * 3 + [True] + [False] * 8
    tiers.finish_store(tiers.nvme, wanted, CHECKSUM)
    assert cold[3] not in tiers.look_ahead.wanted_by


def grown(tiers: Tiers, run: Run, numbers: range, *, dram_only: bool = False) -> list[Chunk]:
    saved = [tiers.begin_save(name(n), run, dram_only=dram_only) for n in numbers]
    chunks = [chunk for chunk in saved if chunk is not None]
    assert len(chunks) == len(numbers)
    for chunk in chunks:
        tiers.finish_save(chunk)
    return chunks


@pytest.fixture
def packed() -> tuple[Tiers, list[Chunk], list[Chunk], Counter[str]]:
    """DRAM is full of one run that no tier behind takes and of a newer one that waits to be
    written. Returns both, and how often an order was asked who leaves."""
    asked = Counter[str]()

    class Asked(Departures):
        def victim(self, now: float, can_go: Callable[[int], bool]) -> int | None:
            asked["who leaves"] += 1
            return super().victim(now, can_go)

    def policy(num_slots: int) -> Departures:
        return Asked(num_slots, by_return_order(ReturnEstimator()))

    tiers = Tiers(KEPT_PART * KEPT_SLOTS, 1, policy, chunk_tokens=CHUNK_TOKENS)
    clean_slots = 2 * KEPT_SLOTS
    clean = grown(tiers, unknown_run(0.0), range(clean_slots), dram_only=True)
    tiers.tick()
    dirty = grown(tiers, unknown_run(tiers.now), range(clean_slots, KEPT_PART * KEPT_SLOTS))
    tiers.tick()
    asked.clear()
    return tiers, clean, dirty, asked


def test_one_decision_is_for_many_slots_of_the_same_runs(
    packed: tuple[Tiers, list[Chunk], list[Chunk], Counter[str]],
) -> None:
    tiers, clean, dirty, asked = packed
    new = unknown_run(tiers.now)
    for number in range(1000, 1000 + KEPT_SLOTS):
        assert tiers.begin_save(name(number), new) is not None
        tiers.now += KEPT_S / 1000
    assert [chunk.dropped for chunk in clean] == [False] * KEPT_SLOTS + [True] * KEPT_SLOTS
    assert not any(chunk.dropped for chunk in dirty)
    assert asked["who leaves"] <= 2
    tiers.check_integrity()


@pytest.mark.parametrize("what", ["comes", "is used", "is known", "is held", "later", "earlier"])
def test_a_decision_is_not_kept_when_something_has_changed(
    packed: tuple[Tiers, list[Chunk], list[Chunk], Counter[str]], what: str
) -> None:
    tiers, clean, dirty, asked = packed
    new = unknown_run(tiers.now)
    assert tiers.begin_save(name(1000), new) is not None
    before = asked["who leaves"]
    left = [chunk for chunk in clean if not chunk.dropped]
    match what:
        case "comes":
            tiers.begin_store(tiers.nvme)
            tiers.drop(dirty[0])
            grown(tiers, unknown_run(0.0), range(1001, 1002), dram_only=True)
        case "is used":
            tiers.use(left[:1], unknown_run(tiers.now))
        case "is known":
            tiers.rank(left[0].run)
        case "is held":
            tiers.hold(*left)
        case "later":
            tiers.now += 2 * KEPT_S
        case "earlier":
            tiers.now -= KEPT_S
    assert tiers.begin_save(name(1002), new) is not None
    assert asked["who leaves"] > before
    if what == "is held":
        tiers.release(*left)
    tiers.check_integrity()


def test_a_small_dram_decides_for_each_slot(tiers: Tiers) -> None:
    """A few slots are a large part of it: what reads risk changes with each."""
    assert tiers.dram.num_slots < KEPT_PART
    for number in range(SLOTS):
        tiers.save(number)
    asked = Counter[str]()
    victim = tiers.dram.dirty.victim

    def counted(now: float, can_go: Callable[[int], bool]) -> int | None:
        asked["who leaves"] += 1
        return victim(now, can_go)

    tiers.dram.dirty.victim = counted  # type: ignore[method-assign]
    for number in range(SLOTS, 2 * SLOTS):
        tiers.save(number)
    assert asked["who leaves"] == SLOTS
