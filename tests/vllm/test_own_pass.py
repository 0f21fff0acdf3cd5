# SPDX-License-Identifier: Apache-2.0
"""KV that a pass of our own computes, beside that of vLLM's own step.

Goal: the same bytes where all is computed; where KV of documents is there, the same as in a whole
prefill, to rounding.
Method: vLLM computes a prompt; the pass computes it, or the gaps between its documents, in other
blocks of HBM; both are compared layer by layer. Weights are drawn, so that wrong tokens show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest

from attnstore_vllm.connector.own_pass import make_own_pass, slices
from attnstore_vllm.transfer.plan import TokenRun
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import BLOCK, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

NUM_BLOCKS = 8
GAPS = [range(0, 24), range(300, 324), range(560, 561), range(777, 830), range(1000, 1024)]


def compute(
    worker: Any, tokens: Sequence[int], theirs: list[int], ours: list[int],
    runs: Sequence[range], max_tokens: int | None, max_rows: int | None,
) -> list[float]:  # fmt: skip
    """How far K and V of each layer are off, in parts of the largest, where `runs` are computed by
    our pass and all else is vLLM's."""
    runner = worker.model_runner
    config = runner.vllm_config
    caches, num_blocks = runner.compilation_config.static_forward_context, runner.kv_cache_config
    kv = {name: layer.kv_cache for name, layer in caches.items()}
    own = make_own_pass(config, num_blocks, caches, runner.get_model())
    own.max_tokens = max_tokens or own.max_tokens
    own.max_rows = max_rows or own.max_rows
    axis = {name: tensor.shape.index(num_blocks.num_blocks) for name, tensor in kv.items()}
    blocks = {name: tensor.movedim(axis[name], 0) for name, tensor in kv.items()}

    def off() -> list[float]:
        pairs = [(found[ours].float(), found[theirs].float()) for found in blocks.values()]
        return [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]

    for found in blocks.values():
        found[ours] = found[theirs]
    # By tokens that are not the prompt's: the blocks' order of bytes is the backend's own.
    own.compute([TokenRun(run.start, [9] * len(run)) for run in runs], [ours])
    assert min(off()) > 0.1, "this check cannot fail"
    own.compute([TokenRun(run.start, tokens[run.start : run.stop]) for run in runs], [ours])
    return off()


def compare(
    engine: Engine, runs: Sequence[range] | None, max_tokens: int | None = None,
    max_rows: int | None = None,
) -> list[float]:  # fmt: skip
    tokens = random_tokens("own pass", NUM_BLOCKS * BLOCK)
    number = engine.submit(tokens, max_tokens=2)
    engine.step()
    request = engine.request(number)
    theirs = list(engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])
    ours = list(range(60, 60 + NUM_BLOCKS))
    assert not set(theirs) & set(ours)
    work = partial(
        compute, tokens=tokens, theirs=theirs[:NUM_BLOCKS], ours=ours,
        runs=runs or [range(len(tokens))], max_tokens=max_tokens, max_rows=max_rows,
    )  # fmt: skip
    (found,) = engine.llm.collective_rpc(work)
    while number not in engine.done:
        engine.step()
    return list(found)


@pytest.fixture(
    scope="module",
    params=["bfloat16", "float32", pytest.param("compiled", marks=[pytest.mark.long])],
)
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> EngineHost:
    is_compiled = request.param == "compiled"
    dtype = "bfloat16" if is_compiled else request.param
    settings = {"dtype": dtype, "enable_prefix_caching": False}
    return start_engine(store=None, eager=not is_compiled, vllm=settings)


def test_all_of_it_is_vllms_own(engine: EngineHost) -> None:
    assert set(engine.call(compare, None)) == {0.0}


@pytest.mark.parametrize("limits", [(None, None), (40, None), (None, 2), (1, 1)])
def test_gaps_between_documents(engine: EngineHost, limits: tuple[int | None, int | None]) -> None:
    off = max(engine.call(compare, GAPS, *limits))
    most = 1e-5 if engine.spec.vllm["dtype"] == "float32" else 0.02
    assert off < most


def test_slices() -> None:
    runs = [TokenRun(0, range(5)), TokenRun(10, range(3)), TokenRun(20, range(7))]
    for max_tokens in (1, 2, 4, 100):
        for max_rows in (1, 2, 3):
            found = list(slices(runs, max_tokens, max_rows))
            assert all(sum(len(row.token_ids) for row in rows) <= max_tokens for rows in found)
            assert all(1 <= len(rows) <= max_rows for rows in found)
            assert placed(row for rows in found for row in rows) == placed(runs)


def placed(runs: Iterable[TokenRun]) -> list[tuple[int, int]]:
    return [(run.start + i, token) for run in runs for i, token in enumerate(run.token_ids)]
