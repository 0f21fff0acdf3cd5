# SPDX-License-Identifier: Apache-2.0
"""Parts that the scheduler side is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.vllm_types import KVCacheManager


class Names(Protocol):
    """Whose KV there is (identity/weights.py)."""

    @property
    def namespace(self) -> bytes | None:
        """The fingerprint that all keys begin with; None: not known yet."""

    def be_live(self, live: Mapping[int, bytes | None]) -> None:
        """These weights are in memory from now on: by rank, as LiveWeights calls them."""

    def close(self) -> None: ...


class Events(Protocol):
    """KV events of the store's tiers (connector/kv_events.py)."""

    def bind(self, manager: KVCacheManager) -> None: ...
    def name(self, state: RequestState, chunk: Chunk) -> None: ...
    def take(self) -> Sequence[Any]: ...
