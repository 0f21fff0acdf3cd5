# SPDX-License-Identifier: Apache-2.0
"""Figures of an engine that plans no step: they leave once, and a server reads them all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from secrets import token_hex
from typing import Any

import pytest

from attnstore_vllm.config.tenants import TENANTS_MAX, TIERS
from attnstore_vllm.scheduler import figures as figures_module
from attnstore_vllm.scheduler.figures import IdleFigures, StepStats, StoreFigures
from attnstore_vllm.transfer.board import VALUES_MAX, Board, BoardReader, board_path
from tests import helpers


@pytest.fixture
def name() -> str:
    return f"test-{token_hex(8)}"


def data(written: float = 0, held: float | None = None, seconds: tuple[float, ...] = ()) -> Any:
    stats = StepStats()
    stats.add("chunks", "written", written)
    if held is not None:
        stats.set("held_bytes", "dram", held, 0.0)
    for value in seconds:
        stats.observe("nvme_read_seconds", value)
    return stats.data


def test_a_reader_gets_what_has_come_since_its_last_look(name: str) -> None:
    board, reader = Board(name), BoardReader((f"{name}_dp0", name))
    assert reader.take() is None, "nothing is on it yet"
    board.write(data(3, 10.0, (0.1, 0.2)))
    board.write(data(4, 20.0, (0.3,)))
    assert reader.take() == data(7, 20.0, (0.1, 0.2, 0.3))
    assert reader.take() is None
    board.write(data(1, 20.0, (0.4,)))
    found = reader.take()
    assert found == data(1, None, (0.4,)), "a gauge that stays is not told again"
    board.close()
    reader.close()
    assert not board_path(name).exists()


def test_a_reader_that_comes_late_misses_no_count(name: str) -> None:
    board = Board(name)
    for value in range(2 * VALUES_MAX):
        board.write(data(1, None, (float(value),)))
    reader = BoardReader((name,))
    found = reader.take()
    assert found is not None
    assert found["counters"] == {"chunks:written": 2 * VALUES_MAX}
    assert found["observed"]["nvme_read_seconds"][-1] == 2 * VALUES_MAX - 1
    assert len(found["observed"]["nvme_read_seconds"]) == VALUES_MAX
    reader.close()
    board.close()


def test_half_a_page_is_not_read(name: str) -> None:
    board, reader = Board(name), BoardReader((name,))
    board.write(data(3))
    with board_path(name).open("r+b", buffering=0) as file:
        whole = file.read(64)
        file.seek(20)
        file.write(b"#")
        assert reader.take() is None
        file.seek(0)
        file.write(whole)
    assert reader.take() == data(3)
    reader.close()
    board.close()


OTHER = """
import sys
from attnstore_vllm.transfer.board import BoardReader
reader = BoardReader([sys.argv[1]])
for _ in sys.stdin:
    print(reader.take(), flush=True)
"""


def test_of_several_server_processes_one_reads(name: str) -> None:
    board, reader = Board(name), BoardReader((name,))
    board.write(data(3))
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, name],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        print("look", file=other.stdin, flush=True)
        assert "'chunks:written': 3" in other.stdout.readline(), "whoever comes first"
        assert not board_path(name).exists(), "so that a kill leaves nothing behind"
        board.write(data(4))
        assert reader.take() is None
    reader.close()
    board.close()


def test_shared_memory_without_room_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its pages the first write would be a SIGBUS, which ends the engine."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room"):
        Board(name)
    assert not board_path(name).exists()


def test_a_second_engine_of_one_name_is_refused(name: str) -> None:
    board = Board(name)
    with pytest.raises(FileExistsError):
        Board(name)
    board.close()
    Board(name).close()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + helpers.DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_gauges_are_looked_at_once_a_second_and_counts_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = helpers.memory_rig(32)
    figures = StoreFigures(rig.store, 1.0)
    steps = [StepStats() for _ in range(3)]
    figures.add_to(steps[0])
    assert steps[0].data["gauges"]["held_bytes:dram"][1] == 0
    rig.put_all(helpers.sequence_of(helpers.tokens_of(1, 4 * helpers.CHUNK_TOKENS)))
    figures.add_to(steps[1])
    assert steps[1].data["counters"]["chunks:saved"] == 4
    assert steps[1].data["gauges"] == {}
    monkeypatch.setattr(figures_module, "PERIOD_S", 0.0)
    figures.add_to(steps[2])
    assert steps[2].data["gauges"]["held_bytes:dram"][1] == 4 * helpers.PAYLOAD_BYTES
    rig.store.close()


def test_what_changes_without_steps_leaves_by_the_board_and_once(name: str) -> None:
    rig = helpers.memory_rig(32)
    figures = StoreFigures(rig.store, 1.0, ("0.1", "0.32", "threads", "attnstore"))
    reader = BoardReader((name,))
    idle = IdleFigures(figures, Board(name))
    rig.put_all(helpers.sequence_of(helpers.tokens_of(1, 4 * helpers.CHUNK_TOKENS)))
    rig.until_idle()
    seen = StepStats()

    def look() -> bool:
        found = reader.take()
        if found is not None:
            for key, amount in found["counters"].items():
                series, _, label = key.partition(":")
                seen.add(series, label, amount)
            for key, (when, value) in found["gauges"].items():
                series, _, label = key.partition(":")
                seen.set(series, label, value, when)
            seen.data["observed"].update(found["observed"])
        return seen.data["counters"].get("chunks:written", 0) >= 4

    _until(look)
    gauges = {key: value for key, (_, value) in seen.data["gauges"].items()}
    assert gauges["dirty_bytes:nvme"] == 0
    assert gauges["capacity_bytes:dram"] == 8 * helpers.PAYLOAD_BYTES
    assert gauges["held_bytes:dram"] == 4 * helpers.PAYLOAD_BYTES
    assert gauges["info:0.1|0.32|threads|attnstore"] == 1
    assert len(seen.data["observed"]["nvme_write_seconds"]) == 4
    by_step = StepStats()
    figures.add_to(by_step)
    assert "chunks:written" not in by_step.data["counters"], "it has left already"
    idle.close()
    reader.close()
    rig.store.close()


def test_all_that_a_server_may_show_fits(name: str) -> None:
    """As many tenants as may be, each with the longest name, and every histogram full."""
    pytest.importorskip("vllm")
    from attnstore_vllm.connector.metrics import (
        GAUGES,
        HISTOGRAM_LABELS,
        HISTOGRAMS,
        LABELS,
    )

    stats, value = StepStats(), 123456789012345.678
    for metric, labels in LABELS.items():
        for label in labels:
            if metric in HISTOGRAMS:
                for _ in range(VALUES_MAX):
                    stats.observe(f"{metric}:{label}", 1234.567890123456)
            elif metric in GAUGES:
                stats.set(metric, label, value, value)
            else:
                stats.add(metric, label, value)
    for metric in HISTOGRAMS.keys() - HISTOGRAM_LABELS.keys():
        for _ in range(VALUES_MAX):
            stats.observe(metric, 1234.567890123456)
    for number in range(TENANTS_MAX):
        for tier in TIERS:
            for metric in ("tenant_held_bytes", "tenant_quota_bytes"):
                stats.set(metric, f"{number:032}|{tier}", value, value)
    board, reader = Board(name), BoardReader((name,))
    board.write(stats.data)
    found = reader.take()
    assert found is not None and len(found["gauges"]) > 6 * TENANTS_MAX
    reader.close()
    board.close()
