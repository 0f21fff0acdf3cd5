# SPDX-License-Identifier: Apache-2.0
"""A request's hints take nothing from KV that others use too, be it met by a look-up or not.

A request computes what its look-up did not meet: others compute it at the same time, or there was
no time to look. Its save finds the chunk stored, and of another request.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import Run, Terms, Visit, used_by_both
from attnstore_vllm.store.lookup import Lookup
from tests.helpers import Rig, Rigs, lookup_of, name_of, names_of, sequence_of, tokens_of
from tests.step_world import CHUNK, StepWorld
from tests.unit.policy.test_visits import Clock

SHORT = Terms(Priority.ENDED, ttl_s=1.0)
LONG_S = 60.0


def visited(rig: Rig, tokens: list[int], terms: Terms) -> Callable[[int], Run]:
    _, visit = rig.store.arrive("request", Lookup(sequence_of(tokens)), len(tokens), 1, terms)
    return visit.run


def unseen(rig: Rig, tokens: list[int], terms: Terms) -> Callable[[int], Run]:
    run = rig.store.unseen_run(terms)
    return lambda number: run


def save(rig: Rig, tokens: list[int], run_of: Callable[[int], Run]) -> None:
    for number, name in enumerate(names_of(sequence_of(tokens))):
        chunk = rig.store.begin_save(name, run_of(number))
        if chunk is not None:
            rig.store.finish_saves([chunk])


@pytest.mark.parametrize("eviction", ["attnstore", "lru", "fifo"])
@pytest.mark.parametrize("runs", [visited, unseen])
@pytest.mark.parametrize("ttl_s", [None, LONG_S])
def test_a_prompt_that_two_compute_at_once_is_kept_for_both(
    open_rig: Rigs,
    eviction: str,
    runs: Callable[[Rig, list[int], Terms], Callable[[int], Run]],
    ttl_s: float | None,
) -> None:
    clock = Clock()
    rig, device = open_rig(clock=clock, eviction=eviction)
    prompt = tokens_of(1, 32)
    others = runs(rig, prompt, Terms(ttl_s=ttl_s))
    impatient = runs(rig, prompt, SHORT)  # neither look-up finds anything
    save(rig, prompt, others)
    save(rig, prompt, impatient)
    device.settle()
    chunks: list[Chunk] = [rig.chunk(name) for name in names_of(sequence_of(prompt))]
    found = {rig.store.residency.run_of(chunk) for chunk in chunks}
    assert {run.priority for run in found} == {Priority.NORMAL}, "it is worth nothing to one alone"
    assert len(found) == 1, "of a prompt the end leaves first: its chunks are of one run"
    clock.now += LONG_S - 1.0
    assert rig.store.find(lookup_of(prompt), 0, 32)[-1].stop == 32


@pytest.mark.parametrize("eviction", ["attnstore", "lru", "fifo"])
def test_who_waits_takes_nothing_from_what_came_meanwhile(open_rig: Rigs, eviction: str) -> None:
    """Two have one prompt. One of them waits until the other has computed it."""
    clock = Clock()
    rig, device = open_rig(clock=clock, eviction=eviction)
    prompt = tokens_of(1, 32)
    lookup, visit = waiting(rig, prompt + tokens_of(2, 8), SHORT)
    save(rig, prompt, visited(rig, prompt, Terms()))
    device.settle()
    for _ in range(2):
        pieces = rig.store.find(lookup, 0, 39, request_id="waiting", visit=visit)
        assert pieces[-1].stop == 32
    runs = {rig.store.residency.run_of(piece.chunk) for piece in pieces}
    assert {run.priority for run in runs} == {Priority.NORMAL}
    assert len(runs) == 1
    rig.store.leave_queue(["waiting"])
    clock.now += 10.0
    assert rig.store.find(lookup_of(prompt), 0, 32)[-1].stop == 32


@pytest.mark.parametrize("num_own", [4, 2], ids=["chunk", "tail"])
@pytest.mark.parametrize("eviction", ["attnstore", "lru", "fifo"])
def test_who_waits_gives_nothing_to_what_came_meanwhile(
    open_rig: Rigs, eviction: str, num_own: int
) -> None:
    """It found KV without a ttl, which has gone. Another's begins alike, and has one."""
    clock = Clock()
    rig, device = open_rig(clock=clock, eviction=eviction, dram_slots=16)
    begin = tokens_of(1, 28)
    theirs, its = begin + tokens_of(2, 4), begin + tokens_of(3, num_own)
    for number in (4, 5):  # two conversations share it
        prompt = theirs + tokens_of(number, 16)
        save(rig, prompt, visited(rig, prompt, Terms()))
    lookup, visit = waiting(rig, begin + tokens_of(6, 8), Terms(ttl_s=LONG_S))
    rig.store.drop([rig.chunk(names_of(sequence_of(theirs))[1])])
    run_of, end = visited(rig, its, Terms(ttl_s=LONG_S)), name_of(sequence_of(its), 1)
    chunk = rig.store.begin_save(end, run_of(1))
    assert chunk is not None
    rig.store.finish_saves([chunk])
    device.settle()
    pieces = rig.store.find(lookup, 0, 35, request_id="waiting", visit=visit)
    assert pieces[-1].chunk is chunk
    rig.store.leave_queue(["waiting"])
    clock.now += LONG_S + 1.0
    assert rig.store.find(lookup_of(its), 0, len(its))[-1].stop == 16


