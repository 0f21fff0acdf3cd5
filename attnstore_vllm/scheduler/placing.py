# SPDX-License-Identifier: Apache-2.0
"""From the chunks of an offer that vLLM takes to the copies that put them into its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.transfer import moves
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import plan_load


def plan_pieces(
    used: Sequence[Piece], block_ids: Sequence[int], start: int, stop: int, geometry: Geometry
) -> tuple[Any, Any]:
    """The copies of what is loaded in its place, and the moves of what is not.

    Args:
        used: held chunks for the tokens [start, stop).
        block_ids: of the request, from its first block on.
    """
    sizes = {"block_tokens": geometry.block_tokens, "chunk_tokens": geometry.chunk_tokens}
    placed = [piece for piece in used if piece.first is None]
    copies = plan_load(
        [(piece.chunk.dram_slot, piece.start, piece.stop) for piece in placed],
        block_ids, start, min(stop, placed[-1].stop), **sizes,
    ) if placed else ()  # fmt: skip
    moved = moves.plan_moves(
        [
            moves.Piece(
                piece.chunk.dram_slot, piece.first, piece.start - piece.shift,
                piece.start, min(piece.stop, stop),
            )
            for piece in used
            if piece.first is not None
        ],
        block_ids, **sizes,
    )  # fmt: skip
    return copies, moved
