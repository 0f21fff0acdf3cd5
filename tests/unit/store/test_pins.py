# SPDX-License-Identifier: Apache-2.0
"""Pins beside times to live: what is pinned stays, and a pin makes nothing be found for longer than
those who used it said."""

from __future__ import annotations

import pytest

from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others
from attnstore_vllm.config.settings import PinningConfig
from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.policy.visits import Terms
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.remote_io import awaits_remote
from tests.helpers import (
    Rig,
    Rigs,
    lookup_of,
    memory_rig,
    name_of,
    names_of,
    payload_of,
    sequence_of,
    tokens_of,
)
from tests.step_world import CHUNK, StepWorld
from tests.unit.policy.test_visits import Clock, save

PINS = PinningConfig(share=0.5, tenant_share=0.5)
PINNED = Terms(ttl_s=60.0, pin_s=60.0)
PIN = {"attnstore": {"pin": True}}


def test_a_rest_that_is_saved_late_is_not_pinned_beyond_its_ttl(open_rig: Rigs) -> None:
    """Its request has ended: that it is saved is no use of it."""
    clock = Clock()
    rig, _ = open_rig(clock=clock, pinning=PINS)
    tokens = tokens_of(1, 32)
    sequence = sequence_of(tokens)
    _, visit = rig.store.arrive("request", Lookup(sequence), 32, 1, PINNED)
    for number, yields in enumerate((False, True)):
        chunk = rig.store.begin_save(
            name_of(sequence, number), visit.run(number), PINNED.pin_s, yields=yields
        )
        assert chunk is not None
        rig.store.finish_saves([chunk])
        clock.now += 20.0
    save(rig, tokens[:16], PINNED)  # another one has the same beginning
    clock.now += 25.0
    found = rig.store.find(lookup_of(tokens), 0, 32)
    assert found[-1].stop == 16, "the rest's request ended 65 s ago, with a ttl of 60"


def test_a_rest_that_is_not_saved_any_more_pins_nothing(open_rig: Rigs) -> None:
    clock = Clock()
    rig, _ = open_rig(clock=clock, pinning=PINS)
    sequence = sequence_of(tokens_of(1, 16))
    name = name_of(sequence, 0)
    _, visit = rig.store.arrive("request", Lookup(sequence), 16, 1, PINNED)
    chunk = rig.store.begin_save(name, visit.run(0))
    assert chunk is not None
    rig.store.finish_saves([chunk])
    clock.now += 61.0
    assert rig.store.begin_save(name, visit.run(0), PINNED.pin_s, yields=True) is None
    assert rig.store.find(lookup_of(tokens_of(1, 16)), 0, 16) == [], "its ttl was over"


def test_who_goes_on_from_a_pinned_tail_keeps_its_own_ttl(open_rig: Rigs) -> None:
    """The chunk that takes the tail's place has text of another request."""
    clock = Clock()
    rig, device = open_rig(clock=clock, pinning=PINS)
    tokens = tokens_of(1, 24)
    sequence = sequence_of(tokens)
    _, visit = rig.store.arrive("request", Lookup(sequence), 24, 1, PINNED)
    for number, name in enumerate(names_of(sequence)):
        chunk = rig.store.begin_save(name, visit.run(number), PINNED.pin_s)
        assert chunk is not None
        rig.store.finish_saves([chunk])
    longer = tokens + tokens_of(2, 24)
    save(rig, longer, Terms(ttl_s=20.0))
    device.settle()
    clock.now += 25.0
    found = rig.store.find(lookup_of(longer), 0, 48)
    assert found[-1].stop == 16, "its own text was used 25 s ago, with a ttl of 20"


