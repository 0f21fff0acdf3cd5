# SPDX-License-Identifier: Apache-2.0
"""KV events of a real engine: what a router makes of them is what the store has."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attnstore_vllm.connector.kv_events import KvEvents
from attnstore_vllm.types import DRAM, NVME
from tests.vllm import soak
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import BLOCK, CHUNK, Engine, EngineSpec
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.router import Router, events_config

LENGTH = 3 * CHUNK + 100
WHOLE = LENGTH // BLOCK
REQUESTS = 600
EVERY = 3
"""Steps between two checks of the soak."""


def states(engine: Engine) -> None:
    """The states of one prompt: in HBM, in DRAM, on NVMe alone, after resets."""
    router = Router(engine, (None, "alice"))
    prompt, other = random_tokens("a", LENGTH), random_tokens("b", LENGTH)
    engine.ask(prompt)
    engine.settle()
    router.check()
    assert len(router.content[DRAM]) == len(router.content[NVME]) == WHOLE
    assert router.content[DRAM] <= router.in_hbm, "the same blocks, under the same names"
    engine.ask(other, salt="alice")
    engine.settle()
    router.check()
    assert len(router.content[NVME]) == 2 * WHOLE
    assert router.content[DRAM] <= router.in_hbm, "with salts too"
    engine.evict_dram()
    router.check()
    assert not router.content[DRAM]
    before = set(router.content[NVME])
    engine.forget_hbm()  # vLLM tells routers that all is gone
    router.check()
    assert router.num_cleared == 1
    assert router.content[NVME] == before, "told again"
    assert not router.in_hbm
    engine.ask(prompt)
    assert engine.loaded()[NVME] > LENGTH - BLOCK
    router.check()
    assert len(router.content[DRAM]) == WHOLE
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    router.check()
    assert not any(router.content.values())
    engine.ask(prompt)
    engine.settle()
    router.check()
    engine.check_quiet()


def test_states(start_engine: StartEngine) -> None:
    host = start_engine(vllm=events_config())
    host.call(states)


def begin(engine: Engine) -> None:
    """A router that is not back yet hears nothing of the tiers; later it hears all of it."""
    router, events = Router(engine), engine.side.events
    assert isinstance(events, KvEvents)
    events.heard_from = time.monotonic() + 3600
    engine.ask(random_tokens("early", LENGTH))
    engine.settle()
    router.publish()
    router.listen()
    assert len(router.in_hbm) == WHOLE
    assert not any(router.content.values())
    events.heard_from = time.monotonic()
    router.check()
    assert len(router.content[DRAM]) == len(router.content[NVME]) == WHOLE


def test_the_first_seconds(start_engine: StartEngine) -> None:
    host = start_engine(vllm=events_config())
    host.call(begin)


@pytest.mark.long
def test_a_restart(models: Path, tmp_path: Path) -> None:
    """What an earlier run left is told of, under the names that vLLM gives it now."""
    spec = EngineSpec(store=tmp_path / "store", models=models, vllm=events_config())
    with EngineHost(spec, tmp_path / "log") as host:
        host.call(leave)
    with EngineHost(spec, tmp_path / "log") as host:
        told, others = host.call(find)
    assert told == WHOLE, "salts are in no record, so what has one is not told of"
    assert others == 0


def leave(engine: Engine) -> None:
    engine.ask(random_tokens("a", LENGTH))
    engine.ask(random_tokens("b", LENGTH), salt="alice")
    engine.settle()


def find(engine: Engine) -> tuple[int, int]:
    """Blocks that were told of before any request; blocks of the same prompt with other names."""
    router, announcer = Router(engine), engine.store.announcer
    assert announcer is not None
    engine.wait_for(announcer.is_quiet, router.publish)
    engine.wait_for(lambda: len(router.content[NVME]) > 0, router.listen)
    told = len(router.content[NVME])
    engine.ask(random_tokens("a", LENGTH))
    engine.settle()
    router.listen()
    return told, len(router.in_hbm - router.content[NVME])


def crowd(engine: Engine, seed: int, requests: int) -> tuple[soak.Play, int, int, int]:
    """The soak, with a look every few steps: what it played, checks, events, and all-cleared."""
    router = Router(engine, soak.SALTS)
    step, steps = engine.step, 0

    def watched() -> list[str]:
        nonlocal steps
        said, steps = step(), steps + 1
        router.listen()
        if steps % EVERY == 0:
            router.check()
        return said

    engine.step = watched  # type: ignore[method-assign]
    played = soak.play(engine, seed, requests)
    router.check()
    return played, router.num_checks, router.num_heard, router.num_cleared


@pytest.mark.long
def test_soak(start_engine: StartEngine) -> None:
    playing = dict(soak.PLAYING)
    playing["vllm"] = {**playing["vllm"], **events_config()}
    host = start_engine(**playing)
    played, checks, heard, cleared = host.call(crowd, 11, REQUESTS)
    print(f"{checks} checks, {heard} events, {cleared} times all cleared, {played.counts}")
    assert checks > REQUESTS
    assert cleared >= 1
    for event in ("evicted_dram", "evicted_nvme", "superseded"):
        assert played.counts[event] > 0, event
