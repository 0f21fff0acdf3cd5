# SPDX-License-Identifier: Apache-2.0
"""What another start on the same directory finds again: real engines, one after the other."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from attnstore_lab.testing.tiny_tokenizer import build_tokenizer
from attnstore_vllm.index.prefix import whole_blocks
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Engine, store_settings
from tests.vllm.other_process import ask_other_process
from tests.vllm.prompts import random_tokens

LENGTH = 400
SHORT, LONG = 512, 2_048
"""--max-model-len of two starts."""


def answer(engine: Engine, seed: int) -> tuple[dict[str, int], tuple[int, ...]]:
    """What was loaded for a prompt, and the answer to it."""
    prompt = random_tokens(seed, LENGTH)
    said = engine.ask(prompt, max_tokens=8)
    engine.settle()
    return engine.loaded(), said.tokens


def arguments(engine: Engine) -> dict[str, Any]:
    """Of vllm.LLM, as this engine was started."""
    transfer = {
        "kv_connector": "AttnStoreConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": store_settings(engine.spec),
    }  # fmt: skip
    model = str(engine.llm.llm_engine.model_config.model)
    return {"model": model, "dtype": "bfloat16", "kv_transfer_config": transfer}


@pytest.mark.long
def test_another_kind_of_server_finds_a_plain_models_kv(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    """All in one process or not; longer contexts, other steps, another name, HBM of another size:
    none makes a store cold."""
    first = start_engine(store=tmp_path, eager=True, vllm={"max_model_len": SHORT})
    loaded, tokens = first.call(answer, 1)
    assert sum(loaded.values()) == 0
    given = first.call(arguments)
    first.close()
    other = {
        "enforce_eager": True, "max_model_len": LONG, "max_num_seqs": 7,
        "max_num_batched_tokens": 3_000, "served_model_name": "other",
        "num_gpu_blocks_override": 80,
    }  # fmt: skip
    tokens_again, cached = ask_other_process(random_tokens(1, LENGTH), {**given, **other})
    assert cached == whole_blocks(LENGTH - 1)
    assert tuple(tokens_again) == tokens


AUDIO = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")


def hears(directory: Path) -> Path:
    """A tiny Qwen2-Audio with all that vLLM needs to process sounds for it."""
    tokenizer = build_tokenizer(1_024)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in AUDIO])
    end = "⟦end⟧"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", "vocab_size": 1_100, "hidden_size": 128,
                     "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                     "num_key_value_heads": 4, "max_position_embeddings": 4_096},
        audio_config={"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2,
                      "encoder_ffn_dim": 64, "num_mel_bins": 128},
        audio_token_index=fast.convert_tokens_to_ids(AUDIO[0]),
    )  # fmt: skip
    directory.mkdir(parents=True)
    written = config.to_dict() | {"architectures": ["Qwen2AudioForConditionalGeneration"]}
    (directory / "config.json").write_text(json.dumps(written))
    extractor = WhisperFeatureExtractor(feature_size=128, n_fft=400)
    Qwen2AudioProcessor(extractor, fast, chat_template="").save_pretrained(directory)
    return directory


def hear(engine: Engine, salt: str | None) -> tuple[int, tuple[int, ...]]:
    """Tokens that were loaded for a question about a sound, and the answer."""
    tokenizer = engine.llm.get_tokenizer()
    sound = np.sin(np.arange(16_000 * 8) * 0.05).astype(np.float32)
    tokens = [*tokenizer.convert_tokens_to_ids([AUDIO[1], AUDIO[0], AUDIO[2]])]
    prompt = {
        "prompt_token_ids": tokens + random_tokens(3, 80),
        "multi_modal_data": {"audio": [(sound, 16_000)]},
    }
    said = engine.ask(prompt, max_tokens=8, salt=salt)
    engine.settle()
    return sum(engine.loaded().values()), said.tokens


@pytest.mark.long
@pytest.mark.parametrize("how", ["the file", "the argument"])
def test_other_processing_of_sounds_is_another_model(
    start_engine: StartEngine, tmp_path: Path, how: str
) -> None:
    """test_namespace.py has the short version."""
    model = hears(tmp_path / "model")
    vllm = {"model": str(model), "load_format": "dummy", "max_model_len": LONG}
    start = partial(start_engine, store=tmp_path / "store")
    assert start(vllm=vllm).call(hear, None)[0] == 0
    again = start(vllm=vllm)
    assert again.call(hear, None)[0] > 200
    if how == "the file":
        for file in model.glob("*processor_config.json"):
            file.write_text(file.read_text().replace('"n_fft": 400', '"n_fft": 512'))
    else:
        vllm["mm_processor_kwargs"] = {"n_fft": 512}
    other = start(vllm=vllm)
    loaded, tokens = other.call(hear, None)
    assert loaded == 0, "KV of sounds that were processed otherwise was loaded"
    assert tokens == other.call(hear, "nobody's")[1]
