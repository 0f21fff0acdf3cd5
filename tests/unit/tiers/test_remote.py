# SPDX-License-Identifier: Apache-2.0
"""What a remote tier said to have is believed while its lease lasts, and no longer.

However often it was renewed, and whether or not the store's thread came to free what has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others
from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.moved import MovedKv
from attnstore_vllm.policy.eviction.departures import departures
from attnstore_vllm.policy.lazy_heap import STALE_MAX
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import Terms
from attnstore_vllm.tiers.remote import (
    ENDED_MAX,
    Found,
    RemoteTier,
    end_leases,
    enter,
    is_believed,
)
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.tiers.residency import Residency
from tests.helpers import (
    CHUNK_TOKENS,
    conversation,
    lookup_of,
    memory_rig,
    names_of,
    payload_of,
    sequence_of,
    tokens_of,
)
from tests.unit.policy.test_visits import Clock, save

ENTRIES = 1000
LEASE_S = 1.0


@cache
def name_of(number: int) -> ChunkName:
    (name,) = names_of(sequence_of(conversation(number, CHUNK_TOKENS)))
    return name


class Tier:
    """A remote tier, and a clock."""

    def __init__(self, entries: int = ENTRIES) -> None:
        make = MakeRemoteDict(Others(), entries)
        self.residency = Residency(
            8,
            8,
            lambda slots: departures("attnstore", slots, ReturnEstimator()),
            chunk_tokens=CHUNK_TOKENS,
            more=(make,),
        )
        tier = self.residency.behind[1]
        assert isinstance(tier, RemoteTier)
        self.tier = tier
        self.moved = MovedKv(
            self.residency.index, CHUNK_TOKENS, 0, min_tokens=CHUNK_TOKENS, sinks=0, seed=0
        )

    def say(self, number: int, lease_s: float = LEASE_S) -> Chunk | None:
        """The tier has this chunk."""
        found = Found(name_of(number))
        return enter(self.residency, self.tier, found, self.residency.now + lease_s)

    def tick(self, now: float) -> None:
        """Of the store's thread."""
        self.residency.now = now
        end_leases(self.residency, self.tier, self.moved)


@pytest.fixture
def tier() -> Iterator[Tier]:
    tier = Tier()
    yield tier
    tier.residency.check_integrity()


def test_leases_that_are_renewed_end_all_the_same(tier: Tier) -> None:
    """1,000 entries, each renewed 100 times by 1 s: of 60 turns, one each second, 17 free all."""
    chunks = [tier.say(number) for number in range(ENTRIES)]
    for number in range(100):
        tier.residency.now = 0.01 * number
        for other in range(ENTRIES):
            assert tier.say(other) is None, "no news"
    assert len(tier.tier.ends) <= 2 * ENTRIES + STALE_MAX
    for second in range(2, 61):
        tier.tick(float(second))
    assert tier.tier.num_used == 0
    assert len(tier.residency.index) == 0
    assert all(chunk is not None and chunk.dropped for chunk in chunks)


def test_what_has_ended_is_not_believed_before_it_is_freed(tier: Tier) -> None:
    chunks = [tier.say(number) for number in range(3 * ENDED_MAX)]
    last = chunks[-1]
    assert last is not None
    tier.residency.now = LEASE_S - 1e-6
    assert is_believed(tier.residency, last)
    tier.residency.now = LEASE_S
    assert not is_believed(tier.residency, last)
    tier.tick(LEASE_S)
    assert tier.tier.num_used == 2 * ENDED_MAX, "a turn's work is bounded"
    assert tier.tier.has_ended(LEASE_S), "so the next one follows at once"
    for _ in range(2):
        tier.tick(LEASE_S)
    assert not tier.tier.has_ended(LEASE_S)


@pytest.mark.parametrize("ttl_s", [None, 5.0])
def test_what_a_tier_says_has_the_servers_ttl(tier: Tier, ttl_s: float | None) -> None:
    """The request that it was read for may have been aborted, so that none comes to use it."""
    found = Found(name_of(1))
    chunk = enter(tier.residency, tier.tier, found, 1000.0, ttl_s)
    assert chunk is not None
    tier.residency.now = 4.9
    assert not tier.residency.has_expired(chunk)
    tier.residency.now = 5.0
    assert tier.residency.has_expired(chunk) == (ttl_s is not None)


