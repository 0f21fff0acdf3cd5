# SPDX-License-Identifier: Apache-2.0
"""What settings and hints promise about time holds from one process to the next.

The clocks are the test's: `clock` of a process, which begins anew with each, and `wall`.

It is long since each promise has a way in which a restart breaks it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_vllm.config.texts import SETTINGS
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.policy.eviction.departures import departures
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import LEFT_PARTS, NO_TERMS, Terms, by_end
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.context import STEP_S, StoreClock
from attnstore_vllm.tiers.nvme import recovery
from attnstore_vllm.tiers.nvme.format import ages
from attnstore_vllm.tiers.nvme.nvme_io import NvmeIo
from attnstore_vllm.types import NVME
from tests.helpers import (
    GRAIN,
    RECORD_BYTES,
    SHAPE,
    Rig,
    Rigs,
    Start,
    conversation,
    format_device,
    found_slab,
    lookup_of,
    memory_rig,
    names_of,
    new_slab,
    sequence_of,
    slab_bytes,
    starting,
    tokens_of,
)
from tests.unit.policy.test_visits import Clock, ask, save
from tests.unit.tiers.nvme.test_recovery import name, residency, write

ROOT = Path(__file__).parents[4]
DAY_S = 86_400.0


class Wall(Clock):
    def __init__(self) -> None:
        self.now = 1_800_000_000.5


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Stores on one real file, one after the other."""
    with starting(tmp_path / "slab", SHAPE, 64, 16) as start:
        yield start


def found(rig: Rig, number: int, num_tokens: int = 40) -> int:
    """Tokens that a request would find, after the last whole block."""
    pieces = rig.store.find(lookup_of(conversation(number, num_tokens)), 0, num_tokens)
    rig.until_idle()
    return pieces[-1].stop if pieces else 0


def kept(rig: Rig, number: int, terms: Terms | None = None) -> None:
    """A request has come, was computed, and its KV is on NVMe."""
    ask(rig, number, terms=terms)
    rig.until_idle()
    for chunk in names_of(sequence_of(conversation(number))):
        assert rig.chunk(chunk).at(NVME).slot >= 0


def counts(rig: Rig) -> dict[str, int]:
    return rig.store.figures().counts


# ---- ttl ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stopped_s", "tokens"), [(2.0, 40), (65.0, 0)])
def test_a_ttl_goes_on_while_the_server_is_stopped(
    start: Start, wall: Wall, stopped_s: float, tokens: int
) -> None:
    clocks = Clock(), Clock()
    kept(start(ttl_s=5.0, wall=wall, clock=clocks[0], grain=GRAIN), 1)
    wall.now += stopped_s
    again = start(ttl_s=5.0, wall=wall, clock=clocks[1], grain=GRAIN)
    assert counts(again).get("expired", 0) == (0 if tokens else 3)
    assert found(again, 1) == tokens


def test_what_is_left_of_a_ttl_goes_on_after_a_restart(open_rig: Rigs, wall: Wall) -> None:
    """Its use counts, and the restart does not."""
    rig, device = open_rig(ttl_s=60.0, wall=wall)
    kept(rig, 1)
    kept(rig, 2)
    wall.now += 20.0
    clock = Clock()
    again, medium = open_rig(image=bytes(device.image), clock=clock, wall=wall, ttl_s=60.0)
    clock.now += 30.0
    assert ask(again, 2) == 36
    medium.settle()
    clock.now += 11.0
    assert (found(again, 1), found(again, 2)) == (0, 40)
    assert counts(again)["expired"] == 3


def test_what_is_found_expires_though_recovery_goes_on() -> None:
    tiers, slab = residency(), new_slab(8)
    pages = MemoryDevice(slab_bytes(8))
    write(slab, pages, 0, name(1), 1)
    write(slab, pages, 1, name(2), 2)
    headers = b"".join(pages.image[slab.offset(n) :][: slab.header_bytes] for n in range(2))
    ends = np.array([10.0, np.inf])
    slots = np.arange(2, dtype=np.uint32)
    tiers.nvme.adopt(memoryview(headers), slots, slab.header_bytes, ends)

    def expired(now: float) -> list[bool]:
        tiers.now = now
        return [tiers.has_expired(tiers.index.get(name(n).key) or Chunk(name(n))) for n in (1, 2)]

    assert (expired(9.0), expired(10.0)) == ([False, False], [True, False])
    tiers.nvme.all_adopted(tiers.nvme.adopted(), 9.0)
    assert (expired(9.0), expired(10.0)) == ([False, False], [True, False])
    tiers.check_integrity()


