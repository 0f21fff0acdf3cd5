# SPDX-License-Identifier: Apache-2.0
"""How one chunk lies in a slot of the pool.

    slot = [rank][layer][block of the chunk][page bytes], then zero bytes to a whole page

A *page* is what vLLM calls so: the bytes of one block in one layer on one rank, as vLLM wrote
them.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOT_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes that the scheduler side and every worker agree on."""

    num_ranks: int
    num_layers: int
    block_tokens: int
    page_bytes: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        assert min(self.num_ranks, self.num_layers, self.block_tokens, self.page_bytes) > 0
        assert self.chunk_tokens % self.block_tokens == 0

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def layer_bytes(self) -> int:
        return self.blocks_per_chunk * self.page_bytes

    @property
    def rank_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def slot_bytes(self) -> int:
        used = self.num_ranks * self.rank_bytes
        return -(-used // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES

    def token_bytes(self) -> float:
        """KV bytes of one token, all layers and ranks."""
        return self.num_ranks * self.rank_bytes / self.chunk_tokens


def round_chunk_tokens(wanted: int, block_tokens: int) -> int:
    """`wanted` rounded up to whole blocks."""
    return -(-wanted // block_tokens) * block_tokens
