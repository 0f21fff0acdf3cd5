# SPDX-License-Identifier: Apache-2.0
"""Documents in any order on two ranks, and over a restart: exact requests get exact KV, and ranks
choose the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Engine
from tests.vllm.host import EngineHost
from tests.vllm.test_documents import DEEP, FEW_TOKENS, ORDER, prompt_of, store_all
from tests.vllm.test_truncation import ASKS, plain_kv

SALT = "kept"
CHOOSES = {"share": "everyone", "documents": True, "recompute_by": "deviation"}


def kv_of(engine: Engine, salt: str, **how: Any) -> tuple[list[Any], int]:
    """KV of the prompt by rank, and its moved tokens."""
    tokens, _ = prompt_of(ORDER)
    before = engine.metric("moved_tokens", "dram")
    number = engine.submit(tokens, salt=salt, max_tokens=3, **how)
    engine.wait_for(lambda: engine.request(number).num_output_tokens > 0, engine.step)
    args = (engine.block_ids(number), len(tokens), DEEP.layers)
    found: list[Any] = engine.llm.collective_rpc(plain_kv, args=args)
    engine.finish(number)
    engine.settle()
    return found, int(engine.metric("moved_tokens", "dram") - before)


def serve(engine: Engine) -> dict[str, Any]:
    exact, _ = kv_of(engine, "reference")
    engine.forget_hbm()
    store_all(engine, SALT)
    served, moved = kv_of(engine, SALT, extra_args=ASKS)
    engine.forget_hbm()
    return {"exact": exact, "served": served, "moved": moved}


def ask_exactly(engine: Engine) -> tuple[list[Any], int]:
    engine.forget_hbm()
    return kv_of(engine, SALT)


def started(start_engine: StartEngine, share: float, **fields: Any) -> EngineHost:
    settings = {"truncation": {**CHOOSES, "recompute": share}}
    return start_engine(dram="32MiB", shape=DEEP, settings=settings, vllm=FEW_TOKENS, **fields)


def test_exact_requests_after_a_restart(start_engine: StartEngine, tmp_path: Path) -> None:
    where = {"store": tmp_path / "store"}
    found = started(start_engine, 0.15, **where).call(serve)
    assert found["moved"] > 500 and found["served"] != found["exact"], "the check can fail"
    again = started(start_engine, 0.15, **where)
    assert again.call(ask_exactly) == (found["exact"], 0)
    again.call(Engine.check_quiet)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.15, 1])
def test_two_ranks(share: float, start_engine: StartEngine) -> None:
    """Whose heads would choose different tokens each."""
    shape = {"tensor_parallel": 2}
    engine = started(start_engine, share, **shape)
    found = engine.call(serve)
    assert found["moved"] > 500
    for served, exact in zip(found["served"], found["exact"], strict=True):
        # All is computed in two layers; in the others what was chosen, by both ranks.
        assert served[:2] == exact[:2]
        assert (served == exact) == (share == 1)
    assert engine.call(ask_exactly) == (found["exact"], 0)
    engine.call(Engine.check_quiet)
