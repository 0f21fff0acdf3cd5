# SPDX-License-Identifier: Apache-2.0
"""A session ends: all that it has left leaves first, be its chunks of other runs meanwhile.

Goal: `ended` of a session reaches each chunk that it alone has left, and none that others use.
Method: one request of a session leaves chunks, and something happens to them that gives them
another run. Then a request ends the session, and the priority of each chunk is looked at.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from attnstore_vllm.config.settings import PinningConfig
from attnstore_vllm.hints import PrefetchOrder
from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import (
    LOTS_MAX,
    NO_TERMS,
    SHARED_RUNS_MAX,
    Lease,
    Run,
    Terms,
    Visit,
    end,
    left_by,
    moved_run,
    used_by_both,
    visit_of,
)
from attnstore_vllm.scheduler import saving
from attnstore_vllm.scheduler.messages import StepPlan, StepReport
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.types import Seen
from tests.helpers import CHUNK_TOKENS, memory_rig, name_of, names_of, sequence_of, tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.unit.policy.test_visits import Clock
from tests.unit.scheduler.test_session_inputs import begin, say_more
from tests.vllm_objects import output

PROMPT = tokens_of(1, 4 * CHUNK)
PINNING = PinningConfig(share=0.5, tenant_share=0.5)


def serve(world: StepWorld, name: str, tokens: list[int], **hints: object) -> None:
    world.serve(world.request(name, tokens, kv_transfer_params={"attnstore": hints}))


def say_it_is_over(world: StepWorld, session: str = "s") -> None:
    over = tokens_of(99, 2 * CHUNK)
    serve(world, f"over {session}", over, session=session, ended=True, store=False)


def priorities(world: StepWorld) -> set[Priority]:
    """Of all whole chunks that are stored: the world has left a block of its own."""
    residency = world.store.residency
    stored = [chunk for chunk in residency.index if chunk.name.num_tokens == CHUNK]
    return {residency.run_of(chunk).priority for chunk in stored}


def test_a_prefetch_gives_its_chunks_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = StepWorld(monkeypatch)
    serve(world, "one", PROMPT, session="s")
    order = PrefetchOrder(PROMPT, None).as_params()
    world.side.on_new_request(world.request("prefetch", PROMPT[:1], kv_transfer_params=order))
    say_it_is_over(world)
    assert priorities(world) == {Priority.ENDED}
    world.close()


def test_a_later_input_shortens_its_ttl(monkeypatch: pytest.MonkeyPatch) -> None:
    world = StepWorld(monkeypatch)
    session = begin(world, PROMPT, session="s")
    say_more(world, session, tokens_of(2, 2 * CHUNK), ttl=5)
    say_it_is_over(world)
    tokens, residency = list(session.all_token_ids), world.store.residency
    found = {
        residency.run_of(chunk).priority
        for chunk in residency.index
        if chunk.name.tokens == encode_tokens(tokens[chunk.name.position : chunk.name.end])
    }
    assert found == {Priority.ENDED}
    world.close()


def test_its_pin_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = {"pinning": PINNING, "clock": clock}
    world = StepWorld(monkeypatch, slots=64, store=store, pinning=PINNING)
    serve(world, "one", PROMPT, session="s", pin=True)
    clock.now += 4000
    world.store.residency.pinning.end(clock.now)
    say_it_is_over(world)
    assert priorities(world) == {Priority.ENDED}
    world.close()


def test_states_in_between_are_worth_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "MIN_TAIL_TOKENS", BLOCK)
    monkeypatch.setattr(saving, "GRAIN_TOKENS", BLOCK)
    world = StepWorld(monkeypatch, states=True)
    params = {"attnstore": {"session": "s"}}
    request = world.request("one", PROMPT, kv_transfer_params=params)
    world.come(request)
    world.start(request, world.answer(request))
    world.end_step(request)
    before = request.num_tokens
    request.all_token_ids += tokens_of(2, CHUNK)
    world.tables["one"] = list(range(1, 2 + request.num_tokens // BLOCK))
    world.report(world.side.build_step(output({}, {"one": (before, CHUNK)})))
    request.num_computed_tokens = request.num_tokens
    world.finish(request)
    world.end_step()
    assert len(priorities(world)) > 1, "else no state was worth little"
    say_it_is_over(world)
    assert priorities(world) == {Priority.ENDED}
    world.close()


@pytest.mark.parametrize("other", ["s", "another"])
def test_what_a_cut_prompt_has_moved(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends once all sessions have that have used it."""
    world, kept = StepWorld(monkeypatch, truncates=True), list(range(1000, 1400))
    serve(world, "one", [*range(50), *kept], session="s", truncation=True)
    serve(world, "two", [*kept, *range(7000, 7040)], session=other, truncation=True)
    say_it_is_over(world)
    if other != "s":
        residency = world.store.residency
        found = [residency.run_of(chunk) for chunk in residency.index]
        assert {run.priority for run in found if run.is_shared} == {Priority.NORMAL}
        say_it_is_over(world, other)
    assert priorities(world) == {Priority.ENDED}
    world.close()


