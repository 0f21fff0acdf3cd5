# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV events, of what DRAM and NVMe have: blocks under vLLM's own hashes, and the events.

With `--kv-events-config` a router learns which blocks an engine has in HBM. Here it learns the same
of our tiers, as vLLM says it: BlockStored and BlockRemoved, with the medium CPU or STORAGE.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    maybe_convert_block_hash,
)

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.keys import root_key
from attnstore_vllm.scheduler.adapters import NO_ADAPTER
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.vllm_types import KVCacheManager, Request
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.announced import Name, NamedBlocks, Removed, Stored
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.types import DRAM, NVME, TOKEN_BYTES, Key

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

EVENTS_A_STEP = 1000
"""Events of ours that one step takes along, at most."""
HEARD_AFTER_S = 10.0
"""Ours wait so long after the start. A router that lost the server before connects again after a
pause, which grows to 5 s in Dynamo's. What is published meanwhile is lost to it.
"""
_MEDIA = {
    DRAM: "CPU",
    NVME: "STORAGE",
}
_LOCAL = {"locality": "LOCAL"}
_HAS_LOCALITY = "locality" in BlockStored.__struct_fields__


class VllmTeller:
    """Names blocks and makes events as vLLM does (store/announcer.py: Teller).

    Args:
        namespace: that all keys begin with, once it is known.
    """

    def __init__(
        self, vllm_config: VllmConfig, block_tokens: int, namespace: Callable[[], bytes | None]
    ) -> None:
        self.block_tokens = block_tokens
        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._namespace = namespace
        # vLLM looks it up in its environment for each block, which takes longer than all else.
        are_short = isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), int)
        self._event_name: Callable[[Any], Name] = _short if are_short else bytes
        fields = set(BlockStored.__struct_fields__)
        self._of_all: dict[str, Any] = {"group_idx": 0} if "group_idx" in fields else {}
        if _HAS_LOCALITY:
            self._of_all |= _LOCAL
        self._of_stored = dict(self._of_all)
        self._has_extra_keys = "extra_keys" in fields

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM says the kind of its layers in each event: so do we."""
        metadata = getattr(manager, "kv_cache_event_metadata", None)
        if metadata:
            kind, window = metadata[0]
            self._of_stored |= {
                "kv_cache_spec_kind": kind,
                "kv_cache_spec_sliding_window": window,
            }

    # ---- names -------------------------------------------------------------------------

    def root(self) -> Key | None:
        namespace = self._namespace()
        if namespace is None or not hasattr(kv_cache_utils, "NONE_HASH"):
            return None  # vLLM makes the beginning of its hashes once the engine is whole
        return root_key(namespace, None, NO_ADAPTER)

    def blocks(self, parent: bytes | None, tokens: bytes) -> NamedBlocks:
        ids = np.frombuffer(tokens, ">u4").tolist()
        size, before = self.block_tokens, parent
        hashes: list[bytes] = []
        for start in range(0, len(ids) - size + 1, size):
            before = hash_block_tokens(self._hash, before, ids[start : start + size])
            hashes.append(before)
        return self._blocks(hashes, parent, tokens, None)

    def blocks_of(self, request: Request, position: int, tokens: bytes) -> NamedBlocks | None:
        """Those of a request from token `position` on, as vLLM has named them; None: it has not.

        Runs on the scheduler's thread, for each chunk that is saved.
        """
        size = self.block_tokens
        first, count = position // size, len(tokens) // TOKEN_BYTES // size
        hashes = request.block_hashes[first : first + count]
        if not hashes:
            return None
        parent = request.block_hashes[first - 1] if first else None
        is_plain = not (request.lora_request or request.mm_features or request.cache_salt)
        like = None if is_plain else _like(request, position, len(hashes), size)
        return self._blocks(hashes, parent, tokens, like)

    def _blocks(
        self, hashes: Sequence[Any], parent: bytes | None, tokens: bytes, like: Any
    ) -> NamedBlocks:
        names = tuple(map(self._event_name, hashes))
        before = self._event_name(parent) if parent is not None else None
        end = len(hashes) * self.block_tokens * TOKEN_BYTES
        return NamedBlocks(names, before, tokens[:end], hashes[-1] if hashes else b"", like)

    # ---- events ------------------------------------------------------------------------

    def event(self, what: Stored | Removed) -> Any:
        if isinstance(what, Removed):
            return BlockRemoved(
                block_hashes=list(what.names), medium=_MEDIA[what.tier], **self._of_all
            )
        blocks, first = what.blocks, what.first
        tokens = blocks.tokens[first * self.block_tokens * TOKEN_BYTES :]
        fields = dict(self._of_stored)
        lora_id, lora_name, extra_keys = blocks.like or (None, None, None)
        if extra_keys is not None and self._has_extra_keys:
            fields["extra_keys"] = extra_keys[first:]
        return BlockStored(
            block_hashes=list(blocks.names[first:]),
            parent_block_hash=blocks.names[first - 1] if first else blocks.parent,
            token_ids=np.frombuffer(tokens, ">u4").tolist(),
            block_size=self.block_tokens,
            lora_id=lora_id,
            medium=_MEDIA[what.tier],
            lora_name=lora_name,
            **fields,
        )


def _short(block_hash: bytes) -> int:
    """The number that stands for a hash in vLLM's events."""
    return int.from_bytes(block_hash[-8:], "big")


