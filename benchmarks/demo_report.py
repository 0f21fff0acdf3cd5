# SPDX-License-Identifier: Apache-2.0
"""The demo's results: tables for the terminal, numbers for the JSON file, a picture."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from attnstore_lab import palette
from attnstore_lab.bench.records import TurnRecord, failures
from attnstore_lab.bench.summary import percentile, table
from attnstore_lab.bench.traffic import Traffic
from attnstore_vllm.types import ERRORS
from benchmarks.agreement import Agreement

MIB: Final = 1 << 20
ALWAYS_SHOWN: Final = ("dropped", "corrupt")  # with the counters, also when there were none
SIDES: Final = (palette.color("vllm"), palette.color(palette.OURS))


@dataclass(frozen=True, slots=True)
class Side:
    """One replay against one server."""

    name: str
    records: list[TurnRecord]
    traffic: Traffic
    seconds: float

    def ttfts(self, turns: Callable[[int], bool]) -> list[float]:
        """TTFT in ms of the requests that succeeded, of those turns."""
        return [
            r.ttft_ms
            for r in self.records
            if r.error is None and r.ttft_ms is not None and turns(r.turn)
        ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How well two sides agree, and what rounding may explain."""

    agreement: Agreement
    bound: float  # nats
    bound_positions: int  # measured at so many
    largest_change: float  # between the two sides, nats
    positions: int

    @property
    def unexplained(self) -> int:
        return sum(not d.is_within(self.bound) for d in self.agreement.differences)


def is_first(turn: int) -> bool:
    return turn == 1


def is_later(turn: int) -> bool:
    return turn >= 2


def summary(side: Side) -> dict[str, Any]:
    """The numbers of one side, names with units."""
    first, later = side.ttfts(is_first), side.ttfts(is_later)
    tpots = [r.tpot_ms for r in side.records if r.error is None and r.tpot_ms is not None]
    return {
        "name": side.name,
        "requests": len(side.records),
        "failed": len(failures(side.records)),
        "replay_seconds": round(side.seconds, 2),
        "ttft_first_turn_median_ms": _rounded(first, 50),
        "ttft_later_turns_median_ms": _rounded(later, 50),
        "ttft_later_turns_p95_ms": _rounded(later, 95),
        "ttft_later_turns_mean_ms": round(statistics.mean(later), 2) if later else None,
        "tpot_median_ms": _rounded(tpots, 50),
        **side.traffic.to_json(),
    }


def in_one_sentence(sides: Sequence[Side]) -> str:
    """What the run has shown, by the last side: of later turns' first tokens, if there are two
    sides, and of prompt tokens."""
    *others, last = sides
    found = f"{1 - last.traffic.share('computed'):.0%} of prompt tokens were not computed"
    before, after = ([*side.ttfts(is_later)] for side in (others[0] if others else last, last))
    if not others or not before or not after:
        return f"{found}."
    times = percentile(before, 50) / max(percentile(after, 50), 1e-9)
    said = f"{times:.1f} times sooner" if times >= 1 else f"{1 / times:.1f} times LATER"
    alone = f"{others[0].name}: {1 - others[0].traffic.share('computed'):.0%}"
    return f"First tokens of later turns came {said}; {found} ({alone})."


def report_table(sides: Sequence[Side], *, counters: bool = False) -> str:
    """Times and tokens by source; with two sides also the times of the second over those of the
    first, as the README has them: below 1 is sooner.

    Args:
        counters: bytes, chunks and recomputations too. Without them errors alone are shown.
    """
    numbers = [summary(side) for side in sides]
    over = [f"over {sides[0].name}"] if len(sides) == 2 else []
    rows = [["", *(side.name for side in sides), *over]]

    def add(label: str, values: Sequence[str], ratio: str = "") -> None:
        rows.append([label, *values] + ([ratio] if len(sides) == 2 else []))

    for label, key in (
        ("TTFT of turn 1, median, ms", "ttft_first_turn_median_ms"),
        ("TTFT of turn 2 and later, median, ms", "ttft_later_turns_median_ms"),
        ("TTFT of turn 2 and later, p95, ms", "ttft_later_turns_p95_ms"),
        ("time per output token, median, ms", "tpot_median_ms"),
        ("whole replay, s", "replay_seconds"),
    ):
        values = [n[key] for n in numbers]
        both = len(values) == 2 and None not in values and values[0] > 0
        ratio = f"{values[1] / values[0]:.2f}" if both else ""
        add(label, ["-" if v is None else f"{v:.1f}" for v in values], ratio)
    for source in _union(side.traffic.prompt_tokens for side in sides):
        cells = []
        for side in sides:
            count = side.traffic.prompt_tokens.get(source)
            share = side.traffic.share(source)
            cells.append("-" if count is None else f"{count:,} ({share:.0%})")
        add(f"prompt tokens {'' if source == 'computed' else 'from '}{source}", cells)
    for way in _union(side.traffic.moved_bytes for side in sides if counters):
        if not any(side.traffic.moved_bytes.get(way) for side in sides):
            continue
        cells = [
            f"{s.traffic.moved_bytes[way] / MIB:.1f}" if s.traffic.has_store else "-" for s in sides
        ]
        add(f"{_named(way)}, MiB", cells)
    for event in _union(side.traffic.chunks for side in sides):
        counts = [s.traffic.chunks.get(event) for s in sides]
        is_wanted = counters or event in ERRORS
        if (is_wanted and any(counts)) or (counters and event in ALWAYS_SHOWN):
            add(f"chunks {_named(event)}", ["-" if c is None else f"{c:,}" for c in counts])
    for cause in _union(side.traffic.recomputations for side in sides if counters):
        counts = [s.traffic.recomputations.get(cause) for s in sides]
        if any(counts):
            cells = ["-" if c is None else f"{c:,}" for c in counts]
            add(f"recomputations, {_named(cause)}", cells)
    return table(rows)


