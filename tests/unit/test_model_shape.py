# SPDX-License-Identifier: Apache-2.0
"""The KV of known models, as their config.json tells it: against what vLLM's own functions say.

The physical blocks of the large ones were computed by vLLM 0.32 from layers of their sizes. The
small ones are compared on the real engine (tests/vllm/test_families.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.model_shape import shape_of
from attnstore_vllm.transfer.geometry import groups_text

LLAMA_65B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "hidden_size": 8192,
    "torch_dtype": "float16",
}
FALCON_7B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_size": 4544,
    "multi_query": True,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
GLM_5 = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "num_attention_heads": 64,
    "hidden_size": 6144, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
    "index_n_heads": 32, "index_topk": 2048,
}  # fmt: skip
KIMI_LINEAR = {
    "model_type": "kimi_linear", "num_hidden_layers": 27, "num_attention_heads": 32,
    "hidden_size": 2304, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        "kda_layers": [n for n in range(1, 27) if n % 4], "short_conv_kernel_size": 4,
    },
}  # fmt: skip
NEMOTRON_H_56B = {
    "model_type": "nemotron_h", "num_hidden_layers": 118, "num_attention_heads": 64,
    "num_key_value_heads": 8, "hidden_size": 8192, "head_dim": 128, "mamba_num_heads": 256,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 256, "conv_kernel": 4,
    "hybrid_override_pattern": (
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-"
        "M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    ),
}  # fmt: skip
GRANITE4_SMALL = {
    "model_type": "granitemoehybrid", "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "mamba_n_heads": 128, "mamba_d_head": 64,
    "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
    "layer_types": 4 * [*5 * ["mamba"], "attention", *4 * ["mamba"]],
}  # fmt: skip
FALCON_H1_34B = {
    "model_type": "falcon_h1", "num_hidden_layers": 72, "num_attention_heads": 20,
    "num_key_value_heads": 4, "hidden_size": 5120, "head_dim": 128, "mamba_d_ssm": 4096,
    "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_n_groups": 2, "mamba_d_state": 256,
    "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
_V4 = {
    "model_type": "deepseek_v4", "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
    "sliding_window": 128,
}  # fmt: skip
DEEPSEEK_V4_FLASH = _V4 | {
    "num_hidden_layers": 43, "compress_ratios": [0, 0, *20 * [4, 128], 4, 0],
}  # fmt: skip
DEEPSEEK_V4_PRO = _V4 | {
    "num_hidden_layers": 61, "compress_ratios": [128, 128, *29 * [4, 128], 4, 0],
}  # fmt: skip
DEEPSEEK_V41 = {
    "model_type": "deepseek_v41",
    "text_config": _V4 | {
        "model_type": "deepseek_v41_text", "num_hidden_layers": 40,
        "compress_ratios": [0, 0, *18 * [2], *20 * [1], 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
    },
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
    "layer_types": 18 * ["sliding_attention", "full_attention"],
}  # fmt: skip
LLAMA4_SCOUT = {
    "model_type": "llama4_text",
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_chunk_size": 8192,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
GEMMA4_31B = {
    "model_type": "gemma4_text", "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512, "sliding_window": 1024,
    "num_global_key_value_heads": 4, "attention_k_eq_v": True,
    "layer_types": 10 * [*5 * ["sliding_attention"], "full_attention"],
}  # fmt: skip

FLOAT_STATES = "groups: full/1056" + 3 * " state/1056"


def test_states_have_the_dtype_that_vllm_gives_them() -> None:
    told = shape_of(QWEN3_NEXT, "c", state_dtype_bytes=4)
    assert told == shape_of(QWEN3_NEXT | {"mamba_ssm_dtype": "float32"}, "c")
    assert groups_text(told.geometry.groups) == FLOAT_STATES


def test_bytes_of_a_token() -> None:
    def full(config: dict[str, Any], dtype_bytes: int | None = None) -> int:
        shape = shape_of(config, "c", dtype_bytes)
        assert len(shape.geometry.groups) == 1
        return shape.token_bytes(Reach.FULL)

    assert full(LLAMA_65B) == 2_621_440
    assert full(LLAMA_65B | {"num_key_value_heads": 8}) == 327_680
    assert full({"text_config": LLAMA_65B}, 1) == 1_310_720
    assert full(FALCON_7B) == 2 * 32 * 64 * 2
    assert full(DEEPSEEK_V3) == 61 * 576 * 2
    assert full(DEEPSEEK_V32) == 61 * (576 * 2 + 132)
    assert full(LLAMA_65B | {"sliding_window": 4096, "use_sliding_window": False}) == 2_621_440


@pytest.mark.parametrize(
    ("config", "block_mb", "groups"),
    [
        (GPT_OSS_120B, 0.59, "groups: full/16 window:128/16"),
        (GEMMA3_27B, 1.31, "groups: full/16" + 6 * " window:1024/16"),
        (GEMMA4_31B, 2.62, "groups: full/32" + 5 * " window:1024/16"),
        (LLAMA4_SCOUT, 0.79, "groups: full/16" + 3 * " local:8192/16"),
        (
            DEEPSEEK_V4_FLASH,
            1.0,
            "groups: full/256 window:128/64 window:128/64 window:8/4 window:128/8",
        ),
        (DEEPSEEK_V41, 0.46, ""),
        (QWEN3_NEXT, 13.37, "groups: full/544" + 3 * " state/544"),
        (QWEN3_NEXT | {"mamba_ssm_dtype": "float32"}, 25.95, FLOAT_STATES),
    ],
)
def test_groups_are_those_of_vllm(config: dict[str, Any], block_mb: float, groups: str) -> None:
    geometry = shape_of(config, "c").geometry
    assert groups_text(geometry.groups) == groups
    assert geometry.block_bytes / 1e6 == pytest.approx(block_mb, abs=0.006)


def test_a_conversation_of_gemma3() -> None:
    """10,000 tokens: 40 chunks, and of 6 groups the 5 that the last 1,023 tokens lie in."""
    shape = shape_of(GEMMA3_27B, "c")
    assert shape.records(10_000) == {"full": 40, "window": 6 * 5}
    assert shape.record_bytes == 4096 + 256 * 10 * 2 * 16 * 128 * 2
    assert shape.conversation_bytes(10_000) == 70 * shape.record_bytes
    assert shape_of(QWEN3_NEXT, "c").records(10_000) == {"full": 19, "state": 3}


def test_a_conversation_of_deepseek_v4() -> None:
    """10,000 tokens. A slot has 17 blocks, which 16 of a chunk of 4,096 tokens nearly fill."""
    shape = shape_of(DEEPSEEK_V4_FLASH, "c", chunk_tokens=4096)
    assert shape.geometry.slot_bytes == -(-17 * shape.geometry.block_bytes // 4096) * 4096
    # Of 4 groups of windows what the last 127 or 7 tokens lie in, which is one chunk.
    assert shape.records(10_000) == {"full": 3, "window": 4}
    # A block of latents has 64 and 2 of them, and 64 keys: each page a multiple of 576 bytes.
    assert shape.token_bytes(Reach.FULL) == -(-(21 * (37_440 + 8_640) + 20 * 1_728) // 256)
    # 40 blocks of latents; of windows 3 each, of compressors 3 and 17.
    assert shape.held_bytes(10_000) == (40 + 2 * 3 + 3 + 17) * shape.geometry.block_bytes


def test_what_deepseek_v41_computes_again_is_held_and_not_stored() -> None:
    shape = shape_of(DEEPSEEK_V41, "c")
    assert shape.records(10_000) == {"full": 40} and not shape.needs()
    assert shape.token_bytes(Reach.WINDOW) == 0
    # Two groups of windows in blocks of 32 tokens, and the rings.
    assert shape.held_bytes(10_000) == (40 + 2 * 5 + 1) * shape.geometry.block_bytes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "num_hidden_layers is missing"),
        (LLAMA_65B | {"torch_dtype": "int3"}, "--kv-dtype-bytes"),
        (LLAMA_65B | {"sliding_window": 4096}, "layer_types does not say"),
        (
            LLAMA_65B | {"layer_types": 80 * ["sliding_attention"], "sliding_window": 9},
            "does not serve",
        ),
        (LLAMA_65B | {"layer_types": 80 * ["mamba3"]}, r"\['mamba3'\]"),
        (LLAMA_65B | {"layer_types": ["full_attention"]}, "has 1 layers, of 80"),
        (LLAMA_65B | {"layer_types": 40 * ["linear_attention", "full_attention"]}, "recurrent"),
        (LLAMA_65B | {"hybrid_override_pattern": "M-?"}, r"has \['\?'\]"),
        (LLAMA_65B | {"attn_layer_period": 8}, "Mamba 1 layers"),
        (LLAMA_65B | {"mamba_d_state": 128}, "neither layer_types nor"),
        (DEEPSEEK_V3 | {"index_head_dim": 128, "model_type": "hy_v4"}, "sparse indexer"),
        (DEEPSEEK_V3 | {"compress_ratios": [0, 4, 128]}, "compressed latents"),
        (DEEPSEEK_V4_FLASH | {"head_dim": 256}, r"heads have \[256, 64\]"),
        (DEEPSEEK_V4_FLASH | {"compress_ratios": 43 * [8]}, r"compress_ratios has \[8\]"),
        (LLAMA_65B | {"sparse_attention_config": {"topk": 16}}, "sparse indexer"),
    ],
)
def test_what_is_not_known_is_an_error_that_teaches(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_of(config, "c")


@pytest.mark.parametrize(
    ("config", "kv_type", "token_bytes"),
    [
        (LLAMA_65B, "auto", 2_621_440),
        (LLAMA_65B, "fp8", 1_310_720),
        (LLAMA_65B, "nvfp4", 80 * 2 * 64 * (64 + 8)),
        (LLAMA_65B, "int8_per_token_head", 80 * 2 * 64 * (128 + 4)),
        (LLAMA_65B, "int4_per_token_head", 80 * 2 * 64 * (64 + 4)),
        (DEEPSEEK_V3, "fp8", 61 * 576),
        (DEEPSEEK_V32, "fp8_ds_mla", 61 * (656 + 132)),
        (GLM_5 | {"index_topk_pattern": 39 * "FS"}, "auto", 78 * 1152 + 39 * 132),
        (GLM_5 | {"index_topk_freq": 4}, "auto", 78 * 1152 + 21 * 132),
    ],
)
def test_types_of_kv_and_layers_without_an_indexer(
    config: dict[str, Any], kv_type: str, token_bytes: int
) -> None:
    assert shape_of(config, "c", kv_type=kv_type).token_bytes(Reach.FULL) == token_bytes


@pytest.mark.parametrize(
    ("config", "kv_type", "said"),
    [
        (LLAMA_65B, "turboquant_k8v4", "whose bytes are not known here; known are bfloat16"),
        (LLAMA_65B, "fp8_ds_mla", "it keeps none"),
        (DEEPSEEK_V3, "nvfp4", "of a latent of 512 and 64"),
        (DEEPSEEK_V3, "int8_per_token_head", "of a latent"),
        (DEEPSEEK_V3 | {"kv_lora_rank": 256}, "fp8_ds_mla", "of a latent of 256"),
        (DEEPSEEK_V32, "fp8", "say fp8_ds_mla, or --kv-dtype-bytes 1"),
    ],
)
def test_a_type_that_is_not_known_is_not_guessed(
    config: dict[str, Any], kv_type: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_of(config, "c", kv_type=kv_type)
