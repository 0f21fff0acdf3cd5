# SPDX-License-Identifier: Apache-2.0
"""The prefix index, native tables and all, against a dict that scans.

It is long since the machine and its model are read side by side.

Goal: a chunk that was added is found by its key, with what was said of it, until it is removed,
whatever entry it has; a match is the longest; a tail that is superseded is found. Where the
index may miss (NEIGHBOURS_MAX, tokens on NVMe), what it does say must be true.
Method: hypothesis adds chunks that share prefixes, moves them to NVMe, back, and away.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnstore_vllm.index import keys
from attnstore_vllm.index.chunk import NOWHERE, Chunk, ChunkName, InTier, State
from attnstore_vllm.index.keys import MultimodalSpan, SequenceKeys, encode_tokens
from attnstore_vllm.index.prefix import NEIGHBOURS_MAX, Matched, Piece, PrefixIndex, confirm
from attnstore_vllm.types import NVME, TOKEN_BYTES, Key
from tests.helpers import CHUNK_TOKENS, NAMESPACE, name_of

PIECE_TOKENS = CHUNK_TOKENS // 8
CHUNKS_MAX = 150
CROWD = NEIGHBOURS_MAX + 8
TOKENS_MAX = 3 * CHUNK_TOKENS - 4
ROAD = [(i * 0x9E3779B1) % 2**32 for i in range(1, TOKENS_MAX + 1)]
WAYS = [256, 2**32 - 1]
a_piece = partial(Piece, grain=1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of ROAD up to `cut`, then of one of WAYS; perhaps with a salt or an image."""

    cut: int
    way: int
    num_tokens: int
    salt: str | None
    has_image: bool


prompts = st.builds(
    Prompt,
    cut=st.sampled_from([0, 1, 3, 7, 16, 17, 35, TOKENS_MAX, TOKENS_MAX]),
    way=st.sampled_from(WAYS),
    num_tokens=st.sampled_from([2, 5, 6, 15, 16, 18, 21, 32, 37, TOKENS_MAX]),
    salt=st.sampled_from([None, None, None, None, "a"]),
    has_image=st.sampled_from([False, False, False, False, True]),
)
choices = st.integers(0, 2**16)


@cache
def sequence_for(prompt: Prompt) -> SequenceKeys:
    tokens = [ROAD[i] if i < prompt.cut else prompt.way for i in range(prompt.num_tokens)]
    spans = [MultimodalSpan(b"a picture", 12, 8)] if prompt.has_image else []
    return SequenceKeys(keys.root_key(NAMESPACE, prompt.salt, b""), tokens, CHUNK_TOKENS, spans)


