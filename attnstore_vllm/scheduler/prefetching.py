# SPDX-License-Identifier: Apache-2.0
"""Prefetches: KV of a prompt that is likely to come is brought up from the tiers behind DRAM."""

from __future__ import annotations

from attnstore_vllm.hints import PrefetchOrder
from attnstore_vllm.index.keys import SequenceKeys, approximate_root, root_key
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.store.store import Store
from attnstore_vllm.types import Event


def prefetch(
    store: Store,
    stats: StepStats,
    order: PrefetchOrder,
    namespace: bytes | None,
    chunk_tokens: int,
    codec: str | None = None,
) -> None:
    """Bring KV up from NVMe for a request that is likely to come: queue the reads. On the
    scheduler's thread.

    Args:
        namespace: None: it is not known whose KV there is.
        codec: that changes KV: what NVMe has is of its lineage.
    """
    if namespace is None:
        return
    root = root_key(namespace, order.cache_salt, b"")
    root = approximate_root(root, codec) if codec is not None else root
    lookup = Lookup(SequenceKeys(root, order.token_ids, chunk_tokens))
    pieces = store.find(lookup, 0, len(order.token_ids), MIN_LOAD_TOKENS)
    stats.add("prefetches", Event.HIT if pieces else Event.MISS, 1)
    for tier, tokens in store.tiers(pieces, 0).items():
        stats.add("prefetch_tokens", tier, tokens)
