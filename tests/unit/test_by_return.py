# SPDX-License-Identifier: Apache-2.0
"""Who leaves first when the expected return decides."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

import pytest

from attnstore_vllm.policy.by_return import GROUPS_MAX, ByReturn, Run, runs_of_request
from attnstore_vllm.policy.returns import ReturnEstimator, kind_of

KIND = kind_of(1, None, 1000, is_fresh=True, is_shared=False)


def anything(_: Hashable) -> bool:
    return True


def empty(order: ByReturn, now: float) -> list[Hashable]:
    gone = []
    while len(order):
        gone.append(order.victim(now, anything))
        order.remove(gone[-1])
    assert order.victim(now, anything) is None
    return gone


def test_without_knowledge_the_oldest_run_goes_first_and_its_deepest_chunk_before_the_rest() -> (
    None
):
    order = ByReturn(ReturnEstimator())
    for number, since in enumerate((10.0, 20.0, 40.0)):
        run = Run(number, KIND, since, False)
        for depth in range(3):
            order.use((number, depth), run)
    assert empty(order, 100.0) == [(n, d) for n in range(3) for d in (2, 1, 0)]


def test_a_chunk_is_of_the_run_that_used_it_last() -> None:
    order = ByReturn(ReturnEstimator())
    old, new = Run(1, KIND, 0.0, False), Run(2, KIND, 50.0, False)
    for chunk in "abc":
        order.use(chunk, old)
    for chunk in "abd":
        order.use(chunk, new)
    assert [order.run_of(chunk) for chunk in "abcde"] == [new, new, old, new, None]
    assert empty(order, 60.0) == ["c", "d", "b", "a"]


def test_what_is_held_stays_and_the_next_best_goes() -> None:
    order = ByReturn(ReturnEstimator())
    for number in range(3):
        for depth in range(2):
            order.use((number, depth), Run(number, KIND, float(number), False))
    runs = {number: Run(number, KIND, float(number), False) for number in range(3)}
    assert len({id(run) for run in runs.values()}) == 3
    held = {(0, 0), (0, 1), (1, 1)}
    assert order.victim(9.0, lambda chunk: chunk not in held) in {(1, 0), (2, 1)}
    assert order.victim(9.0, lambda chunk: False) is None


def test_held_runs_at_one_end_do_not_hide_the_others() -> None:
    order = ByReturn(ReturnEstimator())
    for number in range(GROUPS_MAX + 2):
        order.use(number, Run(number, KIND, float(number), False))
    assert order.victim(99.0, lambda chunk: chunk != 0) == 1
    newest = GROUPS_MAX + 1
    assert order.victim(99.0, lambda chunk: chunk == newest) == newest


def trained() -> ReturnEstimator:
    """Long prompts return after a minute; short ones seldom do."""
    estimator, rng = ReturnEstimator(), Random(1)
    events = []
    for number in range(4000):
        long = number % 2
        events.append((float(number), number, long))
        if rng.random() < (0.9 if long else 0.05):
            events.append((number + rng.uniform(50, 70), number, -1))
    for now, number, long in sorted(events):
        if long < 0:
            estimator.arrive([number], now)
        else:
            kind = kind_of(1, None, 40_000 if long else 100, is_fresh=True, is_shared=False)
            estimator.open(number, kind, 1, 4.0, now)
    return estimator


def test_a_decision_finds_the_run_that_is_worth_least() -> None:
    """Held against looking at all of them."""
    estimator, rng = trained(), Random(2)
    kinds = [
        kind_of(turn, None, tokens, is_fresh=True, is_shared=False)
        for turn in (1, 2) for tokens in (100, 4000, 40_000)
    ]  # fmt: skip
    order = ByReturn(estimator)
    runs = [Run(n, rng.choice(kinds), 4.0 * n, False) for n in range(60)]
    for run in runs:
        order.use(run.number, run)
    now, left = 4.0 * 60 + 1, {run.number: run for run in runs}
    least_seen = 0.0
    while left:
        gone = order.victim(now, anything)
        assert isinstance(gone, int)
        worth = {n: estimator.worth(r.kind, now - r.since) for n, r in left.items()}
        # Worth rises with age once and falls once, up to what noise in the estimate makes of it.
        assert worth[gone] <= 1.05 * min(worth.values())
        least_seen = max(least_seen, worth[gone])
        order.remove(gone)
        del left[gone]
    assert least_seen > 0


def ask(
    order: ByReturn, estimator: ReturnEstimator, chunks: list[int], now: float
) -> list[tuple[int, Run]]:
    """A request of whole chunks of 256 tokens, all of which are stored then."""
    last = []
    for chunk in chunks:
        run = order.run_of(chunk)
        if run is None:
            break
        last.append(run)
    found = list(runs_of_request(estimator, last, chunks, 256 * len(chunks), len(chunks), now))
    start = 0
    for count, run in found:
        for chunk in chunks[start : start + count]:
            order.use(chunk, run)
        start += count
    assert start == len(chunks)
    return found


def test_what_conversations_share_is_told_from_what_is_their_own() -> None:
    estimator = ReturnEstimator()
    order = ByReturn(estimator)
    ((count, run),) = ask(order, estimator, [0, 1, 2], 0.0)
    assert (count, run.is_shared) == (3, False)
    first, second = ask(order, estimator, [0, 1, 12, 13], 10.0)  # another one, same beginning
    assert (first[0], first[1].is_shared) == (2, True)
    assert (second[0], second[1].is_shared) == (2, False)
    first, second = ask(order, estimator, [0, 1, 2, 3], 20.0)  # the first one's next turn
    assert (first[0], first[1].is_shared) == (2, True)
    assert (second[0], second[1].is_shared) == (2, False)
    turns = {kind_of(2, 20.0, 1024, is_fresh=False, is_shared=False)}
    assert second[1].kind in turns


def test_a_conversation_alone_shares_nothing() -> None:
    estimator = ReturnEstimator()
    order = ByReturn(estimator)
    for turn in range(1, 6):
        ((count, run),) = ask(order, estimator, list(range(2 * turn)), 30.0 * turn)
        assert (count, run.is_shared) == (2 * turn, False)
    assert run.kind == kind_of(5, 30.0, 2560, is_fresh=False, is_shared=False)


def test_turns_are_counted_also_if_nothing_is_stored_any_more() -> None:
    estimator = ReturnEstimator()
    ask(ByReturn(estimator), estimator, [0, 1], 0.0)
    ((_, run),) = ask(ByReturn(estimator), estimator, [0, 1, 2], 20.0)
    assert run.kind == kind_of(2, 20.0, 768, is_fresh=False, is_shared=False)


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_a_request_without_a_whole_chunk_is_followed_by_nobody(num_chunks: int) -> None:
    estimator = ReturnEstimator()
    runs = list(runs_of_request(estimator, [], [], 100, num_chunks, 0.0))
    assert len(runs) == num_chunks
    assert len(estimator) == 0
