# SPDX-License-Identifier: Apache-2.0
"""Which stored chunks continue a prefix: by key for whole chunks, by tokens inside one.

It is long since the rules of where a hit may end stand beside the code that keeps them.

Chunks that continue the same prefix are neighbours. The native index keeps of each a *sketch*, a
hash of each eighth of its tokens (csrc/index/prefix_index_sketch.h), and neighbours in the order of
their sketches: the one that shares most leading eighths with a given one stands beside its place.

What a match rests on:
- a key: a whole chunk, or a tail whose key is that of the request's tokens. Exact;
- the tokens of a chunk that is, or was just, in DRAM. Exact;
- a sketch, where the tokens are on NVMe. Provisional: confirm() compares the tokens when they
  have been read. Equal sketches of different tokens cost a read, and never an answer.

Where within a chunk a match may end: so that hits tell no more than those of a cache of whole
blocks do.

Who can see how many tokens of a request were cached learns whether the store has them. Were any
number possible, the next token of another's prompt would cost one request a candidate. So a hit
ends at a multiple of GRAIN_TOKENS, as in vLLM's own cache of blocks of 16. That alone would take
from each turn of a conversation what stands after its last multiple. So there is one more stop,
the *end* of a stored sequence, and what makes it as expensive as the others:

    stored   |---- 16 ----|---- 16 ----|---- 16 ----|- r -|      0 < r < 16
    stops    0            16           32                 48 + r
                                          (48 is none: r tokens would lie between it and the end)

1. *The end is kept only if the answer was begun before the last multiple* (kept_end()): all tokens
   between the two were generated. Of the prompt before it hits tell multiples of 16 alone. Else
   the store keeps no more than whole blocks.
2. *No other stop of a stored chunk is within 16 tokens of its end* (stop_in()).
3. *What is stored depends on no part of a block.* A tail goes, or does not come, where a longer
   chunk has its whole blocks, be its rest as it may (PrefixIndex.extends, extended_by). So no
   other chunk offers the multiple before an end; and who stores guesses learns nothing from
   which of them stays.
4. *A use of an end is told by whole blocks.* A tail with an end is used by every request that has
   its whole blocks, be the tokens behind them as they may, and by no other: it is renewed, and
   moved in any order, whether or not the request has its end (PrefixIndex.ends_like). It is not
   pinned: the next turn of a conversation supersedes it anyway.

The claim, which tests/property/test_stops.py looks at: two stores that differ in one sequence, from
token n of its prompt on, answer alike to all who have not guessed its tokens up to the first
multiple of 16 after n. It is what a cache of whole blocks promises.

All numbers of tokens are counted from the beginning of a chunk, which is a multiple of 16 itself
(connector/build.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from attnstore_vllm._native import PrefixIndex as Entries
from attnstore_vllm.index.chunk import Chunk, ChunkName, InTier, State
from attnstore_vllm.index.keys import SequenceKeys, chunk_key
from attnstore_vllm.types import NVME, TOKEN_BYTES, Key


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
        self.found: tuple[Chunk, int, bool] | None = None
        """The chunk, up to which of its tokens, and whether that is exact."""
        self._exact = True
        self.stop = 0

    @property
    def needed(self) -> bytes:
        """Tokens that those of a better one begin with, if they are known. Most share nothing."""
        next_stop = whole_blocks(self.stop, self._grain) + self._grain
        wanted = next_stop if self._exact else self.stop
        return self._tokens[: wanted * TOKEN_BYTES]

    def look_at(self, chunk: Chunk) -> None:
        """One whose tokens are known, and begin with what is needed."""
        if chunk.usable:
            self.offer(chunk, common_tokens(chunk.name.tokens, self._tokens), exact=True)

    def offer(self, chunk: Chunk, shared: int, *, exact: bool) -> None:
        """A usable one that has so many leading tokens of the request, or, if not `exact`, seems
        to."""
        stop = stop_in(shared, chunk.name.num_tokens, self._grain)
        better = stop > self.stop or (stop == self.stop > 0 and exact > self._exact)
        if better:
            self.found, self.stop, self._exact = (chunk, stop, exact), stop, exact


GRAIN_TOKENS: Final = 16
"""vLLM's usual block on GPUs. Tests of the index's own structure take smaller ones."""


def whole_blocks(num_tokens: int, grain: int = GRAIN_TOKENS) -> int:
    """The tokens in the leading whole blocks of so many."""
    return num_tokens // grain * grain


def kept_end(num_tokens: int, num_prompt_tokens: int, grain: int = GRAIN_TOKENS) -> int:
    """Up to where a sequence that has ended is stored: to its end, or to its last whole block.

    Args:
        num_tokens: of the sequence, that have KV.
        num_prompt_tokens: of them, those that were not generated.
    """
    whole = whole_blocks(num_tokens, grain)
    return num_tokens if whole >= num_prompt_tokens else whole


def stop_in(shared: int, num_tokens: int, grain: int = GRAIN_TOKENS) -> int:
    """How many of a stored chunk's tokens are a hit.

    Args:
        shared: leading tokens that the request has in common with it; it goes on behind them.
        num_tokens: that the chunk has.
    """
    if num_tokens % grain == 0:
        return whole_blocks(shared, grain)
    if shared == num_tokens >= grain:
        return num_tokens
    return max(0, whole_blocks(min(shared, num_tokens - grain), grain))


NEIGHBOURS_MAX = 32
"""Neighbours that are looked at, on each side, for the longest match and for what extends a tail;
and lengths of tails. What is missed costs a prefill, or goes by eviction."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a request's tokens, [start, stop), whose KV one stored chunk has."""

    chunk: Chunk
    start: int
    stop: int
    exact: bool = True
    """False: `stop` follows from a sketch, and holds only once confirm() has said so."""
    first: int | None = None
    """Moved KV: the token of the chunk that `start` is. None: it is where it was computed."""
    grain: int = GRAIN_TOKENS
    """1: moved KV goes on behind it, from any token; else see the module."""
    group: int = 0
    """Whose KV it is: of the spine (0), or a section of another KV cache group."""
    tokens: bytes = b""
    """Moved KV of the spine: all tokens of the chunk, which name its sections."""
    gap: bool = False
    """A document begins with it: what lies before it and behind the piece before is computed by a
    pass of our own."""

    @property
    def shift(self) -> int:
        """By how many positions it is moved."""
        if self.first is None:
            return 0
        return self.start - self.chunk.name.position - self.first

    def has_end(self, grain: int) -> bool:
        """Whether its chunk has an end (see the module). A section goes with the spine's blocks,
        with any end of its own."""
        return not self.group and self.chunk.name.num_tokens % grain != 0


class Matched:
    """The whole chunks that the last match of a sequence found, for its next one."""

    __slots__ = ("entered_in", "pieces")

    def __init__(self) -> None:
        self.pieces: Sequence[Piece] = ()
        self.entered_in: object = None
        """Which index it was, since when."""

    def forget(self) -> None:
        self.pieces = ()


def confirm(
    piece: Piece, sequence: SequenceKeys, stop: int, begin: int | None = None
) -> Piece | None:
    """The piece with the tokens that its chunk has in common with tokens [start, stop).

    Longer or shorter than was thought, or None if nothing is left or the chunk's tokens are
    not known. What was exact stays as it is; of moved KV all tokens are compared once more.

    Args:
        begin: where the tokens before it end: the piece goes on from there, or is None.
    """
    begin = piece.start if begin is None else begin
    if piece.first is not None:
        if not piece.start <= begin < piece.stop:
            return None
        first = piece.first + begin - piece.start
        has = piece.chunk.name.tokens[first * TOKEN_BYTES :]
        if not has.startswith(sequence.tokens(begin, piece.stop)):
            return None
        return replace(piece, start=begin, first=first)
    if piece.start != begin:
        return None
    if piece.exact:
        return piece
    first = piece.start // sequence.chunk_tokens * sequence.chunk_tokens
    wanted = sequence.tokens(first, min(first + sequence.chunk_tokens, stop))
    name = piece.chunk.name
    end = first + stop_in(common_tokens(name.tokens, wanted), name.num_tokens, piece.grain)
    return replace(piece, stop=end, exact=True) if end > piece.start else None


def settle(pieces: list[Piece], grain: int = GRAIN_TOKENS) -> list[Piece]:
    """The same run, as the whole of what is offered: its last piece ends where one may.

    What was to be followed by moved KV, and moved KV itself, ends at any token of its chunk.
    """
    while pieces:
        last = pieces[-1]
        if last.first is None and last.grain == grain:
            break
        name = last.chunk.name
        origin = name.position if last.first is None else last.start - last.first
        stop = origin + stop_in(last.stop - origin, name.num_tokens, grain)
        if stop > last.start:
            return [*pieces[:-1], replace(last, stop=stop, grain=grain)]
        pieces = pieces[:-1]
    return pieces


def ready_run(
    pieces: Iterable[Piece], sequence: SequenceKeys, stop: int, grain: int = GRAIN_TOKENS
) -> tuple[list[Piece], bool]:
    """The leading pieces of the spine that are READY in DRAM, confirmed and settled; and whether
    they end elsewhere than was found, so that what is behind them is not known to match.

    Args:
        stop: of the wanted tokens: the last piece may end elsewhere than was thought.
    """
    ready: list[Piece] = []
    ends_anew = False
    for piece in pieces:
        chunk = piece.chunk
        if piece.group or chunk.dram.state is not State.READY or chunk.dropped:
            break
        begin = ready[-1].stop if ready else piece.start
        begin = max(begin, piece.start) if piece.gap else begin
        if piece.exact and piece.first is None and piece.start == begin:  # most are
            ready.append(piece)
            ends_anew = False
            continue
        confirmed = confirm(piece, sequence, stop, begin)
        ends_anew = confirmed is None or not piece.exact
        if confirmed is None:
            break
        ready.append(confirmed)
    return settle(ready, grain), ends_anew


def in_place(pieces: Sequence[Piece]) -> list[Piece]:
    """Those of the spine that are not moved."""
    return [piece for piece in pieces if piece.group == 0 and piece.first is None]


def pieces_before(pieces: Sequence[Piece], stop: int) -> list[Piece]:
    """The pieces, of which the last may be longer, up to token `stop`."""
    kept = [piece for piece in pieces if piece.start < stop]
    if kept and kept[-1].stop > stop:
        kept[-1] = replace(kept[-1], stop=stop)
    return kept


def gaps_of(pieces: Sequence[Piece], start: int, stop: int) -> list[range]:
    """The tokens of [start, stop) that none of these pieces has."""
    gaps, at = [], start
    for piece in pieces:
        if piece.start > at:
            gaps.append(range(at, min(piece.start, stop)))
        at = max(at, piece.stop)
    if at < stop:
        gaps.append(range(at, stop))
    return [gap for gap in gaps if gap]


def has_come(pieces: Sequence[Piece]) -> bool:
    """Whether all of them are READY in DRAM, or one never will be."""
    chunks = [piece.chunk for piece in pieces]
    return any(c.dropped for c in chunks) or all(c.dram.state is State.READY for c in chunks)


class PrefixIndex:
    """All chunks that some tier has or is getting. No chunk is in it twice.

    A chunk is one object for as long as a reference is left: residency.py does while the chunk
    is in DRAM. With the last reference it becomes an entry again, which says that it is READY on
    NVMe and nowhere else; the next look-up makes another object of it.

    Args:
        seed: of the sketches; a secret, so that two prompts cannot be made to look alike.
        expected: chunks that there will be; saves the pauses in which tables grow.
        grain: see the module; another one is for tests.
    """

    def __init__(
        self, chunk_tokens: int, seed: int = 0, expected: int = 0, grain: int = GRAIN_TOKENS
    ) -> None:
        assert chunk_tokens % grain == 0
        self.chunk_tokens = chunk_tokens
        self.grain = grain
        self.entries = Entries(chunk_tokens, seed, expected, grain)
        self._live: WeakValueDictionary[int, Chunk] = WeakValueDictionary()
        self._piece_tokens = self.entries.piece_tokens
        self._entered_in = object()
        """Another one after clear(): objects of before it have no entry, even if they name one."""
        self._marks = array("H", bytes(2 * expected))
        """By entry: a mark of its first tokens, 0 where that is not known. Most neighbours differ
        there, and to see it here touches none of their objects."""

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Chunk]:
        """All chunks, as objects. Cost: some microseconds a chunk."""
        return (self.chunk(int(entry)) for entry in self.entries.ids())

    def chunk(self, entry: int) -> Chunk:
        """The object of an entry that is in use."""
        chunk = self._live.get(entry)
        if chunk is None:
            *_, is_alone, slot, checksum = record = self.entries.record(entry)
            at_rest = {NVME: InTier(State.READY, slot, checksum)} if slot >= 0 else {}
            name = ChunkName(*record[:6], b"")
            chunk = Chunk(name, behind=at_rest, is_alone=is_alone, entry=entry)
            self._live[entry] = chunk
        return chunk

    def live(self, entry: int) -> Chunk | None:
        """The object of an entry, if there is one now. None: it is on NVMe and at rest."""
        return self._live.get(entry)

    def all_live(self) -> list[Chunk]:
        return list(self._live.values())

    def get(self, key: Key) -> Chunk | None:
        entry = self.entries.find(key)
        return None if entry < 0 else self.chunk(entry)

    def num_missing(self, names: Iterable[ChunkName]) -> int:
        """How many of these are not in it."""
        find = self.entries.find
        return sum([find(name.key) < 0 for name in names])

    def add(self, chunk: Chunk) -> None:
        """Enter a chunk whose tokens are known."""
        name = chunk.name
        assert chunk.entry < 0
        assert len(name.tokens) == name.num_tokens * TOKEN_BYTES
        chunk.entry = self.entries.add(
            name.key,
            name.parent,
            name.extra,
            name.tenant,
            name.position,
            name.tokens,
            chunk.is_alone,
        )
        self._live[chunk.entry] = chunk
        if chunk.entry >= len(self._marks):
            self._marks.extend(array("H", bytes(2 * (chunk.entry + 1))))
        self._marks[chunk.entry] = self._mark(name.tokens)
        if chunk.behind and chunk.at(NVME).state is State.READY:
            self.bind(chunk)

    def remove(self, chunk: Chunk) -> None:
        assert self._live.pop(chunk.entry) is chunk
        self.entries.remove(chunk.entry)
        chunk.entry = -1

    def remove_entry(self, entry: int) -> None:
        """Remove a chunk that is no object now."""
        assert self._live.get(entry) is None
        self.entries.remove(entry)

    def clear(self, keep: Iterable[Chunk] = ()) -> None:
        """Forget all but these, whose tokens are known. Objects of others must not be used."""
        kept = list(keep)
        self._live.clear()
        self.entries.clear()
        self._entered_in = object()
        for chunk in kept:
            chunk.entry = -1
            self.add(chunk)

    def bind(self, chunk: Chunk) -> None:
        """Note where on NVMe the chunk is; with unbind(), that it is not there any more."""
        copy = chunk.at(NVME)
        self.entries.bind(chunk.entry, copy.slot, copy.checksum)

    def unbind(self, chunk: Chunk) -> None:
        self.entries.unbind(chunk.entry)

    def learn(self, chunk: Chunk, tokens: bytes) -> bool:
        """Note the tokens that were read with the chunk; False if they are not the chunk's."""
        name = chunk.name
        if chunk_key(name.parent, name.extra, tokens) != name.key:
            return False
        chunk.name = replace(name, tokens=tokens)
        return True

    # ---- recovery ----------------------------------------------------------------------

    def adopt(
        self, headers: memoryview, slots: npt.NDArray[np.uint32], header_bytes: int
    ) -> tuple[
        npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.uint32], int, int, int
    ]:
        """See csrc/index/prefix_index.h. Returns slots bound now, their entries, then slots that
        are free again; and how many were entered, were left out, and were superseded."""
        found = self.entries.adopt(headers, slots, header_bytes)
        for entry in found[1].tolist():  # it may have had another name's mark
            if entry < len(self._marks):
                self._marks[entry] = 0
        return found

    def sequences(self, entries: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """The sequence numbers of the records that recovery found these in."""
        return self.entries.sequences(entries)

    # ---- neighbours ----------------------------------------------------------------------

    def extends(self, name: ChunkName) -> bool:
        """Whether a neighbour of more whole blocks holds all those of `name`, or seems to.

        Whether it has the rest of them too must make no difference (see the module, 3). It may
        miss a neighbour that stands among many: then a tail is kept twice.
        """
        if name.num_tokens == self.chunk_tokens:
            return False
        whole = whole_blocks(name.num_tokens, self.grain)
        head = name.tokens[: whole * TOKEN_BYTES]
        near = self.entries.around(name.parent, name.extra, name.tokens, NEIGHBOURS_MAX)
        for entry, pieces in near:
            if pieces < whole // self._piece_tokens:
                continue
            chunk = self.chunk(entry)
            known = chunk.name.tokens
            is_longer = chunk.name.num_tokens >= whole + self.grain
            if is_longer and (known.startswith(head) or not known):
                return True
        return False

    def extended_by(self, name: ChunkName) -> list[Chunk]:
        """The neighbours whose whole blocks `name` holds: tails it supersedes, be the rest of them
        as it may. By their hashes: a mistake costs a tail."""
        heads = self.entries.heads_of(name.parent, name.extra, name.tokens, NEIGHBOURS_MAX)
        own = self.entries.find(name.key)
        return [self.chunk(entry) for entry in heads if entry != own]

    def _mark(self, tokens: bytes) -> int:
        """A mark of a chunk's, or a request's, tokens up to the first at which a hit may end."""
        return hash(tokens[: self.grain * TOKEN_BYTES]) & 0xFFFF or 1

    def _heads_of(self, parent: Key, extra: bytes, tokens: bytes) -> Iterator[Chunk]:
        """Neighbours whose whole blocks begin these tokens, those with most blocks first."""
        return map(self.chunk, self.entries.heads_of(parent, extra, tokens, NEIGHBOURS_MAX))

    def ends_like(self, sequence: SequenceKeys, number: int, stop: int) -> list[Chunk]:
        """The tails with an end whose whole blocks stand in chunk `number` of a sequence, with any
        its tokens behind them (see the module, 4). At most NEIGHBOURS_MAX lengths.

        Args:
            stop: tokens from it on do not count.
        """
        start = number * self.chunk_tokens
        if start >= stop:
            return []
        heads = self._heads_of(*sequence.part(number, stop))
        return [chunk for chunk in heads if chunk.name.num_tokens % self.grain]

    def best_match(
        self, parent: Key, extra: bytes, tokens: bytes, grain: int | None = None
    ) -> tuple[Chunk, int, bool] | None:
        """The usable chunk after `parent` with which a hit goes farthest, up to which of its
        tokens, and whether that is exact.

        Among more than NEIGHBOURS_MAX that share the same eighths it may not be the best.

        Args:
            tokens: of a request, which goes on behind them.
            grain: 1: any token will do, as something else goes on from it.
        """
        grain = self.grain if grain is None else grain
        best = Best(tokens, grain)
        for head in self._heads_of(parent, extra, tokens):
            size = head.name.num_tokens * TOKEN_BYTES
            if not head.usable or size > len(tokens):
                continue
            if chunk_key(parent, extra, tokens[:size]) == head.name.key:
                best.offer(head, head.name.num_tokens, exact=True)
                break
        if best.stop < len(tokens) // TOKEN_BYTES:
            live, needed, mark = self._live, best.needed, self._mark(tokens)
            marks = self._marks if grain == self.grain else ()
            for entry, pieces in self.entries.around(parent, extra, tokens, NEIGHBOURS_MAX):
                if not pieces and entry < len(marks) and marks[entry] not in (0, mark):
                    continue  # nothing of it is a hit
                chunk = live.get(entry)
                if chunk is not None and (known := chunk.name.tokens):
                    if known.startswith(needed):
                        best.look_at(chunk)
                        needed = best.needed
                elif (shared := pieces * self._piece_tokens) > best.stop:
                    if (other := self.chunk(entry)).usable:
                        best.offer(other, shared, exact=False)
                        needed = best.needed
        return best.found

    def exact_head(
        self, parent: Key, extra: bytes, tokens: bytes, is_there: Callable[[Chunk], bool]
    ) -> Chunk | None:
        """The longest usable chunk after `parent` all of whose tokens begin these."""
        found = None
        for head in self._heads_of(parent, extra, tokens):
            size = head.name.num_tokens * TOKEN_BYTES
            is_longer = found is None or head.name.num_tokens > found.name.num_tokens
            if not (is_longer and size <= len(tokens) and head.usable and is_there(head)):
                continue
            if chunk_key(parent, extra, tokens[:size]) == head.name.key:
                found = head
        return found

    def heads_before(
        self, keys: SequenceKeys, stop: int, num_chunks: int, is_there: Callable[[Chunk], bool]
    ) -> Iterator[Chunk]:
        """Usable chunks that end before token `stop`, in the `num_chunks` chunks up to it. The
        caller drops each before it asks for the next one."""
        size, last = keys.chunk_tokens, (stop - 2) // keys.chunk_tokens
        for number in range(last, max(-1, last - num_chunks), -1):
            tokens = keys.tokens(number * size, min(stop - 1, (number + 1) * size))
            parent, extra = keys.parent(number), keys.extra(number)
            while found := self.exact_head(parent, extra, tokens, is_there):
                yield found

    def match(
        self,
        sequence: SequenceKeys,
        start: int,
        stop: int,
        grain: int | None = None,
        *,
        matched: Matched | None = None,
    ) -> list[Piece]:
        """The longest run of usable chunks for the tokens [start, stop) of a sequence.

        Chunks before `start` are not needed: a key names the whole prefix, wherever the KV of
        that prefix is. The run ends at the first chunk that is not there, or is there in part.

        Args:
            grain: see best_match().
            matched: what the sequence's last match found; gets what this one does.

        Cost: a hash look-up a chunk and one search among neighbours; the tokens of one chunk are
        encoded. Of what `matched` has, a look at each chunk.
        """
        grain = self.grain if grain is None else grain
        known = self._still_there(matched, start, stop, grain) if matched is not None else []
        pieces = self._match(known, sequence, start, stop, grain)
        if matched is not None:
            # The last one may be another chunk next time: neighbours of it come and go.
            matched.pieces, matched.entered_in = pieces[:-1], self._entered_in
        return pieces

    def _still_there(self, matched: Matched, start: int, stop: int, grain: int) -> list[Piece]:
        """The whole chunks that a match for the tokens [start, stop) begins with, as far as the
        last match found them and they can still be used.

        A sequence's keys do not change, and a key names one chunk: what is still entered is what
        a look-up would find.
        """
        size, found = self.chunk_tokens, matched.pieces
        number = start // size
        skip = number - found[0].start // size if found else 0
        pieces: list[Piece] = []
        is_ours = matched.entered_in is self._entered_in
        if start >= stop or not is_ours or not 0 <= skip < len(found):
            return pieces
        for piece in found[skip : skip + stop // size - number]:
            chunk = piece.chunk
            if piece.start != start or piece.grain != grain:
                break
            if chunk.entry < 0 or not chunk.usable:
                break
            pieces.append(piece)
            start = piece.stop
        return pieces

    def _match(
        self, pieces: list[Piece], sequence: SequenceKeys, start: int, stop: int, grain: int
    ) -> list[Piece]:
        """These pieces, and what continues them."""
        size = sequence.chunk_tokens
        start = pieces[-1].stop if pieces else start
        if start >= stop:
            return pieces
        number = start // size
        upto = min(-(-stop // size), len(sequence.token_ids) // size)
        for entry in self.entries.find_run(sequence.keys(number, upto)):
            chunk = self.chunk(entry)
            if not chunk.usable:
                break
            number += 1
            end = min(number * size, stop)
            if end < number * size:  # where the request ends: as if its last token differed
                end -= (end - (number - 1) * size) % grain
                return [*pieces, Piece(chunk, start, end, grain=grain)] if end > start else pieces
            pieces.append(Piece(chunk, start, end, grain=grain))
            start = end
        if start < stop:
            first = number * size
            best = self.best_match(*sequence.part(number, stop), grain)
            if best is not None and first + best[1] > start:
                pieces.append(Piece(best[0], start, first + best[1], best[2], grain=grain))
        return pieces
