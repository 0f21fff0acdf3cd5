# SPDX-License-Identifier: Apache-2.0
"""Published policies do on sequences made by hand what their papers say."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from attnstore_lab.sim.baselines import (
    BASELINES,
    Arc,
    Baseline,
    LeCaR,
    S3Fifo,
    SecondUse,
    WTinyLfu,
)


def used(cache: Baseline, chunks: list[int]) -> set[int]:
    """What is in the cache after these, all of which are below 1,000."""
    for chunk in chunks:
        cache.use(chunk)
    return {chunk for chunk in range(1000) if chunk in cache}


def num_found(cache: Baseline, chunks: list[int]) -> int:
    found = 0
    for chunk in chunks:
        found += chunk in cache
        cache.use(chunk)
    return found


@pytest.mark.parametrize("make", BASELINES.values(), ids=BASELINES.keys())
@pytest.mark.parametrize("capacity", [1, 2, 3, 10, 50])
def test_no_more_is_held_than_there_is_room_for(
    make: Callable[[int], Baseline], capacity: int
) -> None:
    rng, cache, seen = Random(capacity), make(capacity), set[int]()
    for step in range(3000):
        chunk = int(rng.paretovariate(0.5)) % 200 if step % 3 else step % 150
        cache.use(chunk)
        seen.add(chunk)
        held = {chunk for chunk in range(200) if chunk in cache}
        assert len(held) <= capacity
        assert held <= seen
    assert held, "and something is"


@pytest.mark.parametrize("make", BASELINES.values(), ids=BASELINES.keys())
def test_the_same_uses_give_the_same_cache(make: Callable[[int], Baseline]) -> None:
    chunks = [int(Random(n).paretovariate(0.7)) % 300 for n in range(2000)]
    assert used(make(20), chunks) == used(make(20), chunks)


def test_second_use_takes_what_comes_twice_and_forgets_after_four_times_the_capacity() -> None:
    assert used(SecondUse(2), [1, 2, 3]) == set()
    assert used(SecondUse(2), [1, 2, 1]) == {1}
    eight = [10, 11, 12, 13, 14, 15, 16]
    assert used(SecondUse(2), [1, *eight, 1]) == {1}
    assert used(SecondUse(2), [1, *eight, 17, 1]) == set()
    # LRU among those: 1 is used again, so 2 goes, and comes back as its ghost is remembered.
    assert used(SecondUse(2), [1, 1, 2, 2, 1, 3, 3]) == {1, 3}
    assert used(SecondUse(2), [1, 1, 2, 2, 1, 3, 3, 2]) == {2, 3}


def test_s3fifo_lets_what_comes_once_go_and_keeps_what_came_often() -> None:
    cache = S3Fifo(10)  # a small queue of one
    held = used(cache, [1, 1, 1, 2, *range(100, 108)])
    assert held == {1, 2, *range(100, 108)}
    # The first of the small queue came often: to the main one. The second did not: it goes.
    assert used(cache, [108]) == {1, *range(100, 109)}
    assert used(cache, list(range(200, 220))) >= {1}
    # A ghost that comes back goes to the main queue at once.
    assert 210 in used(cache, [210])
    assert 210 in used(cache, list(range(300, 320)))


def test_s3fifo_clears_the_main_queue_like_a_clock() -> None:
    cache = S3Fifo(2)
    # 1 and 2 go to the main queue one after the other; 1, which is not used there, goes first.
    assert used(cache, [1, 1, 1, 2, 2, 2, 3]) == {2, 3}


def test_arc_is_lru_until_something_is_used_again() -> None:
    assert used(Arc(3), [1, 2, 3, 4]) == {2, 3, 4}
    assert used(Arc(3), [1, 1, 2, 3, 4, 5]) == {1, 4, 5}, "a scan leaves what was used twice"


def test_arc_shares_the_room_out_by_what_its_ghosts_say() -> None:
    cache = Arc(4)
    used(cache, [1, 1, 2, 2, 3, 4, 5])  # 3 is a ghost of those that were used once
    assert cache.for_once == 0
    used(cache, [3])
    assert cache.for_once == 1, "there was too little room for those"
    assert 3 in cache.more


def test_w_tinylfu_admits_what_was_asked_for_more_often() -> None:
    cache = WTinyLfu(4)  # a window of one, and three behind
    often = [1, 2, 3] * 3
    assert used(cache, [*often, 10, 11, 12, 13]) == {1, 2, 3, 13}
    # 10 has come more often than the one that would go by now.
    assert 10 in used(cache, [10] * 5 + [14])


def test_w_tinylfu_halves_its_counts() -> None:
    cache = WTinyLfu(4)
    used(cache, [1] * 39)
    assert cache.counts[1] == WTinyLfu.COUNT_MAX
    used(cache, [1])
    assert cache.counts[1] == WTinyLfu.COUNT_MAX // 2


def test_lecar_trusts_the_expert_that_is_blamed_less() -> None:
    scans = LeCaR(8)
    for start in range(100, 900, 10):  # five that come again and again, and scans between
        used(scans, [*range(5), *range(start, start + 10)])
    assert scans.weights[1] > 0.9, "LRU gives up what comes back"
    phases = LeCaR(10)
    for start in range(0, 900, 10):  # what was used often is not used any more
        chunks = list(range(start, start + 10))
        num_found(phases, chunks * 3)
    assert phases.weights[0] > phases.weights[1]


def test_scans_leave_what_comes_often_to_those_that_stand_them() -> None:
    chunks = [c for n in range(100, 900, 10) for c in (*range(5), *range(n, n + 10))]
    for name in ("s3fifo", "w-tinylfu", "lecar", "second-use"):  # ARC needs them closer
        assert num_found(BASELINES[name](10), chunks) > 0.8 * 5 * 80, name
