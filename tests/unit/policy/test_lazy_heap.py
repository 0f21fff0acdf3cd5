# SPDX-License-Identifier: Apache-2.0
"""Keys by rank, against a plain dictionary; and what renewals cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.policy.lazy_heap import SETTLED_MAX, STALE_MAX, LazyHeap

STEPS = st.lists(
    st.tuples(st.sampled_from("srrgtf"), st.integers(0, 6), st.integers(0, 20)), max_size=80
)


@given(STEPS)
def test_against_a_plain_model(steps: list[tuple[str, int, int]]) -> None:
    ranks: dict[int, int] = {}
    heap, most = LazyHeap[int](ranks.get), 0

    def lowest() -> int | None:
        return min(ranks, key=lambda key: (ranks[key], key), default=None)

    for action, key, rank in steps:
        if action == "s":
            is_lower = rank < ranks.get(key, 99)
            ranks[key] = rank
            if is_lower:
                heap.push(rank, key)
        elif action == "r" and key in ranks:
            ranks[key] += rank  # the heap finds it
        elif action == "g":
            ranks.pop(key, None)
        elif action == "t":
            due = {other for other, of in ranks.items() if of <= rank}
            assert set(heap.take(rank, 1000)) == due
            for other in due:
                del ranks[other]
        elif action == "f":
            wanted = [other for other in ranks if other >= key and ranks[other] < rank]
            found = heap.find(lambda other, key=key: other >= key, 1000, rank)  # type: ignore[misc]
            assert found == min(wanted, key=lambda other: (ranks[other], other), default=None)
        most = max(most, len(ranks))
        assert heap.first() == lowest()
        assert len(heap) <= 2 * most + STALE_MAX


def test_a_renewal_leaves_nothing_behind() -> None:
    ends = dict.fromkeys(range(1000), 1.0)
    heap = LazyHeap[int](ends.get)
    for key in ends:
        heap.push(1.0, key)
    for number in range(100):
        for key in ends:
            ends[key] = 2.0 + number
    assert len(heap) == 1000
    assert heap.take(100.0, 1000) == []
    assert len(heap.take(101.0, 1000)) == 1000
    assert len(heap) == 0


def test_keys_that_leave_and_come_again_take_no_memory() -> None:
    ends: dict[int, float] = {}
    heap = LazyHeap[int](ends.get)
    for number in range(10_000):
        key = number % 10
        ends[key] = float(number)
        heap.push(ends[key], key)
        assert len(heap) <= 2 * 10 + STALE_MAX
        if number % 3:
            del ends[key]


def test_the_looks_are_bounded_and_go_on_next_time() -> None:
    ends: dict[int, float] = dict.fromkeys(range(100), 1.0)
    heap = LazyHeap[int](ends.get)
    for key in ends:
        heap.push(1.0, key)
    ends.update(dict.fromkeys(range(50), 5.0))
    looks = []
    for _ in range(10):
        taken = heap.take(1.0, 10)
        looks.append(len(taken))
        for key in taken:
            del ends[key]
    assert looks == [0] * 5 + [10] * 5
    assert not heap.is_due(1.0)
    asked: list[int] = []
    assert heap.find(lambda key: bool(asked.append(key)), 7) is None  # type: ignore[func-returns-value]
    assert asked == list(range(7))
    assert len(heap) == 50, "what cannot go stays"


def test_a_key_with_two_entries_is_taken_once() -> None:
    ends = {1: 5.0}
    heap = LazyHeap[int](ends.get)
    heap.push(3.0, 1)
    heap.push(5.0, 1)
    assert heap.take(9.0, 10) == [1]
    del ends[1]
    assert heap.first() is None


def test_a_search_puts_a_few_entries_right() -> None:
    """All but one of many keys have left since the last search. Each search goes on."""
    looks, ranks = 0, {key: float(key) for key in range(5 * SETTLED_MAX)}

    def rank(key: int) -> float | None:
        nonlocal looks
        looks += 1
        return ranks.get(key)

    heap = LazyHeap[int](rank)
    for key, first in ranks.items():
        heap.push(first, key)
    last = max(ranks)
    ranks = {last: ranks[last]}
    looks, searches, found = 0, 0, None
    while found is None and searches < 10:
        looks = 0
        found = heap.find(lambda _: True, 64)
        assert looks <= SETTLED_MAX + 64
        searches += 1
    assert found == last
