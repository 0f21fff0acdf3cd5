# SPDX-License-Identifier: Apache-2.0
"""A picture of a comparison: time to first token of later turns, by system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnstore_lab import palette


def plot(systems: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """
    Args:
        systems: of a comparison's JSON.
    Raises: ImportError without matplotlib.
    """
    colors = palette.colors(systems)
    figure, ((axes,),) = palette.figure((9, 1.6 + 0.4 * len(systems)), title)
    for place, (name, found) in enumerate(systems.items()):
        median = found["figures"]["ttft_later_p50"] or 0
        tail = max(median, found["figures"]["ttft_later_p95"] or 0)
        axes.barh(place, median, 0.7, color=colors[name])
        axes.barh(place, tail - median, 0.2, left=median, color=colors[name], alpha=palette.BEHIND)
        words = f"{median:,.0f} (p95 {tail:,.0f})"
        axes.annotate(words, (tail, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(systems)), [palette.name(name) for name in systems])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("time to first token of turn 2 and later, ms: median, and to p95", loc="left")
    palette.save(figure, path)
