# SPDX-License-Identifier: Apache-2.0
"""Random stories over vLLM's KV cache specs, types of KV, layouts and ranks.

Goal: no forward pass reads a byte that is not that of its tokens, its layer, its rank and its type
of KV; and what is wrong in copies or in names is seen.
Method: spec_story.py. `python -m tests.vllm.spec_stories` tells 10,000.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import get_args

import pytest
from vllm.config.cache import CacheDType
from vllm.v1 import kv_cache_interface as interface

from tests.fake_driver import driver
from tests.vllm import spec_stories
from tests.vllm.drawn_models import FAMILIES, LAYOUTS, STATES, draw
from tests.vllm.drawn_worker import WrongBytesError
from tests.vllm.spec_faults import FAULTS, Fault
from tests.vllm.spec_stories import tell_one
from tests.vllm.spec_story import tell

STORIES = 120
FIRST_OF_LONG = 20_000
UNSEEN_MAX = 12
"""Stories that could show a fault and do not, before one does."""


NOT_DRAWN = {
    "KVCacheSpec", "AttentionSpec",  # what all others are
    "UniformTypeKVCacheSpecs",  # vLLM makes it of a group's specs
    "HiSparseHotSpec", "HiSparseResidentSpec", "CrossAttentionSpec",  # idle: test_specs.py
    "EncoderOnlyAttentionSpec",  # keeps nothing
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    driver()


def tell_these(seeds: range) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        found += tell_one(seed)
    return found


def test_all_of_vllms_specs_and_types_are_drawn() -> None:
    drawn = [draw(Random(seed)) for seed in range(2000)]
    specs = [spec for model in drawn for spec in model.specs.values()]
    known = {
        name
        for name, kind in vars(interface).items()
        if isinstance(kind, type) and issubclass(kind, interface.KVCacheSpec)
    }
    assert {type(spec).__name__ for spec in specs} == known - NOT_DRAWN
    assert {model.kv_type for model in drawn} == set(get_args(CacheDType))
    kinds = {spec.mamba_type for spec in specs if isinstance(spec, interface.MambaSpec)}
    assert kinds == set(STATES)


def test_every_byte_that_is_read_is_right() -> None:
    found = tell_these(range(STORIES))
    assert found["with loads"] > STORIES // 2
    assert {f"with loads: {family}" for family in FAMILIES} <= found.keys()
    assert {f"layout: {layout}" for layout in LAYOUTS} <= found.keys()
    for what in (
        "on a GPU",
        "other types",
        "share tokens",
        "prefill ranks",
        "retained states",
        "stages: 2",
        "ranks: 2",
        "preempt",
    ):
        assert found[what] > 0, what


def test_what_vllm_itself_cannot_start_is_counted() -> None:
    """Of two groups of rings the second stage has one, and vLLM gives it the other one's layers."""
    rings = [sum(name.endswith("ring") for name in stage) for stage in draw(Random(5706)).stages]
    assert rings == [2, 1]
    assert tell_one(5706)["vLLM fails"] == 1


@pytest.mark.long
def test_in_many_more_stories() -> None:
    found = tell_these(range(FIRST_OF_LONG, FIRST_OF_LONG + 1000))
    assert {f"KV type: {kind}" for kind in get_args(CacheDType)} <= found.keys()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str) -> None:
    """Each is planted in copies that go well without it, in stories of models that can show it."""
    unseen, seed = 0, 0
    while unseen < UNSEEN_MAX:
        try:
            unseen += tell(seed, spec_stories.model(), FAULTS[name])["stories"]
        except WrongBytesError:
            return
        seed += 1
    raise AssertionError(f"{UNSEEN_MAX} stories do not see it")


def test_where_nothing_is_planted_nothing_is_seen() -> None:
    """The same stories in the same engine, also with all that makes room for a fault."""
    other_rank = FAULTS["another rank's record"]
    other_type = FAULTS["another type of KV under the same name"]
    for harmless in (
        Fault(lambda _: True),
        replace(other_rank, place=lambda place: place),
        replace(other_type, planted=nullcontext),
    ):
        told, seed = Counter[str](), 0
        while told["with loads"] < 4:
            told += tell(seed, spec_stories.model(), harmless)
            seed += 1


def test_the_command_counts_and_ends_at_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spec_stories.main(["--stories", "2", "--jobs", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["stories"] == 2
    assert "2 of 2 stories" in told.err
    monkeypatch.setattr(spec_stories, "tell_one", lambda seed: 1 // 0)
    assert spec_stories.main(["--stories", "3", "--first", "5", "--jobs", "1"]) == 1
    assert re.search("story 5: ZeroDivisionError", capsys.readouterr().out)
