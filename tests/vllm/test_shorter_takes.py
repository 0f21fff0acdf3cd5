# SPDX-License-Identifier: Apache-2.0
"""vLLM takes less than it is offered: its real schedulers and managers, over a scripted model.

vLLM 0.32 cuts hits to whole blocks where it computes the last window of a hit once more (DeepSeek
V4.1). Of a model without such a window the cut is made here, to any length.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector import facts
from attnstore_vllm.scheduler.offer import Offers
from tests.vllm.grouped import GroupedEngine
from tests.vllm.scripted import Limits, ScriptedEngine
from tests.vllm.scripted_worker import BLOCK
from tests.vllm.test_async_scheduling import drive, wait_until_quiet
from tests.vllm.test_groups_scheduled import CASES, Case, check_stored, make

CUT = [case for case in CASES if case.depth < 3 and "few" not in case.name]


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What came of offers. Engines that are made know that vLLM cuts hits."""
    counts, fail = Counter[str](), vars(Offers)["_fail"]

    def counted(*args: Any) -> bool:
        counts["failed"] += 1
        return bool(fail(*args))

    monkeypatch.setattr(facts, "may_cut_hits", lambda _: True)
    monkeypatch.setattr(Offers, "_fail", counted)
    return counts


def cut_hits(engine: GroupedEngine, seed: int, counts: Counter[str]) -> None:
    """vLLM takes a part of what it is offered, of any length."""
    connector: Any = engine.scheduler.connector
    ask, random = connector.get_num_new_matched_tokens, Random(seed)
    block = max(kind.block for kind in engine.kinds)

    def less(request: Any, local: int) -> tuple[int | None, bool]:
        found, is_ahead = ask(request, local)
        if not found or random.random() < 0.3:
            return found, is_ahead
        cut = random.randrange(found + 1)
        cut = cut if random.random() < 0.3 else cut // block * block
        counts["cut"] += 1
        return cut, is_ahead and cut > 0

    connector.get_num_new_matched_tokens = less


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CUT, ids=lambda case: case.name)
def test_what_is_cut_is_right_or_computed(
    case: Case, seed: int, model: Path, tmp_path: Path, counts: Counter[str]
) -> None:
    """No forward pass sees KV or a state that is not that of its tokens."""
    engine = make(case, seed, model, tmp_path)
    cut_hits(engine, seed, counts)
    try:
        drive(engine, seed)
        wait_until_quiet(engine.ours)
        check_stored(engine)
        assert counts["cut"] > 3
        assert counts["failed"] < counts["cut"], "nothing that was cut is loaded"
        assert engine.worker.loaded_tokens > BLOCK, "the store was hardly used"
    finally:
        engine.close()


@pytest.mark.parametrize("case", [CUT[0], CUT[6]], ids=lambda case: case.name)
def test_a_part_that_is_not_backed_is_noticed(
    case: Case,
    model: Path,
    tmp_path: Path,
    counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """These tests see what they are for: what backs the whole is loaded for a part."""

    def whole(_: Any, state: Any, num_tokens: int) -> Any:
        offered, state.offered = state.offered, None
        return offered

    monkeypatch.setattr(Offers, "part_taken", whole)
    engine = make(case, 0, model, tmp_path)
    cut_hits(engine, 0, counts)
    with pytest.raises(AssertionError, match=r"wrong|no block"):
        drive(engine, 0)
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_vllms_own_cut_of_a_model_with_one_group(model: Path, tmp_path: Path, depth: int) -> None:
    """Its scheduler lets hits end with whole blocks, and computes the last tokens once more."""
    limits = Limits(nvme="8MiB")
    engine = ScriptedEngine(
        model, tmp_path / "store", num_blocks=300, depth=depth, seed=3, limits=limits
    )
    engine.scheduler.prefix_replay_tokens = BLOCK
    try:
        drive(engine, 3)
        wait_until_quiet(engine.ours)
        assert engine.worker.loaded_tokens > BLOCK, "the store was hardly used"
    finally:
        engine.close()