def test_what_an_aborted_request_has_read_ends_with_the_servers_ttl() -> None:
    clock, others = Clock(), Others()
    sequence = sequence_of(conversation(1, 48))
    for name in names_of(sequence):
        others.put(name, payload_of(name))
    make = MakeRemoteDict(others)
    rig = memory_rig(clock=clock, ttl_s=60.0, more_tiers=(make,), threaded=False)
    with rig.store.queue() as queue:
        queue.append("aborted")
    lookup = lookup_of(conversation(1, 49), may_ask=True)
    rig.store.arrive("aborted", lookup, 49)
    for _ in range(20):
        rig.store.tick()
    rig.store.leave_queue(["aborted"])
    chunks = [rig.chunk(name) for name in names_of(sequence)]
    assert {chunk.dram.state for chunk in chunks} == {State.READY}
    clock.now += 60.0
    assert rig.store.find(lookup_of(conversation(1, 49)), 0, 49) == []


@pytest.mark.parametrize(("ttl_s", "written"), [(60.0, 0), (None, 2)])
def test_what_conversations_with_a_ttl_share_is_not_written_to_others(
    ttl_s: float | None, written: int
) -> None:
    """It is where one of them sent none, once it was read from NVMe again."""
    others = Others()
    make = MakeRemoteDict(others, takes_writes=True)
    rig = memory_rig(more_tiers=(make,), threaded=False, clock=Clock())
    document = tokens_of(1, 32)
    for number, ttl in enumerate((60.0, ttl_s)):
        save(rig, document + tokens_of(2 + number, 17), Terms(ttl_s=ttl))
        while not rig.store.is_idle():
            rig.store.tick()
    names = names_of(sequence_of(document))
    for name in names:
        rig.store.residency.leave_dram(rig.chunk(name))
    rig.store.find(lookup_of(document + tokens_of(9, 16)), 0, 48)
    while not rig.store.is_idle():
        rig.store.tick()
    assert {rig.chunk(name).dram.state for name in names} == {State.READY}
    shared = {bytes(name.key) for name in names}
    assert len(shared & others.records.keys()) == written


def test_what_is_wanted_or_read_stays_and_ends_later(tier: Tier) -> None:
    chunk, other = tier.say(1), tier.say(2)
    assert chunk is not None
    assert other is not None
    tier.residency.look_ahead.append("request")
    tier.residency.dram.want("request", [chunk])
    tier.tick(10.0)
    assert is_believed(tier.residency, chunk)
    assert (chunk.dropped, other.dropped) == (False, True)
    tier.residency.dram.leave_queue("request")
    assert is_believed(tier.residency, chunk)
    tier.tick(11.0)
    assert chunk.dropped


def test_a_slot_that_is_another_chunks_has_its_own_lease(tier: Tier) -> None:
    """The heap has the earlier owner's end as well."""
    chunk = tier.say(1)
    assert chunk is not None
    tier.residency.drop(chunk)
    longer = tier.say(2, 5.0)
    assert longer is not None
    tier.tick(2.0)
    assert is_believed(tier.residency, longer)
    tier.tick(5.0)
    assert longer.dropped


def test_entries_that_come_and_go_take_no_memory(tier: Tier) -> None:
    for number in range(2000):
        chunk = tier.say(number, 1e6)
        assert chunk is not None
        tier.residency.drop(chunk)
    assert len(tier.tier.ends) <= STALE_MAX + 2


@pytest.mark.parametrize(("later_s", "found"), [(LEASE_S - 1e-3, 4), (LEASE_S, 0), (60.0, 0)])
def test_a_look_up_ends_before_what_is_not_believed(later_s: float, found: int) -> None:
    """Also where the store's thread has not come to free it."""
    others, clock = Others(), Clock()
    rig = memory_rig(more_tiers=(MakeRemoteDict(others),), clock=clock, threaded=False)
    lookup = lookup_of(conversation(1, 64), may_ask=True)
    for name in names_of(lookup.keys):
        others.put(name, payload_of(name))
    rig.store.find(lookup, 0, 64)
    for _ in range(100):
        rig.store.tick()
    assert not awaits_remote(lookup)
    clock.now += later_s
    assert len(rig.store.find(lookup_of(conversation(1, 64)), 0, 64)) == found


def test_what_has_got_a_ttl_since_it_waits_is_not_written() -> None:
    """The next turn of its conversation sends one before the tier has taken it."""
    others, clock, tokens = Others(), Clock(), tokens_of(1, 48)
    make = MakeRemoteDict(others, takes_writes=True)
    rig = memory_rig(clock=clock, more_tiers=(make,), threaded=False)
    save(rig, tokens, Terms())
    assert len(rig.store.residency.behind[1].waiting) == 3
    _, visit = rig.store.arrive("next", lookup_of(tokens), 48, terms=Terms(ttl_s=20.0))
    assert visit.own.lease is not None
    for _ in range(8):
        rig.store.tick()
    assert not others.records
    rig.store.check_integrity()
    rig.pool.close()
