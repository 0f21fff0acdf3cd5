# SPDX-License-Identifier: Apache-2.0
"""What has expired is not found; what is likely to be used soon counts as used now."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.index.residency import Residency


def unexpired(residency: Residency, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces before the first whose chunk has expired. Drops what has expired: its lease has
    ended, and nobody waits for it or has pinned it.

    Cost: a look at the run of each piece.
    """

    def has_expired(chunk: Chunk) -> bool:
        return (
            residency.run_of(chunk).has_expired(residency.now)
            and not residency.look_ahead.is_wanted(chunk)
            and residency.pinning.of(chunk, residency.now) is None
        )

    kept: list[Piece] = []
    expired = [piece.chunk for piece in pieces if has_expired(piece.chunk)]
    for piece in pieces:
        if piece.chunk in expired[:1]:
            break
        kept.append(piece)
    for chunk in expired:
        residency.counts["expired"] += 1
        residency.drop(chunk)
    return kept


def renew(residency: Residency, chunks: Sequence[Chunk]) -> None:
    """A request for these chunks, in the order of depth, may come soon. They stay of the runs that
    they are of, so that nothing else is believed of the conversation than before."""
    for run, of_run in groupby(reversed(chunks), residency.run_of):
        residency.use([*of_run][::-1], run.renewed(residency.now))
