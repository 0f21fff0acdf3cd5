# SPDX-License-Identifier: Apache-2.0
"""A quota of the shared tier while both lanes store chunks of one name.

A chunk is dropped while it waits to be put, or is put. The same prompt is computed again, and what
it saves gets the same name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.policy.visits import unknown_run
from attnstore_vllm.tiers.shared.lanes import LaneOp
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.shared_io import SharedIo
from attnstore_vllm.tiers.shared.start import MakeShared
from attnstore_vllm.types import StoreFailure
from tests.helpers import CHUNK_TOKENS, NAMESPACE, conversation, memory_rig, payload_of
from tests.property.test_ttl_engines import SETTINGS, Near, Values
from tests.shared.rigs import whole_chunks

GOLD = tenant_hash("gold")
Ended = list[tuple[int, bool]]


def wait(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def begin(io: SharedIo, number: int, ended: Ended, *, is_dropped: bool = False) -> None:
    """Put a chunk of this number. Each call computes it anew."""
    (name,) = whole_chunks(conversation(number, CHUNK_TOKENS + 1), "gold")
    chunk = Chunk(name, run=unknown_run(float(number)))

    def done(outcome: bytes | StoreFailure) -> None:
        ended.append((number, isinstance(outcome, bytes)))

    with io.context.progress:
        io.begin_store(chunk, memoryview(bytearray(payload_of(name))), done)
        chunk.dropped = is_dropped
    io.submit()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_two_lanes_put_one_name(is_dropped: bool) -> None:
    shared = MakeShared(
        SETTINGS,
        namespace=NAMESPACE,
        where="here",
        chunk_tokens=CHUNK_TOKENS,
        deadline_s=1.0,
        directory=None,
        keys=SharedKeys.of(None),
        pause_s=0.0,
        put_quotas={GOLD: 1},
        tenants={GOLD: "best"},
    )
    rig = memory_rig(dram_slots=8, more_tiers=(shared,), threaded=False)
    (io,) = (tier for tier in rig.store.thread.tiers if isinstance(tier, SharedIo))
    ended, values = Ended(), Values()
    near: Any = Near(io.helper.lanes, values)
    io.helper, numbers, deletes = near, near.numbers, list[int]()
    io.weights_seen(True)
    while io.must_wait():
        io.tick()
        time.sleep(0.002)
    begin(io, 1, ended)
    wait(lambda: len(ended) == 1)
    full, num_values = io.tier.puts.held(), len(values.values)

    def slow(lane: int, op: LaneOp, names: Sequence[bytes], deadline_s: float) -> list[int]:
        if op is LaneOp.DELETE:
            deletes.append(lane)
            if len(deletes) == 1:  # the other lane comes to an end meanwhile
                begin(io, 2, ended, is_dropped=is_dropped)
                wait(lambda: len(ended) == 2)
        found: list[int] = numbers(lane, op, names, deadline_s)
        return found

    near.numbers = slow
    begin(io, 2, ended)
    wait(lambda: len(ended) == 3)
    begin(io, 3, ended)
    wait(lambda: len(ended) == 4)
    assert ended == [(1, True), (2, False), (2, True), (3, True)]
    assert io.num_storing == 0
    assert io.tier.puts.held() == full == {GOLD: (1, 1)}
    assert len(values.values) == num_values, "of two puts each let the one before go"
    assert io.close(0.0)


def test_what_gets_a_ttl_while_it_waits_for_a_lane_is_not_put() -> None:
    """As of the same prompt's next turn: the tier would keep it without an end."""
    shared = MakeShared(
        SETTINGS,
        namespace=NAMESPACE,
        where="here",
        chunk_tokens=CHUNK_TOKENS,
        deadline_s=1.0,
        directory=None,
        keys=SharedKeys.of(None),
        pause_s=0.0,
        put_quotas={},
        tenants={},
    )
    rig = memory_rig(dram_slots=8, more_tiers=(shared,), threaded=False)
    (io,) = (tier for tier in rig.store.thread.tiers if isinstance(tier, SharedIo))
    ended, values = list[bytes | StoreFailure](), Values()
    near: Any = Near(io.helper.lanes, values)
    io.helper = near
    io.weights_seen(True)
    while io.must_wait():
        io.tick()
        time.sleep(0.002)
    before = len(values.values)
    (name,) = whole_chunks(conversation(1, CHUNK_TOKENS + 1), "gold")
    chunk = Chunk(name, run=unknown_run(1.0))
    with io.context.progress:
        io.begin_store(chunk, memoryview(bytearray(payload_of(name))), ended.append)
        chunk.run = unknown_run(2.0, 20.0)
    io.submit()
    wait(lambda: len(ended) == 1)
    assert isinstance(ended[0], StoreFailure)
    assert len(values.values) == before
    assert io.close(0.0)
