# SPDX-License-Identifier: Apache-2.0
"""The namespace: a fingerprint of everything the bytes of KV depend on.

Two servers with one namespace would compute bytes that the other may read. When in doubt, a
thing is in: a difference that does not matter costs a prefill, one that is missed the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from attnstore_vllm.transfer.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

FORMAT = 2
"""Raise it whenever the same namespace would mean other bytes."""


def fingerprint(
    vllm_config: VllmConfig,
    geometry: Geometry,
    layouts: Sequence[dict[str, Any]],
    version: str,
    weights: str,
) -> bytes:
    """32 bytes.

    Args:
        layouts: what each rank published of its KV tensors.
        version: vLLM's; its kernels decide the order of bytes within a page.
        weights: a quick look at them; the keys take in all of them (connector/weights.py).
    """
    model = vllm_config.model_config
    facts = {
        "format": FORMAT,
        "vllm": version,
        "model": _config_text(model),
        "weights": weights,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
        "geometry": [
            geometry.num_ranks, geometry.num_layers, geometry.block_tokens, geometry.page_bytes,
            geometry.chunk_tokens,
        ],
        "layouts": list(layouts),
    }  # fmt: skip
    return blake3(json.dumps(facts, sort_keys=True).encode()).digest()


def _config_text(model: ModelConfig) -> str:
    """The model's configuration as vLLM uses it: RoPE parameters and overrides included."""
    config = model.hf_config.to_dict()
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    return json.dumps(config, sort_keys=True, default=str)
