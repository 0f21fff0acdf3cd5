# SPDX-License-Identifier: Apache-2.0
"""The code of the model: a program may register a class of its own under any name, and a plugin's
code may change under one version (`pip install -e`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.vllm.engine import EngineSpec, store_settings
from tests.vllm.host import ENVIRONMENT
from tests.vllm.prompts import random_tokens

pytest.importorskip("vllm")

PROGRAM = """
import json, sys
import my_model
from vllm import LLM, ModelRegistry, SamplingParams

ModelRegistry.register_model("MyLlama", "my_model:MyLlama")
what = json.loads(sys.argv[1])
llm = LLM(**what["arguments"])
greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
for salt in (None, what["salt"]):
    prompt = {"prompt_token_ids": what["prompt"]} | ({"cache_salt": salt} if salt else {})
    (out,) = llm.generate(prompt, greedy, use_tqdm=False)
    print("SAID", json.dumps([out.num_cached_tokens, list(out.outputs[0].token_ids)]))
llm.llm_engine.engine_core.shutdown()
"""
MODEL = """
from vllm.model_executor.models.llama import LlamaForCausalLM


class MyLlama(LlamaForCausalLM):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            attention = layer.self_attn.forward
            layer.self_attn.forward = lambda *a, f=attention, **k: {factor} * f(*a, **k)
"""


def run(directory: Path, factor: float, arguments: dict[str, Any]) -> list[Any]:
    (directory / "my_model.py").write_text(MODEL.replace("{factor}", str(factor)))
    (directory / "program.py").write_text(PROGRAM)
    root = Path(__file__).parents[2]
    what = json.dumps(
        {"prompt": random_tokens("code", 400), "arguments": arguments, "salt": f"nobody {factor}"}
    )
    done = subprocess.run(
        [sys.executable, str(directory / "program.py"), what], cwd=directory,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{root}:{directory}"},
        stdout=subprocess.PIPE, text=True, check=True, timeout=250,
    )  # fmt: skip
    return [json.loads(x[5:]) for x in done.stdout.splitlines() if x.startswith("SAID ")]


@pytest.mark.long
def test_a_model_class_of_ones_own(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", TINY)
    spec = EngineSpec(store=tmp_path / "store", models=tmp_path)
    (tmp_path / "store").mkdir()
    transfer = {
        "kv_connector": "AttnStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": store_settings(spec),
    }
    arguments = {
        "model": str(model), "dtype": "bfloat16", "kv_transfer_config": transfer,
        "enforce_eager": True, "max_model_len": 1024, "num_gpu_blocks_override": 64,
        "hf_overrides": {"architectures": ["MyLlama"]},
    }  # fmt: skip
    run(tmp_path, 1.0, arguments)
    stored, computed = run(tmp_path, 8.0, arguments)
    assert stored[0] == 0, "KV of another version of the model's code"
    assert stored[1] == computed[1]
