# SPDX-License-Identifier: Apache-2.0
"""Weights that come, go and come back, under vLLM's scheduler with steps in flight: KV is found by
the weights that computed it, and what a look has confirmed stays.

The KV of a token tells its tokens and its weights (test_async_stops.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector.compat import is_of_a_pause
from attnstore_vllm.scheduler.reset_watch import LookResult, ResetWatch
from attnstore_vllm.store.store import Store
from attnstore_vllm.types import Seen
from tests.vllm import scripted_worker
from tests.vllm.scripted import ScriptedEngine
from tests.vllm.test_async_scheduling import wait_until_quiet
from tests.vllm.test_async_stops import _extend_kv, _Weights, add, plain, resume

ROUNDS = 24
SEEDS = 4


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture(params=[1, 2, 3])
def engine(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ScriptedEngine]:
    """With so many steps in flight, and workers that say what their weights are."""
    monkeypatch.setattr(scripted_worker, "extend_kv", _extend_kv)
    monkeypatch.setattr(_Weights, "version", 0)
    engine = ScriptedEngine(model, tmp_path / "store", num_blocks=60, depth=request.param, seed=3)
    seen = [0]

    def look() -> tuple[Seen, bytes | None]:
        seen.append(_Weights.version)
        name = bytes([seen[-1]] if seen[-1] else [])
        return (Seen.CHANGED if seen[-1] != seen[-2] else Seen.SAME), name

    engine.worker.side.look_at_weights = look
    yield engine
    engine.close()


def pause(engine: ScriptedEngine) -> None:
    """As vLLM pauses and clears its caches: with its own function, over this engine's scheduler."""
    core: Any = SimpleNamespace(
        reset_prefix_cache=engine.scheduler.reset_prefix_cache,
        reset_mm_cache=lambda: None,
        reset_encoder_cache=lambda: None,
    )
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(200):
        while engine.in_flight:
            engine.finish_oldest()
        try:
            EngineCore._reset_caches(core)
            break
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            engine.step()
    else:
        raise AssertionError("no reset succeeded")
    for hbm in engine.worker.hbm:  # asleep, vLLM gives its memory away
        hbm[:] = 0x7A


def play(engine: ScriptedEngine, seed: int) -> None:
    """Requests that share their beginnings, between pauses that change the weights or do not."""
    random = Random(seed)
    beginnings = [plain(random, 120) for _ in range(2)]
    number = 0
    for _ in range(ROUNDS):
        for _ in range(random.randrange(4)):
            number += 1
            prompt = [*random.choice(beginnings)[: random.randrange(60, 120)], *plain(random, 10)]
            add(engine, str(number), prompt, random.randrange(1, 40))
            for _ in range(random.randrange(6)):
                engine.step()
        if random.random() < 0.5:
            engine.drain()
        pause(engine)
        resume(engine, random.choice([_Weights.version, _Weights.version, 0, 1, 2]))
    engine.drain()
    wait_until_quiet(engine.ours)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_pauses(engine: ScriptedEngine, seed: int) -> None:
    play(engine, seed)
    assert engine.worker.loaded_tokens > 300


def test_a_sleep_right_behind_an_answer(engine: ScriptedEngine) -> None:
    """Within one process vLLM sleeps at once: what the last request has left is to be copied in the
    next step, from blocks that have other content by then."""
    prompt = plain(Random(1), 120)
    add(engine, "cold", prompt, 4)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    pause(engine)
    resume(engine, 0)
    add(engine, "warm", [*prompt, *plain(Random(2), 20)], 4)
    engine.drain()
    assert engine.worker.loaded_tokens >= 64


def test_a_pause_keeps_what_requests_have_left(engine: ScriptedEngine) -> None:
    prompt = plain(Random(1), 130)
    add(engine, "cold", prompt, 4)
    engine.drain()
    wait_until_quiet(engine.ours)
    pause(engine)
    resume(engine, 0)
    add(engine, "warm", prompt, 4)
    engine.drain()
    assert engine.worker.loaded_tokens == 128
    assert engine.scheduler.reset_prefix_cache(reset_connector=True), "a reset on demand"
    add(engine, "after the reset", prompt, 4)
    engine.drain()
    assert engine.worker.loaded_tokens == 128


def _all_are_confirmed(self: ResetWatch, report: Any, num_saves: int) -> LookResult:
    found = _on_report(self, report, num_saves)
    return LookResult.OTHERS if found is LookResult.IN_DOUBT else found


_on_report = ResetWatch.on_report


@pytest.mark.parametrize("fault", ["no look", "one name", "unconfirmed"])
def test_faults_are_seen(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "no look":
        monkeypatch.setattr(ResetWatch, "must_wait", lambda _: False)
    elif fault == "one name":
        monkeypatch.setattr(Store, "reset", lambda _, **__: True)
        monkeypatch.setattr(engine.ours.names, "be_live", lambda _: None)
    else:  # weights that change with no pause at all, until the next
        monkeypatch.setattr(ResetWatch, "on_report", _all_are_confirmed)
    story = unseen if fault == "unconfirmed" else partial(play, seed=0)
    with pytest.raises(AssertionError, match="wrong KV"):
        story(engine)


def unseen(engine: ScriptedEngine) -> None:
    """An update that no reset follows: what is computed then has the name of the weights before."""
    prompt = plain(Random(9), 130)
    resume(engine, 0)
    pause(engine)
    resume(engine, 0)
    add(engine, "confirm", plain(Random(8), 40), 2)
    engine.drain()
    _Weights.version = 1
    add(engine, "unseen", prompt, 2)
    engine.drain()
    wait_until_quiet(engine.ours)
    pause(engine)
    resume(engine, 1)
    add(engine, "others", plain(Random(7), 40), 2)
    engine.drain()
    pause(engine)
    resume(engine, 0)
    add(engine, "back", prompt, 2)
    engine.drain()


def test_an_update_that_no_reset_followed_leaves_nothing(engine: ScriptedEngine) -> None:
    unseen(engine)


def test_who_asks_for_the_reset() -> None:
    assert not is_of_a_pause()
    heard: list[bool] = []

    def reset_prefix_cache(**_: bool) -> bool:
        heard.append(is_of_a_pause())
        return True

    core: Any = SimpleNamespace(
        reset_prefix_cache=reset_prefix_cache, reset_mm_cache=list, reset_encoder_cache=list
    )
    EngineCore._reset_caches(core)
    assert heard == [True]
