# SPDX-License-Identifier: Apache-2.0
"""Which tokens of documents are computed anew: neighbours whose K is furthest off, as many as the
plan says, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch

from attnstore_vllm.connector import document_passes
from attnstore_vllm.connector.document_passes import choose
from attnstore_vllm.transfer.plan import CHOSEN_TOGETHER, Selection

START, STOP = 5, 205
GAPS = (range(START, 17), range(90, 103))
POSITIONS = range(START, STOP)


class Ranks:
    """A group whose other ranks say `others`, of the same tokens."""

    def __init__(self, others: torch.Tensor) -> None:
        self.others = others

    def all_reduce(self, mine: torch.Tensor) -> torch.Tensor:
        return mine + self.others

    def broadcast(self, found: torch.Tensor, src: int) -> torch.Tensor:
        assert src == 0
        return found


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    distances: Sequence[float],
    number: int,
    others: Sequence[float] | None = None,
) -> list[int]:
    """Of documents, in their order."""
    rest = torch.zeros(len(distances)) if others is None else torch.tensor(others)
    monkeypatch.setattr(document_passes, "get_tp_group", lambda: Ranks(rest))
    parts = list(torch.tensor(distances).split(37))  # of several passes
    found = choose(parts, POSITIONS, Selection(GAPS, number, range(1)))
    in_gaps = [at for gap in GAPS for at in gap]
    assert found == sorted(found) and set(in_gaps) <= set(found)
    return [at for at in found if at not in in_gaps]


@pytest.mark.parametrize("number", [0, 1, 7, 40, STOP - START - 25, 500])
def test_groups_that_are_furthest_off(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    random = Random(number)
    distances = [random.random() for _ in POSITIONS]
    found = chosen(monkeypatch, distances, number)
    of_documents = [at for at in POSITIONS if not any(at in gap for gap in GAPS)]
    assert len(found) == min(number, len(of_documents))
    sums: dict[int, float] = {}
    for at in of_documents:
        group = at // CHOSEN_TOGETHER
        sums[group] = sums.get(group, 0.0) + distances[at - START]
    expected: list[int] = []
    for group in sorted(sums, key=lambda one: -sums[one]):
        expected += [at for at in of_documents if at // CHOSEN_TOGETHER == group]
    assert found == sorted(expected[:number])


def test_what_gaps_say_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    distances = [1e6 if any(at in gap for gap in GAPS) else 1.0 for at in POSITIONS]
    distances[150 - START] = 2.0
    first = 150 // CHOSEN_TOGETHER * CHOSEN_TOGETHER
    found = chosen(monkeypatch, distances, CHOSEN_TOGETHER)
    assert found == list(range(first, first + CHOSEN_TOGETHER))


def test_all_ranks_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, others = [0.0] * len(POSITIONS), [0.0] * len(POSITIONS)
    mine[40 - START], others[160 - START] = 1.0, 5.0
    assert 160 in chosen(monkeypatch, mine, CHOSEN_TOGETHER, others)


def test_tokens_with_a_hole_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions far apart are groups of their own, and no index beyond what there is."""
    monkeypatch.setattr(document_passes, "get_tp_group", lambda: Ranks(torch.zeros(200)))
    positions = [*range(100), *range(2000, 2100)]
    distances = torch.zeros(200)
    distances[150] = 1.0
    found = choose([distances], positions, Selection((), CHOSEN_TOGETHER, range(1)))
    first = 2050 // CHOSEN_TOGETHER * CHOSEN_TOGETHER
    assert found == list(range(first, first + CHOSEN_TOGETHER))
