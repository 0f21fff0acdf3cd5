# SPDX-License-Identifier: Apache-2.0
"""Where versions of vLLM differ, and what the store does without where one lacks it.

0.30 and 0.31 have no name for what a connector's hits came from (CacheHitSource): they count them
as one.
"""

from __future__ import annotations

from typing import Any

from attnstore_vllm.types import DRAM, NVME, PEERS, SHARED


def hit_sources() -> dict[str, Any]:
    """vLLM's names for our tiers; empty where it has none, and does not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415
    except ModuleNotFoundError:
        return {}
    return {
        DRAM: CacheHitSource.HOST,
        NVME: CacheHitSource.DISK,
        PEERS: CacheHitSource.P2P,
        SHARED: CacheHitSource.EXTERNAL_UNSPECIFIED,  # it has no other name for a remote store
    }
