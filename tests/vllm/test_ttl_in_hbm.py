# SPDX-License-Identifier: Apache-2.0
"""A ttl, and what vLLM's own prefix cache has of that KV: under vLLM's real scheduler."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.vllm.scripted import CHUNK, ScriptedEngine
from tests.vllm.test_hints import report_of, run

PROMPT = [n % 47 for n in range(3 * CHUNK + 1)]
TTL_S = 1.0


@pytest.mark.parametrize("whose", ["server", "request"])
def test_what_has_expired_is_not_saved_again_from_hbm(
    whose: str, models: Path, tmp_path: Path
) -> None:
    """KV that was idle for longer than its ttl is found in HBM, where there is none. The store must
    not take it from there as if it had come now."""
    model = make_model(models / "scripted", TINY, weights=False)
    settings: dict[str, Any] = {"ttl": "1s"} if whose == "server" else {}
    engine = ScriptedEngine(model, tmp_path / "store", num_blocks=64, depth=1, seed=1, **settings)
    try:
        run(engine, "a", PROMPT, **({"ttl": 1} if whose == "request" else {}))
        time.sleep(TTL_S + 0.6)
        assert report_of(engine, "b", PROMPT)["hbm_tokens"] > 0
        assert engine.scheduler.reset_prefix_cache()
        found = report_of(engine, "c", PROMPT)
        assert engine.scheduler.reset_prefix_cache()
        anew = report_of(engine, "d", PROMPT)
    finally:
        engine.close()
    assert found["dram_tokens"] == 0
    assert anew["dram_tokens"] > 0, "what was computed anew is stored"


def test_who_goes_on_behind_it_leaves_nothing_and_the_next_one_does(
    models: Path, tmp_path: Path
) -> None:
    """Without what has expired no hit would reach what is behind it. The next request's own prompt
    is stored on its own terms."""
    model = make_model(models / "scripted", TINY, weights=False)
    longer = PROMPT + [n % 31 for n in range(2 * CHUNK)]
    engine = ScriptedEngine(model, tmp_path / "store", num_blocks=64, depth=1, seed=1)
    try:
        run(engine, "a", PROMPT, ttl=1)
        time.sleep(TTL_S + 0.6)
        meets = report_of(engine, "b", longer)
        after = report_of(engine, "c", longer)
        assert engine.scheduler.reset_prefix_cache()
        found = report_of(engine, "d", longer)
    finally:
        engine.close()
    assert meets["hbm_tokens"] > 0
    assert meets["why_not_stored"] == "expired"
    assert after["why_not_stored"] is None
    assert found["dram_tokens"] > 0