def test_a_shorter_ttl_of_a_request_is_kept_on_the_disk(open_rig: Rigs, wall: Wall) -> None:
    """A server without a ttl of its own, and one whose ttl is longer."""
    rig, device = open_rig(wall=wall)
    kept(rig, 1, Terms(ttl_s=600.0))
    kept(rig, 2)
    image = bytes(device.image)
    wall.now += 599.0
    clock = Clock()
    again, _ = open_rig(image=image, clock=clock, wall=wall)
    assert (found(again, 1), found(again, 2)) == (40, 40)
    clock.now += 2.0
    assert (found(again, 1), found(again, 2)) == (0, 40)
    wall.now += 2.0
    for ttl_s in (None, DAY_S):
        later, _ = open_rig(image=image, wall=wall, ttl_s=ttl_s)
        assert (found(later, 1), found(later, 2)) == (0, 40)


def test_the_ttl_of_what_is_shared_is_kept_on_the_disk(open_rig: Rigs, wall: Wall) -> None:
    """Two conversations, one document: it is written after the second one came."""
    rig = memory_rig(wall=wall, threaded=False)
    device = rig.device
    assert isinstance(device, MemoryDevice)
    document = tokens_of(1, 32)
    for number, ttl_s in enumerate((20.0, 60.0)):
        save(rig, document + tokens_of(2 + number, 17), Terms(ttl_s=ttl_s))
    while not rig.store.is_idle():
        rig.store.tick()
    image = bytes(device.image)
    rig.pool.close()
    wanted = sequence_of(document + tokens_of(9, 16))
    for stopped_s, tokens in ((30.0, 32), (31.0, 0)):
        wall.now += stopped_s
        again, _ = open_rig(image=image, wall=wall)
        pieces = again.store.find(Lookup(wanted), 0, 48)
        assert (pieces[-1].stop if pieces else 0) == tokens


def test_time_that_a_chunk_waited_to_be_written_counts(open_rig: Rigs, wall: Wall) -> None:
    clock = Clock()
    rig = memory_rig(clock=clock, wall=wall, ttl_s=60.0, threaded=False)
    device = rig.device
    assert isinstance(device, MemoryDevice)
    ask(rig, 1)
    clock.now += 50.0
    wall.now += 50.0
    while not rig.store.is_idle():
        rig.store.tick()
    first = names_of(sequence_of(conversation(1)))[0]
    slab = found_slab(device.image)
    at = slab.offset(rig.chunk(first).at(NVME).slot)
    page = memoryview(device.image)[at : at + slab.header_bytes]
    (written_at,), (used_at,), (ttl_s,) = ages(page, slab.header_bytes)
    assert (wall.now - written_at, written_at - used_at, ttl_s) == (0.5, 50.0, 60.0)
    rig.pool.close()
    wall.now += 10.0
    again, _ = open_rig(image=bytes(device.image), wall=wall, ttl_s=60.0)
    assert (found(again, 1), counts(again)["expired"]) == (0, 3)


def test_a_wall_clock_that_is_put_right_after_the_start_makes_all_older(
    open_rig: Rigs, wall: Wall
) -> None:
    """A host without a clock of its own, and a paused VM: boot time does not know how long."""
    rig, device = open_rig(ttl_s=3600.0, wall=wall)
    kept(rig, 1)
    boot = Clock()
    clock = StoreClock(boot, wall)
    again, medium = open_rig(image=bytes(device.image), ttl_s=3600.0, clock=clock, wall=wall)
    ask(again, 2)
    medium.settle()
    boot.now, wall.now = boot.now + 60.0, wall.now + 60.0 + STEP_S
    assert (found(again, 1), found(again, 2)) == (40, 40), "a little is nothing"
    boot.now, wall.now = boot.now + 1.0, wall.now - 7199.0
    assert (found(again, 1), found(again, 2)) == (40, 40), "set back"
    boot.now, wall.now = boot.now + 1.0, wall.now + 3001.0
    assert (found(again, 1), found(again, 2)) == (40, 40), "put ahead, by less than the ttl"
    boot.now, wall.now = boot.now + 1.0, wall.now + 36_001.0
    assert (found(again, 1), found(again, 2)) == (0, 0)
    ask(again, 3)
    boot.now, wall.now = boot.now + 3599.0, wall.now + 3599.0
    assert found(again, 3) == 40, "what came after it is no older"


def test_what_is_written_as_the_wall_clock_is_put_right_is_as_old_as_before(
    open_rig: Rigs, wall: Wall
) -> None:
    """A VM was paused. The store's clock looks at the other one some times a second: a record may
    be made before it does so."""
    boot = Clock()
    clock = StoreClock(boot, wall)
    rig = memory_rig(clock=clock, wall=wall, ttl_s=3600.0, threaded=False)
    device = rig.device
    assert isinstance(device, MemoryDevice)
    ask(rig, 1)
    wall.now += 3000.0
    while not rig.store.is_idle():
        rig.store.tick()
    boot.now, wall.now = boot.now + 601.0, wall.now + 601.0
    assert rig.store.find(lookup_of(conversation(1)), 0, 40) == []
    rig.pool.close()
    again, _ = open_rig(image=bytes(device.image), wall=wall, ttl_s=3600.0)
    assert (found(again, 1), counts(again)["expired"]) == (0, 3)


