# SPDX-License-Identifier: Apache-2.0
"""One Lookup a request: its keys, and what look-ups have found. One Strategy a store: how it looks.

    AllTokens      a run of chunks from the left; behind it moved KV, for who takes that
    Sections       that run, as far as all other KV cache groups back it
    WindowsAlone   no group has all tokens: names are walked from the right

Which of them is chosen once, by the needs of the model's groups (index/sections.py).

It is long since what a request finds, uses and waits for is told apart in one place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import SequenceKeys, chunk_key
from attnstore_vllm.index.prefix import Matched, Piece, in_place, ready_run, settle, whole_blocks
from attnstore_vllm.index.sections import Need, backed, fit, proven, walk, walks
from attnstore_vllm.policy.visits import Alike, Run, Visit
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.remote import RemoteLookup
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.tiers.tier_io import TierIo


@dataclass(eq=False)
class Lookup(RemoteLookup):
    """The look-ups of one request, from its first to its end. Written by the store, on the
    scheduler's thread."""

    finds_documents: bool = field(default=False, kw_only=True)
    """With gaps between them."""
    searched: int = field(default=0, init=False)  # Work.as_looked_up() of the last search
    matched: Matched = field(default_factory=Matched, init=False)
    """Whole chunks of the spine, for the next look."""
    spine_stop: int = field(default=0, init=False)
    """Up to where the spine was stored at the last look, apart from all else."""
    _began_at: int | None = field(default=None, init=False)
    """That of the last look before the request began. One that was preempted finds its own KV."""
    short_of: set[int] = field(default_factory=set, init=False)
    """The groups that lacked something of that then."""

    @property
    def has_begun(self) -> bool:
        return self._began_at is not None

    @property
    def parts_at(self) -> int:
        """The token up to which others had left its prompt's spine."""
        return self.spine_stop if self._began_at is None else self._began_at

    def begin(self) -> None:
        """Its request computes. May be said again."""
        if self._began_at is None:
            self._began_at = self.spine_stop

    def follow(self) -> None:
        """Its tokens may be others than they were (SequenceKeys.follow). What was noted stands as
        far as the chunks do. Cost: 5 ns a token."""
        changed = self.keys.follow()
        if changed is not None:
            self.matched.forget()
            self.spine_stop = min(self.spine_stop, changed)
            if self._began_at is not None:
                self._began_at = min(self._began_at, changed)