@pytest.mark.parametrize("other", ["s", "another"])
def test_what_branches_of_a_conversation_share(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is edited. What is before it ends once both branches have."""
    world = StepWorld(monkeypatch)
    serve(world, "one", PROMPT + tokens_of(2, 2 * CHUNK), session="s")
    serve(world, "two", PROMPT + tokens_of(3, 2 * CHUNK), session=other)
    say_it_is_over(world)
    if other != "s":
        residency = world.store.residency
        runs = [(chunk.name.position, residency.run_of(chunk)) for chunk in residency.index]
        shared = {run.priority for at, run in runs if CHUNK <= at < 4 * CHUNK}
        assert shared == {Priority.NORMAL}
        say_it_is_over(world, other)
    assert priorities(world) == {Priority.ENDED}
    world.close()


def test_a_branch_says_that_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = StepWorld(monkeypatch)
    serve(world, "one", PROMPT + tokens_of(2, 2 * CHUNK), session="s")
    serve(world, "two", PROMPT + tokens_of(3, 2 * CHUNK), session="s", ended=True)
    assert priorities(world) == {Priority.ENDED}
    world.close()


@pytest.mark.parametrize("terms", [NO_TERMS, Terms(Priority.LOW)], ids=["none", "low"])
def test_what_two_have_computed_at_once_ends_with_both(terms: Terms) -> None:
    estimator = ReturnEstimator()
    one = visit_of(estimator, [], [1], CHUNK, 0.0).own
    two = visit_of(estimator, [], [2], CHUNK, 0.0, terms)
    joint = two.joined(0, one, 0.0)
    both = [joint, used_by_both(two.own, one, 0.0)]
    unknown = used_by_both(two.own, left_by(9.0), 0.0)
    assert joint.is_shared
    assert joint not in [*end([one])]
    ended = [*end([two.own])]
    assert all(run in ended for run in both)
    assert unknown is two.own or unknown not in ended


def test_what_very_many_have_moved_ends_with_none() -> None:
    estimator = ReturnEstimator()
    visits = [visit_of(estimator, [], [n], CHUNK, 0.0) for n in range(LOTS_MAX + 1)]
    run = visits[0].own
    for visit in visits[1:]:
        run = moved_run(run, visit, 0.0)
    ended = [*end(visit.own for visit in visits)]
    assert run not in ended
    assert run.priority is Priority.NORMAL


def test_what_is_moved_of_a_conversation_that_has_ended_ends_with_who_moved_it() -> None:
    """The session came back, has moved what it had left, and ends again."""
    estimator = ReturnEstimator()
    first = visit_of(estimator, [], [1], CHUNK, 0.0)
    assert [*end([first.own])] == [first.own]
    back = visit_of(estimator, [], [2], CHUNK, 1.0)
    moved = moved_run(first.own, back, 1.0)
    assert moved in [*end([back.own])]
    assert moved.priority is Priority.ENDED


def test_a_run_that_is_gone_is_not_kept_for_its_end() -> None:
    run = visit_of(ReturnEstimator(), [], [1], CHUNK, 0.0).own
    for n in range(1000):
        copy = run.renewed(float(n))
    assert [*end([run])] == [run, copy]


def left(ttl_s: float) -> Run:
    """A run that a request has left."""
    return Run(1, 0, 0.0, False, lease=Lease(ttl_s, ttl_s))


@pytest.mark.parametrize("num_left", [2, SHARED_RUNS_MAX, 3 * SHARED_RUNS_MAX])
def test_what_a_session_shares_is_of_a_run_for_each_who_has_left_it(num_left: int) -> None:
    """Of few runs in all, each with a lease of its own, and in the order in which they leave."""
    estimator = ReturnEstimator()
    last = [run for n in range(num_left) for run in [left(9.0)] * 2]
    marks, terms = [*range(len(last) + 1)], Terms(ttl_s=1.0, session=frozenset())
    visit = visit_of(estimator, last, marks, 4096, 0.0, terms)
    assert visit.num_shared == len(last)
    shared = visit.runs[:-1]
    assert [visit.run(2 * n) for n in range(len(shared))] == shared
    assert len(shared) == min(num_left, SHARED_RUNS_MAX)
    shared[-1].use(5.0)
    assert {run.lease and run.lease.expires for run in shared[:-1]} == {9.0}
    used = [run.used_at for run in shared]
    assert used == sorted(used, reverse=True)
    assert len(set(used)) == len(used)
    assert {len(run.lots) for run in shared[:-1]} == {2}
    unnamed = visit_of(estimator, last, marks, 4096, 1.0, Terms(ttl_s=1.0))
    assert len(unnamed.runs) == 2


@pytest.mark.parametrize("ttls", [[40.0, 40.0, 30.0, 20.0, 10.0, 10.0], [40.0, *[10.0] * 5]])
def test_few_leases_come_before_who_has_left_what(ttls: list[float]) -> None:
    """A session's shared chunks are cut where leases change first, and end no later for a cut."""
    last = [left(ttl) for ttl in ttls]
    terms = Terms(ttl_s=1.0, session=frozenset())
    visit = visit_of(ReturnEstimator(), last, [*range(50, 57)], 4096, 0.0, terms)
    leases = [visit.run(number).lease for number in range(len(ttls))]
    assert len({visit.run(number) for number in range(len(ttls))}) == SHARED_RUNS_MAX
    assert [lease and lease.ttl_s for lease in leases] == ttls


class Adapters(StepWorld):
    """The workers load the adapter for the step that computes its first request."""

    has_loaded = False

    def report(self, plan: StepPlan) -> None:
        done = [p.plan_id for p in (*plan.loads, *plan.saves, *plan.saves_before)]
        digest = b"digest" if self.has_loaded else None
        report = StepReport(
            plan.number,
            Counter(done),
            freed=Counter(plan.finished_saving),
            weights=Seen.SAME if plan.looks_at_weights else Seen.NOTHING,
            adapters={number: {0: digest} for number in plan.adapters},
        )
        self.side.on_report(report)

    def turn(self, name: str, tokens: list[int], **hints: object) -> bool:
        """Returns whether it was looked up."""
        lora = SimpleNamespace(lora_int_id=1, lora_name="poet", lora_path="/x")
        params = {"attnstore": hints}
        request = self.request(name, tokens, lora_request=lora, kv_transfer_params=params)
        self.come(request)
        while (found := self.ask(request)) is None:
            self.end_step()
        self.start(request, found)
        self.has_loaded = True
        self.end_step(request)
        was_looked_up = self.side.requests[name].visit is not None
        self.finish(request)
        self.end_step()
        self.rig.until_idle()
        return was_looked_up


@pytest.mark.parametrize("priority", ["low", "high"])
def test_a_priority_without_a_look_up(priority: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Adapters(monkeypatch, serves_adapters=True)
    assert not world.turn("one", PROMPT, priority=priority)
    assert priorities(world) == {Priority[priority.upper()]}
    world.close()


def test_its_end_without_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not written behind DRAM either."""
    world = Adapters(monkeypatch, serves_adapters=True)
    assert not world.turn("one", PROMPT, ended=True)
    assert priorities(world) == {Priority.ENDED}
    assert not any(chunk.behind for chunk in world.store.residency.index)
    world.close()


def test_its_session_ends_without_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Adapters(monkeypatch, serves_adapters=True)
    assert not world.turn("one", PROMPT, session="s")
    assert priorities(world) == {Priority.NORMAL}
    world.turn("two", tokens_of(2, 3 * CHUNK), session="s", ended=True, store=False)
    assert priorities(world) == {Priority.ENDED}
    world.close()


def test_who_was_not_looked_up_ends_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Adapters(monkeypatch, serves_adapters=True)
    serve(world, "one", PROMPT, session="s")
    assert not world.turn("two", tokens_of(2, 3 * CHUNK), session="s", ended=True)
    assert priorities(world) == {Priority.ENDED}
    world.close()


def test_what_another_session_has_moved_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the session that it came from goes on with it, and ends."""
    world = StepWorld(monkeypatch, truncates=True)
    kept = tokens_of(5, 400)
    one = [*tokens_of(6, 64), *kept]
    serve(world, "one", one, session="s", truncation=True)
    serve(world, "moves", [*kept, *tokens_of(7, 40)], session="other", truncation=True)
    keys, residency = sequence_of(one), world.store.residency
    chunks = [residency.index.get(name_of(keys, n).key) for n in range(len(one) // CHUNK)]
    moved = [chunk for chunk in chunks if chunk is not None and residency.run_of(chunk).is_shared]
    assert len(moved) >= 5
    serve(world, "two", [*one, *tokens_of(8, 40)], session="s", truncation=True)
    say_it_is_over(world)
    assert {residency.run_of(chunk).priority for chunk in moved} == {Priority.NORMAL}
    world.close()


def test_who_was_not_looked_up_ends_nothing_that_others_share() -> None:
    """As the first requests of a LoRA adapter: it computes a beginning that two others share."""
    clock = Clock()
    store = memory_rig(64, 64, clock=clock, wall=clock, threaded=False).store
    system = tokens_of(1, 4 * CHUNK_TOKENS)

    def come(tokens: list[int]) -> Visit:
        clock.now += 1
        return store.arrive("request", Lookup(sequence_of(tokens)), len(tokens), 1)[1]

    def save(tokens: list[int], run_of: Callable[[int], Run]) -> None:
        for number, name in enumerate(names_of(sequence_of(tokens))):
            chunk = store.begin_save(name, run_of(number))
            if chunk is not None:
                store.finish_saves([chunk])
        clock.now += 1

    for who in (2, 3):
        text = system + tokens_of(who, 40)
        visit = come(text)
        save(text, visit.run)
        store.answered(visit.own, 0)
    unseen = store.unseen_run(NO_TERMS)
    save(system + tokens_of(4, 40), lambda number: unseen)
    store.answered(unseen, 0)
    store.answered(come(tokens_of(9, 40)).own, 0)
    store.end(deque([unseen]), 1)
    found = [store.residency.index.get(name.key) for name in names_of(sequence_of(system))]
    runs = [store.residency.run_of(chunk) for chunk in found if chunk is not None]
    assert len(runs) == 4
    assert {run.priority for run in runs} == {Priority.NORMAL}
