# SPDX-License-Identifier: Apache-2.0
"""KV whose ttl is over is not used again by any way but a computation of it anew."""

from __future__ import annotations

import pytest

from attnstore_vllm.policy.visits import Terms
from attnstore_vllm.store.lookup import Lookup
from tests.helpers import (
    Rig,
    Rigs,
    conversation,
    lookup_of,
    name_of,
    names_of,
    push_out_of_dram,
    sequence_of,
    tokens_of,
)
from tests.step_world import CHUNK, StepWorld
from tests.unit.policy.test_visits import Clock, ask, save

TTL = Terms(ttl_s=60.0)


def test_the_same_answer_once_more_does_not_revive_the_expired_one(open_rig: Rigs) -> None:
    """A prompt of half a chunk, and an answer up to token 40: a look-up sees the prompt alone."""
    clock = Clock()
    rig, device = open_rig(clock=clock)
    ask(rig, 1, terms=TTL)
    device.settle()
    old = rig.chunk(name_of(sequence_of(conversation(1)), 1))
    clock.now += 100.0
    sequence = sequence_of(conversation(1, 8))
    with rig.store.queue() as queue:
        queue.append("again")
    pieces, visit = rig.store.arrive("again", Lookup(sequence), 8, 1, TTL)
    assert pieces == []
    rig.store.leave_queue(["again"])
    answered = sequence_of(conversation(1))
    for number in range(3):
        chunk = rig.store.begin_save(name_of(answered, number), visit.run(number))
        if chunk is not None:
            rig.store.finish_saves([chunk])
    device.settle()
    clock.now += 10.0
    found = rig.store.find(lookup_of(conversation(1)), 0, 40)
    assert old not in [piece.chunk for piece in found]


@pytest.mark.parametrize("eviction", ["attnstore", "lru", "fifo"])
def test_a_use_of_its_beginning_renews_nothing_behind_it(open_rig: Rigs, eviction: str) -> None:
    """Another conversation goes on from the first chunk alone."""
    clock = Clock()
    rig, device = open_rig(clock=clock, eviction=eviction)
    first = tokens_of(1, 48)
    save(rig, first, TTL)
    device.settle()
    clock.now += 50.0
    save(rig, first[:16] + tokens_of(2, 16), TTL)
    device.settle()
    clock.now += 50.0
    assert rig.store.find(lookup_of(first), 0, 48)[-1].stop == 16, "of 100 s ago, with a ttl of 60"


@pytest.mark.parametrize("has_visit", [True, False])
def test_who_has_its_whole_blocks_revives_no_expired_tail(open_rig: Rigs, has_visit: bool) -> None:
    """It does not have the tail's end, so a look-up does not meet the tail: that is only used."""
    clock = Clock()
    rig, device = open_rig(clock=clock)
    first = tokens_of(1, 22)  # a chunk, and a tail of a block and two tokens
    save_with_tail(rig, first)
    device.settle()
    clock.now += 50.0
    save_with_tail(rig, first[:16] + tokens_of(2, 16))
    device.settle()
    clock.now += 50.0
    like = first[:20] + tokens_of(3, 4)
    if has_visit:
        rig.store.arrive("like", Lookup(sequence_of(like)), len(like), 1, TTL)
    else:
        rig.store.find(lookup_of(like), 0, len(like))
    clock.now += 5.0
    found = rig.store.find(lookup_of([*first, 7]), 0, 23)
    assert found[-1].stop == 16, "the tail was used 105 s ago, with a ttl of 60"


def save_with_tail(rig: Rig, tokens: list[int]) -> None:
    """A request comes, and its KV is saved, the tail with its end too."""
    sequence = sequence_of(tokens)
    _, visit = rig.store.arrive("request", Lookup(sequence), len(tokens), 1, TTL)
    for number, name in enumerate(names_of(sequence)):
        chunk = rig.store.begin_save(name, visit.run(number))
        if chunk is not None:
            rig.store.finish_saves([chunk])


def test_what_becomes_less_worth_is_not_renewed_with_all_of_its_run(open_rig: Rigs) -> None:
    """A request ends long after another one used what it has left, for the last time."""
    clock = Clock()
    rig, device = open_rig(clock=clock)
    tokens = tokens_of(1, 32)
    save(rig, tokens, TTL)
    device.settle()
    clock.now += 100.0
    rig.store.make_low_priority([rig.chunk(name_of(sequence_of(tokens), 0))])
    assert rig.store.find(lookup_of(tokens), 0, 32) == []


