# SPDX-License-Identifier: Apache-2.0
"""The model as a directory that transformers and vLLM load: config, weights, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.quality.model import NORM_EPS, ROPE_THETA, Llama, Shape
from benchmarks.quality.tokenizer import END_ID, write_tokenizer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def export(model: Llama, tokenizer: Tokenizer, directory: Path, dtype: torch.dtype) -> None:
    """Write the model; its weights are rounded to `dtype`, which is what a server computes in."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, directory, model.shape.window)
    # named_parameters gives tied weights once, as transformers writes them.
    weights = {n: w.detach().to(dtype).contiguous() for n, w in model.named_parameters()}
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(_config(model.shape, dtype), indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def load(directory: Path) -> Llama:
    """Read back what `export` wrote; the weights are fp32 from here on."""
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    shape = Shape(
        vocabulary=config["vocab_size"],
        window=config["max_position_embeddings"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
    )
    if _config(shape, getattr(torch, config["dtype"])) != config:
        raise ValueError(f"{directory / CONFIG_FILE} is not of a model made here")
    model = Llama(shape)
    weights = load_file(directory / WEIGHTS_FILE)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.eval()


def _config(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.window,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": NORM_EPS,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
    }
