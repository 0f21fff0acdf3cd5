# SPDX-License-Identifier: Apache-2.0
"""What hits tell of a stored sequence that is not known to who asks: no part of a block.

Two stores differ in one sequence, from token n of its prompt on; it is as long in both. Whatever
others do who have not guessed its tokens up to the first multiple of a block behind n, in either
store: store guesses (also as ends of answers, which a user can dictate), ask, wait until KV goes to
NVMe, comes back or is evicted. All hits are the same in both. A cache of whole blocks promises as
much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import SequenceKeys, chunk_key
from attnstore_vllm.index.prefix import confirm, kept_end, whole_blocks
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.types import NVME
from tests.helpers import lru, sequence_of

GRAIN, CHUNK = 4, 64  # eighths of two blocks, as in chunks of 256
SLOTS = 512
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Store:
    """A request leaves its KV."""

    tokens: Tokens
    num_prompt: int


@dataclass(frozen=True)
class StoreTheSecret:
    pass


@dataclass(frozen=True)
class Ask:
    """How many of the tokens are a hit?"""

    tokens: Tokens


@dataclass(frozen=True)
class Cool:
    """All goes to NVMe, and out of DRAM: the tokens are forgotten."""


@dataclass(frozen=True)
class Evict:
    """What is left of the KV that one of the requests before has left."""

    number: int


Act = Store | StoreTheSecret | Ask | Cool | Evict


class World:
    """A store, as its callers use it."""

    def __init__(self, secret: Store) -> None:
        self._secret = secret
        self._residency = Residency(SLOTS, SLOTS, lru, chunk_tokens=CHUNK, grain=GRAIN)
        self._residency.nvme.open(0, SLOTS)
        self._names: list[list[ChunkName]] = []

    def do(self, act: Act) -> int | None:
        match act:
            case StoreTheSecret():
                self._store(self._secret)
            case Store():
                self._store(act)
            case Ask():
                return self._ask(sequence_of(act.tokens, chunk_tokens=CHUNK))
            case Cool():
                self._cool()
            case Evict():
                self._evict(act.number)
        return None

    def _store(self, what: Store) -> None:
        stop = kept_end(len(what.tokens), what.num_prompt, GRAIN)
        sequence = sequence_of(what.tokens, chunk_tokens=CHUNK)
        names = []
        for start in range(0, stop, CHUNK):
            number, end = start // CHUNK, min(start + CHUNK, stop)
            parent, tokens = sequence.parent(number), sequence.tokens(start, end)
            if end - start >= GRAIN:
                key = chunk_key(parent, b"", tokens)
                names.append(ChunkName(key, parent, b"", bytes(32), start, end - start, tokens))
        self._names.append(names)
        chunks = [self._residency.begin_save(name) for name in names]
        for chunk in chunks:
            if chunk is not None:
                self._residency.finish_save(chunk)

    def _ask(self, sequence: SequenceKeys) -> int:
        """What is found by its sketch is read, and looked at once more."""
        stop = len(sequence.token_ids) - 1
        pieces = self._residency.index.match(sequence, 0, stop)
        if not pieces:
            return 0
        last = pieces[-1]
        if not last.exact:
            self._read(last.chunk)
        confirmed = confirm(last, sequence, stop)
        return confirmed.stop if confirmed is not None else last.start

    def _read(self, chunk: Chunk) -> None:
        assert self._residency.begin_fetch(chunk, self._residency.nvme)
        known = {name.key: name.tokens for names in self._names for name in names}
        assert self._residency.index.learn(chunk, known[chunk.name.key])
        self._residency.finish_fetch(chunk, verified=True)

    def _cool(self) -> None:
        residency = self._residency
        while (chunk := residency.begin_store(residency.nvme)) is not None:
            residency.finish_store(residency.nvme, chunk, bytes(16))
        for chunk in list(residency.dram.owned.values()):
            assert (chunk.dram.state, chunk.at(NVME).state) == (State.READY, State.READY)
            residency.leave_dram(chunk)

    def _evict(self, number: int) -> None:
        for name in self._names[number] if number < len(self._names) else ():
            chunk = self._residency.index.get(name.key)
            if chunk is not None:
                self._residency.drop(chunk)


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


TOKEN = st.integers(0, 2)


@st.composite
def games(draw: st.DrawFn) -> tuple[Store, Store, list[Act]]:
    """A secret, another, and what those do who have not guessed either."""
    known = draw(st.sampled_from([0, 1, 2, 5, 14, 16])) * GRAIN + draw(st.integers(0, GRAIN - 1))
    template = tuple(draw(st.lists(TOKEN, min_size=known, max_size=known)))
    length = draw(st.integers(0, 2 * GRAIN + 1))
    num_prompt = known + 1 + draw(st.integers(0, length))
    rests = [draw(st.lists(TOKEN, min_size=length, max_size=length)) for _ in range(2)]
    secrets = [Store((*template, n, *rest), num_prompt) for n, rest in enumerate(rests)]
    guessed = whole_blocks(known, GRAIN) + GRAIN

    def others() -> Tokens:
        """Most are as near to a secret as they may be."""
        base = draw(st.sampled_from(secrets)).tokens[: guessed - 1]
        base = base[: len(base) - draw(st.sampled_from([0, 0, 1, 1, 2, 3, GRAIN, 2 * GRAIN]))]
        rest = draw(st.sampled_from([0, 0, 1, 2, GRAIN, 2 * GRAIN]))
        return (*base, *draw(st.lists(TOKEN, min_size=rest, max_size=rest))) or (0,)

    def act() -> Act:
        kind = draw(st.sampled_from("ssaaaakce"))
        if kind == "k":
            return StoreTheSecret()
        if kind == "c":
            return Cool()
        if kind == "e":
            return Evict(draw(st.integers(0, 5)))
        tokens = others()
        if max(shared(tokens, s.tokens) for s in secrets) >= guessed:
            return Cool()
        if kind == "a":
            return Ask((*tokens, 3))
        return Store(tokens, draw(st.sampled_from([0, len(tokens)])))

    acts: list[Act] = [act() for _ in range(draw(st.integers(2, 10)))]
    at = draw(st.integers(0, len(acts)))
    return secrets[0], secrets[1], [*acts[:at], StoreTheSecret(), *acts[at:]]


def answers(secret: Store, acts: list[Act]) -> list[int | None]:
    world = World(secret)
    return [world.do(act) for act in acts]


def play(game: tuple[Store, Store, list[Act]]) -> None:
    one, another, acts = game
    assert answers(one, acts) == answers(another, acts)


@given(games())
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_part_of_a_block_is_told(game: tuple[Store, Store, list[Act]]) -> None:
    play(game)
