# SPDX-License-Identifier: Apache-2.0
"""A truncated conversation goes on at another engine: its KV is moved from a sibling's chunks."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnstore_vllm.index import moved as moved_kv
from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys, encode_tokens, root_key
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.peers import peers_io
from attnstore_vllm.tiers.peers.owner import MOVABLE
from attnstore_vllm.tiers.peers.wire import WireError
from attnstore_vllm.tiers.remote import Ask, Found
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.types import TOKEN_BYTES, Key
from tests.helpers import CHUNK_TOKENS, NAMESPACE, conversation, payload_of
from tests.peer_engine import PeerEngine, PeerProcess

SLOTS = 128
"""A quarter of them may be held for siblings."""
WHOLE = 320
SYSTEM, CUT = 21, 80
"""Tokens of the conversation that stay in their place, and the first that stays behind them."""


@pytest.fixture(scope="module")
def process() -> Iterator[PeerProcess]:
    made = PeerProcess()
    yield made
    made.close()


@pytest.fixture
def sibling(tmp_path: Path, process: PeerProcess) -> Iterator[PeerProcess]:
    process.open(tmp_path, 1, slots=SLOTS)
    yield process
    process.call("shut")


@pytest.fixture
def here(tmp_path: Path, sibling: PeerProcess) -> Iterator[PeerEngine]:
    engine = PeerEngine(tmp_path, 0, 2, SLOTS)
    sibling.call("wait_ready")
    engine.wait_ready()
    yield engine
    engine.wait(engine.is_idle)
    engine.store.check_integrity()
    engine.close()


def truncated(number: int = 1) -> list[int]:
    tokens = conversation(number, WHOLE)
    return tokens[:SYSTEM] + tokens[CUT:]


def lookup_for(tokens: list[int], salt: str | None = None, *, finds_moved: bool) -> Lookup:
    root = root_key(NAMESPACE, salt, b"")
    keys = SequenceKeys(root, tokens, CHUNK_TOKENS)
    return Lookup(keys, may_ask=True, finds_moved=finds_moved)


def read(
    engine: PeerEngine, tokens: list[int], salt: str | None = None, *, finds_moved: bool = True
) -> list[Piece]:
    """What a request finds once siblings were asked and all has come, its bytes compared."""
    lookup = lookup_for(tokens, salt, finds_moved=finds_moved)

    def find() -> list[Piece]:
        return engine.store.find(lookup, 0, len(tokens))

    find()
    engine.wait(lambda: not awaits_remote(lookup))
    engine.wait(lambda: all(piece.chunk.dram.state is State.READY for piece in find()))
    held = engine.store.hold_ready(find(), lookup.keys, len(tokens))
    for piece in held:
        assert bytes(engine.pool.slot(piece.chunk.dram.slot)) == payload_of(piece.chunk.name)
    engine.store.loaded(piece.chunk for piece in held)
    return held


def test_what_was_cut_is_moved_from_a_siblings_chunks(
    here: PeerEngine, sibling: PeerProcess
) -> None:
    sibling.call("put_movable", 1, WHOLE)
    prompt = truncated()
    pieces = read(here, prompt)
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, len(prompt))
    placed = [piece for piece in pieces if piece.first is None]
    moved = [piece for piece in pieces if piece.first is not None]
    assert placed[-1].stop == SYSTEM
    assert {piece.shift for piece in moved} == {SYSTEM - CUT}
    for piece in moved:
        assert piece.first is not None
        first, count = piece.first, piece.stop - piece.start
        of_chunk = piece.chunk.name.tokens[first * TOKEN_BYTES :][: count * TOKEN_BYTES]
        assert of_chunk == encode_tokens(prompt[piece.start : piece.stop])
    assert sibling.call("tokens", 1, WHOLE) == 0


def test_it_is_moved_again_without_a_question(here: PeerEngine, sibling: PeerProcess) -> None:
    sibling.call("put_movable", 1, WHOLE)
    read(here, truncated())
    lookup = lookup_for(truncated(), finds_moved=True)
    lookup.may_ask = False
    assert here.store.find(lookup, 0, len(truncated()))[-1].stop == len(truncated())


@pytest.mark.parametrize(
    ("salt", "finds_moved"), [("alice", True), (None, False)], ids=["another salt", "does not ask"]
)
def test_who_may_not_have_it_is_told_nothing_of_it(
    here: PeerEngine, sibling: PeerProcess, salt: str | None, finds_moved: bool
) -> None:
    sibling.call("put_movable", 1, WHOLE)
    assert all(p.first is None for p in read(here, truncated(), salt, finds_moved=finds_moved))
    assert len(list(here.store.residency.index.all_live())) <= 2, "chunks behind the cut came too"


def test_what_a_sibling_had_moved_is_not_moved_again(
    here: PeerEngine, sibling: PeerProcess
) -> None:
    native_from = 150
    sibling.call("put_movable", 1, WHOLE, None, native_from)
    tokens = conversation(1, WHOLE)
    assert (
        read(here, tokens[:SYSTEM] + tokens[native_from:])[-1].stop == SYSTEM + WHOLE - native_from
    )
    assert read(here, tokens[:SYSTEM] + tokens[native_from - 1 :])[-1].stop <= SYSTEM
    for chunk in here.store.residency.index.all_live():
        first = native_from - chunk.name.position
        assert first < CHUNK_TOKENS or chunk.name.position < SYSTEM


def test_it_begins_where_our_own_chunks_part_from_the_prompt(
    here: PeerEngine, sibling: PeerProcess
) -> None:
    """The sibling has nothing in its place: it has to hear of the very token."""
    head = conversation(2, SYSTEM)
    here.put(2, 3 * CHUNK_TOKENS)
    sibling.call("put_movable", 1, WHOLE)
    prompt = head + conversation(1, WHOLE)[CUT:]
    pieces = read(here, prompt)
    assert pieces[-1].stop == len(prompt)
    assert next(piece for piece in pieces if piece.first is not None).start == SYSTEM


def test_a_note_of_what_has_gone_hides_nothing(here: PeerEngine, sibling: PeerProcess) -> None:
    """The sibling had the tokens in two conversations, and dropped the later one."""
    sibling.call("put_movable", 1, WHOLE)
    sibling.call("put_movable_and_drop", 3, 1, CUT, WHOLE)
    assert read(here, truncated())[-1].stop == len(truncated())


def test_what_is_in_its_place_comes_before_what_is_moved() -> None:
    lookup = lookup_for(truncated(), finds_moved=True)
    ask = Ask(lookup, 0, WHOLE - CUT, lambda: 0.0)
    moved = peers_io.movable_of(ask, answer()) * 100
    assert (
        peers_io.length_of([Found(ask.name(0))])
        > peers_io.length_of(moved)
        > peers_io.length_of([])
    )
    assert peers_io.length_of([Found(ask.name(0)), *moved]) > peers_io.length_of(
        [Found(ask.name(0))]
    )


def test_a_long_prompt_is_answered_in_parts(
    here: PeerEngine, sibling: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither engine's lock is held for all of it at once."""
    here.put_movable(1, WHOLE)
    tokens = encode_tokens(truncated())
    root = root_key(NAMESPACE, None, b"")

    def named() -> int:
        return len(here.io.context.moved.movable(root, tokens, SYSTEM, lambda chunk: True))

    whole = named()
    monkeypatch.setattr(moved_kv, "MOVABLE_MAX", 5)
    assert named() == 5 < whole
    monkeypatch.setattr(moved_kv, "MOVABLE_MAX", 512)
    monkeypatch.setattr(moved_kv, "MOVABLE_TOKENS_MAX", 100)
    assert 100 // CHUNK_TOKENS <= named() < whole


