# SPDX-License-Identifier: Apache-2.0
"""A picture of the hits: how much longer DRAM takes than HBM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnstore_lab import palette


def draw(hits: dict[str, Any], goal: float, path: Path) -> None:
    """One part for each model and number of new tokens: ratio by history, a line a batch."""
    parts: dict[tuple[str, int], dict[int, list[dict[str, Any]]]] = {}
    for cell in hits["cells"]:
        part = parts.setdefault((cell["model"], cell["new_tokens"]), {})
        part.setdefault(cell["batch"], []).append(cell)
    within = sum(cell["dram_over_hbm"]["median"] <= goal for cell in hits["cells"])
    share = f"{within} of {len(hits['cells'])} cells"
    title = (
        f"A hit in DRAM takes at most {goal:g} times one in HBM in {share}"
        f"\n(time to first token; dashed: {goal:g}; upright: quartiles)"
    )
    figure, (panels,) = palette.figure((10, 4.2), title, 1, len(parts), sharex=True, sharey=True)
    for axes, ((model, new), batches) in zip(panels, parts.items(), strict=True):
        for n, (batch, cells) in enumerate(sorted(batches.items())):
            _line(axes, n, batch, cells)
        axes.axhline(goal, color=palette.INK, linestyle="--", linewidth=1)
        axes.set_title(f"{model}, {new} new token{'s' * (new > 1)}")
        tokens = sorted({cell["history_tokens"] for cells in batches.values() for cell in cells})
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{count / 1000:.0f}k" for count in tokens])
        axes.minorticks_off()
        axes.set_xlabel("tokens of history")
    panels[0].set_ylabel("DRAM over HBM")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    palette.save(figure, path)


def _line(axes: Any, number: int, batch: int, cells: list[dict[str, Any]]) -> None:
    """Medians with their quartiles, a little aside from the other lines' at the same history."""
    aside = 1.07 ** (number - 1.5)
    ratios = [cell["dram_over_hbm"] for cell in cells]
    medians = [ratio["median"] for ratio in ratios]
    low, high = zip(*(ratio["quartiles"] for ratio in ratios), strict=True)
    axes.errorbar(
        [cell["history_tokens"] * aside for cell in cells],
        medians,
        yerr=[
            [middle - end for middle, end in zip(medians, low, strict=True)],
            [end - middle for middle, end in zip(medians, high, strict=True)],
        ],
        color=palette.OTHERS[number % len(palette.OTHERS)],
        marker=palette.MARKS[number % len(palette.MARKS)],
        elinewidth=1,
        label=f"{batch} at once",
    )