def verdict_text(verdict: Verdict) -> str:
    """Say how many answers are the same, and account for each one that is not."""
    a = verdict.agreement
    lines = [
        f"Answers: {a.identical} of {a.compared} are identical"
        + (f"; {a.not_compared} had another history and are not compared" * bool(a.not_compared))
        + ".",
        f"Rounding: the gap between the two best candidates moves by up to "
        f"{verdict.largest_change:.3f} nats between the sides ({verdict.positions:,} places). "
        f"Up to {verdict.bound:.3f} is put down to rounding: twice what the first server alone "
        f"does with prompts split elsewhere and in other company "
        f"({verdict.bound_positions:,} places).",
    ]
    for d in a.differences:
        gaps = "the other's choice was not among the candidates recorded"
        if d.change is not None:
            gaps = f"gaps {d.gap_a:.3f} and {d.gap_b:.3f} nats"
        said = "within rounding" if d.is_within(verdict.bound) else "MORE THAN ROUNDING EXPLAINS"
        lines.append(
            f"  {d.conversation}, turn {d.turn}, token {d.position + 1}: "
            f"{d.token_a} or {d.token_b}, {gaps}: {said}"
        )
    return "\n".join(lines)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    a = verdict.agreement
    return {
        "compared": a.compared,
        "identical": a.identical,
        "not_compared": a.not_compared,
        "rounding_bound_nats": verdict.bound,
        "rounding_bound_positions": verdict.bound_positions,
        "largest_gap_change_nats": verdict.largest_change,
        "positions": verdict.positions,
        "unexplained": verdict.unexplained,
        "differences": [
            asdict(d) | {"within_rounding": d.is_within(verdict.bound)} for d in a.differences
        ],
    }


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw TTFT by turn, of the demo's JSON: medians, and every request as a point."""
    names = [side["name"] for side in result["sides"]]
    medians = [side["ttft_later_turns_median_ms"] for side in result["sides"]]
    said = " and ".join(
        f"{middle:.0f} ms {name if name.startswith('with') else f'with {name}'}"
        for middle, name in zip(medians, names, strict=True)
        if middle is not None
    )
    figure, ((axes,),) = palette.figure((9, 4), f"First token of later turns: {said}")
    for n, (name, color) in enumerate(zip(names, SIDES, strict=False)):
        by_turn: dict[int, list[float]] = {}
        for record in result["records"][name]:
            if record["error"] is None and record["ttft_ms"] is not None:
                by_turn.setdefault(record["turn"], []).append(record["ttft_ms"])
        turns = sorted(by_turn)
        for turn in turns:
            at = [turn + 0.1 * n] * len(by_turn[turn])
            axes.scatter(at, by_turn[turn], s=8, color=color, alpha=palette.BEHIND)
        middles = [statistics.median(by_turn[turn]) for turn in turns]
        axes.plot(turns, middles, marker=palette.MARKS[n], color=color, label=f"{name} (median)")
    axes.set(xlabel="turn of the conversation", ylabel="time to first token, ms")
    axes.set_ylim(bottom=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    palette.save(figure, path)


def _named(label: str) -> str:
    """A label of a metric as a person writes it: "hbm_to_dram" is "HBM to DRAM"."""
    names = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe"}
    return " ".join(names.get(word, word) for word in label.split("_"))


def _rounded(values: Sequence[float], percent: float) -> float | None:
    return round(percentile(values, percent), 2) if values else None


def _union(dicts: Any) -> list[str]:
    return list(dict.fromkeys(key for d in dicts for key in d))
