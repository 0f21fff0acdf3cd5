# SPDX-License-Identifier: Apache-2.0
"""Sections: what KV cache groups beside the spine keep, and how far a hit has all of it.

A group needs other tokens than the spine does. Of a prefix that ends at `stop`:

    full attention       all tokens
    sliding window       the last window - 1
    chunked local        those from the last multiple of the local chunk on
    recurrent            no tokens: the state after exactly `stop` of them

A *section* is what one group keeps of one chunk. It is stored as a chunk of its own: under the
same tokens, behind a parent of its own (keys.py: SectionKeys). So all that is true of chunks is
true of sections: tails, siblings, recovery, eviction, verification.

A section may begin with a *hole*: blocks that vLLM had taken back when the chunk was complete. The
hole's length is in the section's name, so a section never seems to have what it lacks.

The section of a recurrent group is a *state*, named by its chunk's tokens up to where it was. It is
of use where a hit ends right there, and nowhere else.

A hit counts only as far as every group has what it needs there (fit()). A length that one group
does not back is a wrong answer: vLLM skips those tokens in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import Piece, PrefixIndex
from attnstore_vllm.index.stops import stop_in


class Reach(Enum):
    """How far back a group looks."""

    FULL = "full"
    WINDOW = "window"
    LOCAL = "local"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Need:
    """The tokens that one group needs of a prefix."""

    group: int
    """Its number among vLLM's groups of this model."""
    reach: Reach
    reach_tokens: int
    """Of the window, with the token that looks back; or of a local chunk. FULL: 0."""
    block_tokens: int

    def first(self, stop: int) -> int:
        """The first token that is needed of a prefix [0, stop), down to a whole block; `stop` if
        none is. Never falls as `stop` rises. Of a state it is the last, which names its block."""
        if self.reach is Reach.STATE:
            return max(0, stop - 1)
        if self.reach is Reach.FULL:
            return 0
        if self.reach is Reach.LOCAL:
            return stop // self.reach_tokens * self.reach_tokens
        first = max(0, stop - self.reach_tokens + 1)
        return min(stop, first // self.block_tokens * self.block_tokens)


def fit(
    index: PrefixIndex,
    sequence: SequenceKeys,
    needs: Sequence[Need],
    spine: Sequence[Piece],
    start: int,
    is_there: Callable[[Chunk], bool],
    short: set[int] | None = None,
) -> list[Piece]:
    """The spine's pieces up to the farthest stop that all groups back, then their sections, in the
    order of the groups. Empty if there is no such stop.

    Each group can only lower the stop, and each lower one is looked at again: at most a window or
    a piece is passed a time, and no length is tried that a missing section rules out.

    Args:
        needs: of the groups beside the spine.
        spine: what is stored of it for tokens [start, ...).
        start: what is before is in HBM, in all groups.
        is_there: whether a section that is stored may be used.
        short: gets the groups that have made the hit shorter than the spine is.
    """
    kept = list(spine)
    while kept:
        stop = kept[-1].stop
        sections: list[Piece] = []
        for need in needs:
            found, reached = _cover(index, sequence, need, start, stop, is_there)
            if reached < stop:
                if short is not None:
                    short.add(need.group)
                kept = cut(kept, reached, index.grain)
                break
            sections += found
        else:
            return [*kept, *sections]
    return []


def cut(pieces: Sequence[Piece], stop: int, grain: int) -> list[Piece]:
    """The pieces up to `stop`, or to the last place before it where a hit may end (stops.py)."""
    kept = [piece for piece in pieces if piece.start < stop]
    while kept:
        last = kept[-1]
        if last.stop <= stop:
            return kept
        name = last.chunk.name
        end = name.position + stop_in(stop - name.position, name.num_tokens, grain)
        if end > last.start:
            return [*kept[:-1], replace(last, stop=end)]
        kept.pop()
    return kept


def _cover(
    index: PrefixIndex,
    sequence: SequenceKeys,
    need: Need,
    start: int,
    stop: int,
    is_there: Callable[[Chunk], bool],
) -> tuple[list[Piece], int]:
    """The group's sections for a hit that ends at `stop`, and up to where they go on without a
    gap. A shorter hit needs nothing behind the gap, since needs never fall."""
    if need.reach is Reach.STATE:
        return _last_state(index, sequence, need, start, stop, is_there)
    at = max(start, need.first(stop))
    if at >= stop:
        return [], stop
    pieces: list[Piece] = []
    while at < stop:
        piece = _section(index, sequence, need, at, stop)
        if piece is None or not is_there(piece.chunk):
            break
        pieces.append(piece)
        at = piece.stop
        if at % sequence.chunk_tokens:
            break
    return pieces, at


def _last_state(
    index: PrefixIndex,
    sequence: SequenceKeys,
    need: Need,
    start: int,
    stop: int,
    is_there: Callable[[Chunk], bool],
) -> tuple[list[Piece], int]:
    """The state nearest to `stop`, and where it was. By keys alone: whoever has one has all of its
    tokens. Cost: a look-up a chunk."""
    size, keys = sequence.chunk_tokens, sequence.section(need.group, 0)
    while stop > start:
        number = (stop - 1) // size
        first = number * size
        chunk = index.exact_head(
            keys.parent(number), keys.extra(number), sequence.tokens(first, stop), is_there
        )
        if chunk is not None:
            end = first + chunk.name.num_tokens
            if end <= start:
                break
            return [Piece(chunk, end - 1, end, group=need.group)], end
        stop = first
    return [], start


def _section(
    index: PrefixIndex, sequence: SequenceKeys, need: Need, at: int, stop: int
) -> Piece | None:
    """The section that goes farthest from token `at` on, within its chunk. Any token will do: the
    spine says where a hit may end."""
    size = sequence.chunk_tokens
    end = min(stop, (at // size + 1) * size)
    best: Piece | None = None
    for hole in range(at % size // need.block_tokens + 1):
        found = index.match(sequence.section(need.group, hole), at, end, grain=1)
        if found and (best is None or found[0].stop > best.stop):
            best = replace(found[0], group=need.group)
            if best.stop == end:
                break
    return best
