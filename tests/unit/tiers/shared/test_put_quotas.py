# SPDX-License-Identifier: Apache-2.0
"""A quota of the shared tier while both lanes store chunks of one name.

A chunk is dropped while it waits to be put, or is put. The same prompt is computed again, and what
it saves gets the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.policy.visits import unknown_run
from attnstore_vllm.tiers.shared.lanes import LaneOp
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.shared_io import STORE_LANES, SharedIo, _StoreJob
from attnstore_vllm.tiers.shared.start import MakeShared
from attnstore_vllm.types import StoreFailure
from tests.helpers import CHUNK_TOKENS, NAMESPACE, conversation, memory_rig, payload_of
from tests.property.test_ttl_engines import SETTINGS, Near, Values
from tests.shared.rigs import whole_chunks

GOLD = tenant_hash("gold")
Ended = list[tuple[int, bool]]


def joined(io: SharedIo, values: Values) -> Any:
    """With a near store, once there is a generation."""
    near: Any = Near(io.helper.lanes, values)
    io.helper = near
    io.weights_seen(True)
    for _ in range(4):
        io._look()
    assert io._usable
    return near


def job(io: SharedIo, number: int, ended: Ended) -> _StoreJob:
    """A chunk of this number that is to be put; each call computes it anew."""
    (name,) = whole_chunks(conversation(number, CHUNK_TOKENS + 1), "gold")
    chunk, names = Chunk(name, run=unknown_run(float(number))), io._names()
    assert names is not None
    record = names.of(name.key, name.tenant)

    def done(outcome: bytes | StoreFailure) -> None:
        ended.append((number, isinstance(outcome, bytes)))

    return _StoreJob(chunk, names, record, memoryview(bytearray(payload_of(name))), done)


def store(io: SharedIo, lane: int, *jobs: _StoreJob) -> None:
    io._num_storing += len(jobs)
    io._store(lane, jobs, set())


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
    near = joined(io, values)
    numbers, (one, other) = near.numbers, STORE_LANES
    store(io, one, job(io, 1, ended))
    full, num_values = io.tier.puts.held(), len(values.values)
    first, again = job(io, 2, ended), job(io, 2, ended)
    first.chunk.dropped = is_dropped

    def slow(lane: int, op: LaneOp, names: Sequence[bytes], deadline_s: float) -> list[int]:
        if lane == one and op is LaneOp.DELETE:
            store(io, other, first)
        found: list[int] = numbers(lane, op, names, deadline_s)
        return found

    near.numbers = slow
    store(io, one, again)
    assert ended == [(1, True), (2, False), (2, True)]
    assert io.num_storing == 0
    assert io.tier.puts.held() == full == {GOLD: (1, 1)}
    assert len(values.values) == num_values
    assert io.close(0.0)
