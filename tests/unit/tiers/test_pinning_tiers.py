# SPDX-License-Identifier: Apache-2.0
"""Pinned chunks in both tiers, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.policy.eviction.departures import GROUPS_MAX, SLOTS_MAX, Departures, departures
from attnstore_vllm.policy.eviction.lru import LOOK_MAX
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.tiers.tier import ENDED_MAX
from attnstore_vllm.types import NVME, StoreFailure
from tests.helpers import CHUNK_TOKENS, lru, name_of, sequence_of, tokens_of
from tests.unit.tiers.test_residency_room import CHECKSUM, Tiers

LONG = 1e6


def by_return(num_slots: int) -> Departures:
    return departures("attnstore", num_slots, ReturnEstimator())


def tiers_of(
    slots: int,
    policy: Callable[[int], Departures] = by_return,
    shares: tuple[float, float] = (0.5, 0.5),
) -> Tiers:
    tiers = Tiers(slots, 3 * slots, policy, chunk_tokens=CHUNK_TOKENS, pin_shares=shares)
    tiers.nvme.open(0, 3 * slots)
    return tiers


@pytest.fixture(params=[lru, by_return])
def tiers(request: pytest.FixtureRequest) -> Iterator[Tiers]:
    tiers = tiers_of(4, request.param)
    yield tiers
    tiers.check_integrity()


def pin(tiers: Tiers, chunk: Chunk, seconds: float = LONG) -> None:
    tiers.pinning.pin(chunk, tiers.now + seconds, tiers.now)


def press(tiers: Tiers, first: int, count: int) -> list[Chunk]:
    """Chunks that fill both tiers and push out what can go."""
    return [tiers.clean(first + n) for n in range(count)]


def test_what_is_pinned_stays_in_the_tiers_that_it_is_in(tiers: Tiers) -> None:
    chunks = press(tiers, 0, 3)
    pin(tiers, chunks[0])
    press(tiers, 3, 30)
    assert (chunks[0].dram.state, chunks[0].at(NVME).state) == (State.READY, State.READY)
    assert chunks[1].dropped
    assert tiers.counts["pinned"] == 2


def test_a_pin_follows_the_chunk_to_the_other_tier(tiers: Tiers) -> None:
    cold = tiers.cold(1)
    dirty = tiers.save(0)
    for chunk in (cold, dirty):
        pin(tiers, chunk)
    assert tiers.begin_store(tiers.nvme) is dirty
    tiers.finish_store(tiers.nvme, dirty, CHECKSUM)
    tiers.wait("a", cold)
    assert tiers.fetch() is cold
    tiers.dram.leave_queue("a")
    press(tiers, 3, 30)
    for chunk in (dirty, cold):
        assert (chunk.dram.state, chunk.at(NVME).state) == (State.READY, State.READY)


def test_its_end_makes_it_one_among_others(tiers: Tiers) -> None:
    chunks = press(tiers, 0, 2)
    pin(tiers, chunks[0], 25.0)
    press(tiers, 2, 30)
    assert chunks[0].dropped
    assert len(tiers.dram.pins) == len(tiers.nvme.pins) == 0


def test_nobody_pins_more_than_its_share() -> None:
    tiers = tiers_of(20, shares=(0.2, 0.1))
    chunks = [tiers.save(n) for n in range(20)]
    for chunk in chunks[:5]:
        pin(tiers, chunk)
    assert (tiers.counts["pinned"], tiers.counts["pin_refused"]) == (2, 3)
    other = [name_of(sequence_of(tokens_of(50 + n, 16), "other"), 0, "other") for n in range(4)]
    for name in other:
        theirs = tiers.begin_save(name)
        assert theirs is not None
        tiers.finish_save(theirs)
        pin(tiers, theirs)
    assert len(tiers.dram.pins) == 4
    assert tiers.begin_save(name_of(sequence_of(tokens_of(90, 16)), 0)) is not None
    tiers.check_integrity()


def test_pins_that_have_ended_are_nobodys_share(tiers: Tiers) -> None:
    chunks = [tiers.save(n) for n in range(4)]
    for chunk in chunks[:2]:
        pin(tiers, chunk, 5.0)
    tiers.tick()
    for chunk in chunks[2:]:
        pin(tiers, chunk)
    assert set(tiers.dram.pins) == {chunk.dram.slot for chunk in chunks[2:]}
    assert tiers.counts["pin_refused"] == 0


def test_many_pins_hide_nobody_else() -> None:
    """More of them than a decision looks at, older and poorer than all that can go."""
    slots = 8 * GROUPS_MAX * SLOTS_MAX
    assert slots > 2 * LOOK_MAX
    for policy in (by_return, lru):
        tiers = tiers_of(slots, policy)
        for number in range(slots // 2):
            pin(tiers, tiers.clean(number))
        rest = press(tiers, slots, 4 * slots)
        assert len(tiers.dram.pins) == slots // 2
        assert tiers.counts["dropped"] == 0
        assert tiers.counts["evicted_dram"] == 4 * slots - slots // 2
        assert rest[0].dropped
        assert not rest[-1].dropped
        tiers.check_integrity()


def test_pins_that_end_together_are_let_go_step_by_step() -> None:
    slots = 8 * ENDED_MAX
    tiers = tiers_of(slots)
    for number in range(slots // 2):
        chunk = tiers.save(number)
        tiers.pinning.pin(chunk, LONG, tiers.now)
    for number in range(slots // 2):
        tiers.save(slots + number)
    tiers.now = LONG
    before = len(tiers.dram.pins)
    tiers.save(5 * slots)
    assert len(tiers.dram.pins) == before - ENDED_MAX
    tiers.check_integrity()


def test_what_is_waited_for_and_pinned_is_not_given_up(tiers: Tiers) -> None:
    cold = [tiers.cold(n) for n in range(5)]
    tiers.wait("far", *cold[:4])
    while tiers.fetch():
        pass
    tiers.use(cold[2:4])
    for chunk in cold[2:4]:
        pin(tiers, chunk)
    tiers.look_ahead.prepend(["first"])
    tiers.dram.want("first", cold[4:])
    assert tiers.fetch() is cold[4]
    assert [chunk.dram.state for chunk in cold[:4]] == [
        State.READY,
        State.ABSENT,
        State.READY,
        State.READY,
    ]
    tiers.dram.leave_queue("far")
    press(tiers, 10, 10)
    assert [chunk.dram.state for chunk in cold[2:4]] == [State.READY, State.READY]


def test_what_is_dropped_is_pinned_no_more(tiers: Tiers) -> None:
    chunks = press(tiers, 0, 2)
    for chunk in chunks:
        pin(tiers, chunk)
    tiers.drop(chunks[0])
    assert (len(tiers.dram.pins), len(tiers.nvme.pins)) == (1, 1)
    pin(tiers, chunks[0])
    tiers.drop_all()
    assert len(tiers.dram.pins) == len(tiers.nvme.pins) == 0


def test_a_disk_that_is_lost_takes_its_pins_along(tiers: Tiers) -> None:
    clean, cold, written = tiers.clean(0), tiers.cold(2), tiers.save(1)
    assert tiers.begin_store(tiers.nvme) is written
    for chunk in (clean, written, cold):
        pin(tiers, chunk)
    tiers.lose(tiers.nvme)
    pin(tiers, written)
    assert len(tiers.nvme.pins) == 0
    assert set(tiers.dram.pins) == {clean.dram.slot, written.dram.slot}
    tiers.finish_store(tiers.nvme, written, StoreFailure.FAILED)


def test_the_chunk_that_takes_a_tails_place_is_pinned_in_its_stead() -> None:
    tiers = tiers_of(4, shares=(0.25, 0.25))  # one slot of DRAM
    tokens = tokens_of(7, 16)
    tail = tiers.begin_save(name_of(sequence_of(tokens[:9]), 0))
    assert tail is not None
    tiers.finish_save(tail)
    assert tiers.begin_store(tiers.nvme) is tail
    tiers.finish_store(tiers.nvme, tail, CHECKSUM)
    pin(tiers, tail)
    whole = tiers.begin_save(name_of(sequence_of(tokens), 0))
    assert whole is not None
    tiers.finish_save(whole)
    assert tail.dropped
    assert list(tiers.dram.pins) == [whole.dram.slot]
    assert tiers.counts["pin_refused"] == 0
    tiers.check_integrity()


def test_use_by_others_neither_ends_a_pin_nor_is_forgotten(tiers: Tiers) -> None:
    chunk = tiers.clean(0)
    pin(tiers, chunk, 1000.0)
    for _ in range(3):
        tiers.tick()
        tiers.use([chunk])
    press(tiers, 1, 20)
    assert not chunk.dropped
    tiers.now += 1000.0
    press(tiers, 30, 1)
    assert len(tiers.nvme.pins) == 0


def test_a_pin_that_ends_behind_dram_alone_gives_its_chunk_the_run_that_the_order_has() -> None:
    tiers = tiers_of(4, shares=(0.25, 0.25))
    first, second = press(tiers, 0, 2)
    pin(tiers, first)
    pin(tiers, second, 1.0)
    assert (len(tiers.dram.pins), len(tiers.nvme.pins)) == (1, 2)  # DRAM has no share for it
    tiers.now += 2.0
    tiers.pinning.end(tiers.now)
    assert len(tiers.nvme.pins) == 1
    assert second.run is tiers.nvme.run_of(second)
    tiers.check_integrity()
