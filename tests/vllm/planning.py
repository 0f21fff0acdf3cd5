# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.33 has in another module than 0.32."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

_PLANNING = "vllm.v1.core.kv_cache_planning"
_MODULE = _PLANNING if find_spec(_PLANNING) is not None else "vllm.v1.core.kv_cache_utils"
get_kv_cache_configs: Callable[..., Any] = importlib.import_module(_MODULE).get_kv_cache_configs
