# SPDX-License-Identifier: Apache-2.0
"""Small models whose drafts are good if the KV of the drafts is right, and bad if it is not.

A model of one layer, and an EAGLE head that has the same layer. What the head makes of a token's
embedding and of its KV is what the model makes of it, but for the prompt's first token, which a
head does not see. Attention is sharp, so that an answer hangs on few tokens of a long prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attnstore_lab.testing.family_models import COMMON, VOCAB

HIDDEN, INTERMEDIATE = 256, 512
KV_HIDDEN = HIDDEN // 4
FAINTNESS = 0.03
SHARPNESS = 2.0
"""What Q and K are larger by than what transformers starts with."""


def make_model(directory: Path, window: int | None = None, *, before: bool = False) -> Path:
    """The model. One that is there already is used as it is.

    Args:
        window: of its layer; None: it has all tokens.
        before: the window is that of another layer before it, which adds little to what it makes.
    """
    layers = [_layer()]
    kinds = ["full_attention" if window is None or before else "sliding_attention"]
    if before:
        layers, kinds = [_faint(_layer()), *layers], ["sliding_attention", *kinds]
    weights = {
        f"model.layers.{number}.{name}": tensor
        for number, layer in enumerate(layers)
        for name, tensor in layer.items()
    }
    weights |= {
        "model.embed_tokens.weight": _embeddings(),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _random(5, VOCAB, HIDDEN),
    }
    more = {} if window is None else {"sliding_window": window, "layer_types": kinds}
    return _write(directory, "LlamaForCausalLM", weights, num_hidden_layers=len(layers), **more)


def make_eagle_head(directory: Path, noise: float = 0.0) -> Path:
    """Its EAGLE head. Noise is the part of the hidden states that comes to the embeddings: with
    some, guesses hang on both, and not all are right."""
    weights = {f"layers.0.{name}": tensor for name, tensor in _layer().items()}
    del weights["layers.0.input_layernorm.weight"]
    others = _random(6, HIDDEN, HIDDEN, scale=noise)
    weights["fc.weight"] = torch.cat([torch.eye(HIDDEN), others], dim=1)
    return _write(directory, "EagleLlamaForCausalLM", weights)


def _faint(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    outward = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    return layer | {name: layer[name] * FAINTNESS for name in outward}


def _random(seed: int, *shape: int, scale: float = 0.08) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _embeddings() -> torch.Tensor:
    """Of length 1, root mean square: the head normalizes none."""
    found = _random(4, VOCAB, HIDDEN)
    return found / found.pow(2).mean(dim=1, keepdim=True).sqrt()


def _layer() -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HIDDEN, HIDDEN),
        "self_attn.v_proj": (KV_HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }  # fmt: skip
    found = {
        f"{name}.weight": _random(100 + number, *shape)
        for number, (name, shape) in enumerate(shapes.items())
    }
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        found[name] *= SHARPNESS
    norms = ("input_layernorm", "post_attention_layernorm")
    return found | {f"{name}.weight": torch.ones(HIDDEN) for name in norms}


def _write(
    directory: Path, architecture: str, weights: dict[str, torch.Tensor], **more: Any
) -> Path:
    if directory.exists():
        return directory
    config = {
        **COMMON,
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **more,
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory
