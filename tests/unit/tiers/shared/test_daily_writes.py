# SPDX-License-Identifier: Apache-2.0
"""What may be written to the shared tier in a day, on a machine whose wall clock is put ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from attnstore_vllm.tiers.context import StoreClock
from attnstore_vllm.tiers.shared.shared_generation import GenerationId
from tests.helpers import NAMESPACE, PAYLOAD_BYTES, memory_rig, name_of, sequence_of, tokens_of
from tests.shared.rigs import io_of, make
from tests.unit.policy.test_visits import Clock

HOURS = 4


def test_a_wall_clock_that_is_put_ahead_adds_nothing_to_the_writes_of_a_day() -> None:
    boot, wall = Clock(), Clock()
    clock = StoreClock(boot, wall)
    settings = {"redis": {"url": "redis://nowhere:1"}}
    tier = make(settings, NAMESPACE, daily_writes=10 * 24 * (PAYLOAD_BYTES + 64))
    rig = memory_rig(more_tiers=(tier,), threaded=False, clock=clock)
    chunk = rig.put(name_of(sequence_of(tokens_of(1, 16)), 0))
    assert chunk is not None
    io = io_of(rig)
    io.weights_seen(True)
    io.generation.see(GenerationId(bytes(16), 3))
    io.save_generation()
    running: Any = SimpleNamespace(is_running=True)
    io.helper, helper = running, io.helper
    written = []
    for _ in range(HOURS):
        number = 0
        while number < 100 and not io.must_wait():
            io.begin_store(chunk, memoryview(bytes(PAYLOAD_BYTES)), lambda outcome: None)
            number += 1
        written.append(number)
        boot.now, wall.now = boot.now + 1.0, wall.now + 3600.0
        clock()
    assert not sum(written), "a start has no savings, and none is lent"
    boot.now += 300.0
    assert io.must_wait(), "less than a record is saved up"
    boot.now += 3300.0
    assert not io.must_wait()
    io.helper = helper
    for moves in rig.store.thread.tiers:
        moves.cancel()
        moves.close(1.0)
    rig.pool.close()
