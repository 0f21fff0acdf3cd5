# SPDX-License-Identifier: Apache-2.0
"""Priorities and times to live: who leaves first, and what is not found any more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.config.settings import PinningConfig
from attnstore_vllm.policy.eviction.departures import GROUPS_MAX, SLOTS_MAX, departures
from attnstore_vllm.policy.lazy_heap import STALE_MAX
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import (
    SHARED_RUNS_MAX,
    Lease,
    Run,
    Terms,
    Visit,
    lease_for,
    left_by,
    visit_of,
)
from attnstore_vllm.store.lookup import Lookup
from tests.helpers import (
    Rig,
    Rigs,
    conversation,
    lookup_of,
    name_of,
    names_of,
    sequence_of,
    tokens_of,
)
from tests.unit.policy.test_by_return import KIND, anything, empty, fill, untrained


def run_of(since: float, *, ttl_s: float | None = None, priority: int = 0, kind: int = KIND) -> Run:
    return Run(1, kind, since, False, Priority(priority), lease_for(ttl_s, since))


# ---- the order of departure ------------------------------------------------------------------


def test_low_goes_before_normal_before_high() -> None:
    order = untrained()
    for number, priority in enumerate((1, 0, -1)):
        fill(order, range(10 * number, 10 * number + 2), run_of(number, priority=priority))
    assert empty(order, 9.0) == [21, 20, 11, 10, 1, 0]


def test_a_priority_is_a_factor_and_no_order() -> None:
    """What has not been used for long leaves before what was used now, whatever was said."""
    order = untrained()
    order.add(0, run_of(0.0, priority=1))
    order.add(1, run_of(100_000.0, priority=-1))
    assert empty(order, 100_001.0) == [0, 1]


@pytest.mark.parametrize("name", ["attnstore", "lru"])
def test_what_has_ended_goes_first_though_it_was_used_last(name: str) -> None:
    order = departures(name, 100, ReturnEstimator())
    fill(order, range(2), run_of(-1e6, priority=Priority.LOW_VALUE))
    fill(order, range(10, 13), run_of(-1e6))
    order.use([11, 12], run_of(1000.0, priority=Priority.ENDED))
    assert empty(order, 1000.0)[:3] == [12, 11, 1]


def test_what_has_expired_goes_first() -> None:
    order = untrained()
    fill(order, range(2), run_of(0.0))
    fill(order, range(10, 12), run_of(90.0, ttl_s=5.0, priority=1))
    fill(order, range(20, 22), run_of(50.0))
    assert order.victim(94.9, anything) == 1
    assert empty(order, 95.0) == [11, 10, 1, 0, 21, 20]


def test_a_use_makes_it_last_longer() -> None:
    order = untrained()
    short = run_of(0.0, ttl_s=10.0)
    order.add(5, short)
    order.add(1, run_of(-99.0))
    assert order.victim(9.0, anything) == 1
    assert order.victim(10.0, anything) == 5
    short.use(12.0)
    assert order.victim(13.0, anything) == 1
    assert order.victim(21.9, anything) == 1
    assert order.victim(22.0, anything) == 5


def test_a_use_before_anybody_looked_makes_it_last_longer_too() -> None:
    order = untrained()
    short = run_of(0.0, ttl_s=10.0)
    order.add(5, short)
    order.add(1, run_of(-99.0))
    short.use(5.0)
    assert [order.victim(now, anything) for now in (12.0, 14.9, 15.0)] == [1, 1, 5]


def test_expired_ones_that_have_left_are_forgotten() -> None:
    order = untrained()
    for slot in range(20):
        order.add(slot, run_of(float(slot), ttl_s=1.0))
    assert order.victim(99.0, lambda slot: False) is None
    assert len(order.expired) == 20
    assert len(empty(order, 99.0)) == 20
    assert not order.expired


def test_expired_ones_that_are_held_hide_nobody() -> None:
    order = untrained(4000)
    count = 3 * GROUPS_MAX
    for number in range(count):
        first = 20 * number
        fill(order, range(first, first + SLOTS_MAX + 2), run_of(float(number), ttl_s=1.0))
    order.add(3999, run_of(0.0))
    free = 20 * (count - 1) + SLOTS_MAX + 1
    asked = [order.victim(99.0, lambda slot: slot in (free, 3999)) for _ in range(count)]
    assert None not in asked
    assert free in asked


def test_the_memory_of_leases_is_bounded() -> None:
    order = untrained(50)
    for number in range(5000):
        slot = number % 50
        if slot in order:
            order.remove(slot)
        order.add(slot, run_of(float(number), ttl_s=1e9))
        assert len(order.leases) <= 2 * len(order.groups) + STALE_MAX + 1
    assert len(order.expired) == 0
    assert len(empty(order, 2e9)) == 50
    assert not order.groups


STEPS = st.lists(st.tuples(st.sampled_from("aurtv"), st.integers(0, 9), st.integers(0, 5)))


@given(STEPS)
def test_against_a_plain_model(steps: list[tuple[str, int, int]]) -> None:
    """Whatever happens, an expired slot is chosen as long as there is one."""
    order, owner, now = untrained(10), dict[int, Run](), 0.0
    runs = [
        run_of(0.0, ttl_s=ttl, priority=n % 3 - 1)
        for n, ttl in enumerate((None, 3.0, 5.0, 40.0, None, 7.0))
    ]
    for action, slot, number in steps:
        if action == "a" and slot not in owner:
            order.add(slot, runs[number])
            owner[slot] = runs[number]
        elif action == "u" and slot in owner:
            runs[number].use(now)
            order.use([slot], runs[number])
            owner[slot] = runs[number]
        elif action == "r" and slot in owner:
            order.remove(slot)
            del owner[slot]
        elif action == "t":
            now += number
        victim = order.victim(now, anything)
        assert (victim is None) == (not owner)
        expired = [slot for slot, run in owner.items() if run.has_expired(now)]
        assert not expired or victim in expired
        assert [order.run_of(s) for s in range(10)] == [owner.get(s) for s in range(10)]


# ---- what a request's terms are about --------------------------------------------------------


def test_terms_are_of_what_is_the_requests_own() -> None:
    """Who shares a prefix with others may ask for more of it than they have, and not for less."""
    estimator = ReturnEstimator()
    others = visit_of(estimator, [], [1, 2, 3], 768, 0.0)
    last = [others.run(0), others.run(1)]
    visit = visit_of(estimator, last, [1, 2, 4], 768, 10.0, Terms(Priority.LOW, 5.0), ttl_s=60.0)
    assert visit.num_shared == 2
    assert (visit.shared.priority, visit.own.priority) == (0, -1)
    assert visit.shared.lease is not None
    assert visit.own.lease is not None
    assert (visit.shared.lease.expires, visit.own.lease.expires) == (70.0, 15.0)
    high = visit_of(estimator, last, [1, 2, 5], 768, 20.0, Terms(Priority.HIGH))
    assert (high.shared.priority, high.own.priority) == (1, 1)
    assert high.own.lease is None
    over = visit_of(estimator, last, [1, 2, 6], 768, 30.0, Terms(Priority.ENDED))
    assert (over.shared.priority, over.own.priority) == (0, Priority.ENDED)


@pytest.mark.parametrize(("asked", "kept"), [(None, 60.0), (10.0, 10.0), (600.0, 60.0)])
def test_a_request_may_have_less_than_the_servers_time_and_not_more(
    asked: float | None, kept: float
) -> None:
    visit = visit_of(ReturnEstimator(), [], [1], 256, 0.0, Terms(ttl_s=asked), ttl_s=60.0)
    assert visit.own.lease is not None
    assert visit.own.lease.ttl_s == kept


def shared_by(*ttls: float | None, most: float | None = None) -> list[float | None]:
    """Requests come with these at 0, 1, ... s, each shares a chunk less than the one before it.
    The ttl of each chunk that the last of them shares."""
    estimator, last, count = ReturnEstimator(), list[Run](), len(ttls)
    visit: Visit | None = None
    for turn, ttl in enumerate(ttls):
        marks = [*range(count - turn), *(100 * turn + 100 + n for n in range(turn + 1))]
        found = last[: count - turn]
        visit = visit_of(estimator, found, marks, 4096, turn, Terms(ttl_s=ttl), most)
        last = [visit.run(n) for n in range(count + 1)]
    assert visit is not None
    leases = [run.lease for run in last[: visit.num_shared]]
    return [None if lease is None else lease.ttl_s for lease in leases]


def test_what_is_shared_has_the_longest_ttl_of_all_its_users() -> None:
    assert shared_by(2.0, 2.0) == [2.0]
    assert shared_by(5.0, 2.0) == shared_by(2.0, 5.0) == [5.0]
    assert shared_by(5.0, None) == shared_by(None, 5.0) == [None]
    assert shared_by(5.0, 2.0, 2.0) == [5.0]
    assert shared_by(5.0, 2.0, most=3.0) == shared_by(None, 2.0, most=3.0) == [3.0]


def test_a_prefix_that_is_kept_for_good_takes_along_nothing_that_is_not() -> None:
    """A system prompt that all share, and behind it what is of requests with a ttl."""
    estimator = ReturnEstimator()
    plain = visit_of(estimator, [], [1, 90], 512, 0.0)
    first = visit_of(estimator, [plain.run(0)], [1, 2, 3, 91], 1024, 1.0, Terms(ttl_s=7.0))
    last = [first.run(number) for number in range(3)]
    second = visit_of(estimator, last, [1, 2, 3, 92], 1024, 2.0, Terms(ttl_s=2.0))
    leases = [second.run(number).lease for number in range(4)]
    assert [lease and lease.ttl_s for lease in leases] == [None, 7.0, 7.0, 2.0]
    assert [lease and lease.expires for lease in leases] == [None, 9.0, 9.0, 4.0]
    assert second.runs == [second.run(0), second.run(1), second.run(3)]
    second.own.use(3.0)
    used = [run.used_at for run in second.runs]
    assert used == sorted(used, reverse=True)
    assert len(set(used)) == 3, "what comes before leaves after it"


def test_shared_chunks_are_of_few_runs_and_none_is_kept_for_less() -> None:
    estimator, count = ReturnEstimator(), 3 * SHARED_RUNS_MAX
    ttls = [1000.0 - 10.0 * number for number in range(count)]
    last = [run_of(0.0, ttl_s=ttl) for ttl in ttls]
    visit = visit_of(estimator, last, [*range(50, 50 + count)], 4096, 0.0, Terms(ttl_s=1.0))
    assert visit.num_shared == count
    assert len(visit.runs) == SHARED_RUNS_MAX + 1
    for number, ttl in enumerate(ttls):
        lease = visit.run(number).lease
        assert lease is not None
        assert lease.ttl_s >= ttl


def test_what_was_left_by_an_earlier_process_keeps_its_end_where_it_is_shared() -> None:
    estimator = ReturnEstimator()
    visit_of(estimator, [], [1, 2, 3], 768, 0.0)
    left = [left_by(500.0), left_by(500.0)]
    visit = visit_of(estimator, left, [1, 2, 3], 768, 10.0, Terms(ttl_s=60.0))
    assert visit.num_shared == 2
    assert visit.shared.lease is not None
    assert (visit.shared.lease.ttl_s, visit.shared.lease.expires) == (60.0, 500.0)


# ---- in the store ----------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ask(rig: Rig, number: int, num_tokens: int = 40, terms: Terms | None = None) -> int:
    """A request comes and is computed; the tokens that it found stored."""
    sequence = sequence_of(conversation(number, num_tokens))
    with rig.store.queue() as queue:
        queue.append("request")
    terms = terms or Terms()
    pieces, visit = rig.store.arrive("request", Lookup(sequence), num_tokens, 1, terms)
    rig.store.leave_queue(["request"])
    for place, name in enumerate(names_of(sequence)):
        chunk = rig.store.begin_save(name, visit.run(place), terms.pin_s)
        if chunk is not None:
            rig.store.finish_saves([chunk])
    return pieces[-1].stop if pieces else 0  # all but the last block, of GRAIN tokens


def test_what_has_expired_is_not_found_and_is_dropped(open_rig: Rigs) -> None:
    clock = Clock()
    rig, device = open_rig(clock=clock)
    assert ask(rig, 1, terms=Terms(ttl_s=60.0)) == 0
    assert ask(rig, 2) == 0
    device.settle()
    clock.now += 59.0
    assert ask(rig, 1, terms=Terms(ttl_s=60.0)) == 36  # a use: it begins anew
    clock.now += 59.0
    assert rig.store.find(lookup_of(conversation(1)), 0, 40, 1) != []
    clock.now += 61.0
    assert rig.store.find(lookup_of(conversation(1)), 0, 40, 1) == []
    assert rig.store.figures().counts["expired"] == 3
    assert ask(rig, 2) == 36
    device.settle()
    assert rig.store.residency.dram.num_used == rig.store.residency.nvme.num_used == 3


def test_what_two_conversations_share_expires_too(open_rig: Rigs) -> None:
    clock = Clock()
    rig, device = open_rig(clock=clock)
    document = tokens_of(1, 32)
    for number, ttl_s in enumerate((60.0, 20.0)):
        save(rig, document + tokens_of(2 + number, 17), Terms(ttl_s=ttl_s))
        device.settle()
    wanted = sequence_of(document + tokens_of(9, 16))
    clock.now += 59.0
    assert rig.store.find(Lookup(wanted), 0, 48)[-1].stop == 32
    clock.now += 61.0
    assert rig.store.find(Lookup(wanted), 0, 48) == []


def save(rig: Rig, tokens: list[int], terms: Terms) -> None:
    """A request comes, and its KV is saved."""
    sequence = sequence_of(tokens)
    _, visit = rig.store.arrive("request", Lookup(sequence), len(tokens), 1, terms)
    for number in range(len(tokens) // 16):
        chunk = rig.store.begin_save(name_of(sequence, number), visit.run(number))
        if chunk is not None:
            rig.store.finish_saves([chunk])
    rig.store.leave_queue(["request"])


def test_on_nvme_too(open_rig: Rigs) -> None:
    clock = Clock()
    rig, device = open_rig(num_records=32, clock=clock)
    ask(rig, 1, terms=Terms(ttl_s=60.0))
    device.settle()
    for number in range(10, 14):
        ask(rig, number)
        device.settle()
    names = names_of(sequence_of(conversation(1)))
    assert not any(rig.chunk(name).dram.slot >= 0 for name in names)
    clock.now += 60.0
    assert ask(rig, 1) == 0


def test_what_somebody_waits_for_does_not_expire_meanwhile(open_rig: Rigs) -> None:
    clock = Clock()
    rig, device = open_rig(clock=clock)
    terms = Terms(ttl_s=60.0)
    ask(rig, 1, terms=terms)
    device.settle()
    sequence = sequence_of(conversation(1))
    with rig.store.queue() as queue:
        queue.append("waits")
    _, visit = rig.store.arrive("waits", Lookup(sequence), 40, 1, terms)
    clock.now += 100.0
    assert rig.store.find(Lookup(sequence), 0, 39, request_id="waits", visit=visit) != []
    rig.store.leave_queue(["waits"])
    clock.now += 59.0
    assert rig.store.find(Lookup(sequence), 0, 39) != []


def test_a_pin_outlasts_what_others_say_of_the_chunk(open_rig: Rigs) -> None:
    clock = Clock()
    rig, _ = open_rig(clock=clock, pinning=PinningConfig(share=0.5, tenant_share=0.5))
    ask(rig, 1, 32, Terms(pin_s=600.0))
    assert rig.store.figures().counts["pinned"] >= 2
    ask(rig, 1, 32, Terms(ttl_s=10.0))  # the same conversation, but not its wish
    clock.now += 100.0
    assert ask(rig, 1, 32) == 28
    clock.now += 10_000.0
    assert ask(rig, 1, 32) == 28


def test_a_prefetch_leaves_what_is_known_of_the_conversation_as_it_is(open_rig: Rigs) -> None:
    clock = Clock()
    rig, device = open_rig(num_records=32, clock=clock)
    ask(rig, 1)
    device.settle()
    for number in range(10, 14):
        ask(rig, number)
        device.settle()
    sequence = sequence_of(conversation(1))
    chunk = rig.chunk(name_of(sequence, 0))
    before = rig.store.residency.run_of(chunk)
    clock.now += 50.0
    pieces = rig.store.find(Lookup(sequence), 0, 40)
    device.settle()
    assert {piece.chunk.dram.slot >= 0 for piece in pieces} == {True}
    runs = {rig.store.residency.run_of(piece.chunk) for piece in pieces}
    assert [(run.number, run.kind, run.is_shared) for run in runs] == [
        (before.number, before.kind, before.is_shared)
    ]
    assert {run.since for run in runs} == {clock.now}


def test_a_renewed_part_has_a_lease_of_its_own() -> None:
    run = Run(1, KIND, 0.0, False, lease=Lease(10.0, 10.0))
    part = run.renewed(5.0)
    part.use(5.0)
    assert (run.has_expired(12.0), part.has_expired(12.0)) == (True, False)
