# SPDX-License-Identifier: Apache-2.0
"""A picture of the hits: how much longer DRAM takes than HBM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = ("#3e7cb1", "#81a4cd", "#c9a227", "#b0413e")


def draw(hits: dict[str, Any], goal: float, path: Path) -> None:
    """One part for each model and number of new tokens: ratio by history, a line a batch."""
    import matplotlib  # noqa: PLC0415  (a second to import, and only here)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    parts: dict[tuple[str, int], dict[int, list[dict[str, Any]]]] = {}
    for cell in hits["cells"]:
        part = parts.setdefault((cell["model"], cell["new_tokens"]), {})
        part.setdefault(cell["batch"], []).append(cell)
    figure, axes = pyplot.subplots(
        1,
        len(parts),
        figsize=(3.2 * len(parts), 3.4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, ((model, new), batches) in zip(axes[0], parts.items(), strict=True):
        for (batch, cells), color in zip(sorted(batches.items()), COLORS, strict=False):
            tokens = [cell["history_tokens"] for cell in cells]
            ratios = [cell["dram_over_hbm"] for cell in cells]
            axis.plot(
                tokens,
                [r["median"] for r in ratios],
                marker="o",
                color=color,
                label=f"{batch} at once",
            )
            low, high = zip(*(r["quartiles"] for r in ratios), strict=True)
            axis.fill_between(tokens, low, high, color=color, alpha=0.15, linewidth=0)
        axis.axhline(goal, color="#999999", linestyle="--", linewidth=1)
        axis.set_title(f"{model}, {new} new token{'s' * (new > 1)}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens, [f"{n / 1000:.0f}k" for n in tokens])
        axis.set_xlabel("tokens of history")
    axes[0][0].set_ylabel("TTFT, DRAM hit over HBM hit")
    axes[0][-1].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
