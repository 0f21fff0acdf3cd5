# SPDX-License-Identifier: Apache-2.0
"""The figures as tables, with what was to be reached."""

from __future__ import annotations

from typing import Any

from attnstore_lab.bench.summary import table

RATIO_GOAL = 1.005  # perplexity, CA over TT
POINTS_GOAL = 2.0  # recall, TT minus CA
RECALL_GOAL = 0.9  # of TT
METHODS = ("TT", "CA", "NKVT")


def tables(result: dict[str, Any]) -> str:
    cells = result["cells"]
    return "\n\n".join(
        (
            _about(result),
            _by_method(cells, "perplexity", ".2f", "perplexity_ratio", (4, 2), "{} over TT"),
            _by_method(cells, "recall", ".1%", "recall_points_lost", (2, 1), "TT - {}, points"),
            _curve(result["curve"]),
            _layers(result["layers"]),
            *([_served(result["served"])] if result["served"] else []),
            "\n".join(verdicts(result)),
        )
    )


def verdicts(result: dict[str, Any]) -> list[str]:
    """One line for each goal: the worst cell, and whether it is reached."""
    cells = result["cells"]
    ratio = max(cell["perplexity_ratio"]["CA"]["value"] for cell in cells)
    naive = min(cell["perplexity_ratio"]["NKVT"]["value"] for cell in cells)
    lost = max(cell["recall_points_lost"]["CA"]["value"] for cell in cells)
    recall = min(cell["methods"]["TT"]["recall"] for cell in cells)
    return [
        _verdict(f"perplexity, CA over TT, largest: {ratio:.4f}", "<= 1.005", ratio <= RATIO_GOAL),
        f"perplexity, NKVT over TT, smallest: {naive:.2f} (a check that the measure can fail)",
        _verdict(f"recall, TT - CA, largest: {lost:.2f} points", "<= 2", lost <= POINTS_GOAL),
        _verdict(f"recall, TT, smallest: {recall:.1%}", "> 90 %", recall > RECALL_GOAL),
    ]


def _verdict(what: str, goal: str, reached: bool) -> str:
    return f"{what} (goal {goal}: {'reached' if reached else 'MISSED'})"


def _about(result: dict[str, Any]) -> str:
    model = result["model"]
    plain = ", ".join(f"{v:.1f} ({name})" for name, v in model["perplexity"].items())
    return (
        f"{model['parameters'] / 1e6:.1f}M parameters, {model['layers']} layers, window "
        f"{model['window']} tokens. Without truncation: perplexity {plain}, recall "
        f"{model['recall']:.1%}.\nKV kept in {result['settings']['stored']}."
    )


def _spread(value: dict[str, float], digits: int) -> str:
    return f"{value['value']:.{digits}f} ({value['low']:.{digits}f} to {value['high']:.{digits}f})"


def _by_method(
    cells: list[dict[str, Any]],
    measure: str,
    form: str,
    change: str,
    digits: tuple[int, int],
    heading: str,
) -> str:
    """A row a cell: a measure of each method, and how far CA and NKVT are from TT.

    Args:
        digits: of the two changes.
        heading: of the changes, with a place for the method.
    """
    changes = [heading.format(name) for name in METHODS[1:]]
    rows: list[tuple[str, ...]] = [(f"{measure}: cut", "overflows", *METHODS, *changes)]
    for cell in cells:
        rows.append(
            (
                f"{cell['ratio']:.0%}",
                str(cell["overflows"]),
                *(format(cell["methods"][name][measure], form) for name in METHODS),
                *(
                    _spread(cell[change][name], n)
                    for name, n in zip(METHODS[1:], digits, strict=True)
                ),
            )
        )
    return table(rows)


def _curve(curve: list[dict[str, Any]]) -> str:
    rows = [("CA, recomputed: first", "last", "overflows", "perplexity over TT", "TT - CA, points")]
    for point in curve:
        rows.append(
            (
                str(point["first"]),
                str(point["last"]),
                str(point["overflows"]),
                _spread(point["perplexity_ratio"], 4),
                _spread(point["recall_points_lost"], 2),
            )
        )
    return table(rows)


def _layers(layers: list[dict[str, Any]]) -> str:
    numbers = range(len(layers[0]["k"]))
    rows = [("CA from TT: cut", "overflows", "of", *(f"layer {n}" for n in numbers))]
    for line in layers:
        for name in ("k", "v"):
            rows.append(
                (
                    f"{line['ratio']:.0%}",
                    str(line["overflows"]),
                    name.upper(),
                    *(f"{value:.4f}" for value in line[name]),
                )
            )
    return table(rows)


def _served(served: list[dict[str, Any]]) -> str:
    rows = [
        (
            "real server: cut",
            "documents",
            "with TT",
            "first token",
            "whole answer",
            "share of the answer until the first difference",
        )
    ]
    for line in served:
        for name in ("CA", "again"):
            rows.append(
                (
                    f"{line['ratio']:.0%}",
                    str(line["documents"]),
                    name,
                    f"{line['first_token_equal'][name]:.0%}",
                    f"{line['whole_answer_equal'][name]:.0%}",
                    _spread(line["equal_until_first_difference"][name], 2),
                )
            )
    return table(rows)