def _like(
    request: Any, position: int, count: int, size: int
) -> tuple[int | None, str | None, list[Any]] | None:
    """The adapter, and what names each block beside its tokens. None: nothing does."""
    number, keys = 0, []
    for start in range(position, position + count * size, size):
        found, number = generate_block_hash_extra_keys(request, start, start + size, number)
        keys.append(found)
    lora = request.lora_request
    if lora is None and not any(keys):
        return None
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)(keys)
    if lora is None:
        return None, None, untagged
    return lora.adapter_id, lora.name, untagged


class KvEvents:
    """The scheduler side's: what it saves gets names, and each step takes events along."""

    def __init__(self, store: Store, teller: VllmTeller) -> None:
        assert store.announcer is not None
        self._store = store
        self._announcer = store.announcer
        self._teller = teller
        self._pool: Any = None
        self.heard_from = time.monotonic() + HEARD_AFTER_S
        """When the first events of ours go out."""
        self._blocks: object = None
        """vLLM's table of cached blocks: a reset puts another in its place."""

    def bind(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._blocks = self._pool.cached_block_hash_to_block
        self._teller.bind(manager)

    def name(self, state: RequestState, chunk: Chunk) -> None:
        """The request saves this chunk. KV behind moved KV is no other request's, and approximate
        KV is no exact one's: neither is told of."""
        if state.moved is None and state.approximate is None:
            name = chunk.name
            blocks = self._teller.blocks_of(state.request, name.position, name.tokens)
            if blocks is not None:
                self._announcer.name(chunk, blocks)

    def take(self) -> list[Any]:
        """The events of this step.

        A reset of vLLM's prefix cache is published as AllBlocksCleared, for which routers forget
        our tiers too. vLLM has put it before these, since it has taken its own events already.
        """
        if self._pool is None:  # the connector is idle
            return []
        blocks = self._pool.cached_block_hash_to_block
        if blocks is not self._blocks:
            self._blocks = blocks
            self._announcer.all_cleared()
            self._store.thread.wake()
            return []
        if time.monotonic() < self.heard_from:
            return []
        events = self._announcer.take(EVENTS_A_STEP)
        if len(events) == EVENTS_A_STEP:
            self._store.thread.wake()
        return events


def teller_of(
    vllm_config: VllmConfig, geometry: Geometry, namespace: Callable[[], bytes | None]
) -> VllmTeller | None:
    """None where no events are wanted, or where the store's blocks say too little of a hit."""
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events:
        return None
    if len(geometry.groups) > 1 or geometry.has_window_alone:
        logger.warning(
            "AttnStore publishes no KV events of its tiers: this model has layers that keep no KV "
            "of all tokens, so that blocks alone do not say what a request finds"
        )
        return None
    if getattr(vllm_config, "num_hash_lookahead_tokens", 0):
        # vLLM 0.33 has such hashes for drafts, and none where there is a connector.
        logger.warning(
            "AttnStore publishes no KV events of its tiers: vLLM names blocks by tokens behind "
            "them too, which what is stored does not know"
        )
        return None
    return VllmTeller(vllm_config, geometry.block_tokens, namespace)
