# SPDX-License-Identifier: Apache-2.0
"""Which stored chunks hold the tokens of a request, wherever they stand in it.

A prompt that was truncated (oldest turns dropped, middle cut out, thinking removed) has the
tokens of stored chunks at other positions. They are looked for by content: hashes of windows of
32 tokens, rolled over the request, against those of every 64th token of the stored chunks; what
is found is compared token by token in memory, and followed through the chain of chunks, forth and
back. The algorithm and its limits are in csrc/content/content_index.h.

vLLM takes KV only for tokens that follow without a gap. So what is found is one contiguous cover:

    start            stop of the cover
      |  extent 0    |  extent 1  |  extent 2 | ...   computed
      |piece|piece|pi|ece|piece   |

- Nothing is found across domains, and nothing that was not compared.
- KV that was itself moved is never found (`native_from`): no rotation of a rotation.
- Found are runs of at least 95 tokens (32 + 64 - 1), shorter ones if an anchor happens to lie in
  them. A cover may miss what repeats itself many times, and ends at such a miss.

Not thread-safe: the store's lock covers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attnstore_vllm._native import ContentIndex as Entries
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.types import TOKEN_BYTES, Key

MAX_EXTENTS = 64


class MovedPiece(NamedTuple):
    """Tokens [start, stop) of a request, which a chunk has from its token `first` on.

    A tuple, and not a dataclass, as a long prompt has hundreds.
    """

    key: Key
    first: int
    """Offset in the chunk, in tokens. Its own position is that of the chunk and this."""
    start: int
    stop: int
    tokens: bytes = b""
    """All of the chunk's, as encode_tokens() makes them: what names its sections."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class Extent(NamedTuple):
    """Tokens [start, stop) of a request that stand one after the other in one stored sequence:
    all its pieces are shifted by the same number of positions."""

    start: int
    stop: int
    is_exact: bool
    """All its KV was computed without anything moved before it."""
    pieces: tuple[MovedPiece, ...]


class Work(NamedTuple):
    """Counts of what one find() did; each is bounded, for any input
    (csrc/content/content_index.h)."""

    windows: int
    """Windows of the request that were hashed and looked up."""
    candidates: int
    """Places of chunks that were compared with the request."""
    walks: int
    """Those of the places that were followed to their ends."""
    looks: int
    """At neighbours: comparisons of at most a chunk's tokens each."""
    compared_tokens: int
    """Those of `looks` left out."""

    def as_looked_up(self) -> int:
        """Tokens of a look-up that takes as long: a window is hashed in 22 ns, a token looked up in
        15, one compared in 5, and a place is fetched from memory in half a microsecond."""
        fetched = self.candidates + self.looks
        return self.windows * 3 // 2 + self.compared_tokens // 3 + 32 * fetched


class ContentIndex:
    """Chunks by their content, with all their token ids: about 1.3 KiB for 256 tokens.

    When `max_chunks` are there, the one that was added or found longest ago leaves: what a
    conversation's next truncated turn wants was found by the one before it.

    Args:
        chunk_tokens: of a whole chunk, 1 to 65,536. If it is less than 32, windows are as long.
        max_chunks: tables for so many are reserved; they take memory as they are used.
        seed: of the hashes; a secret, so that windows cannot be made to collide.
    """

    def __init__(self, chunk_tokens: int, max_chunks: int, seed: int = 0) -> None:
        self._entries = Entries(chunk_tokens, max_chunks, seed)

    def __len__(self) -> int:
        return len(self._entries)

    def memory_bytes(self) -> int:
        """Memory that it has taken, tables included, without the allocator's own. Cost: O(n)."""
        return self._entries.memory_bytes()

    def add(
        self, name: ChunkName, domain: bytes, native_from: int = 0, is_exact: bool = True
    ) -> None:
        """Enter a chunk, whose tokens are known, or enter it anew.

        Args:
            name: without multimodal inputs, since equal tokens do not mean equal KV there.
            domain: 32 bytes; all that KV depends on besides the tokens.
            native_from: tokens of the chunk before this one have KV that was moved; at most
                its number of tokens.
            is_exact: its KV was computed without anything moved before it.

        Cost: 2 to 10 us for 256 tokens, as caches are warm or cold.
        """
        assert not name.extra
        assert len(name.tokens) == name.num_tokens * TOKEN_BYTES
        self._entries.add(name.key, name.parent, domain, name.tokens, native_from, is_exact)

    def drop(self, key: Key) -> bool:
        """Forget a chunk; returns whether it was there. Cost: as add()."""
        return self._entries.remove(key)

    def clear(self) -> None:
        self._entries.clear()

    def find(
        self,
        domain: bytes,
        tokens: bytes,
        start: int,
        stop: int,
        min_extent: int,
        max_extents: int = MAX_EXTENTS,
    ) -> list[Extent]:
        """The longest contiguous cover of tokens [start, stop) of a request, from `start` on.

        What is found counts as used. Extents follow each other without a gap, and so do the
        pieces of one; neighbouring ones are of different sequences or shifts.

        Args:
            tokens: the whole request's, as encode_tokens() makes them.
            min_extent: shorter extents are not taken, and end the cover.
            max_extents: so many at most.

        Cost: independent of the number of chunks; with cold caches about 2 us
        a chunk found and 15 us an extent.
        Encoding the tokens may cost more.
        """
        return _extents(self._entries.find(domain, tokens, start, stop, min_extent, max_extents))

    def find_all(
        self,
        domain: bytes,
        tokens: bytes,
        start: int,
        stop: int,
        min_extent: int,
        max_extents: int = MAX_EXTENTS,
    ) -> list[Extent]:
        """Extents that are stored of tokens [start, stop) of a request, in their order, with gaps.

        Of extents that overlap the longest is taken, and the others lose what it covers. What is
        found counts as used. Args: as find()'s; of more than `max_extents` the longest are taken.

        Cost: of 8,000 tokens of which nothing is stored 0.1 to 0.2 ms.
        """
        found = self._entries.find_all(domain, tokens, start, stop, min_extent, max_extents)
        return _extents(found)

    def work(self) -> Work:
        """Counts of what the last search did."""
        return Work(*self._entries.work())


def _extents(found: Iterable[Sequence[tuple[Key, int, int, int, bytes, bool]]]) -> list[Extent]:
    extents = []
    for some in found:
        pieces = tuple([MovedPiece(*piece[:5]) for piece in some])
        is_exact = all(piece[5] for piece in some)
        extents.append(Extent(pieces[0].start, pieces[-1].stop, is_exact, pieces))
    return extents
