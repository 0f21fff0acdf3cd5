# SPDX-License-Identifier: Apache-2.0
"""Pauses and new weights: which KV is found after them, and under whose name."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others
from attnstore_vllm.identity.weights import Weights
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.scheduler.request import make_state
from attnstore_vllm.store.store import Store
from attnstore_vllm.types import Seen
from tests.step_world import BLOCK, CHUNK, StepWorld

PROMPT = list(range(2 * CHUNK + 1))
OF_START: Mapping[int, bytes | None] = {0: b""}
OTHERS: Mapping[int, bytes | None] = {0: b"others"}
UNTOLD: Mapping[int, bytes | None] = {0: None}


class World(StepWorld):
    """Workers say of the weights what the test says. `resets` counts those of the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.look: tuple[Seen, Mapping[int, bytes | None]] = Seen.SAME, OF_START
        self.num_looks = self.resets = 0
        super().__init__(monkeypatch, **options)
        self.side.names = Weights(bytes(32), b"files")
        self.side.namespace = None
        reset = Store.reset

        def counted(store: Store, *, keeps_aside: bool = False) -> bool:
            self.resets += 1
            return reset(store, keeps_aside=keeps_aside)

        monkeypatch.setattr(Store, "reset", counted)

    def report(self, plan: Any) -> None:
        done = [p.plan_id for p in (*plan.loads, *plan.saves, *plan.saves_before)]
        report = StepReport(plan.number, Counter(done), freed=Counter(plan.finished_saving))
        if plan.looks_at_weights:
            self.num_looks += 1
            report.weights, live = self.look
            report.live = dict(live)
            self.look = Seen.SAME, live
        self.side.on_report(report)

    def empty_hbm(self) -> None:
        manager: Any = self.side.rests.manager
        manager.block_pool.cached_block_hash_to_block = OrderedDict()

    def now(self, seen: Seen, live: Mapping[int, bytes | None]) -> None:
        """New weights, and what a trainer calls then."""
        self.look = seen, live
        self.empty_hbm()

    def found(self, name: str, tokens: list[int] | None = None) -> int:
        """Serve a prompt: the tokens of it that the store had."""
        return self.serve(self.request(name, tokens or PROMPT))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    assert world.found("cold") == 0
    world.empty_hbm()
    assert world.found("warm") == 2 * CHUNK
    yield world
    world.close()


def test_a_pause_keeps_every_tier(world: World) -> None:
    looks = world.num_looks
    assert world.side.pause()
    assert world.found("after the pause") == 2 * CHUNK
    assert world.resets == 0 and world.num_looks == looks + 1, "unchanged, as the workers saw"


def test_a_reset_on_demand_drops_every_tier(world: World) -> None:
    assert world.side.reset()
    assert world.found("after the reset") == 0


def test_what_a_look_has_confirmed_outlives_new_weights(world: World) -> None:
    world.side.pause()
    world.now(Seen.CHANGED, OTHERS)
    assert world.found("others") == 0, "KV of the weights of before"
    world.empty_hbm()
    assert world.found("others, again") == 2 * CHUNK
    world.now(Seen.CHANGED, OF_START)
    assert world.resets == 0


def test_the_weights_of_the_files_find_theirs_again(world: World) -> None:
    """Those that came between have left nothing under their name."""
    world.now(Seen.CHANGED, OTHERS)
    other = world.request("others", range(1000, 1000 + CHUNK + 1))
    world.come(other)
    assert world.ask(other) is None, "it waits for the look"
    world.end_step()
    world.now(Seen.CHANGED, OF_START)
    assert world.found("files") == 2 * CHUNK
    assert world.resets == 0


def test_kv_that_no_look_has_confirmed_goes(world: World) -> None:
    """An update that no reset followed: the next requests were computed by it."""
    world.found("unseen", list(range(500, 500 + CHUNK + BLOCK)))
    world.now(Seen.CHANGED, OTHERS)
    assert world.found("others") == 0
    assert world.resets == 1
    world.empty_hbm()
    world.now(Seen.CHANGED, OF_START)
    assert world.found("files") == 0, "dropped"


