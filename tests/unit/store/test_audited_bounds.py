# SPDX-License-Identifier: Apache-2.0
"""What an audit has learned, over restarts: no chunk counts again after one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnstore_vllm.policy.kv_compare import BOUND, STATE_BOUND
from attnstore_vllm.policy.learned_bound import LEAST, PAIRS
from attnstore_vllm.store.audited_bounds import AuditedBounds
from attnstore_vllm.tiers.nvme.aside import Aside
from attnstore_vllm.types import KEY_BYTES, Key

NAMESPACE = b"n" * 32


def key_of(number: int) -> Key:
    return Key(number.to_bytes(KEY_BYTES, "little"))


def started(path: Path, groups: int = 1) -> AuditedBounds:
    return AuditedBounds(Aside(path, None), NAMESPACE, [BOUND] * groups)


def learns(bounds: AuditedBounds, group: int = 0, chunks: int = PAIRS) -> None:
    for number in range(chunks):
        bounds.note(group, number, key_of(number), 0.001)


def test_a_wrong_chunk_counts_once_over_all_starts(tmp_path: Path) -> None:
    """It is off by less than the bound, and comes at each start. Each writes it, since rounding
    shows a little more."""
    learns(started(tmp_path))
    for start, bound in enumerate((0.35, 0.4, 0.45)):
        bounds = started(tmp_path)
        bounds.note(0, 1, key_of(999), 0.09)
        for number in range(100, 103):
            bounds.note(0, number, key_of(number), 0.02 + 0.0035 * start)
        assert bounds.of(0) == started(tmp_path).of(0) == pytest.approx(bound)


def test_hits_of_other_processes_are_others(tmp_path: Path) -> None:
    """They are numbered anew in each: what they show is another's."""
    bounds = started(tmp_path)
    learns(bounds)
    for number, distance in enumerate((0.01, 0.03, 0.03), 100):
        bounds.note(0, number, key_of(number), distance)
    again = started(tmp_path)
    assert bounds.of(0) == again.of(0) == pytest.approx(0.2)
    again.note(0, 102, key_of(200), 0.03)
    assert again.of(0) == pytest.approx(0.25)


def test_a_group_that_has_few_chunks_has_as_few_after_a_restart(tmp_path: Path) -> None:
    """Another group's bound is written, and this one's with it."""
    learns(started(tmp_path, 2))
    for _ in range(3):
        bounds = started(tmp_path, 2)
        learns(bounds, group=1, chunks=PAIRS - 1)
        for number in range(3):
            bounds.note(0, 100 + number, key_of(100 + number), 0.02)
    assert bounds.of(0) == pytest.approx(0.2)
    assert bounds.of(1) == BOUND
    learns(bounds, group=1)
    assert bounds.of(1) == started(tmp_path, 2).of(1) == LEAST


def test_a_file_of_an_earlier_version_is_forgotten(tmp_path: Path) -> None:
    learns(started(tmp_path))
    file = tmp_path / "audit" / "learned"
    said = json.loads(file.read_text())
    assert started(tmp_path).of(0) == LEAST
    said["learned"] = {"version": 4, "groups": [[PAIRS, [0.001] * 8]]}
    file.write_text(json.dumps(said))
    assert started(tmp_path).of(0) == BOUND
    learns(started(tmp_path))
    assert started(tmp_path).of(0) == LEAST, "and written over"


def test_nothing_is_written_of_states(tmp_path: Path) -> None:
    learns(AuditedBounds(Aside(tmp_path, None), NAMESPACE, [STATE_BOUND]))
    assert not (tmp_path / "audit").exists()
