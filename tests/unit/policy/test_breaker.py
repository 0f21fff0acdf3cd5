# SPDX-License-Identifier: Apache-2.0
"""When a failing device is left alone, how much may be written, and what a hang costs."""

from __future__ import annotations

import errno
import threading
from collections import Counter

from attnstore_lab.testing.devices import MemoryDevice, SlowDevice
from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.index.prefix import Piece, confirm
from attnstore_vllm.policy.breaker import FAILURES_MAX, PAUSE_MAX_S, PAUSE_MIN_S, Breaker
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.health import Health
from tests.helpers import (
    CHUNK_TOKENS,
    format_device,
    name_of,
    new_slab,
    open_pool,
    payload_of,
    sequence_of,
    slab_bytes,
    tokens_of,
)


def test_failures_in_a_row_put_it_out_of_use_and_a_success_between_does_not() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(FAILURES_MAX - 1):
            assert not breaker.failure(0.0)
        assert not breaker.success()
    for _ in range(FAILURES_MAX - 1):
        breaker.failure(0.0)
    assert breaker.failure(0.0)
    assert not breaker.in_use


def test_one_hang_is_enough() -> None:
    breaker = Breaker()
    assert breaker.failure(0.0, hung=True)
    assert not breaker.in_use


def test_a_full_disk_is_counted_by_itself() -> None:
    progress, counts = threading.Condition(), Counter[str]()
    health = Health("NVMe", "/kv", progress, counts, lambda: 0.0)
    health.note_write(DeviceError("write failed", errno.EIO))
    assert counts["device_full"] == 0
    for code in (errno.ENOSPC, errno.EDQUOT):
        health.note_write(DeviceError("write failed", code))
    assert counts["device_full"] == 2


def test_it_is_probed_after_a_pause_that_doubles() -> None:
    breaker, now, pause = Breaker(), 0.0, PAUSE_MIN_S
    breaker.failure(now, hung=True)
    for _ in range(10):
        assert not breaker.take_probe(now + pause * 0.99)
        now += pause
        assert breaker.take_probe(now)
        assert not breaker.take_probe(now), "one at a time"
        assert not breaker.failure(now)
        pause = min(2 * pause, PAUSE_MAX_S)
    now += pause
    assert breaker.take_probe(now)
    assert breaker.success()
    assert breaker.in_use


def test_a_budget_is_kept_over_time_and_one_transfer_may_overdraw_it() -> None:
    budget = Budget(100.0, burst_s=1.0)
    assert budget.take(0.0, 1000)
    assert not budget.take(1.0, 1)
    moved = 1000
    for tenth in range(1, 1000):
        moved += 30 if budget.take(tenth / 10, 30) else 0
    assert moved <= 100 * 100 + 100 + 30
    assert moved > 0.9 * 100 * 100
    assert Budget(None, 1.0).take(0.0, 1 << 60)


def test_a_match_by_sketch_ends_where_the_tokens_differ() -> None:
    """Sketches that collide, planted: what the piece says is not what the tokens say."""
    mine = tokens_of(1, CHUNK_TOKENS)
    for shared in range(CHUNK_TOKENS):
        theirs = [*mine[:shared], *tokens_of(2, CHUNK_TOKENS - shared)]
        chunk = Chunk(name_of(sequence_of(theirs), 0))
        for claimed in (1, 8, CHUNK_TOKENS):
            for grain in (1, 4):
                piece = Piece(chunk, 0, claimed, exact=False, grain=grain)
                found = confirm(piece, sequence_of(mine), CHUNK_TOKENS)
                assert (found.stop if found else 0) == shared // grain * grain
        nothing = Piece(chunk, shared, CHUNK_TOKENS, exact=False, grain=1)
        assert confirm(nothing, sequence_of(mine), 16) is None


def test_a_hang_costs_the_chunk_and_the_tier_comes_back() -> None:
    memory, slab = MemoryDevice(slab_bytes(8)), new_slab(8)
    format_device(memory, slab)
    slow, pool = SlowDevice(memory), open_pool(2)
    store = open_store(pool, slab, slow, io_depth=4, io_deadline_ms=200)

    def until(condition: object) -> None:
        assert callable(condition)
        for _ in range(1000):
            if condition():
                return
            store.wait_for_any((), 0.01)
        raise AssertionError("it did not come to that")

    def put(number: int) -> None:
        name = name_of(sequence_of(tokens_of(number, CHUNK_TOKENS)), 0)
        chunk = store.begin_save(name)
        assert chunk is not None
        pool.slot(chunk.dram.slot)[:] = payload_of(name)
        store.finish_saves([chunk])
        until(store.is_idle)

    for number in (1, 2, 3):
        put(number)
    sequence = sequence_of(tokens_of(1, CHUNK_TOKENS))
    slow.hang()
    (piece,) = store.find(Lookup(sequence), 0, CHUNK_TOKENS)
    until(lambda: piece.chunk.dropped)
    assert store.figures().counts["read_late"] == store.figures().counts["device_late"] == 1
    assert store.gauges()["nvme_in_use", "reads"] == store.gauges()["nvme_in_use", "writes"] == 0
    assert piece.chunk.dram.state is State.READING, "the device may still write to its slot"
    on_nvme = sequence_of(tokens_of(2, CHUNK_TOKENS))
    ready = [
        p
        for p in store.find(Lookup(on_nvme), 0, CHUNK_TOKENS)
        if p.chunk.dram.state is not State.READY
    ]
    assert ready == [], "nobody waits for a tier that is out of use"
    slow.release()
    until(lambda: store.gauges()["nvme_in_use", "reads"] == 1)
    until(lambda: store.gauges()["nvme_in_use", "writes"] == 1)
    put(9)
    store.check_integrity()
    assert store.residency.num_held() == 0
    store.close()
