# SPDX-License-Identifier: Apache-2.0
"""Who watches requests: spans where vLLM sends its own, and the recorder of the setting `trace`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.scheduler.observed import Watcher
from attnstore_vllm.scheduler.recorder import Recorder
from attnstore_vllm.transfer.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


def watchers_of(
    vllm_config: VllmConfig, config: StoreConfig, geometry: Geometry, version: str
) -> list[Watcher]:
    """Empty where none are asked for. Raises: ConfigError."""
    watchers: list[Watcher] = []
    if config.trace is not None:
        sizes = _sizes(vllm_config, config, geometry)
        watchers.append(Recorder(config.trace, geometry.chunk_tokens, sizes))
    endpoint = vllm_config.observability_config.otlp_traces_endpoint
    if endpoint is not None:
        try:
            # Needed nowhere else, and packages of others may be missing.
            from vllm.tracing.otel import get_span_exporter  # noqa: PLC0415

            from attnstore_vllm.connector.spans import SpanWatcher  # noqa: PLC0415

            watchers.append(SpanWatcher(get_span_exporter(endpoint), version))
        except (ImportError, ValueError, OSError) as error:
            logger.warning("AttnStore sends no spans to %s: %s", endpoint, error)
    return watchers


def _sizes(
    vllm_config: VllmConfig, config: StoreConfig, geometry: Geometry
) -> dict[str, int | float | bool]:
    """The part of a machine file that is not measured."""
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    return {
        "kv_bytes_per_token": round(geometry.token_bytes()),
        # Of tokens as DRAM keeps them, of which its own bytes may be fewer.
        "hbm": (cache.num_gpu_blocks or 0)
        * geometry.all_block_bytes
        * geometry.rank_bytes
        // geometry.decoded.rank_bytes,
        "dram": config.dram_bytes,
        "nvme": config.nvme.capacity_bytes,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "prefix_cache": bool(cache.enable_prefix_caching),
        "chunk_tokens": geometry.chunk_tokens,
        "io_depth": config.io_depth,
        "load_deadline_s": config.load_deadline_ms / 1000,
    }
