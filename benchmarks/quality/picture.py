# SPDX-License-Identifier: Apache-2.0
"""A picture of what truncation costs the answers: right ones by what is cut.

The tables have the rest: perplexity, what recomputing buys, and what the layers remember.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from attnstore_lab import palette

METHODS: Final = {
    "TT": ("computed again (TT)", palette.INK),
    "CA": ("KV is moved (CA)", palette.color("moved")),
    "NKVT": ("KV stays at old positions (NKVT)", palette.color("old positions")),
}


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel for each number of overflows, rows of what is cut, a bar for each method."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        groups.setdefault(cell["overflows"], []).append(cell)
    moved = _lost(result["cells"], "CA")
    title = f"Moved KV costs at most {moved:.1f} points of right answers, old positions up to "
    figure, (panels,) = palette.figure(
        (9, 4), f"{title}{_lost(result['cells'], 'NKVT'):.0f}", 1, len(groups), sharey=True
    )
    for axes, (overflows, cells) in zip(panels, groups.items(), strict=True):
        for n, (method, (name, color)) in enumerate(METHODS.items()):
            found = [cell["methods"][method] for cell in cells]
            axes.bar(
                [place + 0.27 * (n - 1) for place in range(len(cells))],
                [100 * value["recall"] for value in found],
                0.25,
                yerr=[196 * value["recall_standard_error"] for value in found],
                color=color,
                ecolor=palette.INK,
                label=name,
            )
        axes.set_xticks(range(len(cells)), [f"{cell['ratio']:.0%}" for cell in cells])
        axes.set_xlabel("cut, of the window")
        axes.set_title(f"overflowed {'once' if overflows == 1 else f'{overflows} times'}")
    panels[0].set(ylabel="right answers, %", ylim=(0, 105))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    palette.save(figure, path)


def _lost(cells: list[dict[str, Any]], method: str) -> float:
    """The most right answers that it loses, points."""
    ours = [cell["methods"]["TT"]["recall"] - cell["methods"][method]["recall"] for cell in cells]
    return 100 * max(0.0, *ours)
