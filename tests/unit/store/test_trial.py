# SPDX-License-Identifier: Apache-2.0
"""When a tier is believed."""

from __future__ import annotations

from operator import attrgetter

import pytest

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.store.trial import NO_PLACE_S, PUT_OFF_MAX, PUT_OFF_S, TRIED_CHUNKS, TierTrial
from attnstore_vllm.types import NVME, SHARED
from tests.helpers import CHUNK_TOKENS, conversation, name_of, sequence_of

source_of = attrgetter("brought_by")


def piece(number: int = 0, tier: str = NVME, group: int = 0, *, ready: bool = True) -> Piece:
    name = name_of(sequence_of(conversation(number)), 0)
    there = {tier: InTier(State.READY)} if tier else {}
    chunk = Chunk(name, InTier(State.READY if ready else State.READING), there, brought_by=tier)
    return Piece(chunk, 0, CHUNK_TOKENS, group=group)


def test_a_tier_is_believed_after_some_chunks() -> None:
    trial = TierTrial([NVME, SHARED], [0], source_of)
    many = [piece(number) for number in range(2 * TRIED_CHUNKS)]
    assert trial.awaits(many) and trial.awaits(many[-1:])
    trial.begin(many)
    for one in many[:TRIED_CHUNKS]:
        assert trial.awaits(many)
        trial.agreed(NVME, 0, one.chunk.name.key)
    assert not trial.awaits(many) and not trial.is_open(NVME)
    assert trial.awaits([*many, piece(9, SHARED)]), "the other one is not"


def test_one_chunk_that_many_requests_have_compared_is_one() -> None:
    """A burst behind one system prompt compares its chunk again and again."""
    trial = TierTrial([NVME], [0], source_of)
    many = [piece(number) for number in range(TRIED_CHUNKS)]
    trial.begin(many)
    for _ in range(TRIED_CHUNKS):
        trial.agreed(NVME, 0, many[0].chunk.name.key)
    assert trial.awaits(many) and trial.is_open(NVME)
    for one in many:
        trial.agreed(NVME, 0, one.chunk.name.key)
    assert not trial.is_open(NVME)


def test_a_short_hit_is_enough() -> None:
    trial = TierTrial([NVME], [0], source_of)
    trial.begin([piece()])
    trial.agreed(NVME, 0, piece().chunk.name.key)
    assert not trial.awaits([piece(1)])


def test_what_was_computed_here_needs_none() -> None:
    trial = TierTrial([NVME], [0], source_of)
    assert not trial.awaits([piece(tier="")])
    trial.agreed("", 0, piece().chunk.name.key)
    assert trial.is_open(NVME)


def test_what_is_still_to_come_up_is_not_served_either() -> None:
    trial = TierTrial([NVME], [0], source_of)
    assert trial.awaits([piece(0, "", ready=True), piece(1, ready=False)])
    assert not trial.awaits([piece(1, "another", ready=False)])


def test_each_group_is_tried() -> None:
    trial = TierTrial([NVME], [0, 2], source_of)
    hit = [piece(0), piece(1), piece(2, group=1), piece(3, group=2)]
    trial.begin(hit)
    for one in hit[:2]:
        trial.agreed(NVME, 0, one.chunk.name.key)
    assert not trial.awaits(hit[:3]), "group 1 is not compared"
    assert trial.awaits(hit)
    trial.agreed(NVME, 2, hit[3].chunk.name.key)
    assert not trial.is_open(NVME)


def test_it_ends_where_nothing_can_be_compared() -> None:
    trial = TierTrial([NVME, SHARED], [0], source_of)
    told = [trial.put_off([piece()], 7.0 + n) for n in range(PUT_OFF_MAX)]
    assert told == PUT_OFF_MAX * [[]]
    assert trial.put_off([piece()], 6.0 + PUT_OFF_MAX + PUT_OFF_S) == [NVME]
    assert not trial.awaits([piece()]) and trial.awaits([piece(0, SHARED)])
    assert trial.put_off([piece()], 7.0 + PUT_OFF_MAX + PUT_OFF_S) == []


