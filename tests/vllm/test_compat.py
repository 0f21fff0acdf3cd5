# SPDX-License-Identifier: Apache-2.0
"""Versions of vLLM that lack a part, or have one more. tools/try_version.py tries them for real."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.connector.compat import hit_sources
from attnstore_vllm.connector.connector import AttnStoreConnector
from attnstore_vllm.connector.kv_events import teller_of
from attnstore_vllm.connector.metrics import LABELS
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.types import OWN_PASS

# What vLLM 0.32 imports for itself it has; whoever asks from then on meets vLLM 0.31.
WITHOUT_SOURCES = """
import importlib.abc, sys
import vllm.distributed.kv_transfer.kv_connector.v1.base, vllm.v1.core.sched.scheduler
import vllm.v1.kv_offload.base

NAME = "vllm.v1.metrics.cache_hit_source"

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == NAME:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.modules.pop(NAME, None)
sys.meta_path.insert(0, Hidden())
from attnstore_vllm.connector import connector
print("sources", connector._SOURCES)
"""


def test_a_vllm_that_does_not_know_where_hits_came_from() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SOURCES],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.strip().endswith("sources {}"), done.stderr[-2_000:]


@pytest.mark.skipif(
    importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is None,
    reason="this vLLM has no names for them",
)
def test_hits_of_each_tier_have_a_name_of_vllms() -> None:
    """Without one vLLM warns, and counts all hits of the request as from nowhere."""
    assert set(hit_sources()) == {*LABELS["loaded_tokens"], OWN_PASS}


class Heard:
    """A worker side that does nothing but say what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def release_kv(self) -> None:
        self.calls.append("release")

    def restore_kv(self) -> None:
        self.calls.append("restore")


def test_a_vllm_that_tells_of_its_sleep() -> None:
    """vLLM 0.33: before it unmaps its KV, and after it has mapped it again."""
    config: Any = None
    assert AttnStoreConnector.supports_sleep_mode(config)
    side = object.__new__(AttnStoreConnector)
    worker: Any = Heard()
    for side.worker in (None, worker):
        side.unregister_kv_caches()
        side.restore_kv_caches()
    assert worker.calls == ["release", "restore"]


def test_a_vllm_that_names_blocks_by_tokens_behind_them(caplog: pytest.LogCaptureFixture) -> None:
    """Routers are told nothing then, and not wrong names."""
    config: Any = SimpleNamespace(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True), num_hash_lookahead_tokens=1
    )
    geometry = Geometry(1, (64,), (Group(16, ("l",)),), 16)
    assert teller_of(config, geometry, lambda: None) is None
    assert "tokens behind them" in caplog.text
