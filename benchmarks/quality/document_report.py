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
    rows: list[tuple[str, ...]] = [("computed anew", "moved tokens", *COLUMNS)]
    for row in result["rows"]:
        cells = [_spread(row[name], digits) for name, digits in COLUMNS.values()]
        rows.append((row["name"], f"{row['moved_tokens']:.0f}", *cells))
    return (
        f"{about['parameters'] / 1e6:.1f}M parameters, {about['layers']} layers. A prompt has "
        f"{prompt['documents']} documents of {prompt['document_tokens']} tokens, and "
        f"{prompt['gap_tokens']} new ones before each.\n{result['texts']} texts; "
        f"{result['questions']} questions to {result['chains']} prompts. (Standard errors.)\n\n"
        f"{table(rows)}"
    )


def _spread(value: dict[str, float], digits: int) -> str:
    return f"{value['value']:.{digits}f} ({value['standard_error']:.{digits}f})"


def curve(result: dict[str, Any], stored: str) -> list[tuple[float, dict[str, Any]]]:
    """(percent of each document computed anew, row) of the rows whose documents were stored so."""
    rows = [r for r in result["rows"] if r["stored"] == stored and not r["gaps_left_out"]]
    shares = [0.0 if row["recompute"] == "off" else 100 * row["recompute"] for row in rows]
    return sorted(zip(shares, rows, strict=True), key=lambda point: point[0])


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel for each measure: documents stored behind other text and alone, and full prefill."""
    (full,) = (row for row in result["rows"] if not row["stored"])
    (broken,) = (row for row in result["rows"] if row["gaps_left_out"])
    behind = curve(result, "behind")
    lost = full["two_hop_recall"]["value"] - behind[0][1]["two_hop_recall"]["value"]
    title = f"Reused documents cost {lost:.0f} points of recall over two of them"
    figure, (panels,) = palette.figure((11, 4.2), title, 1, len(LINES), sharey=True)
    kinds = {
        "stored behind other text": (behind, palette.color(palette.OURS), palette.MARKS[0]),
        "stored alone": (curve(result, "alone"), palette.OTHERS[1], palette.MARKS[1]),
    }
    for axes, (name, words) in zip(panels, LINES.items(), strict=True):
        for label, (points, color, mark) in kinds.items():
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
        axes.axhline(broken[name]["value"], color=palette.INK, ls=":", label="gaps left out")
        axes.set_title(words, fontsize="small")
        axes.set_xlabel("computed anew, % of each document")
    panels[0].set(ylabel="%", ylim=(0, 105))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    palette.save(figure, path)
