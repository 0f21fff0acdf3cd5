# SPDX-License-Identifier: Apache-2.0
"""The peers' tier: what other engines of this host have, which serve the same model. Nothing is
written to it: a peer keeps what it has computed."""

from __future__ import annotations

from collections.abc import Callable

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.tiers.dram_tier import DramTier
from attnstore_vllm.tiers.remote import RemoteTier
from attnstore_vllm.types import PEERS

ENTRIES_MAX = 1 << 16
"""Chunks of siblings that are known at a time."""


class PeersTier(RemoteTier):
    """See the module."""

    def __init__(
        self, policy: Callable[[int], Departures], dram: DramTier, look_ahead: LookAhead[Chunk]
    ) -> None:
        super().__init__(PEERS, ENTRIES_MAX, policy, dram, look_ahead, takes_writes=False)
