# SPDX-License-Identifier: Apache-2.0
"""Two pictures of docs/images, drawn by hand as SVG: what the demo and a restart have shown.

`python -m benchmarks.pictures` writes them of results/demo.json and results/restart.json. Every
number in them is one of these files, or made of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

from attnstore_lab.palette import BEHIND, INK, ON_TINT, TINTS, color

WIDTH: Final = 600
"""A phone shows it in 360 pixels: words of 15 are 9 there."""
LEFT: Final = 12
"""Where all begins; a bar's name stands above it."""
ROW: Final = 30
TOPS: Final = (74, 132, 190)
"""Of the bars."""
LINE: Final = 18
LETTER: Final = 8.5
"""Of 15 px, on average and a little more: what a word needs, as no browser is asked."""
SMALL, SMALL_LETTER = 13, 7.4
"""The same of words on a part of a bar."""


def hero(demo: Mapping[str, Any]) -> str:
    """The first token of later turns, without the store and with it, and where its KV was."""
    alone, ours = demo["sides"]
    before, after = (side["ttft_later_turns_median_ms"] for side in (alone, ours))
    ratio = before / after
    said = f"{ratio:.1f} times sooner" if ratio >= 1 else f"{1 / ratio:.1f} times as late"
    title = f"The first token of a later turn comes {said}"
    scale = 460 / max(side["ttft_later_turns_p95_ms"] for side in (alone, ours))
    body = [
        *_time(alone, TOPS[0], scale, TINTS["computed"], color("vllm")),
        *_time(ours, TOPS[1], scale, TINTS["DRAM"], color("attnstore")),
    ]
    tokens = dict(sorted(ours["prompt_tokens"].items(), key=lambda source: _rank(source[0])))
    all_tokens = sum(tokens.values())
    words = {
        source: f"{source} {100 * count / all_tokens:.0f} %" for source, count in tokens.items()
    }
    body += _row("where its prompt's KV was", TOPS[2])
    body += _parts(tokens, words, TOPS[2], (WIDTH - 2 * LEFT) / all_tokens)
    turns = sum(
        record["turn"] >= 2 and record["error"] is None and record["ttft_ms"] is not None
        for record in demo["records"][ours["name"]]
    )
    here, chats = demo["machine"], demo["settings"]["conversations"]
    engine, _, build = here["vllm"].partition("+")
    where = f"vLLM {engine}, {here['cores']} cores" + (", no GPU" if build == "cpu" else "")
    foot = (
        f"Median of {turns} later turns of {chats} chats; "
        f"HBM has room for {demo['settings']['hbm_tokens']:,} tokens.",
        f"{where}: make demo",
    )
    told = (
        f"{title}: {after:.0f} ms in place of {before:.0f} ms. Its KV: {', '.join(words.values())}."
    )
    return _svg(title, told, body, foot)


def restart(found: Mapping[str, Any]) -> str:
    """Prompt tokens that were not computed, by tier: on an empty store, before, after a restart."""
    title = f"A restart keeps {100 * found['kept']:.0f} % of the hits that the store had added"
    rows = (
        ("an empty store", "empty"),
        ("before the restart", "before"),
        ("after it", "after"),
    )
    scale = 500 / max(sum(found[key].values()) for _, key in rows)
    body: list[str] = []
    told = []
    for top, (name, key) in zip(TOPS, rows, strict=True):
        tokens = {tier: count for tier, count in found[key].items() if count}
        total = sum(tokens.values())
        words = {tier: f"{tier} {count:,}" for tier, count in tokens.items()}
        body += _row(name, top)
        body += _parts(tokens, words, top, scale)
        body.append(_text(LEFT + total * scale + 10, top + 20, f"{total:,}", bold=True))
        told.append(f"{name}: {', '.join(words.values())}")
    foot = (
        f"Prompt tokens found of the same {found['conversations']} chats. A chat finds its own "
        "turns;",
        "what was stored before a restart comes from NVMe.",
    )
    return _svg(title, f"{title}. {'. '.join(told)}.", body, foot)


def _rank(source: str) -> tuple[bool, bool]:
    """Tiers before what is none, and DRAM and NVMe, which are the store's, first."""
    return source == "computed", source not in ("DRAM", "NVMe")


def _time(side: Mapping[str, Any], top: int, scale: float, tint: str, line: str) -> list[str]:
    """A bar to the median, a thinner one to p95."""
    median, tail = side["ttft_later_turns_median_ms"], side["ttft_later_turns_p95_ms"]
    end, far = LEFT + median * scale, LEFT + tail * scale
    drawn = _row(side["name"], top)
    drawn.append(
        f'<rect x="{end:.1f}" y="{top + 10}" width="{far - end:.1f}" height="10" rx="4" '
        f'fill="{line}" fill-opacity="{BEHIND}"/>'
    )
    drawn.append(
        f'<rect x="{LEFT}" y="{top}" width="{end - LEFT:.1f}" height="{ROW}" rx="5" fill="{tint}"/>'
    )
    inside, beside = f"{median:.0f} ms", f"p95 {tail:.0f} ms"
    if (end - LEFT) > LETTER * len(inside) + 20:
        drawn.append(_text(end - 10, top + 20, inside, fill=ON_TINT, anchor="end", bold=True))
        drawn.append(_text(far + 10, top + 20, beside))
    else:
        drawn.append(_text(far + 10, top + 20, f"{inside}, {beside}", bold=True))
    return drawn


def _parts(
    counts: Mapping[str, int], words: Mapping[str, str], top: int, scale: float
) -> list[str]:
    """One bar of several tints; one that is short has its name alone, or no words."""
    drawn, at = [], float(LEFT)
    for source, count in counts.items():
        width = count * scale
        drawn.append(
            f'<rect x="{at:.1f}" y="{top}" width="{max(1.0, width - 2):.1f}" height="{ROW}" '
            f'rx="{5 if width > 12 else 1}" fill="{TINTS[source]}"/>'
        )
        fitting = [w for w in (words[source], source) if width > SMALL_LETTER * len(w) + 6]
        if fitting:
            middle = at + width / 2 - 1
            drawn.append(
                _text(middle, top + 20, fitting[0], fill=ON_TINT, anchor="middle", size=SMALL)
            )
        at += width
    return drawn


def _row(name: str, top: int) -> list[str]:
    return [_text(LEFT, top - 8, name)]


def _text(
    x: float,
    y: float,
    words: str,
    *,
    fill: str = INK,
    anchor: str = "start",
    bold: bool = False,
    size: int = 15,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" '
        f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


def _svg(title: str, told: str, body: Sequence[str], foot: Sequence[str]) -> str:
    """Args:
    told: for those who do not see it.
    """
    under = TOPS[-1] + ROW + 28
    height = under + LINE * len(foot)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        'font-family="Helvetica, Arial, sans-serif" role="img" aria-labelledby="t">',
        f'<title id="t">{escape(told)}</title>',
        _text(LEFT, 28, title, bold=True, size=18),
        *body,
        *(_text(LEFT, under + LINE * n, line, size=13) for n, line in enumerate(foot)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
