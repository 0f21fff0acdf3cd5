# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters for the tiny models: they change K and V, and so the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attnstore_lab.testing.tiny_model import ModelShape

RANK = 8
STRENGTH = 0.2


def make_adapter(directory: Path, shape: ModelShape, seed: int) -> Path:
    """Write an adapter of these weights; one that is there already is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "q_proj": shape.heads * shape.head_dim,
        "k_proj": shape.kv_heads * shape.head_dim,
        "v_proj": shape.kv_heads * shape.head_dim,
    }
    tensors: dict[str, Any] = {}
    for layer in range(shape.layers):
        for name, rows in sizes.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(RANK, shape.hidden, generator=generator) * STRENGTH
            b = torch.randn(rows, RANK, generator=generator) * STRENGTH
            tensors[f"{module}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"{module}.lora_B.weight"] = b.to(torch.bfloat16)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(sizes),
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
