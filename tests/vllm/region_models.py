# SPDX-License-Identifier: Apache-2.0
"""Small models whose layers keep KV of different size in one block table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, HEAD_DIM, VOCAB = 128, 4, 32, 1024
KV_HEADS = (2, 2, 4, 1)
INTERMEDIATE = 256
_CONFIGURATION = """
from transformers import PretrainedConfig


class Part:
    def __init__(self, fields):
        self.__dict__.update(fields)


class Block:
    def __init__(self, raw):
        self.raw, self.attention, self.ffn = raw, Part(raw["attention"]), Part(raw["ffn"])


class DeciLMConfig(PretrainedConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=None, **others):
        super().__init__(**others)
        self.block_configs = [Block(b) if isinstance(b, dict) else b for b in block_configs or []]

    def to_dict(self):
        found = super().to_dict()
        found["block_configs"] = [b.raw for b in self.block_configs]
        return found
"""


def make_nemotron_nas(directory: Path, kv_heads: Sequence[int] = KV_HEADS) -> Path:
    """A model of Nemotron-NAS's kind: each layer has as many KV heads as it is given."""
    if directory.exists():
        return directory
    directory.mkdir(parents=True)
    (directory / "configuration_decilm.py").write_text(_CONFIGURATION)
    blocks = [
        {
            "attention": {
                "n_heads_in_group": HEADS // n, "no_op": False, "replace_with_linear": False,
            },
            "ffn": {"ffn_mult": 3 * INTERMEDIATE / 2 / HIDDEN, "no_op": False,
                    "replace_with_linear": False},
        }
        for n in kv_heads
    ]  # fmt: skip
    config = {
        "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"}, "dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCAB,
        "num_hidden_layers": len(kv_heads), "num_attention_heads": HEADS,
        "num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1, "tie_word_embeddings": False,
        "block_configs": blocks,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(kv_heads), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights(kv_heads: Sequence[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(rows: int, columns: int) -> torch.Tensor:
        plain = torch.randn(rows, columns, generator=generator)
        return (plain / columns**0.5).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    q = HEADS * HEAD_DIM
    found = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN) * HIDDEN**0.5,
        "model.norm.weight": ones,
        "lm_head.weight": normal(VOCAB, HIDDEN) * 4,
    }
    for layer, heads in enumerate(kv_heads):
        kv, at = heads * HEAD_DIM, f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": ones.clone(),
            f"{at}.post_attention_layernorm.weight": ones.clone(),
            f"{at}.self_attn.q_proj.weight": normal(q, HIDDEN) * 2,
            f"{at}.self_attn.k_proj.weight": normal(kv, HIDDEN) * 2,
            f"{at}.self_attn.v_proj.weight": normal(kv, HIDDEN),
            f"{at}.self_attn.o_proj.weight": normal(HIDDEN, q),
            f"{at}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    return found


def make_gemma4(directory: Path) -> Path:
    """Gemma 4's kind: layers with a window have two heads of 32 dims, the others two of 64."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    if directory.exists():
        return directory
    config = Gemma4TextConfig(
        vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, pad_token_id=1, hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE, num_attention_heads=HEADS, num_key_value_heads=2,
        head_dim=32, global_head_dim=64, max_position_embeddings=4096, initializer_range=0.08,
        num_hidden_layers=6, sliding_window=256, num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB,
    )  # fmt: skip
    torch.manual_seed(1)
    Gemma4ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory
