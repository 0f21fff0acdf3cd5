# SPDX-License-Identifier: Apache-2.0
"""Quotas of a real engine: on NVMe, after a restart with a smaller one, and in the shared tier."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnstore_lab.testing.network_stores import NetworkStore, missing
from attnstore_vllm.config.shared import SharedConfig
from attnstore_vllm.tiers.shared.deletion import delete_tenant
from attnstore_vllm.tiers.shared.shared_io import SharedIo
from attnstore_vllm.tiers.shared.shared_tier import PAUSE_S
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Engine
from tests.vllm.prompts import random_tokens

PROMPTS = [f"prompt {number}" for number in range(6)]
LENGTH = 2 * CHUNK + 1
"""Two whole chunks, and a token to compute."""


@pytest.fixture
def network() -> Iterator[NetworkStore]:
    if reason := missing("redis"):
        pytest.skip(reason)
    made = NetworkStore("redis")
    yield made
    made.kill()


def ask(engine: Engine, names: list[str], salt: str) -> None:
    """Each alone, until all of it is written."""
    for name in names:
        engine.ask(random_tokens(name, LENGTH), salt=salt)
        engine.settle()


def shared_of(engine: Engine) -> SharedIo:
    (io,) = (io for io in engine.store.thread.tiers if isinstance(io, SharedIo))
    return io


def join(engine: Engine) -> None:
    engine.wait_for(lambda: shared_of(engine).generation.mine is not None)


def wait_for_shared(engine: Engine) -> None:
    """All that has paused is written there, or refused."""
    time.sleep(2 * PAUSE_S)
    io = shared_of(engine)
    engine.wait_for(lambda: not (len(io.tier.waiting) or io.num_storing))


def held(engine: Engine) -> dict[tuple[str, str], tuple[int, int]]:
    """Records that tenants hold and may hold, by name and tier, as the gauges say."""
    io = {"dram": engine.store.thread.tiers[0].record_bytes}
    io |= {tier.tier.name: tier.record_bytes for tier in engine.store.thread.tiers}
    gauges = engine.store.gauges()
    found = {}
    for (name, label), value in gauges.items():
        if name == "tenant_held_bytes":
            tenant, tier = label.split("|")
            most = gauges["tenant_quota_bytes", label]
            found[tenant, tier] = (int(value // io[tier]), int(most // io[tier]))
    return found


def tenants_shown(engine: Engine) -> dict[tuple[str, str], float]:
    """Series of tenants on /metrics."""
    return {
        (metric.labels["tenant"], metric.labels["tier"]): metric.value
        for metric in engine.llm.get_metrics()
        if metric.name == "vllm:attnstore_tenant_quota_bytes"
    }


def num_records(engine: Engine) -> int:
    return engine.store.residency.nvme.num_slots


@pytest.mark.long
def test_a_tenant_stays_within_its_quotas(
    start_engine: StartEngine, network: NetworkStore, tmp_path: Path
) -> None:
    salt = tmp_path / "salt"
    salt.write_text("gold")
    salt.chmod(0o400)
    shared = {"redis": f"redis://127.0.0.1:{network.port}", "deadline": "1s"}
    gold = {"salt_file": str(salt)}
    given = {"shared": shared, "quotas": {"best": {**gold, "nvme": 0.5, "shared": "1MiB"}}}
    engine = start_engine(store=tmp_path / "kv", settings=given)
    engine.call(join)
    engine.call(ask, PROMPTS, "gold")
    engine.call(ask, ["other"], "tin")
    engine.call(wait_for_shared)
    first = engine.call(held)
    assert first["best", "nvme"][0] >= 2 * len(PROMPTS), "and what was answered"
    num_shared, most_shared = first["best", "shared"]
    assert num_shared == most_shared < 2 * len(PROMPTS), "it is at its quota"
    there = delete_tenant(SharedConfig.parse(shared), "gold", is_dry=True)
    assert there.records == num_shared, "a recount by the store's own names"
    shown = engine.call(tenants_shown)
    assert set(shown) == {("best", "nvme"), ("best", "shared")}, shown
    smaller = {**gold, "nvme": 3.5 / engine.call(num_records)}
    engine = start_engine(store=tmp_path / "kv", settings={"quotas": {"best": smaller}})
    engine.call(Engine.settle)
    again = engine.call(held)
    assert again == {("best", "nvme"): (first["best", "nvme"][0], 3)}, "whose it was is known"
    engine.call(ask, ["last"], "gold")
    assert engine.call(held)["best", "nvme"] == (3, 3)
