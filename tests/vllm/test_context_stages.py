# SPDX-License-Identifier: Apache-2.0
"""Context parallelism (test_context_ranks.py) in each stage of a pipeline.

Goal: no rank of any stage attends to KV of other tokens, all ranks load alike, and a restart finds
what they stored; shapes are those of vLLM's own configurations of the stages.
Method: vLLM's scheduler and its aggregation of reports, over a scripted worker for each rank. No
device that is here runs it.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.connector.build import geometry_of
from attnstore_vllm.connector.pipeline import PipelineStage
from tests.vllm.context_ranks import CHUNK, Ranks, StagedContextEngine, settle, with_ranks
from tests.vllm.planning import get_kv_cache_configs
from tests.vllm.scripted_worker import BLOCK
from tests.vllm.test_async_scheduling import wait_until_quiet
from tests.vllm.test_context_ranks import BY_ONE, name_of, tell


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


STAGED = [
    (Ranks(2, 2), (2, 1)), (Ranks(2, 2, 1, 16), (1, 2, 1)), (Ranks(4, 2), (1, 2)),
    (Ranks(2, 4, 2), (2, 1)),
]  # fmt: skip


def of_stages(prompt: tuple[Ranks, tuple[int, ...]]) -> str:
    return f"{name_of(prompt[0])}, layers {prompt[1]}"


@pytest.mark.parametrize("spread", STAGED, ids=of_stages)
def test_stages_whose_ranks_share_tokens(
    spread: tuple[Ranks, tuple[int, ...]], model: Path, tmp_path: Path
) -> None:
    """Pipeline stages, each over ranks that share tokens: all ranks of all stages load alike. Then
    a restart finds all of it on NVMe."""
    ranks, stages = spread
    how: dict[str, Any] = {"depth": len(stages) + 1}
    engine = StagedContextEngine(model, tmp_path / "store", ranks, stages, seed=1, **how)
    assert engine.ours.geometry.block_tokens == BLOCK * ranks.decode
    prompts = tell(engine, 1)
    loaded = {worker.loaded_tokens for worker in engine.workers}
    assert len(loaded) == 1 and min(loaded) > CHUNK, loaded
    engine.close()
    engine = StagedContextEngine(model, tmp_path / "store", ranks, stages, seed=2, **how)
    with closing(engine):
        wait_until_quiet(engine.ours)
        for number, prompt in enumerate(prompts):
            engine.add(f"again {number}", prompt, 2)
            settle(engine)
        assert min(worker.loaded_tokens for worker in engine.workers) > CHUNK


def test_tokens_swapped_in_the_last_stage_would_be_seen(model: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"stages": (1, 2), "depth": 3}
    engine = StagedContextEngine(model, tmp_path / "store", BY_ONE, seed=1, **how)
    prompts = tell(engine, 3, requests=8)
    engine.close()
    engine = StagedContextEngine(model, tmp_path / "store", BY_ONE, seed=2, swapped=True, **how)
    with closing(engine):
        wait_until_quiet(engine.ours)
        engine.add("again", max(prompts, key=len), 2)
        with pytest.raises(AssertionError, match=r"wrong KV of token .* on rank [23]"):
            settle(engine)


@pytest.mark.parametrize("decode", [1, 2, 4])
def test_stages_of_latents(decode: int, model: Path) -> None:
    """Two stages of four ranks, by vLLM's own configurations of both. All four hold the same
    latents, or with DCP those that share no tokens: each then stores its own."""
    config = EngineArgs(
        model=str(model), dtype="bfloat16", max_model_len=512, max_num_batched_tokens=64
    ).create_engine_config()
    with_ranks(config.parallel_config, Ranks(4, decode))
    config.parallel_config.pipeline_parallel_size = 2
    config.cache_config.num_gpu_blocks_override = 64
    config.cache_config.kv_cache_layout = "LBNHC"
    latent = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1
    )
    specs: list[dict[str, KVCacheSpec]] = [
        dict.fromkeys(names, latent) for names in (("l0", "l1"), ("l2",))
    ]
    made = get_kv_cache_configs(config, specs, [1 << 40, 1 << 40])
    replicas = 4 if decode == 1 else 1
    assert [kv.kv_tp_replicas for kv in made] == [replicas, replicas]
    settings = StoreConfig.parse(
        {"dram": "1GiB", "nvme": {"path": "/nowhere", "capacity": "1GiB"}, "chunk_tokens": 256}
    )
    stages = [PipelineStage.of(geometry_of(config, kv, settings)) for kv in made]
    shapes = [geometry_of(config, kv, settings, stages) for kv in made]
    assert [len(shape.regions) for shape in shapes] == [2, 1]
    for shape in shapes:
        assert (shape.num_ranks, shape.replicas) == (8, replicas)
        assert shape.block_tokens == resolve_dcp_kv_block_size(latent, decode) == 64 * decode
        assert shape.stages == (2 * (64 * 576 * 2,), (64 * 576 * 2,))
    # A slot has each stage's part: once, or of all four ranks.
    parts = 2 * (4 // replicas)
    assert shapes[0].slot_bytes == parts * 256 // (64 * decode) * 2 * 64 * 576 * 2