def test_a_request_is_put_off_for_what_it_may_not_have_alone() -> None:
    """Nothing of the other tier was to be compared: the group is not, or has passed."""
    trial = TierTrial([NVME, SHARED], [0, 1], source_of)
    passed = piece(1, SHARED)
    trial.begin([passed])
    trial.agreed(SHARED, 0, passed.chunk.name.key)
    hit = [piece(), passed, piece(2, SHARED, group=2)]
    for number in range(PUT_OFF_MAX):
        trial.put_off(hit, float(number))
    assert trial.put_off(hit, PUT_OFF_MAX + PUT_OFF_S) == [NVME]
    assert trial.is_open(SHARED)


@pytest.mark.parametrize("before_s", [0.0, 2 * PUT_OFF_S])
def test_no_burst_ends_it_before_it_could_be_compared(before_s: float) -> None:
    """Nor does one that comes long after a request that leaves nothing."""
    trial = TierTrial([NVME], [0], source_of)
    assert trial.put_off([piece()], 7.0 - before_s) == []
    for number in range(4 * PUT_OFF_MAX):
        assert trial.put_off([piece()], 7.0 + number / 1000) == []
    assert trial.awaits([piece()])
    assert trial.put_off([piece()], 8.0 + PUT_OFF_S) == [NVME]


def test_requests_whose_copies_found_no_place_end_no_trial_for_long() -> None:
    """Others may have had all places. The trial ends all the same, but later."""
    trial = TierTrial([NVME], [0], source_of)
    for number in range(4 * PUT_OFF_MAX):
        assert trial.put_off([piece()], number * PUT_OFF_S) == []
        trial.had_no_place(NVME, number)
        trial.had_no_place(NVME, number)  # another chunk of it
        if number == PUT_OFF_MAX - 1:
            break
    at = number * PUT_OFF_S
    for more in range(1, 4):
        assert trial.put_off([piece()], at + more * PUT_OFF_S) == []
        trial.had_no_place(NVME, number + more)
    assert trial.put_off([piece()], at + NO_PLACE_S) == [NVME]


def test_requests_that_had_a_place_count_beside_those_that_had_none() -> None:
    trial = TierTrial([NVME], [0], source_of)
    for number in range(2 * PUT_OFF_MAX - 2):
        assert trial.put_off([piece()], 0.0) == []
        for _ in range(number % 2 * 2):  # two chunks of it
            trial.had_no_place(NVME, number)
    assert trial.put_off([piece()], PUT_OFF_S) == [], "it is counted from here on"
    assert trial.put_off([piece()], 2 * PUT_OFF_S) == [NVME]


def test_what_failed_is_not_served_though_it_is_held() -> None:
    trial = TierTrial([NVME, SHARED], [0], source_of)
    trial.close(SHARED)
    trial.fail(NVME)
    assert trial.awaits([piece(0, SHARED), piece(1)]) and trial.awaits([piece(1, group=1)])
    assert not trial.awaits([piece(0, SHARED), piece(1, "")])


def test_what_was_served_before_it_failed() -> None:
    """A group that has passed, or all once it is believed; and what is not tried, at any time."""
    trial = TierTrial([NVME], [0, 1], source_of)
    hit = [piece(0), piece(1, group=1)]
    assert not trial.has_served(NVME) and trial.has_served("")
    trial.begin(hit)
    assert not trial.has_served(NVME)
    trial.agreed(NVME, 0, hit[0].chunk.name.key)
    assert trial.is_open(NVME) and trial.has_served(NVME)
    assert not trial.is_held, "nothing was put off"
    trial.put_off([piece(2, group=1)], 0.0)
    assert trial.is_held
    trial.agreed(NVME, 1, hit[1].chunk.name.key)
    assert not trial.is_held
    assert TierTrial([NVME], [0], source_of, tries_all=False).has_served(NVME)