def test_copies_that_no_look_has_confirmed_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling has weights updated first. What it computes before it looks has the old name, and
    comes here: later the weights of that name would find it."""
    others = Others()
    world = World(monkeypatch, store={"more_tiers": (MakeRemoteDict(others),)})
    namespace = world.side.names.namespace
    assert namespace is not None
    state = make_state(world.request("theirs", PROMPT), namespace, b"", CHUNK)
    for name in state.sequence.names(0, 2, state.tenant):
        others.put(name, bytes(world.rig.pool.slot_bytes))
    assert world.found("copies", [*PROMPT[: 2 * CHUNK], 7]) == 2 * CHUNK
    world.now(Seen.CHANGED, OTHERS)
    assert world.found("others") == 0
    assert world.resets == 1
    world.close()


def test_a_request_that_waits_is_of_the_new_weights(world: World) -> None:
    request = world.request("waiting", PROMPT)
    world.now(Seen.CHANGED, OTHERS)
    world.come(request)
    before = world.side.requests["waiting"].root
    assert world.ask(request) is None
    world.end_step()
    assert world.side.requests["waiting"].root != before
    assert world.ask(request) == 0
    world.end(request)


def test_weights_without_a_content_have_a_new_name_each_time(world: World) -> None:
    namespaces = {world.side.names.namespace}
    for live in (UNTOLD, UNTOLD, {0: b"", 1: None}):
        world.now(Seen.CHANGED, live)
        assert world.found(f"one of {len(namespaces)}") == 0
        namespaces.add(world.side.names.namespace)
    assert len(namespaces) == 4


def test_weights_that_cannot_be_seen_lose_all_at_a_pause(world: World) -> None:
    world.side.pause()
    world.look = Seen.UNKNOWN, UNTOLD
    assert world.found("after the pause") == 0
    assert world.resets == 1


@pytest.mark.parametrize("is_served", [True, False])
def test_what_vllm_has_kept_over_new_weights_is_saved_under_no_name(
    world: World, is_served: bool
) -> None:
    """A reset fails in vLLM as long as a request runs: what it has is of the weights of before. A
    plain one that succeeds later says nothing of it, since the weights are the same by then. The
    running request may be one that the store leaves alone, with a reset before it that no other
    has noticed."""
    if not is_served:
        world.empty_hbm()
    running = world.request("running", range(500, 500 + CHUNK + 1))
    if is_served:
        world.come(running)
        world.start(running, world.answer(running))
    world.end_step(running)
    world.look = Seen.CHANGED, OTHERS
    assert world.side.reset()
    tokens = [*range(2000, 2000 + 2 * CHUNK), *range(9)]
    late = world.request("hits vLLM's cache", tokens)
    world.come(late)
    running.all_token_ids.append(1)
    while (found := world.ask(late, CHUNK)) is None:
        world.end_step(running)
    assert found == 0
    world.start(late, 0)
    late.num_computed_tokens = CHUNK
    world.end_step(late, running)
    world.finish(late, *[running] * is_served)
    world.end_step()
    world.empty_hbm()
    assert world.found("after the reset", tokens) == 0
    assert world.found("the same", tokens) == 2 * CHUNK, "what it has computed"


def test_no_other_process_has_the_names_of_weights_of_no_file() -> None:
    one, other = (Weights(bytes(32), b"files") for _ in range(2))
    of_files = one.namespace
    assert of_files == other.namespace
    for weights in (one, other):
        weights.be_live(OTHERS)
    assert len({of_files, one.namespace, other.namespace}) == 3
    again = one.namespace
    one.be_live({})
    one.be_live(OTHERS)
    assert one.namespace == again, "of one content, in this process"
    one.be_live({0: b"", 1: b""})
    assert one.namespace == of_files
