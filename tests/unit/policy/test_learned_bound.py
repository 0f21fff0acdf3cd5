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
    HIT_BITS,
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
from attnstore_vllm.tiers.nvme.aside import LEARNED_MAX
from attnstore_vllm.types import KEY_BYTES

USUAL = [0.01] * PAIRS
WRONG = 0.45
"""It passes at first."""


NOTHING = LearnedBound()
NUMBERS = count(10_000)


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def learned(distances: Iterable[float], begun: LearnedBound = NOTHING) -> LearnedBound:
    """Each of a hit and a chunk of its own."""
    for number, distance in zip(NUMBERS, distances):  # noqa: B905 - the first one has no end
        begun = begun.and_one(distance, number, key_of(number))
    return begun


def restarted(bound: LearnedBound) -> LearnedBound:
    (again,) = bounds_from(json.loads(json.dumps(as_json([bound]))), 1)
    return again


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
        key = key_of(999 if of == "one chunk" else number)
        bound = bound.and_one(WRONG, hit, key)
    bound = learned(USUAL, bound)
    assert bound.value <= FACTOR * TIMES * 0.01 + STEP < WRONG
    assert learned(USUAL, restarted(bound)).value == bound.value, "nor at the next start"


@pytest.mark.parametrize("of", ["one chunk", "one hit", "two chunks"])
def test_what_has_counted_counts_no_more_after_any_number_of_starts(of: str) -> None:
    """A wrong chunk that passes is compared again after each. Of a hit there is none of a process
    that has ended, but its chunks come again."""
    bound = learned(USUAL)
    for start in range(20):
        for chunk in range(2 if of == "two chunks" else 1):
            bound = bound.and_one(0.09, 7 if of == "one hit" else start, key_of(chunk))
        bound = restarted(bound)
        assert bound.value <= FACTOR * TIMES * 0.01 + STEP, start


def test_few_chunks_are_not_enough_though_there_are_many_starts() -> None:
    bound = LearnedBound()
    for start in range(PAIRS):
        for chunk in range(PAIRS - 1):
            bound = restarted(bound.and_one(0.001, start, key_of(chunk)))
    assert bound.value == BOUND
    assert bound.and_one(0.001, PAIRS, key_of(PAIRS)).value == LEAST


def test_what_rounding_shows_again_and_again_does_widen_it() -> None:
    """As a crowd does that has not come before."""
    bound = learned(USUAL)
    assert bound.value == LEAST
    assert learned([0.05] * SHOWN, bound).value == pytest.approx(0.4)


def test_few_hits_are_not_enough_though_they_have_many_chunks() -> None:
    bound = LearnedBound()
    for number in range(4 * PAIRS):
        bound = bound.and_one(0.001, number % (HITS - 1), key_of(number))
    assert bound.value == BOUND
    assert bound.and_one(0.001, HITS, key_of(4 * PAIRS)).value == LEAST


def test_it_never_gets_narrower_once_it_is_learned() -> None:
    chance = Random(1)
    bound = learned(USUAL)
    for _ in range(3000):
        before = bound.value
        hit, key = chance.randrange(30), key_of(chance.randrange(30))
        bound = bound.and_one(chance.random() ** 4 * before, hit, key)
        assert bound.value >= before
        assert len(bound.farthest) == HITS


@given(st.lists(st.lists(st.floats(0.0, BOUND), max_size=40), min_size=1, max_size=4))
def test_it_is_read_as_it_was_written(groups: list[list[float]]) -> None:
    bounds = [learned(group) for group in groups]
    found = bounds_from(json.loads(json.dumps(as_json(bounds))), len(bounds))
    assert found == bounds


