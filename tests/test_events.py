# SPDX-License-Identifier: Apache-2.0
"""What is counted is counted under a name that exists: a member of Event or Cause, in a metric that
connector/metrics.py has. So a search for the event of an alert finds the code behind it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnstore_vllm.types import (
    AUDITS,
    CHUNK_EVENTS,
    ERRORS,
    OUTCOMES,
    PUT_OFF,
    Cause,
    Event,
    StoreFailure,
)
from tests.test_readme import metric_names

PACKAGE = Path(__file__).resolve().parent.parent / "attnstore_vllm"
OURS = sorted(PACKAGE.rglob("*.py"))
METRICS = {name.removesuffix("_total") for name in metric_names()}
WORDS = {word.value for word in (*Event, *Cause) if "_" in word.value} - {"step_budget"}
"""Values that mean nothing else, wherever they stand. (That one is a setting, too.)"""


def has_text(node: ast.expr) -> bool:
    """Whether some string is made there."""
    kinds = [part for part in ast.walk(node) if isinstance(part, ast.Constant | ast.JoinedStr)]
    return any(isinstance(getattr(kind, "value", ""), str) for kind in kinds)


def faults(tree: ast.AST, *, defines: bool = False) -> Iterator[str]:
    """Counts under a string that is no member, or in a metric that there is not.

    Args:
        defines: the file is the one that may have the values as strings.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            if ast.unparse(node.value).endswith(("counts", "put_off")) and has_text(node.slice):
                yield f"{node.lineno}: {ast.unparse(node)} is no member of Event"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver = ast.unparse(node.func.value).rpartition(".")[2].removeprefix("_")
            adds = node.func.attr in ("add", "add_blocks", "set", "observe")
            if not (adds and receiver in ("stats", "counts")):
                continue
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value not in METRICS:
                yield f"{node.lineno}: there is no metric {ast.unparse(name)}"
            if isinstance(name, ast.JoinedStr) or has_text(ast.Tuple(node.args[1:])):
                yield f"{node.lineno}: {ast.unparse(node)} has a bare string"
        elif isinstance(node, ast.Constant) and node.value in WORDS and not defines:
            yield f"{node.lineno}: {node.value!r} is a bare string: use the member"


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_counts_have_names_that_exist(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = list(faults(tree, defines=path.name == "types.py"))
    assert not found, f"{path}: {found}"


@pytest.mark.parametrize(
    "planted",
    [
        'context.residency.counts["droped"] += 1',
        'self.counts["saved_again" if chunk.behind else "saved"] += 1',
        'self._counts[f"{self._event}_late"] += 1',
        'residency.counts[source.events + "corrupt"] += 1',
        'self.put_off["save"] += left',
        'stats.add("recomputations", "lost", 1)',
        'self._stats.add(f"{name}_tokens", tier, 1)',
        'self._stats.add("recomputation", Cause.LOST, 1)',
        'stats.observe("wait_second", 1.0)',
        'event = "shared_corrupt"',
    ],
)
def test_a_planted_string_is_found(planted: str) -> None:
    assert list(faults(ast.parse(planted)))


def test_each_event_is_of_one_metric() -> None:
    groups = (*CHUNK_EVENTS, *ERRORS, *PUT_OFF, *OUTCOMES, *AUDITS)
    assert sorted(groups) == sorted(Event)
    assert {failure.value for failure in StoreFailure} <= set(Event)


def test_a_member_is_its_text() -> None:
    assert f"{Event.SHARED_CORRUPT} {Cause.LOST!s}" == "shared_corrupt lost"
    assert {Event.SAVED: 1}["saved"] == 1  # type: ignore[index]
    assert repr(f"{Event.SAVED}") == "'saved'"


def test_every_member_is_used() -> None:
    """One that stands in types.py alone counts nothing."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in OURS if path.name != "types.py")
    types = (PACKAGE / "types.py").read_text(encoding="utf-8").partition("class StoreFailure")[2]
    for word in (*Event, *Cause):
        name = f"{type(word).__name__}.{word.name}"
        assert re.search(rf"{name}\b", text + types), f"{name} is counted nowhere"
