# SPDX-License-Identifier: Apache-2.0
"""Where versions of vLLM differ, and what the store does without where one lacks it.

0.30 and 0.31 have no name for what a connector's hits came from (CacheHitSource): they count them
as one. And no version says why it resets a connector: EngineCore's own functions tell.
"""

from __future__ import annotations

import sys
from typing import Any

from attnstore_vllm.types import DRAM, NVME, OWN_PASS, PEERS, SHARED

_ENGINE = "vllm.v1.engine.core"
_OF_A_PAUSE = "_reset_caches"
"""EngineCore's: what it does with all caches when it has paused. A reset on demand goes past it."""
_FRAMES_MAX = 16


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
        OWN_PASS: CacheHitSource.EXTERNAL_UNSPECIFIED,
    }


def is_of_a_pause() -> bool:
    """Whether the reset that calls this comes from vLLM's pause or sleep, and from no user: vLLM
    resets connectors then, since it cannot know whether weights come meanwhile.

    False where that is not known: then all is dropped.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if code.co_name == _OF_A_PAUSE and module == _ENGINE:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
