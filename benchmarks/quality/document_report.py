# SPDX-License-Identifier: Apache-2.0
"""What reuse of documents costs the answers: a table, and a picture by what is computed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from attnstore_lab import palette
from attnstore_lab.bench.summary import table

COLUMNS: Final = {
    "whole answer as full, %": ("whole_answer_equal", 1),
    "until first difference": ("equal_until_first_difference", 3),
    "perplexity over full": ("perplexity_over_full", 4),
    "key recall, %": ("key_recall", 1),
    "two hops, %": ("two_hop_recall", 1),
}
"""By heading the figure, and its digits."""
LINES: Final = {
    "whole_answer_equal": "greedy answers of 32 tokens that are those of full prefill",
    "key_recall": "recall within a document",
    "two_hop_recall": "recall over two documents",
}


def tables(result: dict[str, Any]) -> str:
    about, prompt = result["model"], result["prompt"]
    rows: list[tuple[str, ...]] = [("computed anew", "moved", "own passes", *COLUMNS)]
    for row in result["rows"]:
        cells = [_spread(row[name], digits) for name, digits in COLUMNS.values()]
        tokens = [f"{row[name]:.0f}" for name in ("moved_tokens", "own_pass_tokens")]
        rows.append((row["name"], *tokens, *cells))
    return (
        f"{about['parameters'] / 1e6:.1f}M parameters, {about['layers']} layers. A prompt has "
        f"{prompt['documents']} documents of {prompt['document_tokens']} tokens, and "
        f"{prompt['gap_tokens']} new ones before each.\n{result['texts']} texts; "
        f"{result['questions']} questions to {result['chains']} prompts. (Standard errors.)\n\n"
        f"{table(rows)}"
    )


def _spread(value: dict[str, float], digits: int) -> str:
    return f"{value['value']:.{digits}f} ({value['standard_error']:.{digits}f})"


def curve(result: dict[str, Any], stored: str, by: str) -> list[tuple[float, dict[str, Any]]]:
    """(percent computed anew, row) of the rows whose documents were stored so, and whose tokens
    were chosen so."""
    rows = [r for r in result["rows"] if r["stored"] == stored and not r["fault"]]
    shares = [0.0 if row["recompute"] == "off" else 100 * row["recompute"] for row in rows]
    points = [
        (share, row)
        for share, row in zip(shares, rows, strict=True)
        if not share or row["recompute_by"] == by
    ]
    return sorted(points, key=lambda point: point[0])


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel for each measure: documents stored behind other text and alone, and full prefill."""
    (full,) = (row for row in result["rows"] if not row["stored"])
    faults = [row for row in result["rows"] if row["fault"]]
    kinds = {
        "first tokens": (curve(result, "behind", "first"), palette.color(palette.OURS)),
        "selected": (curve(result, "behind", "deviation"), palette.OTHERS[1]),
        "stored alone, first tokens": (curve(result, "alone", "first"), palette.OTHERS[2]),
        "stored alone, selected": (curve(result, "alone", "deviation"), palette.OTHERS[3]),
    }
    none = kinds["first tokens"][0][0][1]
    lost = full["two_hop_recall"]["value"] - none["two_hop_recall"]["value"]
    title = f"Reused documents cost {lost:.0f} points of recall over two of them"
    figure, (panels,) = palette.figure((11, 4.2), title, 1, len(LINES), sharey=True)
    for axes, (name, words) in zip(panels, LINES.items(), strict=True):
        for mark, (label, (points, color)) in zip(palette.MARKS, kinds.items(), strict=False):
            axes.errorbar(
                [share for share, _ in points],
                [row[name]["value"] for _, row in points],
                [1.96 * row[name]["standard_error"] for _, row in points],
                color=color,
                marker=mark,
                capsize=3,
                label=label,
            )
        axes.axhline(full[name]["value"], color=palette.INK, ls="--", label="full prefill")
        for style, row in zip((":", "-."), faults, strict=True):
            axes.axhline(row[name]["value"], color=palette.INK, ls=style, label=row["name"])
        axes.set_title(words, fontsize="small")
        axes.set_xlabel("computed anew, % of each document")
    panels[0].set(ylabel="%", ylim=(0, 105))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    palette.save(figure, path)
