# SPDX-License-Identifier: Apache-2.0
"""Verdicts on other connectors: a wrong answer that is planted is called wrong; and the damages."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.others_parts import damage
from benchmarks.others_parts.judge import (
    Cell,
    NoPowerError,
    Outcome,
    absent,
    check_power,
    judge,
    table,
)
from benchmarks.others_parts.systems import SYSTEMS, Piece
from benchmarks.rounding import LogProbs, bound

ROOT = Path(__file__).parent.parent.parent.parent
LIMIT = bound([0.01])


@dataclass
class Said:
    tokens: tuple[int, ...]
    logprobs: tuple[LogProbs, ...]


def said(*tokens: int, moved: float = 0.0) -> Said:
    """An answer in which each token is best, and its log-probability is moved by so much."""
    candidates = [((t, -0.5 + moved), (t + 1, -2.0), (t + 2, -3.0)) for t in tokens]
    return Said(tokens, tuple(candidates))


RIGHT = said(5, 6, 7)


def outcome(answer: Said, served: int) -> Outcome:
    return judge([(RIGHT, RIGHT), (answer, RIGHT)], served, 1024, LIMIT).outcome


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (said(5, 6, 7), True),
        (said(5, 6, 7, moved=LIMIT * 0.9), True),
        (said(5, 6, 7, moved=LIMIT * 1.1), False),  # the same tokens
        (said(5, 6, 90), False),
        (said(90, 6, 7), False),
        (said(5, 6, 7, moved=math.nan), False),
    ],
)
def test_a_wrong_answer_is_called_wrong(answer: Said, is_right: bool) -> None:
    assert outcome(answer, served=512) is (Outcome.RIGHT if is_right else Outcome.WRONG)
    assert outcome(answer, served=0) is (Outcome.COMPUTED if is_right else Outcome.WRONG)


def test_a_near_tie_is_rounding_and_no_fault() -> None:
    """The other candidate was drawn, and both have about the same log-probability: what comes
    behind is another text."""
    one = Said((5, 8), (((5, -0.70), (6, -0.71), (7, -4.0)), ((8, -0.1), (9, -3.0), (1, -5.0))))
    other = Said((6, 2), (((6, -0.70), (5, -0.71), (7, -4.0)), ((2, -0.1), (3, -3.0), (4, -5.0))))
    assert judge([(one, other)], 512, 512, LIMIT).outcome is Outcome.RIGHT


def test_a_fault_that_changes_no_answer_proves_nothing() -> None:
    check_power([RIGHT], [said(50, 60, 70)], LIMIT)
    with pytest.raises(NoPowerError):
        check_power([RIGHT, RIGHT], [said(50, 60, 70), said(5, 6, 7)], LIMIT)


def result() -> dict[str, Any]:
    def of(*cells: Cell) -> dict[str, Any]:
        names = ("restart", "bit")
        return {"cells": {n: asdict(c) for n, c in zip(names, cells, strict=False)}}

    gone = Cell(Outcome.ABSENT, why="needs a GPU")
    return {
        "systems": {
            "ours": of(Cell(Outcome.RIGHT, 1024, 1024), Cell(Outcome.RIGHT, 512, 1024)),
            "theirs": of(Cell(Outcome.WRONG, 1024, 1024)),
            "theirs-gpu": of(gone, gone),
        }
    }


def test_the_table_has_those_that_ran_and_the_rest_a_reason() -> None:
    text = table(result(), {"restart": "a restart", "bit": "one bit"})
    assert text.splitlines() == [
        "| fault | ours | theirs |",
        "|---|---|---|",
        "| a restart (`restart`) | served right | **served WRONG** |",
        "| one bit (`bit`) | served right, 512 of 1024 | not run |",
    ]
    assert absent(result()) == {"theirs-gpu": "needs a GPU"}


def test_the_page_has_the_table_of_the_file() -> None:
    pytest.importorskip("vllm", reason="the faults are stories of vLLM's engines")
    from benchmarks.audit_others import PAGE, with_table

    found = json.loads((ROOT / "results" / "audit_others.json").read_text())
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, found) == page, "python -m benchmarks.audit_others --docs"


def test_one_cell_that_does_not_run_is_one_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a system that serves nothing at all is given up."""
    pytest.importorskip("vllm", reason="the faults are stories of vLLM's engines")
    from benchmarks import audit_others
    from benchmarks.others_parts.faults import FAULTS

    tried = []

    def fails(lab: Any, system: Any, fault: Any) -> Cell:
        tried.append((system.name, fault.name))
        if system.name == "example":
            lab.serving.add(system.name)
        return Cell(Outcome.ABSENT, why="no such model")

    monkeypatch.setattr(audit_others, "try_fault", fails)
    file = tmp_path / "found.json"
    assert audit_others.main(["--only", "multi", "--out", str(file)]) == 0
    assert audit_others.main(["--only", "example", "bit", "swap", "--out", str(file)]) == 0
    assert tried == [("multi", "same-process"), ("example", "bit"), ("example", "swap")]
    cells = {n: list(s["cells"]) for n, s in json.loads(file.read_text())["systems"].items()}
    assert cells == {"example": ["bit", "swap"], "multi": list(FAULTS)}
    with pytest.raises(SystemExit):
        audit_others.main(["--only", "example", "bits", "--out", str(file)])


