# SPDX-License-Identifier: Apache-2.0
"""KV that one real engine leaves in a network store, and another one goes on with."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.testing.network_stores import KINDS, NetworkStore, missing
from attnstore_vllm.testing.tiny_model import TINY, make_model
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Answer, Engine
from tests.vllm.prompts import random_tokens

LENGTH = 600
DEADLINE_MS = 1000


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest) -> Iterator[NetworkStore]:
    if reason := missing(request.param):
        pytest.skip(reason)
    made = NetworkStore(request.param)
    yield made
    made.kill()


def settings_of(store: NetworkStore) -> dict[str, Any]:
    address = f"127.0.0.1:{store.port}"
    where: dict[str, Any] = (
        {"redis": f"redis://{address}"}
        if store.kind == "redis"
        else {"mooncake": {"master": address}}
    )
    return {"shared": {**where, "deadline_ms": DEADLINE_MS}}


def ask(engine: Engine, name: str) -> tuple[float, Answer, float]:
    """Tokens that were loaded from the shared tier, the answer, and its seconds."""
    before = engine.metric("loaded_tokens", "shared")
    begun_at = time.monotonic()
    answer = engine.ask(random_tokens(name, LENGTH), max_tokens=5)
    seconds = time.monotonic() - begun_at
    engine.settle()
    return engine.metric("loaded_tokens", "shared") - before, answer, seconds


def leave(engine: Engine, name: str) -> Answer:
    """Compute, and wait until it is in the network store."""
    _, answer, _ = ask(engine, name)
    deadline = time.monotonic() + 30
    while not engine.metric("bytes", "dram_to_shared"):
        assert time.monotonic() < deadline, "nothing is written to the shared tier"
        time.sleep(0.1)
        ask(engine, "anything")
    time.sleep(1.5)
    return answer


def in_trouble(engine: Engine) -> list[float]:
    """Seconds of prompts that nobody has."""
    return [ask(engine, f"new {number}")[2] for number in range(4)]


@pytest.mark.long
def test_another_engine_goes_on(
    start_engine: StartEngine, network: NetworkStore, models: Path, tmp_path: Path
) -> None:
    """Each has a copy of the model's files of its own, as two hosts have."""
    given = settings_of(network)
    one = make_model(tmp_path / "here" / "model", TINY)
    two = make_model(tmp_path / "there" / "same model", TINY)
    first = start_engine(store=tmp_path / "a", vllm={"model": str(one)}, settings=given)
    answer = first.call(leave, "shared")
    second = start_engine(store=tmp_path / "b", vllm={"model": str(two)}, settings=given)
    second.call(ask, "the first, in whose first step the workers look at their weights")
    loaded, again, _ = second.call(ask, "shared")
    assert loaded == LENGTH // 256 * 256
    assert again.tokens == answer.tokens
    usual = max(second.call(in_trouble))
    network.signal(signal.SIGSTOP)
    times = second.call(in_trouble)
    assert max(times) <= usual + DEADLINE_MS / 1000 + 1.0, (times, usual)
    network.signal(signal.SIGCONT)