def test_a_time_that_has_not_come_counts_as_expired_and_is_said_once(
    open_rig: Rigs, wall: Wall, caplog: pytest.LogCaptureFixture
) -> None:
    rig, device = open_rig(ttl_s=60.0, wall=wall)
    kept(rig, 1)
    kept(rig, 2)
    wall.now -= 3600.0
    with caplog.at_level(logging.WARNING, "attnstore_vllm.tiers.nvme.recovery"):
        again, _ = open_rig(image=bytes(device.image), wall=wall, ttl_s=60.0)
        again.until_idle()
    assert (found(again, 1), counts(again)["expired"]) == (0, 6)
    assert [r.getMessage()[:30] for r in caplog.records] == ["6 of these chunks were written"]
    unlimited, _ = open_rig(image=bytes(device.image), wall=wall)
    assert found(unlimited, 1) == 0, "its own ttl is in its record"


def test_without_a_ttl_no_clock_matters(open_rig: Rigs, wall: Wall) -> None:
    rig, device = open_rig(wall=wall)
    kept(rig, 1)
    for jump_s in (-1e9, 1e9):
        again, _ = open_rig(image=bytes(device.image), wall=lambda jump=jump_s: wall.now + jump)
        assert found(again, 1) == 40
        assert not counts(again)["expired"]


def test_records_that_say_nothing_of_a_ttl_have_that_of_the_server() -> None:
    """Those of builds before the fields were there, where headers are zeros."""
    slab, device = new_slab(8), MemoryDevice(slab_bytes(8))
    format_device(device, slab)
    for record in range(3):
        write(slab, device, record, name(record), record + 1)
    for ttl_s, count in ((None, 3), (101.0, 3), (99.0, 0)):
        medium = MemoryDevice(len(device.image))
        medium.image[:] = device.image
        options = {"ttl_s": ttl_s, "wall": lambda: 100.0}
        rig = Rig(medium, found_slab(device.image), options=options)
        rig.until_idle()
        assert len(rig.store.residency.index) == count
        rig.close()


def test_leases_of_what_was_left_end_no_later_and_are_few() -> None:
    random = np.random.default_rng(1)
    ends = 1000.0 + random.exponential(3600.0, 20_000)
    ends[::7] = np.inf
    ends[5] = 999.0
    seen: list[int] = []
    leases = 0
    for chosen, lease in by_end(ends, 1000.0):
        leases += 1
        seen += chosen.tolist()
        assert (np.diff(chosen) > 0).all(), "in their order"
        if lease is None:
            assert np.isinf(ends[chosen]).all()
        else:
            left = np.maximum(0.0, ends[chosen] - 1000.0)
            assert (lease.expires <= ends[chosen]).all()
            assert (max(0.0, lease.expires - 1000.0) >= left * (1 - 1 / LEFT_PARTS) - 1e-3).all()
    assert sorted(seen) == list(range(len(ends)))
    assert leases < 40 * LEFT_PARTS


def test_one_short_ttl_takes_nobody_elses_chunk_along() -> None:
    order = departures("attnstore", 100, ReturnEstimator())
    ends = np.array([2000.0, 1001.0, np.inf, 2000.0])
    order.add_oldest(np.array([4, 5, 6, 7], np.int32), 1000.0, ends)
    expired = {
        slot for slot in (4, 5, 6, 7) if (run := order.run_of(slot)) and run.has_expired(1500)
    }
    assert expired == {5}
    assert order.victim(1500.0, lambda _: True) == 5


