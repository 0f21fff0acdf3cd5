# SPDX-License-Identifier: Apache-2.0
"""A reset of vLLM's prefix cache fails while a request has moved KV.

vLLM has preempted all that ran, and the cache stays as it is: another request waits for its load.
So vLLM asks for the first one again before a step has told of its preemption. With a prefix cache
it finds its own blocks by their hidden names; without one its documents are loaded in that step.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Engine
from tests.vllm.host import EngineHost
from tests.vllm.test_documents import DEEP, FEW_TOKENS, ORDER, prompt_of, store_all
from tests.vllm.test_truncation import ASKS, kv_of

SALT = "reset"


def fail_a_reset(engine: Engine) -> dict[str, Any]:
    """KV of the same tokens as requests get it that ask for none that was moved."""
    tokens, _ = prompt_of(ORDER)
    other, _ = prompt_of((3, 1, 0, 2))
    store_all(engine, SALT)
    expected, _ = kv_of(engine, tokens, layers=DEEP.layers, salt="reference")
    engine.forget_hbm()
    asked = engine.submit(tokens, salt=SALT, max_tokens=80, extra_args=ASKS)
    engine.wait_for(lambda: bool(engine.answers(asked)), engine.step)
    (state,) = engine.side.requests.values()
    found: dict[str, Any] = {"moved": state.moved}
    waiting = engine.submit(other, salt=SALT, max_tokens=4, extra_args=ASKS)
    engine.wait_for(lambda: engine.side.documents.is_open, engine.step)
    with pytest.raises(RuntimeError, match="Failed to reset"):
        engine.scheduler.reset_prefix_cache(True)
    engine.finish(asked, waiting)
    engine.settle()
    found["in HBM"] = kv_of(engine, tokens, layers=DEEP.layers, salt=SALT)[0] == expected
    engine.forget_hbm()
    found["stored"] = kv_of(engine, tokens, layers=DEEP.layers, salt=SALT)[0] == expected
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["caching", "no caching"])
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> EngineHost:
    settings = {"truncation": {"share": "everyone", "documents": True, "recompute": "off"}}
    vllm = {**FEW_TOKENS, "enable_prefix_caching": request.param}
    return start_engine(dram="32MiB", shape=DEEP, settings=settings, vllm=vllm)


def test_others_get_exact_kv(engine: EngineHost) -> None:
    found = engine.call(fail_a_reset)
    assert found["moved"] is not None
    assert found["in HBM"], "vLLM's own cache has moved KV under names of exact KV"
    assert found["stored"], "the store has"
