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
from attnstore_vllm.policy.visits import Run, Terms, used_by_both
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
