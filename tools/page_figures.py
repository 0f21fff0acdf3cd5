# SPDX-License-Identifier: Apache-2.0
"""Figures in pages that come from files of results/: held against them, or written anew.

    python3 tools/page_figures.py            (exit 1, and what differs)
    python3 tools/page_figures.py --write    (after a benchmark has left another result)

FIGURES names each by its page and the words around it. docs/experiments.md, docs/models.md and the
README's tables have tools of their own. What is not made of a file stands in a section that says
when and on what it was measured (tests/test_figures.py). Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.wrap_pages import wrapped  # noqa: E402

NUMBER = r"[\d,]+(?:\.\d+)?"
SLOT = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Figure:
    """Some words of a page.

    Args:
        text: with a slot for each figure, as `{:.2f}`; a page may go on in a new line at a space.
        file: of results/.
        values: of the slots, from what is in the file.
    """

    page: str
    text: str
    file: str
    values: Callable[[Any], list[float]]

    def pattern(self) -> re.Pattern[str]:
        pieces = SLOT.split(self.text)[::2]
        words = [r"\s+".join(map(re.escape, piece.split(" "))) for piece in pieces]
        return re.compile(NUMBER.join(words))

    def said(self) -> str:
        return self.text.format(*self.values(read(self.file)))


@cache
def read(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))


def hits(model: int, *kinds: str) -> Callable[[Any], list[float]]:
    """TTFT of kinds of hits, ms; `-KIND` is without the store, `KIND/KIND` one over the other."""

    def values(found: Any) -> list[float]:
        result = found["results"][model]

        def value(kind: str) -> float:
            over, _, under = kind.partition("/")
            of = result["ttft_ms_without_store" if over.startswith("-") else "ttft_ms"]
            time = float(of[over.removeprefix("-")])
            return time / float(result["ttft_ms"][under]) if under else time

        return [value(kind) for kind in kinds]

    return values


def demo(name: str, scale: float = 1.0, digits: int = 0) -> Callable[[Any], list[float]]:
    """Of both sides of the demo, and the second over the first, of what is shown."""

    def values(found: Any) -> list[float]:
        alone, ours = (float(side[name]) * scale for side in found["sides"])
        return [round(alone, digits), round(ours, digits), ours / alone]

    return values


def not_computed(found: Any) -> list[float]:
    """The share of prompt tokens that the store's side of the demo has not computed, in %."""
    tokens = found["sides"][1]["prompt_tokens"]
    return [100 * (1 - tokens["computed"] / sum(tokens.values()))]


def throughput(found: Any) -> list[float]:
    ratios = found["ratios"]
    both = found["tokens_per_s"]
    return [
        found["rounds"],
        found["ratio_median"],
        min(ratios),
        max(ratios),
        both["store"] / both["plain"],
    ]


def throughputs(found: Any) -> list[float]:
    return [found["ratio_median"], read("overlap.json")["throughput"]["result"]["ratio"]]


def served(name: str, scale: float = 1.0) -> Callable[[Any], list[float]]:
    """Of a real server without a cache, with vLLM's own, with LMCache's daemon and with ours."""

    def values(found: Any) -> list[float]:
        (sides,) = found["values"][name].values()
        return [scale * sides[side] for side in ("re", "vllm", "lmcache", "attnstore")]

    return values


def on_h200(tokens: int, *columns: str) -> Callable[[Any], list[float]]:
    """TTFT, ms, with nothing beside; `-KIND` is vLLM's own offloading; the last is DRAM's ratio."""

    def values(found: Any) -> list[float]:
        times = {
            sign: next(
                hits["ttft_ms"]
                for hits in found[f"hits {name}"]
                if hits["tokens"] == tokens and hits["decoders"] == 0
            )
            for sign, name in (("", "attnstore"), ("-", "offloading"))
        }
        row = [times[c[:1] if c[:1] == "-" else ""][c.removeprefix("-")] for c in columns]
        return [*row, times[""]["DRAM"] / times["-"]["DRAM"]]

    return values


def speed_on_h200(found: Any) -> list[float]:
    tokens = {name: median(rounds) for name, rounds in found["throughput"].items()}
    return [tokens["store"] / tokens["plain"], tokens["offloading"] / tokens["plain"]]


