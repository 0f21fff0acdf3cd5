# SPDX-License-Identifier: Apache-2.0
"""Figures that a vLLM server gives of itself in its /metrics."""

from __future__ import annotations

import re
from typing import TypeAlias

Metrics: TypeAlias = "dict[tuple[str, frozenset[tuple[str, str]]], float]"
"""Samples of /metrics: (name, labels) to value."""

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


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