def test_what_others_have_takes_over_the_pin_of_the_tail_that_it_replaces() -> None:
    others, tokens = Others(), tokens_of(1, 64)
    for name in names_of(sequence_of(tokens)):
        others.put(name, payload_of(name))
    clock = Clock()
    rig = rig_with(others, clock)
    tail = pinned(rig, tokens[:24])[1]
    assert rig.store.residency.pinning.of(tail, clock.now) is not None
    lookup = lookup_of(tokens, may_ask=True)
    with rig.store.queue() as queue:
        queue.append("next")
    rig.store.arrive("next", lookup, 64)
    for _ in range(8):
        rig.store.tick()
    assert not awaits_remote(lookup)
    assert all(is_here(rig, tokens[:stop]) for stop in (32, 48))
    assert tail.dropped, "the whole chunk has its tokens"
    whole = rig.chunk(name_of(sequence_of(tokens), 1))
    assert rig.store.residency.pinning.of(whole, clock.now) is not None
    rig.store.leave_queue(["next"])
    rig.pool.close()


def rig_with(others: Others, clock: Clock) -> Rig:
    return memory_rig(
        clock=clock, pinning=PINS, more_tiers=(MakeRemoteDict(others),), threaded=False
    )


def pinned(rig: Rig, tokens: list[int]) -> list[Chunk]:
    sequence = sequence_of(tokens)
    _, visit = rig.store.arrive("pinned", Lookup(sequence), len(tokens), 1, Terms(pin_s=600.0))
    chunks = []
    for number, name in enumerate(names_of(sequence)):
        chunk = rig.store.begin_save(name, visit.run(number), 600.0)
        assert chunk is not None
        rig.store.finish_saves([chunk])
        chunks.append(chunk)
    return chunks


def is_here(rig: Rig, tokens: list[int]) -> bool:
    chunk = rig.store.residency.index.get(names_of(sequence_of(tokens))[-1].key)
    return chunk is not None and chunk.dram.state is State.READY


def test_a_prompt_that_others_have_is_pinned_once_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it came nothing of it was here."""
    others, tokens = Others(), tokens_of(1, 4 * CHUNK + 1)
    for name in names_of(sequence_of(tokens[: 4 * CHUNK])):
        others.put(name, payload_of(name))
    store = {"pinning": PINS, "more_tiers": (MakeRemoteDict(others),)}
    world = StepWorld(monkeypatch, store=store, pinning=PINS)
    world.serve(world.request("one", tokens, kv_transfer_params=PIN))
    residency = world.store.residency
    loaded = [chunk for chunk in residency.index if chunk.origin == "asked"]
    assert len(loaded) == 4
    assert all(residency.pinning.of(chunk, residency.now) is not None for chunk in loaded)
    world.close()


def test_what_a_pinned_prompt_needs_outlasts_the_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The turn after it needs another window, and an edited one needs this one again."""
    store = {"pinning": PINS}
    world = StepWorld(monkeypatch, windows=True, store=store, pinning=PINS)
    tokens = tokens_of(1, 8 * CHUNK)
    first = tokens[: 3 * CHUNK]
    world.serve(world.request("one", first, kv_transfer_params=PIN))
    world.serve(world.request("two", tokens[: 6 * CHUNK]))
    world.serve(world.request("three", tokens))
    again = world.request("again", [*first, 7], kv_transfer_params=PIN)
    world.come(again)
    assert world.ask(again) == len(first)
    world.end(again)
    world.close()


def test_after_a_restart_nothing_is_pinned_and_an_open_breaker_is_tried(open_rig: Rigs) -> None:
    """docs/operations.md, times across restarts."""
    rig, device = open_rig(pinning=PINS)
    chunks = pinned(rig, tokens_of(1, 32))
    device.settle()
    rig.until_idle()
    assert all(rig.store.residency.pinning.of(chunk, 0.0) is not None for chunk in chunks)
    rig.store.thread.tiers[0].health.note_hang("read")
    assert not rig.store.thread.tiers[0].health.reads.in_use
    again, _ = open_rig(image=bytes(device.image), pinning=PINS)
    again.until_idle()
    found = [again.chunk(chunk.name) for chunk in chunks]
    assert all(chunk.is_behind for chunk in found)
    assert not any(again.store.residency.pinning.of(chunk, 0.0) is not None for chunk in found)
    assert again.store.thread.tiers[0].health.reads.in_use
