# SPDX-License-Identifier: Apache-2.0
"""The queue in its order, what is fetched next, and what is given up for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attnstore_vllm.policy.lookahead import LAST, SHARED_MIN, LookAhead


def anything(_: object) -> bool:
    return True


def queue_of(wants: dict[str, str]) -> LookAhead[Any]:
    """Requests by name, each wanting chunks named by letters; all of them are missing."""
    queue = LookAhead[Any]()
    for name, chunks in wants.items():
        queue.append(name)
        queue.want(name, chunks, chunks)
    return queue


def fetch_all(queue: LookAhead[Any]) -> str:
    fetched = ""
    while (found := queue.next_to_fetch()) is not None:
        fetched += str(found[0])
        queue.has_come(found[0])
    return fetched


def test_first_come_first_served_and_the_preempted_before_them() -> None:
    queue = queue_of({"1": "", "2": "", "3": ""})
    queue.remove("2")
    queue.prepend(["7", "8"])
    queue.prepend(["6"])
    queue.append("4")
    assert list(queue) == ["6", "7", "8", "1", "3", "4"]
    assert len(queue) == 6
    assert "7" in queue
    assert "2" not in queue
    assert queue.remove("2") == []  # it does not wait any more


def test_priorities_come_before_arrival() -> None:
    queue = LookAhead[Any]()
    for name, priority, arrival in (("a", 1, 5.0), ("b", 0, 9.0), ("c", 1, 4.0), ("d", 1, 4.0)):
        queue.insert(name, priority, arrival)
    assert list(queue) == ["b", "c", "d", "a"]


def test_a_request_waits_once() -> None:
    queue = queue_of({"1": ""})
    with pytest.raises(AssertionError):
        queue.append("1")


def test_the_nearest_request_is_fetched_first_in_the_order_of_its_prompt() -> None:
    queue = queue_of({"1": "", "2": "abc", "3": "xay"})
    queue.prepend(["0"])
    queue.want("0", "pbq", "pbq")
    assert fetch_all(queue) == "pbqacxy"


def test_what_comes_for_one_has_come_for_all() -> None:
    queue = queue_of({"1": "ab", "2": "ac"})
    assert queue.next_to_fetch() is not None
    queue.remove("1")
    assert fetch_all(queue) == "ac"
    assert queue.next_to_fetch() is None


def test_what_has_gone_is_fetched_again() -> None:
    queue = queue_of({"1": "ab", "2": "cd"})
    fetch_all(queue)
    queue.has_gone("d")
    queue.has_gone("a")
    queue.has_gone("z")  # nobody waits for it
    assert fetch_all(queue) == "ad"


def test_a_new_want_replaces_the_old_one() -> None:
    queue = queue_of({"1": "ab", "2": "bc"})
    queue.want("1", "d", "d")
    assert [chunk in queue.wanted_by for chunk in "abcd"] == [False, True, True, True]
    assert fetch_all(queue) == "dbc"
    queue.remove("2")
    assert [chunk in queue.wanted_by for chunk in "abcd"] == [False, False, False, True]


def test_the_farthest_gives_up_its_deepest_chunk() -> None:
    queue = queue_of({"1": "ab", "2": "cd", "3": "aef"})
    fetch_all(queue)
    gone = []
    while (chunk := queue.farthest(None, anything)) is not None:
        gone.append(chunk)
        queue.has_gone(chunk)
    assert gone == ["f", "e", "d", "c", "b", "a"]  # a is the nearest's too


def test_a_nearer_request_never_loses_what_it_wants_to_a_farther_one() -> None:
    queue = queue_of({"1": "ab", "2": "cd", "3": "ae"})
    fetch_all(queue)
    queue.has_gone("d")
    found = queue.next_to_fetch()
    assert found is not None
    chunk, whose = found
    assert chunk == "d"
    assert queue.farthest(whose, anything) == "e"
    queue.has_gone("e")
    assert queue.farthest(whose, anything) is None
    assert queue.farthest(LAST, anything) is None
    assert queue.farthest(None, lambda chunk: chunk == "b") == "b"


def test_what_many_want_is_not_given_up() -> None:
    queue = queue_of({str(n): "a" for n in range(SHARED_MIN)})
    fetch_all(queue)
    assert queue.farthest(None, anything) is None
    queue.remove("0")
    assert queue.farthest(None, anything) == "a"  # even what the nearest wants
    queue.prepend(["first"])
    queue.want("first", "ab", "b")
    found = queue.next_to_fetch()
    assert found is not None
    assert queue.farthest(found[1], anything) is None


def test_what_is_lost_ends_what_is_wanted_behind_it() -> None:
    queue = queue_of({"1": "abc", "2": "abd"})
    assert queue.lost("z") == []
    assert queue.lost("c") == ["c"]
    assert fetch_all(queue) == "abd"
    assert set(queue.lost("b")) == {"b", "d"}
    assert [chunk in queue.wanted_by for chunk in "abcd"] == [True, False, False, False]
    assert queue.farthest(None, anything) == "a"


class _Counted(int):
    """A chunk that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Counted.compared += 1
        return self is other

    __hash__ = int.__hash__


