# SPDX-License-Identifier: Apache-2.0
"""KV that is moved is of another conversation: a request that takes it has its own ttl for its own,
and the chunks that it takes are kept as long as the longest of their users said."""

from __future__ import annotations

import pytest

from attnstore_vllm.config.settings import TruncationConfig
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import NO_TERMS, Terms
from attnstore_vllm.store.lookup import Lookup
from tests.helpers import Rig, Rigs, lookup_of, name_of, names_of, sequence_of, tokens_of
from tests.unit.policy.test_visits import Clock

MOVES = TruncationConfig(enabled=True, min_tokens=32, shared_by="everyone")
SHORT, LONG = Terms(ttl_s=20.0), Terms(ttl_s=600.0)


def serve(rig: Rig, tokens: list[int], terms: Terms, *, moves: bool = False) -> int:
    """A request for all these tokens, answered. Returns up to where it finds KV."""
    sequence = sequence_of(tokens)
    lookup = Lookup(sequence, finds_moved=moves)
    pieces, visit = rig.store.arrive("request", lookup, len(tokens), 1, terms)
    for number, name in enumerate(names_of(sequence)):
        chunk = rig.store.begin_save(name, visit.run(number))
        if chunk is not None:
            rig.store.finish_saves([chunk])
            rig.store.may_be_moved(name, sequence.root)
    rig.store.answered(visit.own, 0)
    return pieces[-1].stop if pieces else 0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rig(open_rig: Rigs, clock: Clock) -> Rig:
    return open_rig(64, 64, clock=clock, truncation=MOVES)[0]


def test_a_request_that_takes_moved_kv_has_its_own_ttl(rig: Rig, clock: Clock) -> None:
    """More pieces are found than they fill chunks of its prompt: they begin at any token."""
    source = tokens_of(1, 192)
    serve(rig, source, NO_TERMS)
    cut = source[:20] + source[70:170] + tokens_of(2, 40)
    assert serve(rig, cut, SHORT, moves=True) == 118
    clock.now += 25.0
    rig.store.residency.now = clock.now
    for number in range(1, 10):
        own = rig.chunk(name_of(sequence_of(cut), number))
        assert rig.store.residency.has_expired(own), f"chunk {number}: used 25 s ago, ttl 20"


def test_what_is_moved_is_kept_as_long_as_its_users_said(rig: Rig, clock: Clock) -> None:
    """And not as what stands before it in the prompt, which others share."""
    system, source = tokens_of(3, 20), tokens_of(1, 192)
    serve(rig, system, NO_TERMS)
    serve(rig, source, SHORT)
    assert serve(rig, system + source[70:170] + tokens_of(2, 8), SHORT, moves=True) == 118
    rig.store.residency.now = clock.now = clock.now + 25.0
    for number, name in enumerate(names_of(sequence_of(source))):
        chunk = rig.chunk(name)
        assert rig.store.residency.has_expired(chunk), f"{number}: used 25 s ago, with a ttl of 20"


@pytest.mark.parametrize("terms", [LONG, NO_TERMS])
def test_who_takes_it_takes_no_time_from_others(rig: Rig, clock: Clock, terms: Terms) -> None:
    source = tokens_of(1, 192)
    serve(rig, source, terms)
    assert serve(rig, source[:20] + source[70:170] + tokens_of(2, 8), SHORT, moves=True) == 118
    clock.now += 25.0
    assert rig.store.find(lookup_of(source), 0, 192)[-1].stop == 192


def test_who_moves_a_part_of_a_chunk_keeps_none_of_it(rig: Rig, clock: Clock) -> None:
    """The rest of it is another's, who has said for how long. What is moved whole is of both."""
    source = tokens_of(1, 192)
    serve(rig, source, SHORT)
    moved = source[:20] + source[70:170]
    assert serve(rig, moved + tokens_of(2, 8), NO_TERMS, moves=True) == len(moved) - 2
    rig.store.residency.now = clock.now = clock.now + 25.0
    chunks = [rig.chunk(name) for name in names_of(sequence_of(source))]
    kept = {n for n, chunk in enumerate(chunks) if not rig.store.residency.has_expired(chunk)}
    assert kept == {0, *range(5, 10)}, "of the fourth and the tenth it has moved a part"


@pytest.mark.parametrize("terms", [SHORT, Terms(Priority.ENDED), Terms(Priority.LOW)], ids=str)
def test_the_next_turn_of_where_it_came_from_ends_nothing_of_who_moved_it(
    rig: Rig, clock: Clock, terms: Terms
) -> None:
    source = tokens_of(1, 192)
    serve(rig, source, NO_TERMS)
    assert serve(rig, source[80:180] + tokens_of(2, 40), NO_TERMS, moves=True) > 90
    chunks = [rig.chunk(name) for name in names_of(sequence_of(source))]
    moved = [chunk for chunk in chunks if rig.store.residency.run_of(chunk).is_shared]
    assert len(moved) >= 5
    clock.now += 1
    serve(rig, source + tokens_of(5, 32), terms)
    for run in map(rig.store.residency.run_of, moved):
        assert (run.priority, run.lease) == (Priority.NORMAL, None)
