# SPDX-License-Identifier: Apache-2.0
"""Sections: what KV cache groups beside the spine keep, and how far a hit has all of it.

A group needs other tokens than the spine does. Of a prefix that ends at `stop`:

    full attention       all tokens
    sliding window       the last window - 1
    chunked local        those from the last multiple of the local chunk on
    recurrent            no tokens: the state after exactly `stop` of them

A *section* is what one group keeps of one chunk. It is stored as a chunk of its own: under the
same tokens, behind a parent of its own (keys.py: SectionKeys). So all that is true of chunks is
true of sections: tails, neighbours, recovery, eviction, verification.

A section may begin with a *hole*: blocks that vLLM had taken back when the chunk was complete. The
hole's length is in the section's name, so a section never seems to have what it lacks.

The section of a recurrent group is a *state*, named by its chunk's tokens up to where it was. It is
of use where a hit ends right there, and nowhere else.

Of *moved* KV (moved.py) a group needs the same tokens, wherever they stood: they are in the
sections of the chunks that the spine's pieces are of. They are taken token by token, so none is
needed that only fills a block. A state is of all tokens before it, and none goes with moved KV.

A hit counts only as far as every group has what it needs there (fit()). A length that one group
does not back is a wrong answer: vLLM skips those tokens in every layer.

Where all layers have windows no group has all tokens. Then the spine is a window too. Its chunks
are whole and have their plain names, but of those before a hit's window most are gone: no run of
them can be followed from the left. The names, which need no KV, are walked from the end (walk()).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.keys import SequenceKeys, section_parent
from attnstore_vllm.index.prefix import Piece, PrefixIndex, settle, stop_in


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
    """Its place: 0 is the spine's, which is among them where it has no KV of all tokens."""
    reach: Reach
    reach_tokens: int
    """Length of the window, with the token that looks back, or of a local chunk. FULL: 0."""
    block_tokens: int
    ahead: int = 0
    """So many tokens behind it decide KV of a token too (drafts)."""
    room: int = 0
    """A section has its chunk's last blocks alone, so many at most; 0: all (Geometry.room())."""

    def first(self, stop: int) -> int:
        """The first token that is needed of a prefix [0, stop), down to a whole block; `stop` if
        none is. Never falls as `stop` rises. Of a state it is the last, which names its block."""
        first = self.first_token(stop)
        if self.reach is not Reach.WINDOW:
            return first
        return min(stop, first // self.block_tokens * self.block_tokens)

    def first_token(self, stop: int) -> int:
        """The same, to the token."""
        if self.reach is Reach.STATE:
            return max(0, stop - 1)
        if self.reach is Reach.FULL:
            return 0
        if self.reach is Reach.LOCAL:
            return stop // self.reach_tokens * self.reach_tokens
        return min(stop, max(0, stop - self.reach_tokens + 1))


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
        sections, reached = _back(index, sequence, needs, kept, start, stop, is_there, short)
        if reached == stop:
            return [*kept, *sections]
        kept = settle(cut(kept, reached, index.grain), index.grain)
    return []


def walks(needs: Sequence[Need]) -> bool:
    """Whether the spine is one of those that do not need all tokens."""
    return any(need.group == 0 for need in needs)


def walk(
    index: PrefixIndex,
    sequence: SequenceKeys,
    needs: Sequence[Need],
    start: int,
    stop: int,
    is_there: Callable[[Chunk], bool],
) -> tuple[list[Piece], int]:
    """The pieces of all groups, the spine's first, for the farthest hit up to `stop` that all of
    them back, none if there is no such hit; and how far the spine is stored.

    Args:
        needs: of all groups, the spine's first; see fit() for the others.
    Cost: a key and a look-up a chunk of tokens [start, stop), while nothing is found.
    """
    spine_stop = stop = _last_end(index, sequence, start, stop, is_there)
    if needs[0].ahead:
        stop = _last_end(index, sequence, start, stop - needs[0].ahead, is_there)
    while stop > start:
        pieces, reached = _back(index, sequence, needs, (), start, stop, is_there)
        if reached == stop:
            return pieces, spine_stop
        stop = _last_end(index, sequence, start, reached, is_there)
    return [], spine_stop


def _last_end(
    index: PrefixIndex,
    sequence: SequenceKeys,
    start: int,
    stop: int,
    is_there: Callable[[Chunk], bool],
) -> int:
    """The last place up to `stop` where a chunk of the spine lets a hit end; `start` if none."""
    size = sequence.chunk_tokens
    while stop > start:
        first = (stop - 1) // size * size
        found = index.match(sequence, max(start, first), stop)
        if found and is_there(found[0].chunk):
            return found[0].stop
        stop = first
    return start


def _back(
    index: PrefixIndex,
    sequence: SequenceKeys,
    needs: Sequence[Need],
    spine: Sequence[Piece],
    start: int,
    stop: int,
    is_there: Callable[[Chunk], bool],
    short: set[int] | None = None,
) -> tuple[list[Piece], int]:
    """The sections of all groups for a hit that ends at `stop`, and `stop`; or nothing, and up to
    where the sections of the first group with a gap go.

    Args:
        spine: its pieces, which say what is moved; none where the spine is a window.
    """
    sections: list[Piece] = []
    for need in needs:
        found, reached = _cover(index, sequence, need, spine, start, stop, is_there)
        if reached < stop:
            if short is not None:
                short.add(need.group)
            return [], reached
        sections += found
    return sections, stop


def backed(
    index: PrefixIndex,
    sequence: SequenceKeys,
    needs: Sequence[Need],
    spine: Sequence[Piece],
    start: int,
    stop: int,
    is_there: Callable[[Chunk], bool],
) -> list[Piece]:
    """The pieces of all groups for a hit of the tokens [start, stop), no more and no fewer; empty
    if a group lacks something of them. Any `stop` will do: a farther one was offered.

    Args:
        needs, spine, start, is_there: see fit(); without a spine where walks() says so.
    """
    kept: list[Piece] = []
    if not walks(needs):
        kept = cut(spine, stop, grain=1)
        if not kept or kept[-1].stop != stop:
            return []
    sections, reached = _back(index, sequence, needs, kept, start, stop, is_there)
    return [*kept, *sections] if reached == stop else []


def proven(pieces: list[Piece], ahead: int, grain: int) -> list[Piece]:
    """The pieces without the tokens whose KV hangs on tokens behind the last one that matches.

    Args:
        ahead: on so many (Need.ahead).
    """
    return cut(pieces, pieces[-1].stop - ahead, grain) if pieces else pieces


def cut(pieces: Sequence[Piece], stop: int, grain: int) -> list[Piece]:
    """The pieces up to `stop`, or to the last place before it where a hit may end (prefix.py)."""
    kept = [piece for piece in pieces if piece.start < stop]
    while kept:
        last = kept[-1]
        if last.stop <= stop:
            return kept
        name = last.chunk.name
        origin = name.position + last.shift
        end = origin + stop_in(stop - origin, name.num_tokens, grain)
        if end > last.start:
            return [*kept[:-1], replace(last, stop=end)]
        kept.pop()
    return kept


def _cover(
    index: PrefixIndex,
    sequence: SequenceKeys,
    need: Need,
    spine: Sequence[Piece],
    start: int,
    stop: int,
    is_there: Callable[[Chunk], bool],
) -> tuple[list[Piece], int]:
    """The group's sections for a hit that ends at `stop`, and up to where they go on without a gap.
    A shorter hit needs nothing behind the gap, since needs never fall."""
    placed_stop = next((piece.start for piece in spine if piece.first is not None), stop)
    if need.reach is Reach.STATE:
        return _last_state(index, sequence, need, start, placed_stop, is_there)
    first = need.first_token(stop)
    if first < placed_stop:
        first = need.first(stop)
    at = max(start, first)
    pieces: list[Piece] = []
    while at < placed_stop:
        piece = _section(index, sequence, need, at, placed_stop)
        if piece is None or not is_there(piece.chunk):
            return pieces, at
        pieces.append(piece)
        at = piece.stop
        if at < placed_stop and at % sequence.chunk_tokens:
            return pieces, at
    for source in spine:
        if source.first is None or source.stop <= at:
            continue
        piece = _moved_section(index, need, source, at)
        if piece is None or not is_there(piece.chunk):
            return pieces, at
        pieces.append(piece)
        at = piece.stop
        if at < source.stop:
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
    """The state nearest to `stop`, and where it was. By keys alone: a prompt that has one has all
    of its tokens. Cost: a look-up a chunk."""
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


def _moved_section(index: PrefixIndex, need: Need, source: Piece, at: int) -> Piece | None:
    """The section that goes farthest from token `at` on, of the chunk that a piece of moved KV is
    of."""
    assert source.first is not None
    name, first = source.chunk.name, source.first + at - source.start
    best: Piece | None = None
    for hole in range(first // need.block_tokens + 1):
        parent = section_parent(name.parent, need.group, hole)
        found = index.best_match(parent, name.extra, source.tokens, grain=1)
        if found is None:
            continue
        chunk, shared, exact = found
        stop = min(source.stop, at + shared - first)
        if stop > (at if best is None else best.stop):
            best = Piece(chunk, at, stop, exact, first, group=need.group)
            if stop == source.stop:
                break
    return best


def _section(
    index: PrefixIndex, sequence: SequenceKeys, need: Need, at: int, stop: int
) -> Piece | None:
    """The section that goes farthest from token `at` on, within its chunk. Any token will do: the
    spine says where a hit may end."""
    size = sequence.chunk_tokens
    chunk_stop = (at // size + 1) * size
    end, proof = min(stop, chunk_stop), min(stop + need.ahead, chunk_stop)
    best: Piece | None = None
    holes = at % size // need.block_tokens if need.group else 0
    for hole in range(max(0, holes + 1 - need.room) if need.room else 0, holes + 1):
        found = index.match(sequence.section(need.group, hole), at, proof, grain=1)
        if not found:
            continue
        reached = found[0].stop
        if found[0].exact and reached < chunk_stop:
            reached -= need.ahead
        reached = min(reached, end)
        if reached > (at if best is None else best.stop):
            best = replace(found[0], stop=reached, group=need.group)
            if reached == end:
                break
    return best