def test_what_many_want_is_lost_without_a_search() -> None:
    """A tail that a longer chunk takes the place of, while `n` children of one prompt wait."""
    chunks, children = [_Counted(n) for n in range(200)], 50
    queue = LookAhead[Any]()
    for child in range(children):
        queue.append(str(child))
        queue.want(str(child), chunks, [])
    _Counted.compared = 0
    assert queue.lost(chunks[-1]) == [chunks[-1]]
    assert _Counted.compared <= 4 * children
    assert len(queue.wants_of("7")) == len(chunks) - 1


def test_of_all_the_farthest_gives_up_its_deepest_chunk_wherever_it_is() -> None:
    queue = queue_of({"1": "ab", "2": "cd", "3": "aef"})
    queue.has_come("e")
    gone = []
    while (chunk := queue.farthest_of_all(anything)) is not None:
        gone.append(chunk)
        queue.lost(chunk)
    assert gone == ["f", "e", "d", "c", "b", "a"]


def test_how_much_is_fetched_before() -> None:
    queue = queue_of({"1": "abc", "2": "ad", "3": "e"})
    queue.has_come("b")
    assert [queue.num_absent_before(name) for name in ("1", "2", "3", "?")] == [0, 2, 3, 4]


def test_who_waits_for_what_is_not_even_on_its_way() -> None:
    queue = queue_of({"1": "ab", "2": "b"})
    queue.has_come("b")
    assert [queue.has_missing(name) for name in ("1", "2", "?")] == [True, False, False]


def test_fetching_can_be_stopped() -> None:
    queue = queue_of({"1": "ab", "2": "c"})
    queue.stop_fetching()
    assert queue.next_to_fetch() is None
    queue.want("2", "d", "d")
    assert fetch_all(queue) == "d"
    queue.want("1", "ab", "ab")
    assert fetch_all(queue) == "ab", "the same as before, but it is asked for anew"


