# SPDX-License-Identifier: Apache-2.0
"""From the settings to the peers' tier (Store's more_tiers)."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.dram_tier import DramTier
from attnstore_vllm.tiers.peers.generation import Generation
from attnstore_vllm.tiers.peers.peers_io import PeersIo
from attnstore_vllm.tiers.peers.peers_tier import PeersTier
from attnstore_vllm.tiers.peers.sibling import SHAPE, Sibling
from attnstore_vllm.tiers.peers.wire import listen
from attnstore_vllm.tiers.tier import TierBehind
from attnstore_vllm.transfer.page_tables import Unmapped
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.types import PEERS

logger = logging.getLogger(__name__)

VERSION = 3
"""That of the messages."""
_HELLO = struct.Struct("<IQQ32s")


def peers_of(
    own: Path,
    group: Path,
    others: Sequence[Path],
    namespace: bytes,
    chunk_tokens: int,
    pool: SharedPool,
) -> tuple[MakePeers, ...]:
    """The tier; none without siblings, or where no socket can be made beside the store's file.

    Args:
        own: the directory of this engine's store, whose lock it holds.
        group: the one that all engines know (generation.py).
        others: those of its siblings.
        namespace: of the store: siblings with another are none.
    """
    if not others:
        return ()
    try:
        listening = listen(own)
    except OSError as error:
        logger.warning("this engine reads no others and is read by none: %s: %s", own, error)
        return ()
    hello = _HELLO.pack(VERSION, chunk_tokens, pool.slot_bytes, namespace)
    return (MakePeers(own, group, others, namespace, pool, listening, hello),)


@dataclass(slots=True)
class MakePeers:
    """For Store's `more_tiers`. The fields are as peers_of() has them."""

    own: Path
    group: Path
    others: Sequence[Path]
    namespace: bytes
    pool: SharedPool
    listening: socket.socket
    hello: bytes
    name: str = field(default=PEERS, init=False)

    def tier(
        self, policy: Callable[[int], Departures], dram: DramTier, look_ahead: LookAhead[Chunk]
    ) -> PeersTier:
        return PeersTier(policy, dram, look_ahead)

    def io(self, context: Context, tier: TierBehind) -> PeersIo:
        assert isinstance(tier, PeersTier)
        pool, slot_bytes = self.pool, self.pool.slot_bytes
        return PeersIo(
            context,
            tier,
            [Sibling(directory, self.hello, slot_bytes) for directory in self.others],
            Generation(self.own, self.group, self.namespace),
            self.listening,
            self.hello,
            (pool.read_only_fds, SHAPE.pack(*pool.shape)),
            Unmapped([pool.buffer], writes=True),
        )
