# SPDX-License-Identifier: Apache-2.0
"""What is counted of a request when vLLM asks for its KV: once each, though vLLM asks again and
again while it has no room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnstore_vllm.connector.metrics import AttnStoreStats
from attnstore_vllm.connector.requests import RequestState
from attnstore_vllm.index.chunk import Dram
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.types import Tier


def count_wanted(stats: AttnStoreStats, state: RequestState, pieces: Sequence[Piece]) -> None:
    """The request is first offered a place: where is what it wants then?"""
    if state.was_asked:
        return
    state.was_asked = True
    in_dram = sum(p.stop - p.start for p in pieces if p.chunk.dram is Dram.READY)
    wanted = sum(piece.stop - piece.start for piece in pieces)
    stats.add("wanted_tokens", Tier.DRAM.value, in_dram)
    stats.add("wanted_tokens", Tier.NVME.value, wanted - in_dram)


def count_recomputation(stats: AttnStoreStats, state: RequestState, cause: str) -> None:
    """Before count_offer."""
    if not state.counted:
        stats.add("recomputations", cause, 1)


def count_offer(stats: AttnStoreStats, state: RequestState, tokens: Mapping[Tier, int]) -> None:
    """The request's first answer."""
    if state.counted:
        return
    state.counted = True
    for tier, number in tokens.items():
        stats.add("offered_tokens", tier.value, number)
