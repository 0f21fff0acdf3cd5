# SPDX-License-Identifier: Apache-2.0
"""A picture of a comparison: time to first token, hits, and time in prefill, by system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot(systems: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """
    Args:
        systems: of a comparison's JSON.
    Raises: ImportError without matplotlib.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  a second to import, and not everywhere

    names = list(systems)
    found = [systems[name]["figures"] for name in names]
    places = range(len(names))
    figure = Figure(figsize=(11, 1.5 + 0.4 * len(names)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    for offset, key, label in (
        (-0.2, "ttft_first", "turn 1"),
        (0.2, "ttft_later", "turn 2 and later"),
    ):
        medians = [f[f"{key}_p50"] or 0 for f in found]
        tails = [max(0, (f[f"{key}_p95"] or 0) - m) for f, m in zip(found, medians, strict=True)]
        at = [place + offset for place in places]
        left.barh(
            at,
            medians,
            0.38,
            xerr=[[0] * len(tails), tails],
            capsize=2,
            label=label,
            error_kw={"alpha": 0.5},
        )
    left.set(xlabel="time to first token, ms (median, to p95)")
    left.legend(loc="best", fontsize="small")
    middle.barh(places, [100 * (f["hit_share"] or 0) for f in found])
    middle.set(xlabel="prompt tokens not computed, %", xlim=(0, 100))
    right.barh(places, [f["prefill_s"] or 0 for f in found])
    right.set(xlabel="accelerator time in prefill, s")
    left.set_yticks(places, names)
    left.invert_yaxis()
    for axes in (left, middle, right):
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
