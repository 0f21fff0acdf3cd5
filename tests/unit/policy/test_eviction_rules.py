# SPDX-License-Identifier: Apache-2.0
"""The rules of eviction, one by one, without a tier: who leaves, and for what."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnstore_vllm.policy.eviction.rules import (
    For,
    Gives,
    behind_gives_up,
    dram_gives_up,
    is_full_of_wanted,
    lag,
    may_be_lost,
    may_go_for_low_value,
)
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import Run

TIERS = Path(__file__).parents[3] / "attnstore_vllm" / "tiers"


@dataclass
class Dram:
    """See rules.Full. By default nothing can go."""

    clean_worth: float | None = None
    dirty_worth: float = math.inf
    num_dirty: int = 9
    rest: tuple[int, bool] = (0, False)
    room_behind: bool = False
    behind: Sequence[float | None] = ()
    late_share: float = 0.0
    waited_s: float | None = None
    again_worth: float = 0.0
    stuck: bool = False

    def clean(self) -> float | None:
        return self.clean_worth

    def dirty(self) -> float:
        return self.dirty_worth

    def num_rest(self) -> tuple[int, bool]:
        return self.rest

    def has_room_behind(self) -> bool:
        return self.room_behind

    def poorest_behind(self) -> Iterable[float | None]:
        return self.behind

    def late(self) -> float:
        return self.late_share

    def late_reads(self) -> float:
        return self.late_share

    def waited(self) -> float | None:
        return self.waited_s

    def again(self) -> float:
        return self.again_worth

    def is_stuck(self) -> bool:
        return self.stuck


WHAT_GOES = [
    ("nothing can", Dram(), Gives.NOTHING),
    ("nothing is dirty", Dram(1.0, num_dirty=0), Gives.CLEAN),
    ("there is room behind", Dram(9.0, 1.0, room_behind=True), Gives.CLEAN),
    ("reads come late", Dram(9.0, 1.0, room_behind=True, late_share=0.5), Gives.DIRTY),
    ("the clean one is worth less", Dram(1.0, 9.0), Gives.CLEAN),
    ("the dirty one is worth less", Dram(9.0, 1.0), Gives.DIRTY),
    ("it will stay behind", Dram(9.0, 1.0, behind=(0.5,)), Gives.CLEAN),
    ("it is what leaves next there", Dram(9.0, 1.0, behind=(5.0,)), Gives.DIRTY),
    ("some tier has room", Dram(9.0, 1.0, behind=(5.0, None)), Gives.CLEAN),
    ("its rest can go", Dram(1.0, 9.0, rest=(3, True)), Gives.REST),
    ("its rest is held", Dram(1.0, 9.0, rest=(3, False)), Gives.CLEAN),
    ("its rest makes it dear", Dram(1.0, 2.0, rest=(3, False)), Gives.DIRTY),
    ("a request waits", Dram(None, 1.0, waited_s=1.0), Gives.WANTED),
    ("it has just begun to wait", Dram(None, 1.0, waited_s=1.0, late_share=2.0), Gives.DIRTY),
]


@pytest.mark.parametrize("what", For)
@pytest.mark.parametrize(("why", "dram", "gives"), WHAT_GOES, ids=[row[0] for row in WHAT_GOES])
def test_dram(why: str, dram: Dram, gives: Gives, what: For) -> None:
    assert dram_gives_up(dram, what) is gives


@pytest.mark.parametrize(
    ("what", "dram", "gives"),
    [
        (For.SAVE, Dram(None, 1.0), Gives.DIRTY),
        (For.READ, Dram(None, 1.0), Gives.NOTHING),
        (For.READ, Dram(None, 1.0, stuck=True), Gives.DIRTY),
        (For.COPY, Dram(None, 1.0, stuck=True), Gives.NOTHING),
        (For.COPY, Dram(None, 1.0, again_worth=8.0, late_share=0.5), Gives.DIRTY),
        (For.COPY, Dram(None, 1.0, again_worth=8.0, late_share=0.1), Gives.NOTHING),
    ],
)
def test_what_would_be_lost_goes_for_few(what: For, dram: Dram, gives: Gives) -> None:
    assert dram_gives_up(dram, what) is gives


@pytest.mark.parametrize(
    ("wanted", "idle", "others", "own", "admitted", "gives"),
    [
        (True, True, True, True, False, Gives.CLEAN),
        (True, False, True, False, False, Gives.WANTED),
        (True, False, False, False, False, Gives.NOTHING),
        (False, True, True, False, True, Gives.CLEAN),
        (False, True, True, False, False, Gives.REFUSED),
        (False, True, True, True, True, Gives.REFUSED),
        (False, False, True, False, True, Gives.REFUSED),
        (False, False, False, False, True, Gives.NOTHING),
    ],
)
def test_a_tier_behind(
    wanted: bool, idle: bool, others: bool, own: bool, admitted: bool, gives: Gives
) -> None:
    found = behind_gives_up(
        is_wanted=wanted,
        has_idle=idle,
        has_wanted=lambda: others,
        is_own=lambda: own,
        is_admitted=lambda: admitted,
    )
    assert found is gives


def test_shares() -> None:
    low, usual = Run(1, 0, 5.0, False, Priority.LOW_VALUE), Run(2, 0, 5.0, False)
    assert may_go_for_low_value(low, Gives.CLEAN)
    assert not may_go_for_low_value(low, Gives.WANTED)
    assert not may_go_for_low_value(usual, Gives.CLEAN)
    assert may_be_lost(usual, 6.0, ())
    assert not may_be_lost(usual, 5.0, ())
    assert not may_be_lost(usual, 6.0, {usual})
    assert [lag(dirty, 64) for dirty in (0, 4, 20, 64)] == [0.0, 0.0, 0.5, 1.0]
    assert [is_full_of_wanted(slots, 16) for slots in (13, 14)] == [False, True]


DECIDES = {"worth", "poorest", "late", "late_reads", "admits", "Priority", "priority"}
MAY_COMPARE = {"residency.py": 3}
"""residency.py: what has ended is not written (2), and low value is told from the rest."""


@pytest.mark.parametrize("path", sorted(TIERS.rglob("*.py")), ids=lambda path: path.name)
def test_tiers_compare_no_worths(path: Path) -> None:
    """Who leaves is decided in policy/eviction alone: a tier that weighs is a second place."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            inside = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
            inside |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if inside & DECIDES:
                found.append(node.lineno)
    assert len(found) <= MAY_COMPARE.get(path.name, 0), found