def test_a_note_goes_with_what_was_only_heard_of(
    here: PeerEngine, sibling: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.io, "lease_s", 0.2)
    sibling.call("put_movable", 1, WHOLE)
    lookup = lookup_for(truncated(), finds_moved=True)
    here.store.find(lookup, 0, len(truncated()))
    here.wait(lambda: not awaits_remote(lookup))
    forgotten: list[bytes] = []
    forget = here.io.context.moved.forget

    def note(key: Key) -> None:
        forgotten.append(key)
        forget(key)

    monkeypatch.setattr(here.io.context.moved, "forget", note)
    here.wait(lambda: not list(here.store.residency.index.all_live()))
    assert len(forgotten) >= (WHOLE - CUT) // CHUNK_TOKENS


def answer(**changed: object) -> list[bytes]:
    given = {"head": MOVABLE.pack(64, 0, True), "parent": bytes(32), "tokens": bytes(64)}
    fields = given | changed
    return [bytes(field) for field in fields.values()]  # type: ignore[call-overload]


def test_an_answer_that_cannot_be_ends_the_connection() -> None:
    lookup = lookup_for(truncated(), finds_moved=True)
    ask = Ask(lookup, 0, WHOLE - CUT, lambda: 0.0)
    assert len(peers_io.movable_of(ask, answer())) == 1
    for wrong in (
        answer(head=MOVABLE.pack(64, 16, True)),
        answer(parent=bytes(31)),
        answer(tokens=bytes(63)),
        answer(tokens=bytes(68)),
        answer(tokens=b""),
        answer(head=MOVABLE.pack(67, 0, True)),
        answer(head=MOVABLE.pack(1 << 40, 0, True)),
    ):
        with pytest.raises(WireError):
            peers_io.movable_of(ask, wrong)
    with pytest.raises((struct.error, ValueError)):
        peers_io.movable_of(ask, answer()[:-1])
    with pytest.raises(struct.error):
        peers_io.movable_of(ask, answer(head=b"short"))


def test_what_has_a_time_of_its_own_is_not_told(here: PeerEngine, sibling: PeerProcess) -> None:
    """A copy would not know when it ends."""
    sibling.call("put_for_a_time", 1, 48, 3600.0)
    sibling.call("put", 2, 48)
    assert (here.tokens(1, 48), here.tokens(2, 48)) == (0, 48)
