# SPDX-License-Identifier: Apache-2.0
"""Models that read weights beside vLLM's loader: what they read is in no name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from torch import nn

from attnstore_vllm.identity.weights import own_files


def test_models_that_choose_their_files() -> None:
    class Chooses(nn.Module):
        secondary_weights = ("another repository",)

    assert own_files(nn.Linear(1, 1)) is None
    reason = own_files(Chooses())
    assert reason is not None and "Chooses" in reason


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mimo_audio", "MiMoAudioTokenizer"),
        ("jina", "JinaEmbeddingsV5DecoderModel"),
        ("jina", "JinaEmbeddingsV5EncoderModel"),
    ],
)
def test_parts_of_models_that_read_subfolders(file: str, name: str) -> None:
    """However deep within a model they are: what they read is no file of weight_files()."""
    module = importlib.import_module(f"vllm.model_executor.models.{file}")
    part: nn.Module = type("Part", (getattr(module, name),), {"__init__": nn.Module.__init__})()
    reason = own_files(nn.Sequential(nn.Linear(1, 1), nn.ModuleList([part])))
    assert reason is not None and "by itself" in reason


READ = re.compile(
    r"(?<!def )\b(load_file|safe_open|safetensors_load|load_safetensors|get_hf_file_bytes"
    r"|torch\.load|np\.load|load_state_dict_from_\w+|\w*[Mm]odel\w*\.from_pretrained)\("
)
KNOWN = {
    "adapters.py": "what it loads is behind the last layer that has KV",
    "jina.py": "_FROM_SUBFOLDERS",
    "mimo_audio.py": "_FROM_SUBFOLDERS",
    "qwen3_dflash.py": "its drafts are not served (drafts.py)",
}


def test_models_of_vllm_that_read_weights_beside_its_loader() -> None:
    """One more has to be looked at: what it reads is in no name."""
    from vllm.model_executor import models

    (directory,) = models.__path__
    found = {
        file.name for file in Path(directory).rglob("*.py") if READ.search(file.read_text("utf-8"))
    }
    assert found == set(KNOWN)
