# SPDX-License-Identifier: Apache-2.0
"""Bounds that are learned from rounding: never wider than the usual one, and slow to trust. Wrong
KV that passes as rounding teaches next to nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import combinations, count
from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.policy.kv_compare import BOUND
from attnstore_vllm.policy.learned_bound import (
    FACTOR,
    HITS,
    LEAST,
    PAIRS,
    SHOWN,
    STEP,
    TIMES,
    VERSION,
    LearnedBound,
    as_json,
    bounds_from,
)

USUAL = [0.01] * PAIRS
WRONG = 0.45
"""It passes at first."""


NOTHING = LearnedBound()


def learned(distances: Iterable[float], begun: LearnedBound = NOTHING) -> LearnedBound:
    """Each of a hit and a chunk of its own."""
    for number, distance in zip(count(begun.pairs), distances, strict=False):
        begun = begun.and_one(distance, number, b"%d" % number)
    return begun


@pytest.mark.parametrize(
    ("seen", "value"),
    [
        ([0.0] * (PAIRS - 1), BOUND),
        ([0.0] * PAIRS, LEAST),
        ([0.01] * PAIRS, LEAST),
        ([*[0.0] * PAIRS, 0.02], LEAST),
        ([*[0.0] * PAIRS, 0.02, 0.02], LEAST),
        ([*[0.0] * PAIRS, 0.02, 0.02, 0.02], 0.2),
        ([*[0.02] * PAIRS, 0.026], 0.25),
        ([*[0.02] * PAIRS, 0.3], 0.35),
        ([*[0.0] * PAIRS, 0.2, 0.2, 0.2], BOUND),
    ],
)
def test_the_bound(seen: list[float], value: float) -> None:
    assert learned(seen).value == pytest.approx(value)


@given(st.lists(st.floats(0.0, BOUND), max_size=100))
def test_what_three_hits_have_shown_is_far_within_it(distances: list[float]) -> None:
    bound = learned(distances)
    assert LEAST <= bound.value <= BOUND
    shown = sorted(distances)[: 1 - SHOWN]
    assert all(FACTOR * one <= bound.value + 1e-6 or bound.value == BOUND for one in shown)


@given(st.permutations([0.011, 0.017, 0.02, *USUAL]))
def test_all_of_rounding_is_far_within_it(distances: list[float]) -> None:
    assert learned(distances).value >= FACTOR * max(distances)


@pytest.mark.parametrize("at", [0, 10, PAIRS - 1, PAIRS])
@pytest.mark.parametrize("of", ["one chunk", "one hit", "two hits"])
def test_wrong_kv_that_passes_teaches_next_to_nothing(at: int, of: str) -> None:
    """Be it a chunk that many hits have, or a hit with many chunks; early or late."""
    bound = learned(USUAL[:at])
    for number in range(2 if of == "two hits" else 20):
        hit = 1000 if of == "one hit" else 1000 + number
        key = b"wrong" if of == "one chunk" else b"wrong %d" % number
        bound = bound.and_one(WRONG, hit, key, is_new=of != "one chunk" or not number)
    bound = learned(USUAL, bound)
    assert bound.value <= FACTOR * TIMES * 0.01 + STEP < WRONG
    again = bounds_from(json.loads(json.dumps(as_json([bound]))), 1)
    assert learned(USUAL, *again).value == bound.value, "nor at the next start"


def test_what_rounding_shows_again_and_again_does_widen_it() -> None:
    """As a crowd does that has not come before."""
    bound = learned(USUAL)
    assert bound.value == LEAST
    assert learned([0.05] * SHOWN, bound).value == pytest.approx(0.4)


def test_few_hits_are_not_enough_though_they_have_many_chunks() -> None:
    bound = LearnedBound()
    for number in range(4 * PAIRS):
        bound = bound.and_one(0.001, number % (HITS - 1), b"%d" % number)
    assert bound.value == BOUND
    assert bound.and_one(0.001, HITS, b"another").value == LEAST


def test_it_never_gets_narrower_once_it_is_learned() -> None:
    chance = Random(1)
    bound = learned(USUAL)
    for _ in range(3000):
        before = bound.value
        hit, key = chance.randrange(30), b"%d" % chance.randrange(30)
        bound = bound.and_one(chance.random() ** 4 * before, hit, key)
        assert bound.value >= before
        assert len(bound.farthest) == HITS


@given(st.lists(st.lists(st.floats(0.0, BOUND), max_size=40), min_size=1, max_size=4))
def test_it_is_read_as_it_was_written(groups: list[list[float]]) -> None:
    bounds = [learned(group) for group in groups]
    found = bounds_from(json.loads(json.dumps(as_json(bounds))), len(bounds))
    assert [one.value for one in found] == [one.value for one in bounds]
    assert as_json(found) == as_json(bounds)


def test_what_was_written_of_another_distance_is_learned_anew() -> None:
    """One over all blocks of a chunk, which is smaller: the first version had it. The second one
    may have been widened by pairs that were never seen."""
    assert bounds_from([[40, 0.01]], 1) == [LearnedBound()]
    for version in (1, 2, 3, VERSION + 1):
        said = {"version": version, "groups": [[40, [0.01] * HITS]]}
        assert bounds_from(said, 1) == [LearnedBound()]


ZEROS = [0.0] * HITS


@pytest.mark.parametrize(
    "groups",
    [
        None, 7, {}, [], [[40, ZEROS]], [[40, ZEROS], [40, [-0.1]]], [[40, ZEROS], [40, [0.6]]],
        [[40, ZEROS], [-1, ZEROS]], [[40, ZEROS], [10**5000, ZEROS]], [[40, ZEROS], [40, [nan]]],
        [[40, ZEROS], [40, [inf]]], [[40, ZEROS], "40"], [[40, ZEROS], [40, 0.0]],
        [[40, ZEROS], [40, ZEROS, 1]], [[40, ZEROS], [40.5, ZEROS]], [[40, ZEROS], [40, ["0"]]],
        [[40, ZEROS], [40, [*ZEROS, 0.0]]], [[40, ZEROS], [40, [10**5000]]],
    ],
)  # fmt: skip
def test_anything_else_tells_nothing(groups: object) -> None:
    for found in (groups, {"version": VERSION, "groups": groups}):
        assert bounds_from(found, 2) == [LearnedBound()] * 2


def test_two_wrong_chunks_count_as_two_in_any_order() -> None:
    """A pair may be of one entry's hit and of another's chunk."""
    usual = [(hit, b"%d" % (hit % 30), 0.005) for hit in range(100, 140)]
    for seed in range(300):
        random, bound = Random(seed), NOTHING
        pairs = [(hit, key, random.uniform(0.25, 0.35)) for hit in range(8) for key in (b"a", b"b")]
        pairs += usual
        random.shuffle(pairs)
        for hit, key, distance in pairs:
            bound = bound.and_one(distance, hit, key)
            of_hits, of_keys = ({far[at] for far in bound.farthest} for at in (1, 2))
            assert len(of_hits) == len(of_keys) == len(bound.farthest)
        assert bound.value == LEAST


HISTORIES = [*range(300), 1232, 1379, 2437]
"""Seeds. The last ones widened a bound by a pair that was never seen."""


def third_of(seen: set[tuple[float, int, bytes]]) -> float:
    """The largest distance that three pairs of other hits and other chunks each have shown."""
    best = 0.0
    for three in combinations(sorted(seen, reverse=True), 3):
        if all(len({pair[at] for pair in three}) == 3 for at in (1, 2)):
            best = max(best, three[2][0])
    return best


def some_pairs(random: Random) -> list[tuple[float, int, bytes]]:
    """Of few hits that have few chunks, in any order."""
    num_hits, num_keys = random.randint(1, 5), random.randint(1, 5)
    pairs: list[tuple[float, int, bytes]] = []
    for _ in range(random.randint(3, 25)):
        distance = random.choice([random.uniform(0.2, 0.4), 0.3, 0.005])
        pairs.append((distance, random.randint(0, num_hits), b"%d" % random.randint(0, num_keys)))
    if random.random() < 0.5:
        pairs = [pair for pair in pairs if pair[1] == 0 or pair[2] == b"0"]
    return pairs


def test_no_more_is_believed_than_three_hits_have_shown() -> None:
    """Compared with all threes there are. Nor is less believed than before."""
    for seed in HISTORIES:
        bound, seen = NOTHING, set[tuple[float, int, bytes]]()
        for pair in some_pairs(Random(seed)):
            before, bound = bound.rounding, bound.and_one(*pair)
            seen.add(pair)
            shown = third_of(seen)
            assert before <= bound.rounding <= min(max(seen)[0], TIMES * shown), seed
            assert len(bound.farthest) < SHOWN or bound.farthest[SHOWN - 1].distance <= shown, seed


def test_a_wrong_hit_and_a_wrong_chunk_count_as_two() -> None:
    """However many chunks the one has, and hits the other."""
    for seed in range(300):
        random, bound = Random(seed), NOTHING
        wrong = [(0, b"wrong %d" % key) for key in range(random.randint(2, 5))]
        wrong += [(hit, b"wrong") for hit in range(random.randint(2, 5))]
        pairs = [(random.uniform(0.25, 0.4), hit, key) for hit, key in wrong]
        usual = [(0.005, hit, b"%d" % hit) for hit in range(20, 60)]
        early = random.randint(0, 6)
        pairs += usual[:early]
        random.shuffle(pairs)
        for distance, hit, key in pairs + usual[early:]:
            if distance <= bound.value:
                bound = bound.and_one(distance, hit, key)
        assert bound.value == LEAST, seed


def test_a_pair_between_two_that_were_far_apart_does_not_narrow_it() -> None:
    """It is of the hit of the one, and of the other's chunk."""
    bound = learned([*USUAL, 0.05, 0.05, 0.05])
    one, two, _ = bound.farthest[:SHOWN]
    assert bound.and_one(0.051, one.hit, two.key).value >= bound.value
    assert bound.and_one(0.051, two.hit, one.key).value >= bound.value
