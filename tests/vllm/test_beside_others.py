# SPDX-License-Identifier: Apache-2.0
"""Beside another connector whose loads fail: what was computed on its garbage is not stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.index.prefix import whole_blocks
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.rogue import RogueConnector

LENGTH = 1300


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, tmp_path_factory: Any) -> EngineHost:
    store: Path = tmp_path_factory.mktemp("multi") / "store"
    settings = {"dram": "16MiB", "nvme": {"path": str(store), "capacity": "64MiB"}}
    children = [
        {
            "kv_connector": "RogueConnector",
            "kv_connector_module_path": "tests.vllm.rogue",
            "kv_role": "kv_both",
        },
        {
            "kv_connector": "AttnStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        },
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    return start_engine(store=store, transfer=transfer)


def failed_load(engine: Engine) -> tuple[Answer, Answer, Answer, int]:
    """(without any store, when the other's load failed, from our store after that, loaded)."""
    rogue = engine.scheduler.connector.sub_connectors[0]
    prompt = [RogueConnector.FIRST, *random_tokens("rogue", LENGTH - 1)]
    rogue.is_on = False
    expected = engine.ask(prompt, max_tokens=5, salt="alone")
    engine.forget_hbm()
    rogue.is_on = True
    failed = engine.ask(prompt, max_tokens=5)
    rogue.is_on = False
    engine.forget_hbm()
    engine.loaded()
    stored = engine.ask(prompt, max_tokens=5)
    loaded = sum(engine.loaded().values())
    engine.check_quiet()
    return expected, failed, stored, loaded


def test_a_failed_load_of_another_connector(engine: EngineHost) -> None:
    expected, failed, stored, loaded = engine.call(failed_load)
    assert failed.tokens == expected.tokens
    assert stored.tokens == expected.tokens
    assert loaded == whole_blocks(LENGTH - 1), "what was computed anew is stored"
