# SPDX-License-Identifier: Apache-2.0
"""Orders of the HTTP route: bring KV up from NVMe for a request that is likely to come."""

from __future__ import annotations

from attnstore_vllm.hints import PrefetchOrder
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS
from attnstore_vllm.scheduler.stats import StepStats
from attnstore_vllm.store.store import Store


def prefetch(
    store: Store,
    stats: StepStats,
    order: PrefetchOrder,
    namespace: bytes | None,
    chunk_tokens: int,
) -> None:
    """Queue the reads. On the scheduler's thread.

    Args:
        namespace: None: it is not known yet whose KV there is.
    """
    if namespace is None:
        return
    root = root_key(namespace, order.cache_salt, b"")
    sequence = SequenceKeys(root, order.token_ids, chunk_tokens)
    pieces = store.find(sequence, 0, len(order.token_ids), MIN_LOAD_TOKENS)
    stats.add("prefetches", "hit" if pieces else "miss", 1)
    for tier, tokens in store.tiers(pieces, 0).items():
        stats.add("prefetch_tokens", tier, tokens)
