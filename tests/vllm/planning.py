# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.33 has in another module than 0.32."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_PLANNING = "vllm.v1.core.kv_cache_planning"
_MODULE = _PLANNING if find_spec(_PLANNING) is not None else "vllm.v1.core.kv_cache_utils"
_planning: Any = importlib.import_module(_MODULE)
get_kv_cache_groups: Callable[..., Any] = _planning.get_kv_cache_groups


def get_kv_cache_configs(
    config: VllmConfig, specs: list[dict[str, KVCacheSpec]], memory: list[int]
) -> list[KVCacheConfig]:
    """As vLLM's EngineCore calls it. 0.33 wants the groups of the whole model, made before.

    Args:
        specs: of each worker, by layer.
        memory: bytes that each worker has for KV.
    """
    if not hasattr(_planning, "get_global_kv_cache_groups"):
        found: list[KVCacheConfig] = _planning.get_kv_cache_configs(config, specs, memory)
        return found
    groups = _planning.get_global_kv_cache_groups(config, specs)
    config.adjust_dcp_kv_cache_interleave_size(groups)
    found = _planning.get_kv_cache_configs(config, specs, memory, groups)
    return found