class Strategy(ABC):
    """All methods are called with the store's lock, and wait for nothing.

    Args:
        tiers: those behind DRAM.
        needs: of the KV cache groups beside the spine, and of the spine if it needs less than all
            tokens; a hit ends where all have what they need.
        ahead: so many tokens behind it decide KV of a token too (drafts): a hit ends before those
            of which that is not known.
    """

    walks = False
    """Whether no group has all tokens, so that the names alone are walked."""
    asks_remote = False
    """Whether tiers that must be asked take part. What one lacks of a group would have to shorten
    the hit of all."""

    def __init__(
        self, context: Context, tiers: Sequence[TierIo], needs: Sequence[Need], ahead: int
    ) -> None:
        self.needs = tuple(replace(need, ahead=ahead) for need in needs)
        self.ahead = ahead
        self._context = context
        self._tiers = tiers
        self._residency = context.residency
        self._index = context.residency.index
        self._num_slots = context.pool.num_slots

    @abstractmethod
    def match(
        self, lookup: Lookup, start: int, stop: int, min_tokens: int, *, in_parts: bool
    ) -> list[Piece]:
        """The longest hit for tokens [start, stop), the spine's pieces first. Empty if it has
        fewer than `min_tokens`.

        Args:
            in_parts: it may be longer than DRAM (scheduler/stages.py).
        """

    @abstractmethod
    def hold(
        self, pieces: Sequence[Piece], keys: SequenceKeys, start: int | None, stop: int
    ) -> list[Piece]:
        """See Store.hold_ready()."""

    def hold_exactly(
        self, pieces: Sequence[Piece], keys: SequenceKeys, start: int, stop: int
    ) -> list[Piece]:
        """See Store.hold_exactly()."""
        index, spine = self._index, [piece for piece in pieces if piece.group == 0]
        are_held = bool(spine) and not self.walks
        if not (spine or self.walks):
            spine = index.match(keys, start, stop + self.ahead)
            spine = proven(spine, self.ahead, index.grain) if self.ahead else spine
        found = backed(index, keys, self.needs, spine, start, stop, is_ready)
        # Tokens of what is READY are known; those of what is held were compared.
        new = [piece for piece in found if piece.group or not are_held]
        are_ready = all(is_ready(piece.chunk) for piece in found)  # else some were dropped since
        if not are_ready or not all(piece.exact for piece in new):
            return []
        if self._context.has_leases and any(self._residency.has_expired(p.chunk) for p in new):
            return []
        self._hold(found)
        return found

    def want(
        self,
        lookup: Lookup,
        pieces: Sequence[Piece],
        start: int,
        stop: int,
        request_id: str | None,
        visit: Visit | None,
        *,
        num_met: int = 0,
    ) -> None:
        """These pieces were found: they are used, and what is not in DRAM is queued for reading.

        Args:
            request_id: that waits for them; None: one is likely to come.
            visit: whose use it is; None: they are renewed.
            num_met: the visit was made for so many chunks, as they were found now.
        """
        residency, size = self._residency, lookup.keys.chunk_tokens
        at = self._tail_start(lookup, pieces, start)
        ends = self._index.ends_like(lookup.keys, at // size, stop) if at < stop else []
        if self._context.has_leases:  # a use of what has expired would renew it
            ends = residency.drop_expired(ends)
        near = pieces[: self._num_slots]  # what is beyond is wanted once there may be room
        is_known = is_wanted_so(residency, lookup, stop, request_id, near, visit)
        used = [] if is_known else wholly_used(pieces, lookup, stop, self._index.grain)
        if visit is None:
            residency.renew([*(piece.chunk for piece in used), *ends])
        else:
            of_run: dict[Run, list[Chunk]] = {run: [] for run in visit.runs}
            residency.use_moved([p.chunk for p in used if p.first is not None], visit)
            placed = [(p.start // size, p.chunk) for p in used if p.first is None]
            for number, chunk in (*placed, *((at // size, end) for end in ends)):
                last = residency.run_of(chunk)
                if number < min(num_met, visit.num_shared) or (
                    number < num_met and not last.is_shared
                ):
                    run = visit.run(number)
                else:
                    run = visit.joined(number, last, residency.now)
                of_run.setdefault(run, []).append(chunk)
            for run, chunks in of_run.items():
                residency.use(chunks, run)
            if is_known:
                residency.use_again(*visit.runs)
                return
        chunks = [piece.chunk for piece in near]
        if request_id is not None and request_id in residency.look_ahead:
            residency.dram.want(request_id, chunks)
        else:
            absent = (chunk for chunk in chunks if chunk.dram.state is State.ABSENT)
            self._context.reader.want(absent)

    def _tail_start(self, lookup: Lookup, pieces: Sequence[Piece], start: int) -> int:
        """A token of the chunk whose tails the request may have (prefix.py, 4)."""
        size = lookup.keys.chunk_tokens
        spine = [piece for piece in pieces if piece.group == 0]
        at = start if not spine else spine[-1].stop
        return spine[-1].start if at % size and spine else at

    def _comes(self, chunk: Chunk) -> bool:
        """Whether it is in DRAM, or a tier that answers is believed to have it."""
        is_in_dram = chunk.dram.state is State.READY
        return is_in_dram or self._context.reader.can_bring(chunk)

    def _drops_expired(self, pieces: list[Piece]) -> bool:
        """Whether some have expired, which are dropped."""
        has_leases = self._context.has_leases
        return has_leases and len(self._residency.unexpired(pieces)) < len(pieces)

    def _hold(self, pieces: Sequence[Piece]) -> None:
        self._residency.hold(*(piece.chunk for piece in pieces))


class AllTokens(Strategy):
    """One KV cache group, which has all tokens."""

    asks_remote = True

    def match(
        self, lookup: Lookup, start: int, stop: int, min_tokens: int, *, in_parts: bool
    ) -> list[Piece]:
        pieces = self._spine(lookup, start, stop, in_parts=in_parts)
        return [] if _is_short(pieces, start, min_tokens) else pieces

    def _spine(self, lookup: Lookup, start: int, stop: int, *, in_parts: bool) -> list[Piece]:
        index = self._index
        pieces = index.match(lookup.keys, start, stop, matched=lookup.matched)
        if lookup.finds_documents:
            pieces = self._context.moved.anywhere(pieces, lookup.keys, start, stop)
        elif lookup.finds_moved:
            pieces = self._context.moved.go_on(pieces, lookup.keys, start, stop)
        lookup.searched = self._context.moved.take_searched()
        if self._context.has_leases:
            pieces = self._residency.unexpired(pieces)
        if not all(io.health.reads.in_use and not io.tier.is_remote for io in self._tiers):
            pieces = list(takewhile(lambda piece: self._comes(piece.chunk), pieces))
        if not in_parts or lookup.finds_moved:
            pieces = pieces[: self._num_slots]  # more can never be in DRAM at once
        pieces = settle(pieces, index.grain)
        return proven(pieces, self.ahead, index.grain) if self.ahead else pieces

    def hold(
        self, pieces: Sequence[Piece], keys: SequenceKeys, start: int | None, stop: int
    ) -> list[Piece]:
        held, ends_anew = ready_run(pieces, keys, stop, self._index.grain)
        if ends_anew and self.ahead:
            held = proven(held, self.ahead, self._index.grain)
        self._hold(held)
        return held


class Sections(AllTokens):
    """A group that has all tokens, and others beside it."""

    asks_remote = False

    def match(
        self, lookup: Lookup, start: int, stop: int, min_tokens: int, *, in_parts: bool
    ) -> list[Piece]:
        spine = self._spine(lookup, start, stop, in_parts=in_parts)
        if _is_short(spine, start, min_tokens):
            return []
        lookup.spine_stop = spine[-1].stop if spine else start
        lookup.short_of = set()
        pieces = self._fit(lookup.keys, spine, start, self._comes, lookup.short_of)
        is_too_long = len(pieces) > self._num_slots
        return [] if is_too_long or _is_short(pieces, start, min_tokens) else pieces

    def _fit(
        self,
        keys: SequenceKeys,
        spine: Sequence[Piece],
        start: int,
        is_there: Callable[[Chunk], bool],
        short: set[int] | None = None,
    ) -> list[Piece]:
        """Sections that have expired are dropped; of the spine they are gone already."""
        while True:
            pieces = fit(self._index, keys, self.needs, spine, start, is_there, short)
            if not self._drops_expired([piece for piece in pieces if piece.group]):
                return pieces

    def hold(
        self, pieces: Sequence[Piece], keys: SequenceKeys, start: int | None, stop: int
    ) -> list[Piece]:
        """With the spine's pieces their sections. What they do not back is let go."""
        spine = super().hold(pieces, keys, start, stop)
        fitting = self._fit(keys, spine, spine[0].start if spine else 0, is_ready)
        kept = [piece for piece in fitting if piece.group == 0]
        sections = [piece for piece in fitting if piece.group]
        if not all(piece.exact for piece in sections):  # tokens of what is READY are known
            kept, sections, fitting = [], [], []
        self._residency.release(*(piece.chunk for piece in spine[len(kept) :]))
        self._hold(sections)
        return fitting


class WindowsAlone(Strategy):
    """No group has all tokens."""

    walks = True

    def match(
        self, lookup: Lookup, start: int, stop: int, min_tokens: int, *, in_parts: bool
    ) -> list[Piece]:
        pieces, lookup.spine_stop = self._walk(lookup.keys, start, stop, self._comes)
        is_too_long = len(pieces) > self._num_slots
        return [] if is_too_long or _is_short(pieces, start, min_tokens) else pieces

    def _walk(
        self, keys: SequenceKeys, start: int, stop: int, is_there: Callable[[Chunk], bool]
    ) -> tuple[list[Piece], int]:
        """Chunks that have expired are dropped, and another hit is looked for."""
        while True:
            pieces, spine_stop = walk(self._index, keys, self.needs, start, stop, is_there)
            if not self._drops_expired(pieces):
                return pieces, spine_stop

    def hold(
        self, pieces: Sequence[Piece], keys: SequenceKeys, start: int | None, stop: int
    ) -> list[Piece]:
        """All of what was found, or else the farthest hit of which all is READY.

        A walk of what is READY passes a chunk that is not, even if another one ends there as well:
        so it may miss what was found, and nothing would be read that could change it.
        """
        assert start is not None, "a window begins behind what is in HBM"
        held = list(pieces)
        if not all(is_ready(piece.chunk) and piece.exact for piece in held):
            held, _ = self._walk(keys, start, stop, is_ready)
        if not all(piece.exact for piece in held):  # tokens of what is READY are known
            return []
        self._hold(held)
        return held

    def _tail_start(self, lookup: Lookup, pieces: Sequence[Piece], start: int) -> int:
        """The tail that it seems to have, be the window before it there or not."""
        size = lookup.keys.chunk_tokens
        return max(start, lookup.spine_stop // size * size)


def strategy_for(needs: Sequence[Need]) -> type[Strategy]:
    """How a store looks up KV of a model whose groups have these needs."""
    if walks(needs):
        return WindowsAlone
    return Sections if needs else AllTokens


def is_wanted_so(
    residency: Residency,
    lookup: Lookup,
    stop: int,
    request_id: str | None,
    pieces: Sequence[Piece],
    visit: Visit | None,
) -> bool:
    """Whether a waiting request wants just these already, all are in DRAM or on their way, and
    no other has used them since. Cost: a look at each."""
    if request_id is None or visit is None:
        return False
    wants, grain = residency.look_ahead.wants_of(request_id), residency.index.grain
    if len(wants) != len(pieces):
        return False
    size = residency.index.chunk_tokens
    for wanted, piece in zip(wants, pieces, strict=True):
        chunk = piece.chunk
        if wanted is not chunk or chunk.dram.state is State.ABSENT:
            return False
        run = visit.own  # most often
        if chunk.run is not run:
            run = visit.run(piece.start // size, chunk.run)
            if chunk.run is not run and piece.first is None:  # moved: of its own conversation
                if uses_all(piece, lookup, stop, grain):
                    return False
                continue
        if chunk.refused_by and chunk.copied_for is not run:  # worth another look
            return False
    return True


def is_ready(chunk: Chunk) -> bool:
    """Whether it is in DRAM, and may be held."""
    return chunk.dram.state is State.READY and not chunk.dropped


def _is_short(pieces: Sequence[Piece], start: int, min_tokens: int) -> bool:
    return bool(pieces) and pieces[-1].stop - start < min_tokens


def uses_all(piece: Piece, lookup: Lookup, stop: int, grain: int) -> bool:
    """Whether a request that has found this uses all of its chunk. One that goes on otherwise
    within it uses none: the rest is another's, kept as long as that one said, and what the
    request computes behind the beginning is saved apart. Of a tail with an end ends_like() says
    who uses it: were it who has its end, the client that planted it would know.

    Args:
        stop: tokens from it on were not looked for.
    Cost: where a piece ends within its chunk, that chunk's tokens are hashed.
    """
    if piece.has_end(grain):
        return False
    name, keys = piece.chunk.name, lookup.keys
    if piece.first is not None:  # of a part it can go on with nothing of its own
        return piece.stop - piece.start == name.num_tokens
    if piece.stop >= name.end:
        return True
    if name.end <= len(keys.token_ids):
        tokens = keys.tokens(name.position, name.end)
        return chunk_key(name.parent, name.extra, tokens) == name.key
    asked = name.position + whole_blocks(stop - name.position, grain)  # it ends within the chunk
    if piece.group:  # the spine's may be another chunk
        return piece.stop >= asked or _begins_with(name, keys.tokens(name.position, asked))
    return max(piece.stop, lookup.spine_stop) >= asked


def _begins_with(name: ChunkName, tokens: bytes) -> bool:
    """Whether these are a chunk's first ones. Of one that NVMe alone has they are not known."""
    return bool(name.tokens) and bytes(name.tokens[: len(tokens)]) == bytes(tokens)


def wholly_used(pieces: Sequence[Piece], lookup: Lookup, stop: int, grain: int) -> list[Piece]:
    """Those of which the request uses all: see uses_all(). Cost: a look at each."""
    size = lookup.keys.chunk_tokens
    return [
        piece
        for piece in pieces
        if (piece.first is None and not piece.stop % size) or uses_all(piece, lookup, stop, grain)
    ]


def alike_of(
    lookup: Lookup, pieces: Sequence[Piece], used: Sequence[Piece], residency: Residency
) -> Alike:
    """How far a prompt seems to go on from what was found of it. A hit is a block shorter, and so
    may be a prompt that a chat template has begun an answer for.

    Args:
        used: wholly_used() of these.
    """
    spine, grain = in_place(pieces), residency.index.grain
    last = spine[-1] if spine else None
    stop, end = (last.stop, last.chunk.name.end) if last is not None else (0, 0)
    num_chunks = -(-stop // lookup.keys.chunk_tokens)
    is_used = last is None or any(last is piece for piece in used)
    parted = None if last is None or is_used else residency.run_of(last.chunk)
    num_tokens = max(lookup.spine_stop, stop) + grain
    gone_on = _gone_on(lookup, spine, used, residency)
    return Alike(num_tokens, stop + grain < end, num_chunks, parted, gone_on)


def _gone_on(
    lookup: Lookup, spine: Sequence[Piece], used: Sequence[Piece], residency: Residency
) -> Run | None:
    """See Alike. Who merely begins as that prompt does has not all of it."""
    for piece in reversed(spine):
        run, end = residency.run_of(piece.chunk), piece.chunk.name.end
        if not run.is_shared:
            is_used = end <= len(lookup.keys.token_ids) and any(piece is one for one in used)
            has_all = (end if is_used else piece.stop) >= run.prompt_tokens
            return run if has_all and run.ended_at <= residency.now else None
    return None
