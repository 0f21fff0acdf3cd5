# SPDX-License-Identifier: Apache-2.0
"""KV whose ttl is over is not used again by any way but a computation of it anew."""

from __future__ import annotations

import pytest

from attnstore_vllm.policy.visits import Terms
from attnstore_vllm.store.lookup import Lookup
from tests.helpers import Rigs, conversation, lookup_of, name_of, sequence_of, tokens_of
from tests.unit.policy.test_visits import Clock, ask, save

TTL = Terms(ttl_s=60.0)


def test_the_same_answer_once_more_does_not_revive_the_expired_one(open_rig: Rigs) -> None:
    """A prompt of half a chunk, and an answer up to token 40: a look-up sees the prompt alone."""
    clock = Clock()
    rig, device = open_rig(clock=clock)
    ask(rig, 1, terms=TTL)
    device.settle()
    old = rig.chunk(name_of(sequence_of(conversation(1)), 1))
    clock.now += 100.0
    sequence = sequence_of(conversation(1, 8))
    with rig.store.queue() as queue:
        queue.append("again")
    pieces, visit = rig.store.arrive("again", Lookup(sequence), 8, 1, TTL)
    assert pieces == []
    rig.store.leave_queue(["again"])
    answered = sequence_of(conversation(1))
    for number in range(3):
        chunk = rig.store.begin_save(name_of(answered, number), visit.run(number))
        if chunk is not None:
            rig.store.finish_saves([chunk])
    device.settle()
    clock.now += 10.0
    found = rig.store.find(lookup_of(conversation(1)), 0, 40)
    assert old not in [piece.chunk for piece in found]


@pytest.mark.parametrize("eviction", ["attnstore", "lru", "fifo"])
def test_a_use_of_its_beginning_renews_nothing_behind_it(open_rig: Rigs, eviction: str) -> None:
    """Another conversation goes on from the first chunk alone."""
    clock = Clock()
    rig, device = open_rig(clock=clock, eviction=eviction)
    first = tokens_of(1, 48)
    save(rig, first, TTL)
    device.settle()
    clock.now += 50.0
    save(rig, first[:16] + tokens_of(2, 16), TTL)
    device.settle()
    clock.now += 50.0
    assert rig.store.find(lookup_of(first), 0, 48)[-1].stop == 16, "of 100 s ago, with a ttl of 60"