class Queue(RuleBasedStateMachine):
    """Held against a list of requests, each with a list of chunks, and a set of absent chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LookAhead[Any]()
        self.order: list[str] = []
        self.wants: dict[str, list[int]] = {}
        self.absent: set[int] = set()
        self.number = 0

    def wanted(self, names: list[str]) -> set[int]:
        return {chunk for name in names for chunk in self.wants[name]}

    @rule(front=st.booleans())
    def come(self, front: bool) -> None:
        self.number += 1
        name = str(self.number)
        if front:
            self.queue.prepend([name])
        else:
            self.queue.append(name)
        self.order.insert(0 if front else len(self.order), name)
        self.wants[name] = []

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.order))
        before = self.wanted(self.order)
        unwanted = self.queue.remove(name)
        self.order.remove(name)
        assert set(unwanted) == before - self.wanted(self.order)

    @precondition(lambda self: self.order)
    @rule(data=st.data(), chunks=st.lists(st.integers(0, 9), unique=True, max_size=5))
    def want(self, data: st.DataObject, chunks: list[int]) -> None:
        name = data.draw(st.sampled_from(self.order))
        before = self.wanted(self.order)
        new, unwanted = self.queue.want(name, chunks, [c for c in chunks if c in self.absent])
        self.wants[name] = list(chunks)
        after = self.wanted(self.order)
        assert (set(new), set(unwanted)) == (after - before, before - after)

    @rule(chunk=st.integers(0, 9), gone=st.booleans())
    def move(self, chunk: int, gone: bool) -> None:
        (self.queue.has_gone if gone else self.queue.has_come)(chunk)
        (self.absent.add if gone else self.absent.discard)(chunk)

    @rule(chunk=st.integers(0, 9))
    def lose(self, chunk: int) -> None:
        before = self.wanted(self.order)
        unwanted = self.queue.lost(chunk)
        for wants in self.wants.values():
            if chunk in wants:
                del wants[wants.index(chunk) :]
        self.absent.discard(chunk)
        assert set(unwanted) == before - self.wanted(self.order)

    @invariant()
    def agrees(self) -> None:
        assert list(self.queue) == self.order
        wanted = self.wanted(self.order)
        assert {chunk for chunk in range(10) if chunk in self.queue.wanted_by} == wanted
        found = self.queue.next_to_fetch()
        missing = ((n, c) for n in self.order for c in self.wants[n] if c in self.absent)
        first = next(missing, None)
        assert (None if found is None else (found[1][2], found[0])) == first
        assert self.queue.farthest(None, anything) == self._farthest(self.absent)
        assert self.queue.farthest_of_all(anything) == self._farthest(set())
        for place, name in enumerate(self.order):
            before = self.wanted(self.order[:place]) & self.absent
            assert self.queue.num_absent_before(name) == len(before)

    def _farthest(self, absent: set[int]) -> int | None:
        for place in range(len(self.order) - 1, -1, -1):
            nearer = self.wanted(self.order[:place])
            for chunk in reversed(self.wants[self.order[place]]):
                if chunk not in absent and chunk not in nearer:
                    return chunk
        return None


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_waits_behind_a_better_priority_may_have_to_go() -> None:
    """A client names the priority of its requests. One that is never reached must keep nothing."""
    queue = LookAhead[str]()
    queue.insert("next", 0, 1.0)
    queue.insert("equal", 0, 2.0)
    queue.insert("never", 7, 0.0)
    for request_id, wants in (("next", "a"), ("equal", "bx"), ("never", "cdx")):
        queue.want(request_id, wants, ())
    assert queue.outranked(anything) == "d", "x is wanted by a better one, too"
    assert queue.outranked(lambda chunk: chunk != "d") == "c"
    assert queue.outranked(lambda chunk: chunk in "abx") is None
    queue.remove("next")
    queue.remove("equal")
    assert queue.outranked(anything) is None, "it is the next one now"


def test_first_come_first_served_has_no_better_priority() -> None:
    queue = LookAhead[str]()
    for request_id in ("near", "far"):
        queue.append(request_id)
        queue.want(request_id, request_id[0], ())
    assert queue.outranked(anything) is None


@pytest.mark.parametrize("priority", [10**400, -(10**400), 2**64, math.nan, math.inf])
def test_a_priority_may_be_any_number(priority: float) -> None:
    """It is a client's: what no float has is the farthest."""
    ahead = LookAhead[int]()
    ahead.insert("plain", 0, 0.0)
    ahead.insert("any", priority, 0.0)
    ahead.insert("ours", -math.inf, 0.0)
    ahead.want("any", [1], [1])
    assert [*ahead] == (["ours", "any", "plain"] if priority < 0 else ["ours", "plain", "any"])
    assert ahead.remove("any") == [1]
    assert [*ahead] == ["ours", "plain"]
