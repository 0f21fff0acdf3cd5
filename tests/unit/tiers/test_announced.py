# SPDX-License-Identifier: Apache-2.0
"""Moments that random stories of KV events seldom come to, one by one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.store.announcer import CHANGES_A_TURN, READY_MAX, Announcer
from attnstore_vllm.tiers.announced import Announced, Removed, Stored
from attnstore_vllm.types import DRAM
from tests.event_helpers import Subscriber, TestTeller
from tests.helpers import CHUNK_TOKENS, Rig, memory_rig, name_of, sequence_of, tokens_of

TELLER = TestTeller()


def told(books: Announced) -> list[Stored | Removed]:
    return [what for change in books.take_changes(100) for what in books.tell(change)]


def test_a_chunk_that_is_saved_again_before_anybody_heard_that_it_went() -> None:
    name = name_of(sequence_of(tokens_of(1, CHUNK_TOKENS)), 0)
    blocks, books = TELLER.blocks(None, name.tokens), Announced()
    chunk = Chunk(name, dram=InTier(State.SAVING, 0))
    books.name(name.key, blocks)
    chunk.dram.state = State.READY
    books.at(chunk)
    assert told(books) == [Stored(DRAM, blocks, 0)]
    books.gone(name.key)
    again = Chunk(name, dram=InTier(State.SAVING, 1))
    books.name(name.key, blocks)
    assert told(books) == [Removed(DRAM, blocks.names)]
    again.dram.state = State.READY
    books.at(again)
    assert told(books) == [Stored(DRAM, blocks, 0)]
    books.gone(name.key)
    assert told(books) == [Removed(DRAM, blocks.names)]
    assert len(books) == 0, "nothing stays of what is gone"


def test_a_chunk_whose_save_is_given_up_leaves_nothing() -> None:
    name = name_of(sequence_of(tokens_of(1, CHUNK_TOKENS)), 0)
    books = Announced()
    books.name(name.key, TELLER.blocks(None, name.tokens))
    books.gone(name.key)
    assert told(books) == []
    assert len(books) == 0


class Clearing(TestTeller):
    """While an event is made, routers are told that all is gone."""

    announcer: Announcer | None = None

    def event(self, what: Stored | Removed) -> Any:
        if self.announcer is not None:
            self.announcer.all_cleared()
            self.announcer = None
        return what


def unthreaded(teller: TestTeller, **options: Any) -> tuple[Rig, Announcer]:
    rig = memory_rig(teller=teller, threaded=False, **options)
    announcer = rig.store.announcer
    assert announcer is not None
    return rig, announcer


def put(rig: Rig, announcer: Announcer, conversation: int) -> None:
    name = name_of(sequence_of(tokens_of(conversation, CHUNK_TOKENS)), 0)
    chunk = rig.store.begin_save(name)
    assert chunk is not None
    announcer.name(chunk, TELLER.blocks(None, name.tokens))
    rig.store.finish_saves([chunk])


def test_all_is_cleared_while_events_are_made() -> None:
    teller = Clearing()
    rig, announcer = unthreaded(teller)
    put(rig, announcer, 1)
    teller.announcer = announcer
    router = Subscriber()
    for _ in range(3):
        announcer.tick(True)
        router.hear(announcer.take(100))
    assert len(router.content[DRAM]) == 4, "told once"
    rig.pool.close()


def test_what_recovery_supersedes_is_told_to_be_gone() -> None:
    rig, announcer = unthreaded(TELLER)
    put(rig, announcer, 1)
    router = Subscriber()
    announcer.tick(False)
    router.hear(announcer.take(100))
    assert len(router.content[DRAM]) == 4
    residency = rig.store.residency
    (chunk,) = residency.index
    residency.index.remove(chunk)  # without a word
    announcer.recovered.append(name_of(sequence_of(tokens_of(2, CHUNK_TOKENS)), 0))
    for _ in range(2):
        announcer.tick(True)
    router.hear(announcer.take(100))
    assert not router.content[DRAM]
    assert announcer.is_quiet()
    rig.pool.close()


def test_events_that_nobody_takes_do_not_pile_up() -> None:
    rig, announcer = unthreaded(TELLER, dram_slots=8)
    router = Subscriber()
    for number in range(READY_MAX):
        put(rig, announcer, number)
        announcer.tick(True)
    assert len(announcer.ready) <= READY_MAX
    stored = len(rig.store.residency.index)
    assert len(announcer.books) <= 2 * stored + CHANGES_A_TURN, "nobody was told of the others"
    router.hear(announcer.take(1 << 20))
    while not announcer.is_quiet():
        announcer.tick(True)
        router.hear(announcer.take(1 << 20))
    assert len(router.content[DRAM]) == 4 * len(rig.store.residency.dram.owned)
    rig.pool.close()


class Broken(TestTeller):
    def event(self, what: Stored | Removed) -> Any:
        raise ValueError("another vLLM")


def test_an_error_ends_the_events_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    rig, announcer = unthreaded(Broken())
    put(rig, announcer, 1)
    with caplog.at_level(logging.ERROR):
        rig.store.tick()
        put(rig, announcer, 2)
        rig.store.tick()
    assert [r.message for r in caplog.records if "publishes no KV events" in r.message] != []
    assert len(rig.store.residency.index) == 2
    assert announcer.take(10) == []
    rig.pool.close()
