# SPDX-License-Identifier: Apache-2.0
"""Among chunks that continue the same prefix: with which a hit goes farthest (stops.py)."""

from __future__ import annotations

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.stops import stop_in, whole_blocks
from attnstore_vllm.types import TOKEN_BYTES


def common_tokens(a: bytes, b: bytes) -> int:
    """The number of leading tokens that two encoded token strings share."""
    stop = min(len(a), len(b))
    if a[:stop] == b[:stop]:
        return stop // TOKEN_BYTES
    low, high = 0, stop // TOKEN_BYTES  # low tokens agree, high tokens do not
    while high - low > 1:
        middle = (low + high) // 2
        at = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        low, high = (middle, high) if a[at] == b[at] else (low, middle)
    return low


class Best:
    """The best match within a chunk so far, by where a hit with it ends.

    Args:
        tokens: of the request.
    """

    def __init__(self, tokens: bytes, grain: int) -> None:
        self._tokens = tokens
        self._grain = grain
        self._chunk: Chunk | None = None
        self._exact = True
        self.stop = 0

    @property
    def found(self) -> tuple[Chunk, int, bool] | None:
        return None if self._chunk is None else (self._chunk, self.stop, self._exact)

    def look_at(self, chunk: Chunk) -> None:
        """One whose tokens are known."""
        # Most share nothing: a look at the tokens that make it better tells.
        next_stop = whole_blocks(self.stop, self._grain) + self._grain
        wanted = next_stop if self._exact else self.stop
        if chunk.name.tokens.startswith(self._tokens[: wanted * TOKEN_BYTES]):
            self.offer(chunk, common_tokens(chunk.name.tokens, self._tokens), exact=True)

    def offer(self, chunk: Chunk, shared: int, *, exact: bool) -> None:
        """One that has so many leading tokens of the request, or, if not `exact`, seems to."""
        stop = stop_in(shared, chunk.name.num_tokens, self._grain)
        better = stop > self.stop or (stop == self.stop > 0 and exact > self._exact)
        if better and chunk.usable:
            self._chunk, self.stop, self._exact = chunk, stop, exact
