# SPDX-License-Identifier: Apache-2.0
"""KV that one real engine leaves in a network store, and another one goes on with."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.network_stores import KINDS, NetworkStore, missing
from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.tiers.shared.shared_io import SharedIo
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

LENGTH = 600
NAMES = ("shared", "later")
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
    return {"shared": {**where, "deadline": f"{DEADLINE_MS}ms"}}


def tier_of(engine: Engine) -> SharedIo:
    (io,) = (io for io in engine.store.thread.tiers if isinstance(io, SharedIo))
    return io


def join(engine: Engine) -> None:
    """Wait until it knows which generation of records there is."""
    engine.wait_for(lambda: tier_of(engine).generation.mine is not None)


def ask(engine: Engine, name: str) -> tuple[float, Answer, float]:
    """Tokens that were loaded from the shared tier, the answer, and its seconds."""
    before = engine.metric("loaded_tokens", "shared")
    begun_at = time.monotonic()
    answer = engine.ask(random_tokens(name, LENGTH), max_tokens=5)
    seconds = time.monotonic() - begun_at
    return engine.metric("loaded_tokens", "shared") - before, answer, seconds


def leave(engine: Engine, names: Sequence[str]) -> list[Answer]:
    """Compute, and wait until all whole chunks are in the network store."""
    join(engine)
    answers = [ask(engine, name)[1] for name in names]
    tier = tier_of(engine).tier
    engine.wait_for(lambda: tier.num_used == len(names) * (LENGTH // CHUNK))
    engine.settle()
    return answers


def in_trouble(engine: Engine, of: str) -> list[float]:
    """Seconds of prompts that nobody has."""
    return [ask(engine, f"{of} {number}")[2] for number in range(4)]


def recover(engine: Engine) -> None:
    """Wait until the tier is in use again, by itself."""
    health = tier_of(engine).health
    assert not health.reads.in_use, "the breaker has not opened"
    engine.wait_for(lambda: health.reads.in_use and health.writes.in_use)


@pytest.mark.long
def test_another_engine_goes_on(
    start_engine: StartEngine, network: NetworkStore, models: Path, tmp_path: Path
) -> None:
    """Each has a copy of the model's files of its own, as two hosts have."""
    given = settings_of(network)
    one = make_model(tmp_path / "here" / "model", TINY)
    two = make_model(tmp_path / "there" / "same model", TINY)
    first = start_engine(store=tmp_path / "a", vllm={"model": str(one)}, settings=given)
    answers = first.call(leave, NAMES)
    second = start_engine(store=tmp_path / "b", vllm={"model": str(two)}, settings=given)
    second.call(join)
    check_goes_on(second, NAMES[0], answers[0])  # also as the first request of all
    usual = max(second.call(in_trouble, "well"))
    network.signal(signal.SIGSTOP)
    times = second.call(in_trouble, "hangs")
    assert times[0] <= usual + DEADLINE_MS / 1000 + 1.0, (times, usual)
    assert max(times[1:]) <= usual + 1.0, (times, usual)
    network.signal(signal.SIGCONT)
    second.call(recover)
    check_goes_on(second, NAMES[1], answers[1])


def check_goes_on(engine: EngineHost, name: str, answer: Answer) -> None:
    loaded, again, _ = engine.call(ask, name)
    assert loaded == LENGTH // CHUNK * CHUNK
    assert again.tokens == answer.tokens