def test_what_is_written_is_small() -> None:
    """And has a limit, however many pairs there were."""
    sizes = [len(json.dumps(as_json([learned([0.1] * pairs)] * 80))) for pairs in (100, 1000)]
    assert max(sizes) < LEARNED_MAX
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_what_was_written_of_another_distance_is_learned_anew() -> None:
    """One over all blocks of a chunk, which is smaller: the first version had it. The second one
    may have been widened by pairs that were never seen."""
    assert bounds_from([[40, 0.01]], 1) == [LearnedBound()]
    for version in (1, 2, 3, 4, VERSION + 1):
        said = {"version": version, "groups": [[40, [0.01] * HITS]]}
        assert bounds_from(said, 1) == [LearnedBound()]
        said = {**as_json([learned(USUAL)]), "version": version}
        assert bounds_from(said, 1) == [LearnedBound()]


KEYS = [key_of(number).hex() for number in range(PAIRS)]
FARS = [[0.01, number, key] for number, key in enumerate(KEYS[:HITS])]
OTHER = key_of(1000).hex()


def fars_with(*far: object) -> list[object]:
    return [*FARS[1:], [*far]]


def test_the_samples_are_read() -> None:
    (found,) = bounds_from({"version": VERSION, "groups": [[KEYS, FARS]]}, 1)
    assert found.value == LEAST
    (other,) = bounds_from({"version": VERSION, "groups": [[KEYS, fars_with(0.4, 99, OTHER)]]}, 1)
    assert other.farthest[0] == (0.4, 99, key_of(1000))


@pytest.mark.parametrize(
    "group",
    [
        None, 7, [], {}, "40", [40, [0.01] * HITS], [KEYS, FARS, 1], [KEYS, 0.0], [40, FARS],
        [[*KEYS, OTHER], FARS], [[7], FARS], [["0"], FARS], [["0" * 62], FARS], [["x" * 64], FARS],
        [["0 " * 32], FARS], [KEYS, [*FARS, [0.01, 99, OTHER]]], [KEYS, fars_with(0.01, 99)],
        [KEYS, fars_with(-0.1, 99, OTHER)], [KEYS, fars_with(0.6, 99, OTHER)],
        [KEYS, fars_with(nan, 99, OTHER)], [KEYS, fars_with(inf, 99, OTHER)],
        [KEYS, fars_with("0", 99, OTHER)], [KEYS, fars_with(10**5000, 99, OTHER)],
        [KEYS, fars_with(0.01, -1, OTHER)], [KEYS, fars_with(0.01, 1 << HIT_BITS, OTHER)],
        [KEYS, fars_with(0.01, 99.0, OTHER)], [KEYS, fars_with(0.01, 99, "00")],
        [KEYS, fars_with(0.01, 1, OTHER)], [KEYS, fars_with(0.01, 99, KEYS[1])],
    ],
)  # fmt: skip
def test_anything_else_tells_nothing(group: object) -> None:
    """Nor does it of groups that are whole."""
    whole = [KEYS, FARS]
    for groups in (group, [whole, group], [group, whole], [whole]):
        for found in (groups, {"version": VERSION, "groups": groups}):
            assert bounds_from(found, 2) == [LearnedBound()] * 2


def test_two_wrong_chunks_count_as_two_in_any_order() -> None:
    """A pair may be of one entry's hit and of another's chunk."""
    usual = [(hit, key_of(hit % 30), 0.005) for hit in range(100, 140)]
    for seed in range(300):
        random, bound = Random(seed), NOTHING
        pairs = [
            (hit, key, random.uniform(0.25, 0.35))
            for hit in range(8)
            for key in map(key_of, (98, 99))
        ]
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
        pairs.append((distance, random.randint(0, num_hits), key_of(random.randint(0, num_keys))))
    if random.random() < 0.5:
        pairs = [pair for pair in pairs if pair[1] == 0 or pair[2] == key_of(0)]
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
        wrong = [(0, key_of(100 + key)) for key in range(random.randint(2, 5))]
        wrong += [(hit, key_of(99)) for hit in range(random.randint(2, 5))]
        pairs = [(random.uniform(0.25, 0.4), hit, key) for hit, key in wrong]
        usual = [(0.005, hit, key_of(hit)) for hit in range(20, 60)]
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