def test_what_becomes_less_worth_renews_no_lease_of_another_request(open_rig: Rigs) -> None:
    """One ends while another still has time left, and has more than that one had."""
    clock = Clock()
    rig, device = open_rig(clock=clock)
    tokens = tokens_of(1, 32)
    save(rig, tokens, TTL)
    device.settle()
    clock.now += 50.0
    rig.store.make_low_priority([rig.chunk(name_of(sequence_of(tokens), 0))])
    clock.now += 15.0
    assert rig.store.find(lookup_of(tokens), 0, 32) == [], "of 65 s ago, with a ttl of 60"


def test_what_only_begins_as_others_do_has_a_ttl_of_its_own(open_rig: Rigs) -> None:
    """Its second chunk is half of a prompt that others share, and half of its own text."""
    clock = Clock()
    rig, device = open_rig(clock=clock)
    shared, own = tokens_of(1, 64), tokens_of(1, 24) + tokens_of(2, 40)
    save(rig, shared, Terms())
    save(rig, own, TTL)
    device.settle()
    clock.now += 100.0
    assert rig.store.find(lookup_of(own), 0, 64)[-1].stop <= 24, "no more than the others'"
    assert rig.store.find(lookup_of(shared), 0, 64)[-1].stop == 64, "it is kept for the others"


def test_a_save_of_an_earlier_request_renews_no_lease_of_a_later_one(open_rig: Rigs) -> None:
    """Both compute a prompt. The later one saves it first, with a time of its own."""
    clock = Clock()
    rig, device = open_rig(clock=clock)
    tokens = tokens_of(1, 32)
    early = sequence_of(tokens[:16])
    _, visit = rig.store.arrive("early", Lookup(early), 16, 1, TTL)
    clock.now += 10.0
    save(rig, tokens, TTL)
    device.settle()
    push_out_of_dram(rig, device, rig.dram_slots)
    clock.now += 50.0
    chunk = rig.store.begin_save(name_of(early, 0), visit.run(0), again=True)
    assert chunk is not None, "DRAM takes it once more"
    rig.store.finish_saves([chunk])
    clock.now += 15.0
    found = rig.store.find(lookup_of(tokens), 0, 32)
    assert found == [], "of 65 s ago, with a ttl of 60"


def test_a_rest_that_finds_room_late_renews_nothing(open_rig: Rigs) -> None:
    """A prompt was too long for DRAM. Its last chunk is saved after the request has ended."""
    clock = Clock()
    rig, _ = open_rig(clock=clock)
    tokens = tokens_of(1, 32)
    sequence = sequence_of(tokens)
    _, visit = rig.store.arrive("request", Lookup(sequence), 32, 1, TTL)
    first = rig.store.begin_save(name_of(sequence, 0), visit.run(0))
    assert first is not None
    rig.store.finish_saves([first])
    clock.now += 20.0
    rest = rig.store.begin_save(name_of(sequence, 1), visit.run(1), yields=True)
    assert rest is not None
    rig.store.finish_saves([rest])
    assert rig.store.begin_save(name_of(sequence, 1), visit.run(1), yields=True) is None
    clock.now += 45.0
    assert rig.store.begin_save(name_of(sequence, 1), visit.run(1), yields=True) is None
    assert rig.store.find(lookup_of(tokens), 0, 32) == [], "it ended 65 s ago, with a ttl of 60"


@pytest.mark.parametrize("of_server", [True, False])
def test_a_request_that_began_without_a_look_up_has_its_ttl(
    monkeypatch: pytest.MonkeyPatch, of_server: bool
) -> None:
    """The step's time was over, and it could not wait."""
    clock = Clock()
    store = {"clock": clock, "ttl_s": 60.0 if of_server else None}
    world = StepWorld(monkeypatch, store=store, step_budget=1, step_tokens=CHUNK)
    world.come(world.request("before", tokens_of(2, 3 * CHUNK)))  # takes the step's look-up
    hints = {} if of_server else {"ttl": 60}
    params = {"do_remote_prefill": True, "attnstore": hints}
    tokens = tokens_of(1, 3 * CHUNK)
    request = world.request("one", tokens, kv_transfer_params=params)
    world.come(request)
    assert world.ask(request) == 0
    world.start(request, 0)
    world.end_step(request)
    assert world.side.requests["one"].visit is None
    world.end(request)
    residency = world.store.residency
    saved = [c for c in residency.index if c.name.tokens == sequence_of(tokens).tokens(0, CHUNK)]
    assert saved
    clock.now += 100.0
    residency.now = clock.now
    assert all(map(residency.has_expired, saved)), "used 100 s ago, with a ttl of 60"
