# SPDX-License-Identifier: Apache-2.0
"""Figures that a vLLM server gives of itself: its /metrics, and the steps in its log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Metrics: TypeAlias = "dict[tuple[str, frozenset[tuple[str, str]]], float]"
"""Samples of /metrics: (name, labels) to value."""

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_STEP = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, "
    r"(\d+) generation requests, (\d+) generation tokens, iteration elapsed time: ([\d.]+) ms"
)


def parse_metrics(text: str) -> Metrics:
    """Parse the Prometheus text format. Lines that are no samples are left out."""
    metrics: Metrics = {}
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SAMPLE.fullmatch(line)):
            name, labels, value = match.groups()
            metrics[name, frozenset(_LABEL.findall(labels or ""))] = float(value)
    return metrics


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Sum the samples of that name which have at least these labels; 0 if there is none."""
    wanted = set(labels.items())
    return sum(v for (n, found), v in metrics.items() if n == name and wanted <= found)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One pass of the model: what it computed of prompts, what it generated, and how long it took.

    The time is from when the engine waits for the pass to its tokens: with vLLM's asynchronous
    scheduling less than the pass takes.
    """

    prompt_requests: int
    prompt_tokens: int
    answer_requests: int
    answer_tokens: int
    seconds: float


def parse_steps(lines: Iterable[str]) -> list[LoggedStep]:
    """The steps in a log of a vLLM that was started with --enable-logging-iteration-details."""
    found = (match for line in lines if (match := _STEP.search(line)))
    return [
        LoggedStep(int(m[1]), int(m[2]), int(m[3]), int(m[4]), seconds=float(m[5]) / 1e3)
        for m in found
    ]