@pytest.mark.parametrize("terms", [Terms(ttl_s=20.0), NO_TERMS], ids=["ttl", "none"])
def test_what_has_no_ttl_gets_none_while_headers_are_read(
    terms: Terms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a `ttl` shares it then, and saves it anew: its age has no end, and can be told
    to no record. The store's thread ended."""
    monkeypatch.setattr(recovery, "BATCH_HEADERS", 2)
    monkeypatch.setattr(recovery, "BATCHES", 1)
    clock = Clock()
    options = {"clock": clock, "wall": clock, "threaded": False}
    slab, device = new_slab(32), MemoryDevice(slab_bytes(32))
    format_device(device, slab)
    first = tokens_of(1, 48)

    def serve(rig: Rig, tokens: list[int], terms: Terms, *, lost: int = 0) -> None:
        clock.now += 1
        sequence = sequence_of(tokens)
        _, visit = rig.store.arrive("request", Lookup(sequence), len(tokens), 1, terms)
        names = names_of(sequence)
        for chunk_name in names[:lost]:
            rig.store.drop([rig.chunk(chunk_name)])
        for number, chunk_name in enumerate(names):
            chunk = rig.store.begin_save(chunk_name, visit.run(number))
            if chunk is not None:
                rig.store.finish_saves([chunk])
        for _ in range(40):
            rig.store.tick()

    before = Rig(device, slab, 40, options=options)
    serve(before, first, NO_TERMS)
    serve(before, tokens_of(2, 48), Terms(ttl_s=1000.0))
    serve(before, tokens_of(3, 20 * 16), NO_TERMS)
    before.pool.close()
    medium = MemoryDevice(len(device.image))
    medium.image[:] = device.image
    rig = Rig(medium, found_slab(device.image), 16, options=options)
    nvme = rig.store.thread.tiers[0]
    assert isinstance(nvme, NvmeIo)
    index = rig.store.residency.index
    while not all(index.get(name.key) for name in names_of(sequence_of(first))):
        rig.store.tick()
    assert not nvme.recovery.is_over
    question = first[:40] + tokens_of(9, 24)
    serve(rig, question, terms)
    serve(rig, question, terms, lost=1)
    run = rig.store.residency.run_of(rig.chunk(names_of(sequence_of(first))[0]))
    assert run.lease is None
    rig.store.check_integrity()
    rig.pool.close()


# ---- budgets -----------------------------------------------------------------------------------


def test_starts_add_nothing_to_the_writes_of_a_day() -> None:
    """A server that is started again each minute, on a disk that was written to before."""
    rate, record, written = 100.0, 1000, 0
    for minute in range(24 * 60):
        budget = Budget(rate, 3600.0, empty_at=60.0 * minute)
        for second in range(1, 61):
            while budget.take(60.0 * minute + second, record):
                written += record
    assert written <= rate * DAY_S
    assert written > 0.9 * rate * DAY_S


def test_each_start_begins_with_no_savings(open_rig: Rigs, wall: Wall) -> None:
    """A day's budget is ten records an hour. Each start on a new directory would have those of an
    hour at once, if it began with them: a container's has one at each start."""
    clock = Clock()
    daily = 10 * 24 * RECORD_BYTES
    rig, device = open_rig(num_records=64, dram_slots=32, clock=clock, daily_writes_bytes=daily)
    for number in range(8):
        ask(rig, number)
    device.settle()
    assert counts(rig).get("written", 0) == 0
    clock.now += 3600.0
    rig.store.thread.wake()
    rig.until(lambda: counts(rig).get("written", 0) >= 10)
    device.settle()
    assert counts(rig)["written"] == 10
    options = {"clock": clock, "daily_writes_bytes": daily, "dram_slots": 32}
    again, medium = open_rig(image=bytes(device.image), **options)
    for number in range(10, 18):
        ask(again, number)
    medium.settle()
    assert counts(again).get("written", 0) == 0
    clock.now += 3600.0
    again.store.thread.wake()
    again.until(lambda: counts(again).get("written", 0) >= 10)


def test_a_wall_clock_that_is_put_ahead_adds_nothing_to_the_writes_of_a_day() -> None:
    """One that two daemons set ahead and back by an hour, within some seconds."""
    boot, wall, daily = Clock(), Wall(), 10 * 24 * RECORD_BYTES
    clock = StoreClock(boot, wall)
    rig = memory_rig(
        64, 32, clock=clock, wall=wall, daily_writes_bytes=daily, ttl_s=DAY_S, threaded=False
    )
    for number in range(8):
        ask(rig, number)
    for _ in range(4):
        wall.now -= 3600.0
        boot.now += 1.0
        clock()
        wall.now += 3600.0
        boot.now += 1.0
        for _ in range(16):
            rig.store.tick()
    assert not counts(rig).get("written"), "no record is saved up, and none is lent"
    boot.now, wall.now = boot.now + 3600.0, wall.now + 3600.0
    for _ in range(16):
        rig.store.tick()
    assert counts(rig)["written"] == 10
    rig.pool.close()


# ---- the class ---------------------------------------------------------------------------------


def test_each_setting_about_time_says_what_a_restart_does() -> None:
    """docs/operations.md has a row for it. A new one fails here until it has."""
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.partition("## Times across restarts")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_.]+)`", table))
    about = re.compile(r"\btime\b|a day|a second|\bms\b")
    keys = {s.key for s in SETTINGS if about.search(s.unit)}
    keys |= {"pinning.longest", "hints.ttl", "hints.pin"}
    assert len(keys) > 6
    assert not keys - named
