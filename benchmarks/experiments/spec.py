# SPDX-License-Identifier: Apache-2.0
"""An experiment's YAML: its question, what is varied, what is measured, what the paper found.

    question: How much of a conversation's history is found?
    varied: model
    paper: figure 13; 9,000 ShareGPT sessions, 128 GB of DRAM, 10 TB of SSD
    simulate:                     # or `serve`: real servers, by `python -m benchmarks.compare`; or
                                  # `script`: another benchmark of this repository
      points:                     # what is varied: a label, and what is different there
        LLaMA-13B: {machine: llama-13b-2xa100}
      policies: [attnstore, lru, belady]
      sessions: 9000
      rate: 1.0
    quick: {sessions: 100}        # over simulate or serve, to try it
    metrics:
      found: {words: history found, unit: "%", paper: {LLaMA-13B: 86}}
    picture: found                # the metric that is drawn; the first, if left out
    message: {says: "{attnstore:.0f} % is found", holds: [attnstore > lru]}    # message.py
    before: above the tables
    notes: below them

What is simulated may be `over` another policy than `recompute`, and take several `draws` of the
conversations as one. A point of it may set `machine` (a file of configs/machines), settings of that
machine, `rate`, `think_s` and `policies`; one that is served `options` of
`python -m benchmarks.compare`. What is served with `together: LABEL` has a row more: the TTFT of
all points as one, and its interval. A metric's `goal` is {system, at_most or at_least}, and its
`missed` says why, if it is missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from attnstore_vllm.errors import AttnStoreError
from benchmarks.experiments import message
from benchmarks.experiments.message import Message

FOLDER: Final = Path(__file__).parent
Kind = Literal["simulate", "serve", "script"]
KINDS: Final[tuple[Kind, ...]] = ("simulate", "serve", "script")


class SpecError(AttnStoreError):
    """A YAML of an experiment is wrong. The message says which, where, and what was expected."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a system's value is to reach, at every point."""

    system: str
    at_most: float | None = None
    at_least: float | None = None

    def is_met(self, value: float) -> bool:
        if self.at_most is not None and value > self.at_most:
            return False
        return self.at_least is None or value >= self.at_least

    def words(self, unit: str = "") -> str:
        scale = 100 if unit == "%" else 1
        if self.at_most is not None:
            return f"at most {scale * self.at_most:g}"
        return f"at least {scale * (self.at_least or 0):g}"


@dataclass(frozen=True, slots=True)
class Metric:
    """One table.

    Args:
        unit: "%" for values that are shares.
        paper: what the paper found, by point.
        missed: why the goal was missed, if it was.
    """

    name: str
    words: str
    unit: str = ""
    paper: Mapping[str, float] = field(default_factory=dict)
    goal: Goal | None = None
    missed: str = ""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One file.

    Args:
        picture: the metric that is drawn, if not the first.
        message: the picture's title; without one it is the question.
    """

    name: str
    question: str
    varied: str
    kind: Kind
    body: Mapping[str, Any]
    quick: Mapping[str, Any]
    metrics: tuple[Metric, ...]
    paper: str = ""
    before: str = ""
    notes: str = ""
    picture: str = ""
    message: Message | None = None

    @property
    def pictured(self) -> Metric:
        """The one of the picture."""
        named = (metric for metric in self.metrics if metric.name == self.picture)
        return next(named, self.metrics[0])

    def quickly(self) -> Experiment:
        """The same, small: to see that it runs."""
        return replace(self, body=dict(self.body) | dict(self.quick))

    @property
    def command(self) -> str:
        return f"python -m benchmarks.experiments {self.name}"


def read_all(folder: Path = FOLDER) -> dict[str, Experiment]:
    """By name, in the order of `order`, then of names. Raises: SpecError."""
    found = {path.stem: read(path) for path in sorted(folder.glob("*.yaml"))}
    return dict(sorted(found.items(), key=lambda entry: (entry[1].body.get("order", 99), entry[0])))


def read(path: Path) -> Experiment:
    """Raises: SpecError."""
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: not YAML: {error}") from error
    return parse(path.stem, given)


def parse(name: str, given: Any) -> Experiment:
    """Raises: SpecError."""
    if not isinstance(given, dict):
        raise SpecError(f"{name}: settings are expected, not {given!r}")
    known = {
        "question",
        "varied",
        "paper",
        "quick",
        "metrics",
        "picture",
        "message",
        "before",
        "notes",
        *KINDS,
    }
    for key in given:
        if key not in known:
            raise SpecError(f"{name}: {key!r} is unknown; known are {', '.join(sorted(known))}")
    kinds = [kind for kind in KINDS if kind in given]
    if len(kinds) != 1:
        raise SpecError(f"{name}: one of {', '.join(KINDS)} is expected")
    for key in ("question", "varied", "metrics"):
        if not given.get(key):
            raise SpecError(f"{name}: {key} is missing")
    points = given[kinds[0]].get("points")
    if not isinstance(points, dict) or not points:
        raise SpecError(f"{name}: {kinds[0]}.points: labels and their settings are expected")
    metrics = tuple(_metric(name, key, value, points) for key, value in given["metrics"].items())
    if given.get("picture", metrics[0].name) not in given["metrics"]:
        raise SpecError(f"{name}: picture: {given['picture']!r} is none of its metrics")
    return Experiment(
        name,
        given["question"],
        given["varied"],
        kinds[0],
        given[kinds[0]],
        given.get("quick", {}),
        metrics,
        given.get("paper", ""),
        given.get("before", ""),
        given.get("notes", ""),
        given.get("picture", ""),
        _message(name, given),
    )


def _message(name: str, given: Mapping[str, Any]) -> Message | None:
    try:
        return message.parse(given["message"]) if "message" in given else None
    except message.MessageError as error:
        raise SpecError(f"{name}: {error}") from error


def _metric(name: str, key: str, given: Any, points: Mapping[str, Any]) -> Metric:
    where = f"{name}: metrics.{key}"
    if not isinstance(given, dict) or "words" not in given:
        raise SpecError(f"{where}: {{words: ...}} is expected, not {given!r}")
    for label in given.get("paper", {}):
        if label not in points:
            raise SpecError(f"{where}.paper: {label!r} is no point; there are {sorted(points)}")
    try:
        values = dict(given)
        goal = Goal(**values.pop("goal")) if "goal" in values else None
        return Metric(key, goal=goal, **values)
    except TypeError as error:
        raise SpecError(f"{where}: {error}") from error
