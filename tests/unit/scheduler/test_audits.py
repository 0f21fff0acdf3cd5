# SPDX-License-Identifier: Apache-2.0
"""Hits that are computed to be compared: the real scheduler side, with workers that copy what a
model would have computed.

It is long since each way in which a drawn hit may come to nothing has a story of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.config.settings import TruncationConfig
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.policy.kv_compare import Comparison, Unit
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.scheduler.saving import Saving
from attnstore_vllm.store import trial
from attnstore_vllm.store.trial import PUT_OFF_MAX
from attnstore_vllm.types import NVME, TOKEN_BYTES, Cause, Event
from tests.helpers import (
    PAYLOAD_BYTES,
    as_of_before,
    name_of,
    names_of,
    push_out_of_dram,
    sequence_of,
    tokens_of,
)
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.vllm_objects import output

LENGTH = 4 * CHUNK + 1
BLOCKS = CHUNK // BLOCK
PAGE = PAYLOAD_BYTES // BLOCKS
BITS = Comparison([Unit(0, 0, 0, PAGE)], None)
GARBAGE = b"\xee"


def computed(name: ChunkName) -> bytes:
    """The KV of a chunk, as the model computes it: of each token what it and its place say, so
    that a longer chunk begins as a shorter one does."""
    found = b""
    for index in range(CHUNK):
        token = name.tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES]
        one = (token + (name.position + index).to_bytes(4, "big")) if token else 8 * GARBAGE
        found += one * (PAYLOAD_BYTES // CHUNK // 8)
    return found


class AuditWorld(StepWorld):
    """Workers that copy what a model computes.

    Args:
        rate: of hits.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, path: Path, rate: float = 1.0, **options: Any
    ) -> None:
        audit = AuditConfig(rate=rate, tokens_per_s=1e9, **options.pop("audit", {}))
        store = {"audit": audit, "comparisons": (BITS,), "path": path, **options.pop("store", {})}
        self.num_looks = 0
        """At the weights."""
        super().__init__(monkeypatch, store=store, audit=audit, **options)
        self.sequences: dict[str, list[int]] = {}
        self.gives_up = False

    def put(self, tokens: list[int], wrong: int = -1) -> list[ChunkName]:
        """Store a prompt's chunks; that of this number is wrong."""
        names = names_of(sequence_of(tokens))
        for number, name in enumerate(names):
            payload = computed(name) if number != wrong else bytes(PAYLOAD_BYTES)
            assert self.rig.put(name, payload) is not None
        return names

    def report(self, plan: Any) -> None:
        """The workers copy the blocks of each save: what is in them says the table of a request."""
        self.num_looks += plan.looks_at_weights
        for save in (*plan.saves_before, *plan.saves):
            tokens = self.sequences.get(save.request_id)
            for slot, first, block_ids in save.copies:
                if tokens is None or self.gives_up:
                    continue
                start = (block_ids[0] - 1) * BLOCK  # StepWorld gives blocks 1, 2, ...
                at = start - first * BLOCK
                whole = computed(name_of(sequence_of(tokens), at // CHUNK))
                part = slice(first * PAGE, (first + len(block_ids)) * PAGE)
                self.rig.pool.slot(slot)[part] = whole[part]
        super().report(plan)

    def asks(self, tokens: list[int], name: str = "one", local: int = 0, **given: Any) -> Any:
        """A request that is served: how many tokens it was offered is its `found`."""
        request = self.request(name, tokens, **given)
        self.sequences[name] = tokens
        self.come(request)
        found = self.ask(request, local)
        while found is None:
            self.end_step()
            found = self.ask(request, local)
        request.found = found
        self.start(request, found)
        request.num_computed_tokens += local
        return request

    def serves(self, tokens: list[int], name: str = "one", local: int = 0, **given: Any) -> int:
        """From its coming to the end of all that it leaves. Returns what it was offered."""
        request = self.asks(tokens, name, local, **given)
        self.end_step(request)
        self.finish(request)
        self.end_step()
        self.rig.until_idle()
        return int(request.found)

    def outcomes(self) -> dict[str, int]:
        counts = self.store.figures().counts
        names = (Event.AGREED, Event.DIFFERED, Event.NOT_COMPARED)
        return {name.value: counts[name] for name in names if counts.get(name)}


Start = Callable[..., AuditWorld]


def opened(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Makes worlds, which are quiet at the end."""
    worlds: list[Any] = []

    def begin(**options: Any) -> Any:
        worlds.append(make(**options))
        return worlds[-1]

    yield begin
    for world in worlds:
        world.rig.until_idle()
        world.side.check_quiet()
        world.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    yield from opened(partial(AuditWorld, monkeypatch, tmp_path))


def test_a_hit_that_is_drawn_is_computed_and_compared(start: Start) -> None:
    world = start()
    world.put(tokens_of(1, LENGTH))
    assert world.serves(tokens_of(1, LENGTH)) == 0
    assert world.outcomes() == {"agreed": 4}
    counters = world.side.take_stats().data["counters"]
    assert counters["recomputations:audit"] == counters["skipped:audit"] == 1
    assert counters["audits:agreed"] == 4
    assert not any(key.startswith("loaded_tokens") for key in counters)


def test_without_the_setting_or_the_luck_nothing_is_drawn(start: Start) -> None:
    world = start(rate=1e-9)
    world.put(tokens_of(1, LENGTH))
    assert world.serves(tokens_of(1, LENGTH)) == LENGTH - 1
    assert world.outcomes() == {}


def nvme_alone(world: AuditWorld, *prompts: list[int], wrong: int = -1) -> None:
    """An earlier process has left these."""
    for tokens in prompts:
        world.put(tokens, wrong=wrong)
        world.rig.until_idle()
        assert isinstance(world.rig.device, MemoryDevice)
        push_out_of_dram(world.rig, world.rig.device, world.rig.dram_slots)
    as_of_before(world.store)


def test_what_a_tier_brings_up_is_tried_before_it_is_served(start: Start) -> None:
    """What an earlier process wrote may be of other code."""
    world = start(rate=1e-9, slots=16)
    prompts = [tokens_of(number, 2 * CHUNK + 1) for number in (1, 2)]
    nvme_alone(world, *prompts)
    assert world.serves(prompts[0], "one") == 0
    assert world.outcomes() == {"agreed": 2}
    assert world.serves(prompts[1], "two") == 2 * CHUNK, "that was it; the others are for luck"
    assert world.outcomes() == {"agreed": 2}


def test_nothing_is_served_of_a_tier_that_fails_its_trial(start: Start) -> None:
    world = start(rate=1e-9, slots=16)
    prompts = [tokens_of(number, 2 * CHUNK + 1) for number in (1, 2)]
    nvme_alone(world, *prompts, wrong=1)
    assert world.serves(prompts[0], "one") == 0
    assert world.outcomes()["differed"] == 1
    assert world.serves(prompts[1], "two") == 0
    assert world.outcomes()["differed"] == 1, "nothing of before is even looked at"
    assert not world.store.is_distrusted
    assert world.serves(prompts[1], "three") == 2 * CHUNK, "what came since is served"


def test_after_a_reset_that_it_begins_workers_look_at_the_weights(start: Start) -> None:
    """The shared tier is out of use from a reset until they have looked."""
    world = start(rate=1e-9, slots=16)
    prompts = [tokens_of(number, 2 * CHUNK + 1) for number in (1, 2)]
    nvme_alone(world, *prompts, wrong=1)
    world.serves(prompts[0], "one")
    assert world.outcomes()["differed"] == 1
    looks = world.num_looks
    world.serves(prompts[1], "two")
    assert world.num_looks == looks + 1
    world.serves(prompts[1], "three")
    assert world.num_looks == looks + 1, "once"


def test_who_comes_while_a_trial_goes_on_is_not_served_either(start: Start) -> None:
    """Not even by a chunk that has come up for another request."""
    world = start(rate=1e-9, slots=32)
    tokens = tokens_of(1, 2 * CHUNK + 1)
    nvme_alone(world, tokens)
    first = world.asks(tokens, "one")
    assert first.found == 0
    second = world.asks(tokens, "two")
    assert second.found == 0
    for request in (first, second):
        world.end_step(request)
        world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.serves(tokens, "three") == 2 * CHUNK


def test_a_trial_that_cannot_be_held_ends(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that leave nothing cannot be compared: they are computed, so many of them."""
    monkeypatch.setattr(trial, "PUT_OFF_S", 0.0)
    world = start(rate=1e-9, slots=16)
    tokens = tokens_of(1, 2 * CHUNK + 1)
    nvme_alone(world, tokens)
    params: Any = {"kv_transfer_params": {"attnstore": {"store": False}}}
    found = [world.serves(tokens, f"r{n}", **params) for n in range(PUT_OFF_MAX + 1)]
    assert found == PUT_OFF_MAX * [0] + [2 * CHUNK]
    assert world.outcomes() == {}
    assert "serves it uncompared" in caplog.text


def test_documents_of_a_tier_that_is_on_trial_are_not_served(start: Start) -> None:
    """A request for its trial has computed some of them, and they are known by their content."""
    config = TruncationConfig(
        enabled=True, shared_by="everyone", documents=True, min_tokens=2 * CHUNK
    )
    passes = {"why_not_moved": None, "why_no_passes": None, "pass_tokens": 1024, "pass_rows": 8}
    store = {"truncation": config}
    world = start(rate=1e-9, slots=32, store=store, truncation=config, **passes)
    tokens = tokens_of(1, LENGTH)
    nvme_alone(world, tokens)
    first = world.asks(tokens, "one")
    assert first.found == 0
    half = 2 * CHUNK
    world.report(world.side.build_step(output({"one": (0, half)}, {})))
    first.num_computed_tokens = half
    document = [*range(5000, 5020), *tokens[:half], *range(6000, 6020)]
    second = world.asks(document, "two")
    assert second.found == 0
    for request in (first, second):
        world.end_step(request)
        world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {"agreed": 4}
    third = world.asks([*range(7000, 7020), *tokens[:half], *range(8000, 8020)], "three")
    assert third.found > half, "they have agreed"
    world.end_step()
    world.end_step(third)
    world.finish(third)


def test_an_answer_that_vllm_had_no_room_for_is_not_given_again_on_trial(start: Start) -> None:
    """It was computed here, has left DRAM since, and NVMe has an earlier process's bytes."""
    world = start(rate=1e-9)
    tokens = tokens_of(1, LENGTH)
    names = world.put(tokens)
    request = world.request("one", tokens)
    world.come(request)
    assert world.answer(request) == LENGTH - 1
    world.end_step()
    assert world.answer(request) == LENGTH - 1, "the same as before"
    world.end_step()
    world.rig.chunk(names[2]).brought_by = NVME
    assert world.answer(request) == 0
    world.finish(request)


@pytest.mark.parametrize("local", [0, CHUNK])
def test_what_an_audit_has_removed_is_not_saved_by_who_has_loaded_it(
    start: Start, local: int
) -> None:
    """It is in that request's blocks, and in vLLM's cache for others."""
    world = start(rate=1e-9)
    tokens = tokens_of(1, LENGTH)
    names = world.put(tokens, wrong=3)
    tries: Any = {"kv_transfer_params": {"attnstore": {"audit": True}}}
    drawn = world.asks(tokens, "drawn", **tries)
    assert drawn.found == 0
    loads = world.asks([*tokens, *range(9000, 9000 + 2 * CHUNK)], "loads", local)
    assert loads.found == LENGTH - 1 - local
    world.end_step(drawn)
    world.finish(drawn)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes()["differed"] == 1
    index = world.store.residency.index
    assert index.get(names[3].key) is None
    world.end_step(loads)
    world.finish(loads)
    world.end_step()
    assert index.get(names[3].key) is None
    behind = [*tokens, *range(9500, 9500 + 2 * CHUNK)]
    again = world.asks(behind, "hits vLLM's cache", LENGTH - 1)
    world.end_step(again)
    world.finish(again)
    world.end_step()
    part = tokens[: 3 * CHUNK + BLOCK + 3]
    world.serves(part, "a part of it", 3 * CHUNK + BLOCK)
    assert index.get(names[3].key) is None
    assert world.serves(part, "finds no part") == 3 * CHUNK
    assert world.serves(tokens, "computes") == 3 * CHUNK
    assert world.serves(behind, "finds nothing behind it") == LENGTH // CHUNK * CHUNK
    assert world.serves(tokens, "finds") == LENGTH - 1, "it was computed anew"


BEHIND = 2 * CHUNK


def removes(world: AuditWorld, tokens: list[int], number: int) -> None:
    """As an audit does with a wrong chunk: the scheduler's thread hears of it when it looks."""
    chunk = world.rig.chunk(names_of(sequence_of(tokens))[number])
    world.store.drop([chunk])
    assert world.store.audit is not None
    world.store.audit.has_removed = True


def saved_behind(world: AuditWorld, tokens: list[int]) -> bool:
    """Whether there is KV that was computed behind what was removed."""
    names = names_of(sequence_of([*tokens, *range(9000, 9000 + BEHIND)]))[4:6]
    found = [world.store.residency.index.get(name.key) is not None for name in names]
    assert found[0] == found[1]
    return found[0]


def goes_on(world: AuditWorld, tokens: list[int], local: int = 0) -> Any:
    """A request for a stored prompt, and more."""
    return world.asks([*tokens, *range(9000, 9000 + BEHIND)], "goes on", local)


def full_dram(world: AuditWorld) -> list[Any]:
    """Chunks that are held, so that no save finds room."""
    world.rig.until_idle()
    residency = world.store.residency
    for number in range(1, residency.dram.num_slots):
        world.rig.put(name_of(sequence_of(tokens_of(700 + number, CHUNK)), 0), bytes(PAYLOAD_BYTES))
        world.rig.until_idle()
        if not residency.dram.free:
            break
    held = [*residency.dram.owned.values()]
    residency.hold(*held)
    return held


@pytest.mark.parametrize("is_removed", [True, False])
@pytest.mark.parametrize("when", ["before it ends", "after"])
def test_what_found_no_room_is_not_saved_behind_what_an_audit_has_removed(
    start: Start, monkeypatch: pytest.MonkeyPatch, when: str, is_removed: bool
) -> None:
    """Its request ends between the removal and the next step, or has ended: its rest is in vLLM's
    blocks."""
    world = start(rate=1e-9, slots=12)
    tokens = tokens_of(1, LENGTH)
    world.put(tokens)
    request = goes_on(world, tokens)
    assert request.found == LENGTH - 1
    world.end_step()
    pool = world.manager.block_pool
    pool.blocks = [SimpleNamespace(block_hash=object()) for _ in range(100)]
    held = full_dram(world)
    monkeypatch.setattr(Saving, "may_come_free", True)  # others' saves are under way
    world.end_step(request)
    assert not saved_behind(world, tokens)
    if when == "before it ends":
        world.store.residency.release(*held)
        if is_removed:
            removes(world, tokens, 3)
        world.finish(request)
    else:
        world.finish(request)
        assert len(world.side.rests) == 1
        world.store.residency.release(*held)
        gone = [chunk for chunk in held if chunk.name.position == 0 and chunk.is_behind]
        world.store.residency.leave_dram(*gone[-4:])  # there is room
        if is_removed:
            removes(world, tokens, 3)
    for _ in range(3):
        world.end_step()
        world.rig.until_idle()
    assert saved_behind(world, tokens) is not is_removed


@pytest.mark.parametrize("is_removed", [True, False])
@pytest.mark.parametrize("when", ["before it is asked for", "after"])
def test_a_request_that_is_not_looked_up_saves_nothing_behind_what_an_audit_has_removed(
    start: Start, when: str, is_removed: bool
) -> None:
    """Its load has failed, it was preempted, and vLLM's cache has its beginning."""
    world = start(rate=1e-9)
    tokens = tokens_of(1, LENGTH)
    world.put(tokens)
    request = world.request("goes on", [*tokens, *range(9000, 9000 + BEHIND)])
    world.sequences["goes on"] = request.all_token_ids
    world.come(request)
    world.side.requests["goes on"].load_has_failed(Cause.COPY_FAILED)
    assert world.ask(request) == 0
    world.start(request, 0)
    world.report(world.side.build_step(output({"goes on": (0, CHUNK)}, {})))
    world.preempt(request)
    if is_removed and when != "after":
        removes(world, tokens, 3)
    assert world.ask(request, LENGTH - 1) == 0
    if is_removed and when == "after":
        removes(world, tokens, 3)
    world.start(request, 0)
    request.num_computed_tokens = LENGTH - 1
    world.end_step(request)
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert saved_behind(world, tokens) is not is_removed


def test_a_drawn_request_that_is_outdated_is_compared_no_more(start: Start) -> None:
    """Its adapter was replaced meanwhile, or vLLM had blocks of other weights: what it computes
    would accuse KV that is right."""
    world = start()
    world.put(tokens_of(1, LENGTH), wrong=2)
    drawn = world.asks(tokens_of(1, LENGTH), "drawn")
    assert drawn.found == 0 and world.side.requests["drawn"].audited
    world.side.requests["drawn"].computing.is_outdated = True
    world.end_step(drawn)
    world.finish(drawn)
    world.end_step()
    world.rig.until_idle()
    assert "differed" not in world.outcomes()


def test_the_wrong_chunk_is_found_and_no_other(start: Start) -> None:
    world = start()
    names = world.put(tokens_of(1, LENGTH), wrong=2)
    assert world.serves(tokens_of(1, LENGTH)) == 0
    assert world.outcomes() == {"agreed": 3, "differed": 1}
    stored = [world.store.residency.index.get(name.key) is not None for name in names[:4]]
    assert stored == [True, True, False, True]
    # What comes next computes it, stores it, and finds it right.
    assert world.serves(tokens_of(1, LENGTH), "two") == 0
    assert world.serves(tokens_of(1, LENGTH), "three") == 0
    assert world.outcomes()["differed"] == 1
    assert world.store.residency.index.get(names[2].key) is not None


def test_parts_of_chunks_and_of_blocks(start: Start) -> None:
    """HBM has a beginning of any length, and the hit ends anywhere: no false alarm, and whole
    blocks are compared alone."""
    world = start(slots=512, records=512)
    chance = Random(1)
    for number in range(1, 41):
        tokens = tokens_of(number, chance.randrange(2 * CHUNK, LENGTH))
        world.put(tokens)
        local = chance.randrange(0, len(tokens) // BLOCK) * BLOCK
        more = [*tokens, *tokens_of(number + 500, chance.randrange(1, CHUNK))]
        world.serves(more, f"r{number}", local=local)
    assert list(world.outcomes()) == ["agreed"] and world.outcomes()["agreed"] > 50


def test_it_is_drawn_once_though_it_is_asked_for_again_and_again(start: Start) -> None:
    world = start()
    world.put(tokens_of(1, LENGTH))
    request = world.request("one", tokens_of(1, LENGTH))
    world.sequences["one"] = tokens_of(1, LENGTH)
    world.come(request)
    for _ in range(5):
        world.free_blocks += 100  # so that it is looked up again
        assert world.ask(request) == 0
        world.end_step()
    world.start(request, 0)
    world.end_step(request)
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {"agreed": 4}
    assert world.side.take_stats().data["counters"]["recomputations:audit"] == 1


@pytest.mark.parametrize("more", [0, BLOCK])
def test_what_another_request_has_loaded_meanwhile_says_nothing(start: Start, more: int) -> None:
    """vLLM had no room, and then had the prompt's beginning: from the store, as it may be."""
    world = start()
    world.put(tokens_of(1, LENGTH))
    request = world.request("one", tokens_of(1, LENGTH))
    world.sequences["one"] = tokens_of(1, LENGTH)
    world.come(request)
    assert world.ask(request) == 0
    world.end_step()
    local = 2 * CHUNK + more
    assert world.ask(request, local) == 0
    world.start(request, 0)
    request.num_computed_tokens = local
    world.end_step(request)
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {"agreed": 2, "not_compared": 2}


def test_after_a_preemption_it_is_served(start: Start) -> None:
    world = start()
    world.put(tokens_of(1, LENGTH))
    request = world.asks(tokens_of(1, LENGTH))
    assert request.found == 0
    plan = world.side.build_step(output({"one": (0, CHUNK)}, {}))
    world.report(plan)
    world.preempt(request)
    found = world.ask(request)
    assert found == LENGTH - 1
    world.start(request, found)
    world.end_step(request)
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {"agreed": 1}


def test_steps_that_end_within_chunks(start: Start) -> None:
    world = start()
    world.put(tokens_of(1, LENGTH))
    request = world.asks(tokens_of(1, LENGTH))
    for at in range(0, LENGTH, 7):
        more = min(7, LENGTH - at)
        told = {"one": (at, more)}
        world.report(world.side.build_step(output(told if at == 0 else {}, told if at else {})))
        request.num_computed_tokens = at + more
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {"agreed": 4}


def test_a_request_that_is_aborted_leaves_nothing_open(start: Start) -> None:
    world = start()
    world.put(tokens_of(1, LENGTH))
    request = world.asks(tokens_of(1, LENGTH))
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {}


def test_what_has_left_meanwhile_is_not_compared(start: Start) -> None:
    world = start()
    names = world.put(tokens_of(1, LENGTH))
    request = world.asks(tokens_of(1, LENGTH))
    world.store.drop([world.rig.chunk(names[0])])
    world.end_step(request)
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {"agreed": 3, "not_compared": 1}


def test_moved_and_approximate_kv_are_never_drawn(start: Start) -> None:
    world = start()
    world.put(tokens_of(1, LENGTH))
    request = world.request("one", tokens_of(1, LENGTH))
    world.come(request)
    state, audits = world.side.requests["one"], world.side.audits
    found = world.store.find(state.lookup, 0, LENGTH - 1)
    held = world.store.hold_ready(found, state.lookup.keys, LENGTH - 1)
    moved = [replace(piece, first=0) for piece in held]
    assert not audits.takes(state, moved, [], LENGTH)
    state.approximate = "int8"
    assert not audits.takes(state, held, [], LENGTH)
    state.approximate, state.stores = None, False
    assert not audits.takes(state, held, [], LENGTH), "it may leave nothing"
    state.stores = True
    assert not audits.takes(state, held, held[:1], LENGTH), "it is loaded in parts"
    assert audits.takes(state, held, [], LENGTH)
    world.store.release(piece.chunk for piece in held)
    state.audited = ()
    world.start(request, 0)
    world.finish(request)


def test_after_too_many_nothing_is_served(start: Start) -> None:
    world = start(audit={"stop_after": 2})
    for number in (1, 2, 3):
        world.put(tokens_of(number, LENGTH), wrong=number)
    assert world.serves(tokens_of(1, LENGTH)) == 0
    assert not world.store.is_distrusted
    assert world.serves(tokens_of(2, LENGTH), "two") == 0
    assert world.store.is_distrusted
    world.side.take_stats()
    assert world.serves(tokens_of(3, LENGTH), "three") == 0
    counters = world.side.take_stats().data["counters"]
    assert counters["skipped:distrusted"] == 1


def test_one_that_waits_when_it_stops_is_computed(start: Start) -> None:
    world = start(audit={"stop_after": 1})
    world.put(tokens_of(1, LENGTH), wrong=1)
    world.put(tokens_of(2, LENGTH))
    waiting = world.request("two", tokens_of(2, LENGTH))
    world.come(waiting)
    assert world.serves(tokens_of(1, LENGTH)) == 0
    assert world.store.is_distrusted
    assert world.ask(waiting) == 0
    world.start(waiting, 0)
    world.end_step(waiting)
    world.finish(waiting)
    world.end_step()


def test_saves_that_are_given_up_are_no_alarm(start: Start) -> None:
    world = start()
    world.put(tokens_of(1, LENGTH))
    request = world.asks(tokens_of(1, LENGTH))
    plan = world.side.build_step(output({"one": (0, LENGTH)}, {}))
    ids = [save.plan_id for save in plan.saves]
    world.side.on_report(StepReport(plan.number, Counter(ids), given_up=set(ids)))
    request.num_computed_tokens = LENGTH
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {"not_compared": 4}


def test_what_runs_when_it_stops_leaves_nothing(start: Start) -> None:
    """It may have loaded what was wrong, and goes on from it."""
    world = start(audit={"stop_after": 1})
    runs = world.asks(tokens_of(2, LENGTH), "runs")
    world.report(world.side.build_step(output({"runs": (0, CHUNK)}, {})))
    runs.num_computed_tokens = CHUNK
    world.put(tokens_of(1, LENGTH), wrong=1)
    assert world.serves(tokens_of(1, LENGTH)) == 0
    assert world.store.is_distrusted
    assert len(world.store.residency.index) == 0
    world.report(world.side.build_step(output({}, {"runs": (CHUNK, LENGTH - CHUNK)})))
    runs.num_computed_tokens = LENGTH
    world.finish(runs)
    world.end_step()
    world.rig.until_idle()
    assert len(world.store.residency.index) == 0


def test_a_hit_that_was_drawn_under_other_weights_says_nothing(start: Start) -> None:
    """vLLM had no room for it, and a pause brought new weights: what it computes is theirs. A false
    alarm would remove what is right, and some of them would end the serving of all."""
    world = start()
    names = world.put(tokens_of(1, LENGTH), wrong=2)
    request = world.request("one", tokens_of(1, LENGTH))
    world.sequences["one"] = tokens_of(1, LENGTH)
    world.come(request)
    assert world.ask(request) == 0
    world.end_step()
    world.side.requests["one"].be_of_weights(b"new" + bytes(29))
    assert world.answer(request) == 0
    world.start(request, 0)
    world.end_step(request)
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    assert world.outcomes() == {}
    assert world.store.residency.index.get(names[2].key) is not None
