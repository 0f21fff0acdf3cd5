# SPDX-License-Identifier: Apache-2.0
"""What single architectures need beside registry.SMALL, so that vLLM starts a small one of them.

Mostly fields that the config.json of published models has and transformers' class does not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from attnstore_lab.testing.family_models import CACHED, FLOAT_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How one architecture's config.json and arguments differ from those of the rest."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Set in config.json, over SMALL and over what transformers gives."""
    without: tuple[str, ...] = ()
    """Left out of config.json: vLLM has its own class for it, which refuses these."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vllm.LLM."""
    kind: str = ""
    """The type of configuration where transformers' first one also sees images."""
    needs_images: bool = False
    """vLLM has it with its relative that sees images, and imports what that one needs."""
    special_tokens: tuple[str, ...] = ()
    """vLLM starts it only with a tokenizer that has these."""


_MIXED: Final = [*3 * ["sliding_attention"], "full_attention"]

FITTED: Final[Mapping[str, Fit]] = {
    "AfmoeForCausalLM": Fit(
        fields={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
    ),
    # The parts of its configuration refuse what transformers itself writes into them.
    "DbrxForCausalLM": Fit(
        fields={
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500_000},
            "ffn_config": {
                "hidden_size": 256, "ffn_hidden_size": 512, "moe_num_experts": 4, "moe_top_k": 2,
            },
        }
    ),
    # A head, its rotary part and the indexer's head have the only sizes that the kernels know.
    "DeepseekV4ForCausalLM": Fit(
        without=("layer_types", "mlp_layer_types", "compress_rates"),
        fields={
            "compress_ratios": [0, 4, 128, 4], "num_hash_layers": 1, "head_dim": 512,
            "qk_rope_head_dim": 64, "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 64,
            "q_lora_rank": 64, "index_n_heads": 8, "index_head_dim": 128, "index_topk": 512,
            "sliding_window": 128, "expert_dtype": "bf16", "topk_method": "noaux_tc",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        options={"num_gpu_blocks_override": 4_096},
    ),
    "Glm4MoeForCausalLM": Fit(fields={"head_dim": 32}),
    "Glm4MoeLiteForCausalLM": Fit(fields={"first_k_dense_replace": 1}),
    "HYV3ForCausalLM": Fit(
        fields={
            "first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True
        }
    ),
    # The names of the fields are those of vLLM's own class, its type too.
    "InklingForCausalLM": Fit(
        special_tokens=(
            "<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>",
            "<|content_text|>", "<|content_image|>", "<|content_model_end_sampling|>",
            "<|content_thinking|>", "<|content_audio_input|>", "<|content_xml|>",
            "<|content_invoke_tool_json|>", "<|end_message|>", "<|audio_end|>",
        ),
        options={"num_gpu_blocks_override": 4_096},
        without=("layer_types", "mlp_layer_types"),
        fields={
            "model_type": "inkling_model", "swa_num_attention_heads": 8, "swa_head_dim": 32,
            "swa_num_key_value_heads": 2, "local_layer_ids": [0, 1, 2], "use_sconv": True,
            "use_gate_bias": True, "use_global_scale": True,
        },
    ),
    # Beside latents the CPU build turns caching off, too late for its own check of the states.
    "KimiLinearForCausalLM": Fit(
        options={"enable_prefix_caching": False},
        without=("layer_types", "mlp_layer_types"),
        fields={
            "first_k_dense_replace": 1, "num_experts_per_token": 2, "max_position_embeddings": 4096,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 128, "num_heads": 2,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    # Its experts score by sigmoid without groups, which the CPU build has not. KV is the same.
    "LagunaForCausalLM": Fit(fields={"mlp_layer_types": 4 * ["dense"], "layer_types": _MIXED}),
    "Lfm2MoeForCausalLM": Fit(
        fields={
            "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1,
        },
        options=CACHED,
    ),
    "LongcatFlashForCausalLM": Fit(
        fields={
            "num_layers": 2, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
            "expert_ffn_hidden_size": 64, "zero_expert_num": 2, "zero_expert_type": "identity",
        }
    ),
    # Published ones score by sigmoid, which the CPU build has with groups of experts only.
    "MiniMaxM2ForCausalLM": Fit(fields={"rotary_dim": 16, "scoring_func": "softmax"}),
    "Qwen3_5MoeForCausalLM": Fit(
        kind="qwen3_5_moe_text", needs_images=True, options=FLOAT_STATES,
        fields={
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "Qwen4ExpForCausalLM": Fit(
        kind="qwen4_exp_text", needs_images=True, options=FLOAT_STATES,
        fields={
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64, "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 64, "indexer_budget": 512, "indexer_compress_ratio": 4,
            "hc_lowrank": 32, "output_gate_type": "sigmoid",
        },
    ),
    "Zamba2ForCausalLM": Fit(
        fields={
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        },
        options=CACHED,
    ),
}  # fmt: skip
"""By vLLM's name of the architecture."""
