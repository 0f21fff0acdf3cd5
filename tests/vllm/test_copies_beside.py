# SPDX-License-Identifier: Apache-2.0
"""Copies beside the model, at random: the cases of test_async_scheduling.py and the resets of
test_async_stops.py, over copies that go on by chance, wherever copies of a device may.

Which loads are ahead of their step, and by how many layers, which steps replay a graph that calls
no hook, and how quick the copies are is chance as well; the write buffer is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.vllm.scripted import Limits
from tests.vllm.stepped import SteppedEngine, leave_to_chance, prompt
from tests.vllm.test_async_scheduling import CASES, Case, check_stored, drive, wait_until_quiet


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def engine(case: Case, seed: int, model: Path, tmp_path: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(
        model, tmp_path / "store", rows=Random(seed).choice((2, 5, 12)),
        num_blocks=case.num_blocks, depth=case.depth, seed=seed, drafts=case.drafts,
        policy=case.policy, limits=Limits(dram_slots=case.dram_slots),
        num_ranks=2 if seed == 1 and not case.drafts else 1,
    )  # fmt: skip
    leave_to_chance(engine, seed)
    # As with vLLM's V1 model runner, where a draft model runs after the report.
    engine.worker.reports_first = case.drafts > 0
    yield engine
    engine.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_right_kv_is_used_and_stored(case: Case, seed: int, engine: SteppedEngine) -> None:
    drive(engine, seed)
    wait_until_quiet(engine.ours)
    assert check_stored(engine) >= 1
    assert engine.worker.loads_ahead > 0


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize(("rows", "gives_away"), [(64, False), (4, True), (0, False)])
def test_kept_blocks_come_free_in_a_step_without_saves(
    rows: int,
    gives_away: bool,
    drafts: int,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With drafts the report of a step is taken before what ends with it."""
    engine = SteppedEngine(
        model, tmp_path / "store", depth=1, rows=rows, num_blocks=60, seed=1, drafts=drafts
    )
    engine.worker.reports_first = drafts > 0
    monkeypatch.setattr(engine.ours.plans, "_gives_blocks_away", gives_away)
    engine.add("first", prompt("a", 96 if gives_away else 64), 1)
    for _ in range(60):
        if engine.scheduler.has_requests() or engine.in_flight:
            for stream in engine.streams:
                stream.go_on()
            engine.step()
    assert not engine.ours.plans.any_open()
    engine.close()
