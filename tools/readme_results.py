# SPDX-License-Identifier: Apache-2.0
"""The results of README.md, from what benchmarks left in results/: ratios with their intervals,
and what a GPU has run.

    python3 tools/readme_results.py        (prints the lines; tests/test_readme.py compares)

Intervals are of 95 %: quantiles of 10,000 resamples with a fixed seed. Standard library only.
"""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
RESAMPLES = 10_000
Samples = list[list[float]]
"""Times of the units that are drawn: conversations, or single requests."""


def interval(over: Samples, under: Samples, *, paired: bool) -> tuple[float, float, float]:
    """Ratio of the medians, and the interval that holds 95 % of its resamples.

    Args:
        paired: the same units are drawn of both sides.
    """
    chance = random.Random(26)
    ratios = sorted(_resampled(over, under, chance, paired) for _ in range(RESAMPLES))
    tail = RESAMPLES // 40
    return _ratio(over, under), ratios[tail], ratios[-tail - 1]


def interval_of_median(values: list[float]) -> tuple[float, float, float]:
    """Of paired ratios: their median, and the interval that holds 95 % of its resamples."""
    chance = random.Random(26)
    found = sorted(median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = RESAMPLES // 40
    return median(values), found[tail], found[-tail - 1]


def _ratio(over: Samples, under: Samples) -> float:
    return median(chain.from_iterable(over)) / median(chain.from_iterable(under))


def _resampled(over: Samples, under: Samples, chance: random.Random, paired: bool) -> float:
    first = chance.choices(range(len(over)), k=len(over))
    second = first if paired else chance.choices(range(len(under)), k=len(under))
    return _ratio([over[i] for i in first], [under[i] for i in second])


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _later_turns(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for record in records:
        if record["turn"] > 1 and record["error"] is None:
            times.setdefault(record["conversation_id"], []).append(record["ttft_ms"])
    return times


def rows() -> list[str]:
    """Rows of the README's table, in its order."""
    records = _read("demo.json")["records"]
    alone, ours = (_later_turns(records[name]) for name in ("vLLM alone", "with AttnStore"))
    both = sorted(alone.keys() & ours.keys())
    demo = interval([ours[c] for c in both], [alone[c] for c in both], paired=True)
    throughput = _read("overlap.json")["throughput"]["result"]
    servers = _read("throughput.json")["ratios"]
    seeds = _read("experiments/served_seeds.json")["values"]["ttft_later_over_vllm"]
    small = _read("hit_latency.json")["results"][0]["all_ms"]
    nvme = interval([[t] for t in small["NVMe"]], [[t] for t in small["HBM"]], paired=False)
    return [
        _row("First token of later turns, over vLLM alone (demo)", *demo),
        _row(
            "Five ShareGPT chats at a light load, where vLLM's own small blocks find nearly all",
            *seeds["all three (95 %)"]["attnstore"],
        ),
        _row(
            "Throughput when nothing is reused, two engines by turns, over no store",
            throughput["ratio"],
            *throughput["interval"],
        ),
        _row("The same, two servers (goal missed)", *interval_of_median(servers)),
        _row("First token of an NVMe hit, over an HBM hit (goal missed)", *nvme),
    ]


def _row(what: str, value: float, low: float, high: float) -> str:
    return f"| {what} | {value:.2f} ({low:.2f} to {high:.2f}) |"


# ---- a GPU ---------------------------------------------------------------------------------

GPU = RESULTS / "gpu.json"
FIRST_GPU = RESULTS / "gpu" / "2026-11-27-h200.json"
HIT_TOKENS = 8_192


def gpu_tested(path: Path = GPU, first: Path = FIRST_GPU) -> str:
    """The row that says what a GPU has run: `make gpu-e2e` writes the file.

    Args:
        first: of a run by hand, which counts until that one is there.
    """
    if not path.exists() and first.exists():
        machine = json.loads(first.read_text(encoding="utf-8"))["machine"]
        told = "[one run, by hand](docs/gpu.md#what-a-gpu-has-run); no other GPU yet"
        return f"| {machine['gpu']} | {told} |"
    if not path.exists():
        return "| an NVIDIA GPU | no GPU has run it yet; `make gpu-e2e` tries |"
    result = json.loads(path.read_text(encoding="utf-8"))
    tried = [case for case in result["cases"] if case["outcome"] != "skipped"]
    right = sum(case["outcome"] == "ok" for case in tried)
    return f"| {result['machine']['gpu']} | {right} of {len(tried)} cases of `make gpu-e2e` |"


def gpu_rows(path: Path = GPU, first: Path = FIRST_GPU) -> list[str]:
    """Lines of the GPU's table; none if no GPU has run it."""
    if not path.exists() and first.exists():
        return _rows_of_first(json.loads(first.read_text(encoding="utf-8")))
    if not path.exists():
        return []
    result = json.loads(path.read_text(encoding="utf-8"))
    figures = [figure for case in result["cases"] for figure in case["figures"]]
    lines = [
        _gpu_row(what, found, unit)
        for what, unit, found in (
            (f"First token of a DRAM hit of {HIT_TOKENS:,} tokens, over an HBM hit", "",
             _hits(figures, beside=False)),
            ("The same, beside requests that generate", "", _hits(figures, beside=True)),
            ("Throughput when nothing is reused, over no store", "",
             _of_kind(figures, "throughput")),
            ("The slowest copy, over one large copy", "", _of_kind(figures, "bandwidth")),
            ("Slowdown of matrix products beside loads", " %",
             _of_kind(figures, "slowdown_percent")),
        )
        if found
    ]  # fmt: skip
    return [f"| On one {result['machine']['gpu']} | |", "|---|---|", *lines] if lines else []


def _rows_of_first(result: dict[str, Any]) -> list[str]:
    """Medians over those of other servers of the same run."""
    ours, offloading = (_alone(result[f"hits {name}"]) for name in ("attnstore", "offloading"))
    speed = result["throughput"]
    rows = [
        (f"First token of a DRAM hit of {HIT_TOKENS:,} tokens, over computing", ours, "computed"),
        ("The same, over vLLM's own offloading", offloading, "DRAM"),
        ("The same, over an HBM hit", ours, "HBM"),
    ]
    return [
        f"| On one {result['machine']['gpu']} | |",
        "|---|---|",
        *(f"| {what} | {ours['DRAM'] / times[under]:.2f} |" for what, times, under in rows),
        "| Throughput when nothing is reused, over no store "
        f"| {median(speed['store']) / median(speed['plain']):.2f} |",
    ]


def _alone(hits: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of hits of HIT_TOKENS that nothing ran beside, ms."""
    (found,) = (h for h in hits if h["tokens"] == HIT_TOKENS and h["decoders"] == 0)
    times: dict[str, float] = found["ttft_ms"]
    return times


def _of_kind(figures: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [figure for figure in figures if figure["kind"] == kind]


def _hits(figures: list[dict[str, Any]], *, beside: bool) -> list[dict[str, Any]]:
    return [
        figure
        for figure in _of_kind(figures, "dram_over_hbm")
        if figure["detail"]["tokens"] == HIT_TOKENS and (figure["detail"]["decoders"] > 0) == beside
    ]


def _gpu_row(what: str, found: list[dict[str, Any]], unit: str) -> str:
    """The worst of them."""
    at_most = found[0]["goal_is"] == "at most"
    worst = (max if at_most else min)(found, key=lambda figure: figure["value"])
    missed = "" if worst["is_met"] else " (goal missed)"
    return f"| {what}{missed} | {worst['value']:.2f}{unit} |"


if __name__ == "__main__":
    print("\n".join([gpu_tested(), "", *rows(), "", *gpu_rows()]))