@pytest.mark.parametrize("eviction", ["attnstore", "lru", "fifo"])
def test_a_prefetch_is_no_other_conversation(open_rig: Rigs, eviction: str) -> None:
    """It renews what a request of the conversation waits for."""
    rig, _ = open_rig(eviction=eviction)
    prompt = tokens_of(1, 32)
    save(rig, prompt, visited(rig, prompt, Terms()))
    lookup, visit = waiting(rig, prompt + tokens_of(2, 8), SHORT)
    for _ in range(2):
        rig.store.find(lookup_of(prompt), 0, 32)
        pieces = rig.store.find(lookup, 0, 39, request_id="waiting", visit=visit)
        runs = {rig.store.residency.run_of(piece.chunk) for piece in pieces}
        assert {(run.priority, run.is_shared) for run in runs} == {(Priority.ENDED, False)}


def waiting(rig: Rig, tokens: list[int], terms: Terms) -> tuple[Lookup, Visit]:
    with rig.store.queue() as queue:
        queue.append("waiting")
    lookup = Lookup(sequence_of(tokens))
    return lookup, rig.store.arrive("waiting", lookup, len(tokens), 1, terms)[1]


@pytest.mark.parametrize("eviction", ["attnstore", "lru", "fifo"])
@pytest.mark.parametrize("terms", [Terms(), Terms(Priority.ENDED, ttl_s=20.0)], ids=str)
def test_the_next_turn_shares_no_rest_unless_it_asks_for_less(
    open_rig: Rigs, eviction: str, terms: Terms
) -> None:
    """A prompt is longer than DRAM has room for, so its rest is saved after its end. Its next turn
    has come then, and computes that as well. Nothing stored tells it from another conversation
    behind the same whole chunks: so where it asks for less, they are kept as the first one said."""
    clock = Clock()
    rig, _ = open_rig(clock=clock, eviction=eviction, dram_slots=16)
    prompt = tokens_of(1, 48)
    names = names_of(sequence_of(prompt))
    _, first = rig.store.arrive("first", Lookup(sequence_of(prompt)), len(prompt))
    longer = prompt + tokens_of(2, 16)
    last: Callable[[int], Run] | None = None
    for number, name in enumerate(names):
        chunk = rig.store.begin_save(name, first.run(number), yields=last is not None)
        assert chunk is not None
        rig.store.finish_saves([chunk])
        if last is None:
            rig.store.answered(first.own, 0)
            last = visited(rig, longer, terms)
    assert last is not None
    save(rig, longer, last)
    runs = [rig.store.residency.run_of(rig.chunk(name)) for name in names_of(sequence_of(longer))]
    asks_for_less = terms != Terms()
    assert [run.is_shared for run in runs] == [*3 * [asks_for_less], False]
    assert [run.priority for run in runs] == [*3 * [Priority.NORMAL], terms.priority]
    clock.now += 21.0
    found = rig.store.find(lookup_of(longer), 0, 64)
    assert found[-1].stop == (48 if asks_for_less else 64)


def test_a_request_that_is_not_looked_up_ends_no_system_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    world = StepWorld(monkeypatch, store={"clock": clock}, step_budget=1, step_tokens=CHUNK)
    prompt = tokens_of(7, 4 * CHUNK)
    for number in range(2):
        world.serve(world.request(f"{number}", prompt + tokens_of(20 + number, 2 * CHUNK)))
    world.come(world.request("before", tokens_of(2, 3 * CHUNK)))  # takes the step's look-up
    hints = {"do_remote_prefill": True, "attnstore": {"ttl": 1}}
    one = world.request("one", prompt + tokens_of(30, 2 * CHUNK), kv_transfer_params=hints)
    world.come(one)
    assert world.ask(one) == 0
    world.start(one, 0)
    world.end_step(one)
    assert world.side.requests["one"].visit is None
    world.end(one)
    clock.now += 10.0
    world.end_step()
    assert world.serve(world.request("two", prompt + tokens_of(40, 2 * CHUNK))) == len(prompt)