README, GPU, COMPARED = "README.md", "docs/gpu.md", "docs/compared.md"
SERVED, H200 = "experiments/served.json", "gpu/2026-11-27-h200.json"
MORE, FAQ, GUIDE = "docs/results.md", "docs/faq.md", "docs/getting-started-cpu.md"
FIGURES = (
    Figure(MORE, "| small, without the store | {:,.0f} ms | {:.1f} ms |", "hit_latency.json",
           hits(0, "-cold", "-HBM")),
    Figure(MORE, "| small, with the store | {:,.0f} ms | {:.1f} ms | {:.1f} ms | {:.1f} ms |",
           "hit_latency.json", hits(0, "cold", "HBM", "DRAM", "NVMe")),
    Figure(MORE, "| over a hit in HBM | {:.0f} | 1 | {:.2f} (goal 1.10) | **{:.2f}** (goal 1.5) |\n"
           "| medium, without", "hit_latency.json", hits(0, "cold/HBM", "DRAM/HBM", "NVMe/HBM")),
    Figure(MORE, "| medium, without the store | {:,.0f} ms | {:.1f} ms |", "hit_latency.json",
           hits(1, "-cold", "-HBM")),
    Figure(MORE, "| medium, with the store | {:,.0f} ms | {:.1f} ms | {:.1f} ms | {:.1f} ms |",
           "hit_latency.json", hits(1, "cold", "HBM", "DRAM", "NVMe")),
    Figure(MORE, "| over a hit in HBM | {:.0f} | 1 | {:.2f} (goal 1.10) | **{:.2f}** (goal 1.5) |\n"
           "\n", "hit_latency.json", hits(1, "cold/HBM", "DRAM/HBM", "NVMe/HBM")),
    Figure(MORE, "median of {:.0f} paired rounds is **{:.3f}** (goal 0.97), and rounds lie from "
           "{:.2f} to {:.2f}. Of all tokens and seconds together it is {:.3f} "
           "(`results/throughput.json`)",
           "throughput.json", throughput),
    Figure(FAQ, "throughput was {:.2f} of that without the store with two servers, and {:.2f} with "
           "two engines by turns", "throughput.json", throughputs),
    Figure(FAQ, "A hit on NVMe took {:.2f} times one in HBM on a disk of about 1 GB/s, and "
           "computing took {:.0f} times.", "hit_latency.json", hits(0, "NVMe/HBM", "cold/HBM")),
    Figure(GUIDE, "| TTFT of turn 2 and later, median | {:.0f} ms | {:.0f} ms | {:.2f} (",
           "demo.json", demo("ttft_later_turns_median_ms")),
    Figure(GUIDE, "| {:.0f} ms | {:.0f} ms | {:.2f} | AMD EPYC: `results/demo.json`",
           "demo.json", demo("ttft_later_turns_median_ms")),
    Figure(GUIDE, "hardly depends on the machine: {:.0f} % were not", "demo.json", not_computed),
    Figure(GUIDE, "| TTFT of turn 2 and later, p95 | {:.0f} ms | {:.0f} ms | {:.2f} |",
           "demo.json", demo("ttft_later_turns_p95_ms")),
    Figure(GUIDE, "| the whole replay | {:.0f} s | {:.0f} s | {:.2f} |",
           "demo.json", demo("replay_seconds")),
    Figure(GUIDE, "{:.0f} of {:.0f} identical", "demo.json",
           lambda found: [found["agreement"]["identical"], found["agreement"]["compared"]]),
    Figure(README, "first tokens in {:.2f} of the time in the", "demo.json",
           lambda found: demo("ttft_later_turns_median_ms")(found)[2:]),
    Figure(MORE, "| AttnStore {:.0f} ms, vLLM's prefix cache {:.0f} ms, LMCache {:.0f} ms, "
           "all computed {:,.0f} ms |", SERVED,
           lambda found: [served("ttft_later_p50")(found)[i] for i in (3, 1, 2, 0)]),
    Figure(MORE, "own offloading | {:.2f} | [on a GPU]", H200,
           lambda found: on_h200(8_192, "DRAM")(found)[1:]),
    Figure("docs/index.md", "comes after {:.0f} ms, and after {:.0f} ms without it.", "demo.json",
           lambda found: demo("ttft_later_turns_median_ms")(found)[1::-1]),
    Figure(COMPARED, "| first token of later turns, median | {:,.0f} ms | {:,.0f} ms | {:,.0f} ms "
           "| {:,.0f} ms |", SERVED, served("ttft_later_p50")),
    Figure(COMPARED, "| the same, p95 | {:,.0f} ms | {:,.0f} ms | {:,.0f} ms | {:,.0f} ms |",
           SERVED, served("ttft_later_p95")),
    Figure(COMPARED, "| first token of first turns, median | {:,.0f} ms | {:,.0f} ms | {:,.0f} ms "
           "| {:,.0f} ms |", SERVED, served("ttft_first_p50")),
    Figure(COMPARED, "| hit tokens over those of an unlimited cache | {:.0f} % | {:.0f} % "
           "| {:.0f} % | {:.0f} % |", SERVED, served("hit_over_unlimited", 100)),
    *(Figure(COMPARED, f"| {tokens:,} tokens | {{:,.{digits}f}} ms | {{:.1f}} ms | {{:.1f}} ms "
             "| {:.2f} |", H200, on_h200(tokens, "computed", "-DRAM", "DRAM"))
      for tokens, digits in ((2_048, 1), (8_192, 0), (32_768, 0))),
    *(Figure(GPU, f"| {tokens:,} tokens | {{:,.{digits}f}} ms | {{:.1f}} ms | {{:.1f}} ms "
             "| {:.1f} ms | {:.2f} |", H200, on_h200(tokens, "computed", "DRAM", "HBM", "-DRAM"))
      for tokens, digits in ((2_048, 1), (8_192, 0), (32_768, 0))),
    Figure(GPU, "reused was {:.3f} of that without a store, the median of five rounds; vLLM's own "
           "offloading had {:.3f}.", H200, speed_on_h200),
    Figure(COMPARED, "over no store: {:.3f} with AttnStore, and {:.3f} with vLLM's own",
           H200, speed_on_h200),
    Figure(FAQ, "On one H200 it was {:.2f} (", H200, lambda found: speed_on_h200(found)[:1]),
)  # fmt: skip


def differing(figures: tuple[Figure, ...], text: str) -> Iterator[str]:
    for figure in figures:
        found = figure.pattern().findall(text)
        if len(found) != 1:
            yield f"{figure.page}: {len(found)} times, and not once: {figure.text}"
        elif found[0].split() != figure.said().split():
            yield f"{figure.page}: {found[0]!r}; results/{figure.file} says {figure.said()!r}"


def of(page: str) -> tuple[Figure, ...]:
    return tuple(figure for figure in FIGURES if figure.page == page)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write the pages anew")
    args = parser.parse_args()
    bad: list[str] = []
    for page in sorted({figure.page for figure in FIGURES}):
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        if args.write:
            for figure in of(page):
                for found in figure.pattern().findall(text):
                    text = text.replace(found, figure.said())
            path.write_text(wrapped(text), encoding="utf-8")
        bad += differing(of(page), text)
    print("\n".join(bad) or "page_figures: the pages say what the files do")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
