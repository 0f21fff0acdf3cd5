# SPDX-License-Identifier: Apache-2.0
"""Lines of the log that people read: at the start, and every so often."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.scheduler.figures import StepStats, in_words
from attnstore_vllm.scheduler.start_log import start_lines
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.transfer.geometry import Geometry, Group
from tests.helpers import SHAPE

MIB = 1 << 20


def test_what_came_of_it_in_one_line() -> None:
    stats = StepStats()
    for source, number in {"hbm": 50, "dram": 600, "nvme": 100, "computed": 250}.items():
        stats.add("prompt_tokens", source, number)
    stats.add("prefill_seconds_saved", "dram", 10.04)
    stats.add("prefill_seconds_saved", "nvme", 2.0)
    stats.observe("wait_seconds", 0.01)
    stats.observe("wait_seconds", 0.04)
    stats.add("recomputations", "deadline", 2)
    stats.add("chunks", "saved", 7)
    stats.add("chunks", "lost", 3)
    stats.add("bytes", "dram_to_nvme", 14 * MIB)
    stats.add("errors", "read_failed", 4)
    assert in_words(stats.data) == (
        "1,000 prompt tokens: HBM 5%, DRAM 60%, NVMe 10%, computed 25%; 12.0 s of prefill saved; "
        "2 waited for NVMe, 40 ms at most; computed though stored: 2 deadline; 7 chunks kept; "
        "14MiB written to NVMe; 3 chunks had no room; ERRORS: 4 read_failed"
    )


def test_a_quiet_time_has_a_line_too() -> None:
    stats = StepStats()
    stats.set("held_bytes", "dram", 5.0, 0.0)
    assert in_words(stats.data) == "nothing was asked for"


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreConfig.parse(
        {"dram": "64MiB", "nvme": {"path": str(tmp_path), "capacity": "256MiB"}}
    )


def lines(config: StoreConfig, geometry: Geometry, slab: Slab) -> list[str]:
    return list(start_lines("0.1.0", config, geometry, 62, slab, "io_uring"))


GEOMETRY = Geometry(
    num_ranks=1,
    regions=(2 * MIB // 16, 2 * MIB // 16),
    chunk_tokens=256,
    groups=(Group(64, ("a", "b")),),
)


def test_the_start_says_what_there_is(config: StoreConfig) -> None:
    slab = Slab(config.nvme.path / "slab", 32 * MIB, replace(SHAPE, payload_bytes=MIB))
    slab.free = list(range(7))
    said = lines(config, GEOMETRY, slab)
    assert said[0] == (
        "AttnStore 0.1.0: a token takes 4KiB, a chunk has 256 tokens; eviction: attnstore"
    )
    assert said[1] == "  DRAM: 15,872 tokens in 62MiB (dram: 64MiB)"
    assert said[2].startswith("  NVMe: 55,552 tokens in 217.8MiB")
    assert said[2].endswith(f"(nvme.capacity: 256MiB) in {config.nvme.path}; io_uring")
    assert said[3] == "  off by settings: pinning, ttl, nvme.daily_writes"
    assert len(said) == 4


@pytest.mark.parametrize(
    "given", [{"audit": 0}, {"dram": {"size": "64MiB", "codec": "lossless"}}], ids=["0", "codec"]
)
def test_the_start_says_that_nothing_is_audited(tmp_path: Path, given: dict[str, Any]) -> None:
    nvme = {"path": str(tmp_path), "capacity": "256MiB"}
    config = StoreConfig.parse({"dram": "64MiB", "nvme": nvme, **given})
    slab = Slab(tmp_path / "slab", 32 * MIB, replace(SHAPE, payload_bytes=MIB))
    *_, off = lines(config, GEOMETRY, slab)
    assert off == "  off by settings: pinning, ttl, audit, nvme.daily_writes"


def test_other_models_and_groups_have_lines_of_their_own(config: StoreConfig) -> None:
    slab = Slab(config.nvme.path / "slab", 32 * MIB, replace(SHAPE, payload_bytes=MIB))
    slab.free, slab.foreign = [0, 1], [replace(SHAPE, number=2), replace(SHAPE, number=3)]
    said = lines(config, GEOMETRY, slab)
    assert "  NVMe: 2 of 4 parts are of other models or settings" in said[3]
    assert len(said) == 5
