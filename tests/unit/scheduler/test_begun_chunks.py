# SPDX-License-Identifier: Apache-2.0
"""A system prompt ends within a chunk, behind which each user's own text begins.

Goal: who shares only the beginning of a chunk neither keeps the rest longer than its request has
said, nor takes its time from it.
Method: one request leaves its text with a time to live. Others that begin alike come for far
longer, in each way in which KV is used; then that text must not be found.
"""

from __future__ import annotations

import pytest

from attnstore_vllm.config.settings import PinningConfig
from attnstore_vllm.hints import PrefetchOrder
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.store.store import Store
from tests.helpers import lookup_of, names_of, sequence_of, tokens_of
from tests.step_world import CHUNK, StepWorld
from tests.unit.policy.test_visits import Clock

SYSTEM = tokens_of(1, 2 * CHUNK + 4)
ASKED = SYSTEM + tokens_of(2, 3 * CHUNK)
"""Its own text begins in the third chunk."""
TTL_S = 60
PINNING = PinningConfig(share=0.5, tenant_share=0.5)


def world_of(monkeypatch: pytest.MonkeyPatch, **store: object) -> tuple[StepWorld, Clock]:
    clock = Clock()
    given = {"clock": clock, "grain": 4, "pinning": PINNING, **store}
    return StepWorld(monkeypatch, slots=128, store=given, pinning=PINNING), clock


def serve(world: StepWorld, name: str, tokens: list[int], **hints: object) -> None:
    params = {"attnstore": hints} if hints else None
    world.serve(world.request(name, tokens, kv_transfer_params=params))


def other(number: int) -> list[int]:
    return SYSTEM + tokens_of(100 + number, 2 * CHUNK)


def found(store: Store, tokens: list[int]) -> int:
    pieces = store.find(lookup_of(tokens), 0, len(tokens) - 1)
    return pieces[-1].stop if pieces else 0


def run_of_the_third(world: StepWorld) -> Run:
    residency = world.store.residency
    chunk = residency.index.get(names_of(sequence_of(ASKED))[2].key)
    assert chunk is not None
    return residency.run_of(chunk)


@pytest.mark.parametrize("hints", [{}, {"ttl": TTL_S}, {"priority": "high"}, {"store": False}])
@pytest.mark.parametrize("of_server", [False, True])
def test_others_renew_nothing_behind_the_system_prompt(
    of_server: bool, hints: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, clock = world_of(monkeypatch, ttl_s=TTL_S if of_server else None)
    serve(world, "one", ASKED, ttl=TTL_S)
    for number in range(4):
        clock.now += TTL_S - 10
        serve(world, f"other {number}", other(number), **hints)
        is_shared = found(world.store, other(number)) >= len(SYSTEM)
        assert is_shared or "store" in hints, "each saves a beginning of its own"
    assert found(world.store, ASKED) <= len(SYSTEM)
    world.close()


def test_a_prefetch_renews_nothing_behind_the_system_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, clock = world_of(monkeypatch, ttl_s=TTL_S)
    serve(world, "one", ASKED)
    for number in range(4):
        clock.now += TTL_S - 10
        order = PrefetchOrder(other(number), None).as_params()
        request = world.request(f"prefetch {number}", SYSTEM[:1], kv_transfer_params=order)
        world.side.on_new_request(request)
        world.end_step()
    assert found(world.store, ASKED) <= len(SYSTEM)
    world.close()


def test_a_pin_of_another_keeps_nothing_behind_the_system_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, clock = world_of(monkeypatch)
    serve(world, "one", ASKED, ttl=TTL_S)
    serve(world, "other", other(0), ttl=3600, pin=True)
    clock.now += 1000
    assert found(world.store, ASKED) <= len(SYSTEM)
    assert found(world.store, other(0)) > len(SYSTEM), "its own is pinned"
    world.close()


def test_it_stays_of_the_request_that_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it has the terms of that one: the shared tier does not get what has a ttl."""
    world, _ = world_of(monkeypatch)
    serve(world, "one", ASKED, ttl=TTL_S)
    before = run_of_the_third(world)
    serve(world, "other", other(0), priority="high")
    assert run_of_the_third(world) is before
    assert before.lease is not None
    assert not before.is_shared
    world.close()


def test_who_has_all_of_the_chunk_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the same prompt once more, whose hit ends a block before; and one that ends there."""
    for stop in (3 * CHUNK + 4, 3 * CHUNK, 3 * CHUNK - 4):
        world, clock = world_of(monkeypatch)
        serve(world, "one", ASKED[: 3 * CHUNK + 1], ttl=TTL_S)
        for number in range(4):
            clock.now += TTL_S - 10
            serve(world, f"again {number}", ASKED[:stop], ttl=TTL_S)
        assert found(world.store, ASKED) >= 3 * CHUNK
        world.close()