@pytest.mark.parametrize(("answer", "cached"), [(RIGHT, 512), (RIGHT, 0), (said(90, 6, 7), 512)])
def test_what_is_wrong_without_the_fault_shows_no_fault(
    tmp_path: Path, answer: Said, cached: int
) -> None:
    pytest.importorskip("vllm", reason="the faults are stories of vLLM's engines")
    from benchmarks.others_parts.faults import PLAIN, DoesNotRunError, Lab, if_right_without
    from tests.vllm.engine import Answer

    class Control(Lab):
        def __post_init__(self) -> None:
            """No model: nothing is started."""

        def prime(self, system: Any, name: str, vllm: Any, ask: Any) -> Path:
            return self.work

        def ask(self, system: Any, vllm: Any, ask: Any = PLAIN) -> list[Answer]:
            return [Answer(answer.tokens, answer.logprobs, cached)]

    reference = [Answer(RIGHT.tokens, RIGHT.logprobs, 0)], LIMIT
    wrong = Cell(Outcome.WRONG, 512, 512)

    def run(cell: Cell) -> Cell:
        setting: Any = ("fp8", {}, PLAIN)
        return if_right_without(Control(tmp_path), SYSTEMS["example"], cell, setting, reference)

    if answer is RIGHT and cached:
        assert run(wrong) is wrong
    else:
        with pytest.raises(DoesNotRunError):
            run(wrong)
    assert run(Cell(Outcome.COMPUTED)).outcome is Outcome.COMPUTED


# ---- damages ---------------------------------------------------------------------------------


def pieces(directory: Path) -> list[Piece]:
    """Two files with three pieces, of numbers below 1."""
    one = bytes([0x11, 0x3F]) * 64
    other = bytes([0x22, 0x3F]) * 64
    (directory / "a").write_bytes(b"head" + one)
    (directory / "b").write_bytes(b"head" + other + b"short")
    return [
        Piece(directory / "a", 4, 128),
        Piece(directory / "b", 132, 5),
        Piece(directory / "b", 4, 128),
    ]


def test_one_bit_is_flipped_and_the_number_is_large(tmp_path: Path) -> None:
    found = pieces(tmp_path)
    before = (tmp_path / "a").read_bytes()
    damage.flip_bit(found)
    after = (tmp_path / "a").read_bytes()
    changed = [(i, a ^ b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    ((place, bits),) = changed
    assert bits == damage.TOP_OF_EXPONENT
    assert (place - 4) % 2 == 1
    assert place >= 4 + 64  # in the second half


def test_two_pieces_of_one_size_change_places(tmp_path: Path) -> None:
    found = pieces(tmp_path)
    a, b = ((tmp_path / name).read_bytes() for name in "ab")
    damage.swap(found)
    assert (tmp_path / "a").read_bytes() == b"head" + b[4:132]
    assert (tmp_path / "b").read_bytes() == b"head" + a[4:] + b"short"


def test_a_file_is_cut_in_the_middle_of_a_piece(tmp_path: Path) -> None:
    damage.cut(pieces(tmp_path))
    assert (tmp_path / "a").stat().st_size == 4 + 64


def test_what_stored_nothing_is_told(tmp_path: Path) -> None:
    for how in (damage.flip_bit, damage.swap, damage.cut):
        with pytest.raises(damage.NothingStoredError):
            how([])
    with pytest.raises(damage.NothingStoredError):
        damage.swap(pieces(tmp_path)[:2])


def test_what_keeps_files_has_a_directory_of_its_own(tmp_path: Path) -> None:
    for system in SYSTEMS.values():
        transfer = json.dumps(system.transfer(tmp_path, 5))
        assert str(tmp_path) in transfer or system.daemon or not system.keeps, system.name
        assert (system.pieces is not None) == system.keeps, system.name
