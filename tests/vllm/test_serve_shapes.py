# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` in other shapes: several engines, and what the store cannot serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.config.values import parse_size
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.prometheus import total
from tests.vllm import serve_helpers as serving
from tests.vllm.serve_helpers import FLAG, MODEL_NAME, ask, story

IDLE = "AttnStore is idle"
PREFETCHES = "vllm:attnstore_prefetches_total"


@pytest.mark.long
def test_each_data_parallel_engine_has_its_share_and_is_told_what_to_prefetch(
    models: Path, tmp_path: Path
) -> None:
    model = make_model(models / "serve", TINY)
    transfer = serving.in_yaml(tmp_path / "a.yaml", serving.settings(tmp_path / "store"))
    arguments = (FLAG, transfer, "--data-parallel-size", "2")
    plugins = {"VLLM_PLUGINS": "attnstore,attnstore_prefetch"}
    with serving.server(
        model, tmp_path / "log", *arguments, cores="0|1", environment=plugins
    ) as server:
        answers = [ask(server, story(n % 3)) for n in range(12)]
        for n, answer in enumerate(answers):
            assert answer == answers[n % 3], "of whichever engine"
        metrics = server.metrics()
        for engine in ("0", "1"):
            saved = total(metrics, "vllm:attnstore_chunks_total", event="saved", engine=engine)
            assert saved > 0, f"engine {engine} had its part of the requests"
        messages = [{"role": "user", "content": story(0)}]
        assert serving.post(server, "/attnstore/prefetch", {"messages": messages})[0] == 202
        for n in range(8):  # metrics come with an engine's next step
            ask(server, story(n % 3))
        metrics = server.metrics()
        told = [total(metrics, PREFETCHES, engine=engine) for engine in ("0", "1")]
        assert told == [1, 1], "either may have the conversation"
        assert total(metrics, PREFETCHES, outcome="hit") >= 1
        sizes = [(tmp_path / "store" / dp / SLAB_NAME).stat().st_size for dp in ("dp0", "dp1")]
        capacity = parse_size("capacity", serving.settings(tmp_path)["nvme"]["capacity"])
        assert sizes[0] == sizes[1]
        assert 0.9 * capacity / 2 < sizes[0] <= capacity / 2
        serving.assert_no_region()
    serving.assert_no_region()


@pytest.mark.parametrize(
    "is_served",
    [
        # Engines with windows are in test_families; that servers run so, the long tests say.
        pytest.param(True, id="some windows", marks=pytest.mark.long),
        pytest.param(False, id="short windows alone", marks=pytest.mark.long),
    ],
)
def test_a_model_with_sliding_windows(tmp_path: Path, is_served: bool) -> None:
    """Beside full attention they are served. Alone, shorter than a chunk, they are not: the server
    runs as without the store."""
    model = make_model(tmp_path / "hybrid", TINY, weights=False)
    tiny = json.loads((model / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"]
    gemma = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds * 2 if is_served else kinds[:1] * 4,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": tiny["head_dim"],
        "sliding_window": 256 if is_served else 64,
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": 10000.0} for k in kinds},
        "tie_word_embeddings": True,
    }
    del tiny["rope_theta"], tiny["hidden_act"]
    (model / "config.json").write_text(json.dumps(tiny | gemma))
    extra = serving.settings(tmp_path / "store")
    arguments = (FLAG, serving.in_yaml(tmp_path / "a.yaml", extra), "--load-format", "dummy")
    with serving.server(model, tmp_path / "log", *arguments) as server:
        first = ask(server, story("hybrid"))
        serving.empty_hbm(server)
        assert ask(server, story("hybrid")) == first
        body = {"model": MODEL_NAME, "prompt": [5] * 600, "max_tokens": 2, "cache_salt": "a"}
        assert serving.post(server, "/v1/completions", body)[0] == 200
        assert (sum(serving.loaded(server).values()) > 0) == is_served
        log = server.log.read_text(errors="replace")
    assert log.count(IDLE) == (not is_served), log
    assert is_served or "all its layers have windows, the longest of 64 tokens" in log
    assert (tmp_path / "store").exists() == is_served
    serving.assert_no_region()


def test_a_codec_over_several_nodes_is_refused(models: Path, tmp_path: Path) -> None:
    model = make_model(models / "serve", TINY)
    extra = serving.settings(tmp_path / "store", codec="lossless")
    arguments = (FLAG, serving.in_yaml(tmp_path / "a.yaml", extra), "--nnodes", "2")
    printed = serving.refused(model, tmp_path / "log", *arguments, cores="0|1")
    assert "--nnodes spreads one engine over several machines" in printed
    assert "where nvme.codec cannot be used" in printed
    assert "--data-parallel-size" in printed
    serving.assert_no_region()