@cache
def names_for(prompt: Prompt) -> list[ChunkName]:
    count = -(-prompt.num_tokens // CHUNK_TOKENS)
    return [name_of(sequence_for(prompt), number, prompt.salt) for number in range(count)]


def branch(base: ChunkName, num_shared: int, token: int) -> ChunkName:
    """A whole chunk that has the first tokens of `base`, and then always the same."""
    begin = base.tokens[: num_shared * TOKEN_BYTES]
    tokens = begin + encode_tokens([token] * (CHUNK_TOKENS - len(begin) // TOKEN_BYTES))
    key = keys.chunk_key(base.parent, base.extra, tokens)
    return replace(base, key=key, tokens=tokens, num_tokens=CHUNK_TOKENS)


def common(a: bytes, b: bytes) -> int:
    """The number of leading tokens that are the same, one by one."""
    pairs = zip(memoryview(a).cast("I"), memoryview(b).cast("I"), strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)) // TOKEN_BYTES)


@dataclass(slots=True)
class Known:
    """A chunk that the index has."""

    name: ChunkName
    """With its tokens, also while the index does not know them."""
    entry: int
    chunk: Chunk | None
    """As long as DRAM has it, or is getting it. None: it is on NVMe only."""
    is_alone: bool
    slot: int = -1
    checksum: bytes = b""

    @property
    def usable(self) -> bool:
        return self.chunk is None or self.chunk.dram.state is State.READY

    def shared(self, wanted: bytes) -> tuple[int, bool]:
        """The leading tokens that a look-up may promise, and whether for sure."""
        count = common(self.name.tokens, wanted)
        if self.chunk is not None or count == self.name.num_tokens:
            return count, True  # by its tokens, or by its key
        return count // PIECE_TOKENS * PIECE_TOKENS, False


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Key, Known] = {}
        self.gone: deque[Key] = deque(maxlen=8)
        self.recent: deque[Prompt] = deque(maxlen=5)
        self.matched: defaultdict[SequenceKeys, Matched] = defaultdict(Matched)
        """What look-ups of these have found, and refer to."""
        self.num_made = 0

    @initialize(seed=st.integers(0, 2**64 - 1))
    def start(self, seed: int) -> None:
        self.index = PrefixIndex(CHUNK_TOKENS, seed, grain=1)  # for others: test_stops.py

    def pick(self, which: int, accept: Callable[[Known], bool]) -> Known | None:
        """One of those chunks, if there is one."""
        found = [known for known in self.known.values() if accept(known)]
        return found[which % len(found)] if found else None

    # ---- coming and going --------------------------------------------------------------

    def enter(self, name: ChunkName, dram: State, *, is_alone: bool = False) -> None:
        chunk = Chunk(name, dram=InTier(dram), is_alone=is_alone)
        if name.key in self.known:
            with pytest.raises(ValueError, match="known already"):
                self.index.add(chunk)
            return
        self.index.add(chunk)
        assert chunk.entry not in {known.entry for known in self.known.values()}
        self.known[name.key] = Known(name, chunk.entry, chunk, is_alone)

    @precondition(lambda self: len(self.known) < CHUNKS_MAX)
    @rule(prompt=prompts, first=st.integers(0, 2), is_saving=st.booleans(), is_alone=st.booleans())
    def add(self, prompt: Prompt, first: int, is_saving: bool, is_alone: bool) -> None:
        self.recent.append(prompt)
        for name in names_for(prompt)[first:]:
            self.enter(name, State.SAVING if is_saving else State.READY, is_alone=is_alone)

    @precondition(lambda self: len(self.known) < CHUNKS_MAX - CROWD)
    @rule(prompt=prompts, number=st.integers(0, 2), shared=st.integers(0, 15), cold=st.booleans())
    def add_crowd(self, prompt: Prompt, number: int, shared: int, cold: bool) -> None:
        """More siblings that begin with the same tokens than are looked at."""
        self.recent.append(prompt)
        for _ in range(CROWD):
            self.num_made += 1
            name = branch(names_for(prompt)[: number + 1][-1], shared, 10**6 + self.num_made)
            self.enter(name, State.READY)
            if cold:
                self.cool_one(self.known[name.key])

    @rule(which=choices)
    def finish_save(self, which: int) -> None:
        saving = self.pick(which, lambda known: not known.usable)
        if saving is not None and saving.chunk is not None:
            saving.chunk.dram.state = State.READY

    @rule(which=choices, as_entry=st.booleans(), count=st.sampled_from([1, 1, 3, 20]))
    def remove(self, which: int, as_entry: bool, count: int) -> None:
        for _ in range(count):
            known = self.pick(which, lambda _: True)
            if known is None:
                return
            if known.chunk is None and as_entry:
                self.index.remove_entry(known.entry)
            else:
                chunk = self.index.get(known.name.key)
                assert chunk is not None
                self.index.remove(chunk)
                assert chunk.entry == -1
            with pytest.raises(IndexError):
                self.index.entries.record(known.entry)
            del self.known[known.name.key]
            self.gone.append(known.name.key)

    @precondition(lambda self: len(self.known) > 12)
    @rule(leave=choices)
    def clear(self, leave: int) -> None:
        """Bits of `leave` choose those that go, of the chunks whose tokens are known."""
        kept = [k for i, k in enumerate(self.known.values()) if k.chunk and ~leave >> i % 16 & 1]
        chunks = [known.chunk for known in kept if known.chunk is not None]
        self.index.clear(chunks)
        self.gone.extend(self.known)
        self.known = {known.name.key: known for known in kept}
        for known, chunk in zip(kept, chunks, strict=True):
            known.entry = chunk.entry

    # ---- between the tiers -------------------------------------------------------------

    def bind_one(self, known: Known) -> None:
        assert known.chunk is not None
        self.num_made += 1
        known.slot, known.checksum = self.num_made, self.num_made.to_bytes(16, "big")
        known.chunk.behind[NVME] = InTier(State.READY, known.slot, known.checksum)
        self.index.bind(known.chunk)

    def cool_one(self, known: Known) -> None:
        """It leaves DRAM: with the last reference to its object the index forgets its tokens."""
        if known.slot < 0:
            self.bind_one(known)
        assert known.chunk is not None
        known.chunk.dram = NOWHERE
        known.chunk = None
        for matched in self.matched.values():
            matched.forget()
        assert self.index.live(known.entry) is None

    @rule(which=choices)
    def bind_or_unbind(self, which: int) -> None:
        known = self.pick(which, lambda k: k.chunk is not None and k.usable)
        if known is None or known.chunk is None:
            return
        if known.slot < 0:
            self.bind_one(known)
            return
        self.index.unbind(known.chunk)
        known.slot, known.checksum = -1, b""
        del known.chunk.behind[NVME]

    @rule(which=choices, count=st.sampled_from([1, 5, 40]))
    def cool(self, which: int, count: int) -> None:
        for _ in range(count):
            known = self.pick(which, lambda k: k.chunk is not None and k.usable)
            if known is not None:
                self.cool_one(known)

    @rule(which=choices)
    def warm(self, which: int) -> None:
        known = self.pick(which, lambda k: k.chunk is None)
        if known is None:
            return
        chunk = self.index.get(known.name.key)
        assert chunk is not None
        assert self.index.get(known.name.key) is self.index.chunk(known.entry) is chunk
        assert (chunk.dram.state, chunk.at(NVME).state) == (State.ABSENT, State.READY)
        assert (chunk.at(NVME).slot, chunk.at(NVME).checksum) == (known.slot, known.checksum)
        assert chunk.is_alone == known.is_alone
        others = bytes([known.name.tokens[0] ^ 1]) + known.name.tokens[1:]
        assert not self.index.learn(chunk, others)
        assert chunk.name.tokens == b""
        assert self.index.learn(chunk, known.name.tokens)
        assert chunk.name == known.name
        chunk.dram, known.chunk = InTier(State.READY), chunk

    # ---- looking up --------------------------------------------------------------------

    def siblings(self, parent: Key, extra: bytes) -> list[Known]:
        group = (parent, extra)
        return [k for k in self.known.values() if (k.name.parent, k.name.extra) == group]

    @rule(prompt=prompts, start=st.sampled_from([0, 1, 3, 16, 18, 31]), stop=st.integers(1, 44))
    def look_up(self, prompt: Prompt, start: int, stop: int) -> None:
        self.recent.append(prompt)
        self.check_match(sequence_for(prompt), start, min(stop, prompt.num_tokens))

    def check_match(self, sequence: SequenceKeys, start: int, stop: int) -> None:
        matched = self.matched[sequence]
        pieces = self.index.match(sequence, start, stop, matched=matched)
        if any(self.known[piece.chunk.name.key].chunk is None for piece in matched.pieces):
            matched.forget()  # what is on NVMe only has no object once we have looked
        position = start
        for number in range(start // CHUNK_TOKENS, len(sequence.token_ids) // CHUNK_TOKENS):
            known = self.known.get(sequence.key(number))
            if position >= stop or known is None or not known.usable:
                break
            end = min((number + 1) * CHUNK_TOKENS, stop)
            assert pieces.pop(0) == a_piece(self.index.chunk(known.entry), position, end)
            position = end
        assert len(pieces) <= (position < stop)
        if position < stop:
            self.check_last(pieces[0] if pieces else None, sequence, position, stop)

    def check_last(
        self, piece: Piece | None, sequence: SequenceKeys, position: int, stop: int
    ) -> None:
        """The piece within a chunk, or none: tokens [position, stop) were to be found."""
        first = position // CHUNK_TOKENS * CHUNK_TOKENS
        wanted = sequence.tokens(first, min(first + CHUNK_TOKENS, stop))
        number = first // CHUNK_TOKENS
        siblings = self.siblings(sequence.parent(number), sequence.extra(number))
        usable = [known for known in siblings if known.usable]
        best, exact = max((known.shared(wanted) for known in usable), default=(0, False))
        if len(siblings) <= NEIGHBOURS_MAX:
            assert (piece is not None) == (first + best > position)
            assert piece is None or (piece.stop - first, piece.exact) == (best, exact)
        elif len(siblings) - len(usable) < NEIGHBOURS_MAX:
            # It may not be the best, but of those that share most eighths one is looked at.
            found = piece.stop - first if piece is not None else position - first
            assert found >= best // PIECE_TOKENS * PIECE_TOKENS
        if piece is not None:
            known = self.known[piece.chunk.name.key]
            count, exact = known.shared(wanted)
            assert known in usable
            assert piece == a_piece(self.index.chunk(known.entry), position, first + count, exact)
            # What a sketch says holds, and perhaps more, once the tokens have been read.
            assert confirm(piece, sequence, stop) is (piece if exact else None)
            assert self.index.learn(piece.chunk, known.name.tokens)
            end = first + common(known.name.tokens, wanted)
            assert confirm(piece, sequence, stop) == replace(piece, stop=end, exact=True)

    def check_superseding(self, name: ChunkName) -> None:
        siblings = self.siblings(name.parent, name.extra)
        longer = [k for k in siblings if k.name.tokens.startswith(name.tokens)]
        is_extended = self.index.extends(name)
        assert longer or not is_extended or any(k.chunk is None for k in siblings)
        objects = [self.index.chunk(k.entry) for k in siblings]  # as if each were being read
        assert self.index.extends(name) == is_extended, objects
        in_dram = [k for k in longer if k.chunk is not None and k.name.key != name.key]
        if len(siblings) <= NEIGHBOURS_MAX and in_dram:
            assert is_extended
        tails = [k for k in siblings if name.tokens.startswith(k.name.tokens)]
        tails.sort(key=lambda k: -k.name.num_tokens)  # `name` itself may be the first
        entries = [k.entry for k in tails if k.name.key != name.key]
        assert [chunk.entry for chunk in self.index.extended_by(name)] == entries

    # ---- what always holds -------------------------------------------------------------

    @invariant()
    def look_ups_agree(self) -> None:
        for prompt in self.recent:
            sequence = sequence_for(prompt)
            self.check_match(sequence, 0, prompt.num_tokens)
            for name in names_for(prompt):
                self.check_superseding(name)

    @invariant()
    def entries_agree(self) -> None:
        index = self.index
        assert len(index) == len(self.known)
        assert sorted(index.entries.ids()) == sorted(k.entry for k in self.known.values())
        for key, known in self.known.items():
            assert index.live(known.entry) is known.chunk
            assert index.entries.find(key) == known.entry
            record = index.entries.record(known.entry)
            assert ChunkName(*record[:6], known.name.tokens) == known.name
            assert record[6] == known.is_alone
            assert record[7] == known.slot
            assert known.slot < 0 or record[8] == known.checksum
        assert set(index.all_live()) == {k.chunk for k in self.known.values()} - {None}
        assert all(index.get(key) is None for key in self.gone if key not in self.known)

    def teardown(self) -> None:
        if hasattr(self, "index"):
            assert {chunk.name.key for chunk in self.index} == self.known.keys()
            self.remove(0, True, len(self.known))
            assert len(self.index) == 0


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=50)


SIBLINGS = 20_000
BATCH = 500  # between two readings of the clock
FIRST = names_for(Prompt(TOKENS_MAX, 0, CHUNK_TOKENS, None, False))[0]


def seconds(work: Callable[[ChunkName], object], names: list[ChunkName]) -> float:
    started = time.perf_counter()
    for name in names:
        work(name)
    return time.perf_counter() - started


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("part_at", [0, CHUNK_TOKENS - 1])
def test_many_siblings_cost_no_more_than_few(part_at: int, cold: bool) -> None:
    index, chunks = PrefixIndex(CHUNK_TOKENS, seed=part_at, grain=1), dict[Key, Chunk]()
    names = [branch(FIRST, part_at, number) for number in range(SIBLINGS)]

    def add(name: ChunkName) -> None:
        at_rest = InTier(State.READY, len(index), bytes(16))
        chunk = Chunk(name, behind={NVME: at_rest})
        index.add(chunk)
        if not cold:
            chunk.dram, chunks[name.key] = InTier(State.READY), chunk

    def look_up(name: ChunkName) -> None:
        """Of another sibling's tokens all but the last, and one that nobody has."""
        head = name.tokens[:-TOKEN_BYTES]
        best = index.best_match(FIRST.parent, b"", head + encode_tokens([SIBLINGS]))
        assert best is not None
        assert best[2] is not cold
        assert best[1] == (CHUNK_TOKENS - PIECE_TOKENS if cold else CHUNK_TOKENS - 1)
        assert part_at == CHUNK_TOKENS - 1 or best[0].name.key == name.key
        found = index.best_match(FIRST.parent, b"", name.tokens)
        assert found is not None
        assert (found[0].name.key, found[1:]) == (name.key, (CHUNK_TOKENS, True))

    adds, looks = list[float](), list[float]()
    for at in range(0, SIBLINGS, BATCH):
        adds.append(seconds(add, names[at : at + BATCH]))
        if at < 3 * BATCH or at >= SIBLINGS - 3 * BATCH:
            step = max(1, (at + BATCH) // BATCH)
            looks.append(seconds(look_up, names[: at + BATCH : step]))
    assert len(index) == SIBLINGS
    # A linear search would take some ten times as long; the clock of a busy machine is rough.
    assert min(adds[-4:]) < 4 * max(adds[:4])
    assert min(looks[-3:]) < 4 * max(looks[:3])