def test_who_asks_for_more_gets_it(open_rig: Rigs) -> None:
    """Of two with a time of their own the longer one holds from the last use on."""
    clock = Clock()
    rig, device = open_rig(clock=clock)
    prompt = tokens_of(1, 16)
    first, second = (visited(rig, prompt, Terms(ttl_s=ttl_s)) for ttl_s in (1.0, LONG_S))
    save(rig, prompt, first)
    save(rig, prompt, second)
    device.settle()
    run = rig.store.residency.run_of(rig.chunk(name_of(sequence_of(prompt), 0)))
    assert run is second(0), "no run is made where nothing is to be added"
    assert used_by_both(run, first(0), clock.now) is run
    clock.now += LONG_S + 1.0
    assert rig.store.find(lookup_of(prompt), 0, 16) == []


HINTS = [{"ttl": 1}, {"ended": True}, {"priority": "low"}]


@pytest.mark.parametrize("length", [1, 5, CHUNK])
@pytest.mark.parametrize("hint", HINTS)
def test_a_short_question_takes_no_system_prompt(
    monkeypatch: pytest.MonkeyPatch, hint: dict[str, object], length: int
) -> None:
    """All whole chunks of both prompts are the same, as in a conversation that goes on."""
    clock = Clock()
    world = StepWorld(monkeypatch, store={"clock": clock})
    prompt = tokens_of(7, 4 * CHUNK)
    world.serve(world.request("theirs", prompt + tokens_of(20, length)))
    hints = {"attnstore": hint}
    mine = world.request("mine", prompt + tokens_of(30, length), kv_transfer_params=hints)
    assert world.serve(mine) == len(prompt)
    residency = world.store.residency
    chunks = [world.rig.chunk(name) for name in names_of(sequence_of(prompt))]
    assert {residency.run_of(chunk).priority for chunk in chunks} == {Priority.NORMAL}
    assert not any(chunk.refused_by for chunk in chunks), "else the disk does not get it"
    clock.now += 10.0
    world.end_step()
    assert world.serve(world.request("third", prompt + tokens_of(40, 2 * CHUNK))) == len(prompt)


@pytest.mark.parametrize("num_whole", [0, 1, 2])
@pytest.mark.parametrize("terms", [SHORT, Terms(ttl_s=1.0)])
def test_who_begins_as_another_ends_no_text_of_his(
    open_rig: Rigs, terms: Terms, num_whole: int
) -> None:
    """What both begin with is shorter than a chunk, or ends within one: it is in one with the rest
    of what was there first."""
    clock = Clock()
    rig, _ = open_rig(clock=clock)
    prompt = tokens_of(1, num_whole * CHUNK + 4)
    theirs, mine = prompt + tokens_of(2, 8), prompt + tokens_of(3, 8)
    save(rig, theirs, visited(rig, theirs, Terms()))
    save(rig, mine, visited(rig, mine, terms))
    clock.now += 10.0
    next_turn = theirs + tokens_of(4, 8)
    assert rig.store.find(lookup_of(next_turn), 0, len(next_turn))[-1].stop == len(theirs)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("terms", [SHORT, Terms(ttl_s=1.0), Terms(Priority.LOW)])
def test_who_goes_on_says_what_becomes_of_the_conversation(
    open_rig: Rigs, terms: Terms, length: int
) -> None:
    rig, device = open_rig(clock=Clock())
    prompt, more = tokens_of(1, 32 + length), tokens_of(2, 8)
    first = visited(rig, prompt, Terms())
    save(rig, prompt + more, first)  # with its answer
    save(rig, prompt + more + more, visited(rig, prompt + more + more, terms))
    device.settle()
    run = rig.store.residency.run_of(rig.chunk(name_of(sequence_of(prompt), 0)))
    assert (run.priority, run.lease and run.lease.ttl_s) == (terms.priority, terms.ttl_s)


@pytest.mark.parametrize("length", [1, CHUNK, 2 * CHUNK])
def test_a_prompt_that_was_not_looked_up_is_taken_by_none(open_rig: Rigs, length: int) -> None:
    """Whose conversation it is was not asked. So who begins as it does shares that."""
    clock = Clock()
    rig, _ = open_rig(clock=clock)
    prompt = tokens_of(1, 2 * CHUNK)
    theirs, mine = prompt + tokens_of(2, length), prompt + tokens_of(3, length)
    save(rig, theirs, unseen(rig, theirs, Terms()))
    save(rig, mine, visited(rig, mine, SHORT))
    clock.now += 10.0
    assert rig.store.find(lookup_of(theirs), 0, len(prompt))[-1].stop == len(prompt)
