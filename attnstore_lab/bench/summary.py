# SPDX-License-Identifier: Apache-2.0
"""Many records in few numbers, in bounded memory: the rows and columns of vLLM's
benchmarks/multi_turn, and what it does not have: times from when a request was due.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final

from attnstore_lab.bench.records import INTERRUPTED, TurnRecord

COLUMNS: Final = ("count", "mean", "std", "min", "25%", "50%", "75%", "90%", "99%", "max")
PERCENTS: Final = (25, 50, 75, 90, 99)
ANSWERED_ROWS: Final = (
    "ttft_ms",
    "tpot_ms",
    "latency_ms",
    "input_num_turns",
    "input_num_tokens",
    "output_num_tokens",
    "output_num_chunks",
    "cached_tokens",
    "due_ttft_ms",
    "due_latency_ms",
)
SENT_ROWS: Final = ("delay_ms", "wait_answer_ms", "wait_limit_ms", "lag_ms")
"""Rows that count failed requests too: it took them as long to be sent."""
BY_TURN: Final = ("ttft_ms", "due_ttft_ms")
KEPT_VALUES: Final = 1 << 18
ERROR_KINDS: Final = 20
OTHER: Final = "other errors"


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile with linear interpolation between ranks. `values` must not be empty."""
    assert values
    return _percentile(sorted(values), percent)


def _percentile(ordered: Sequence[float], percent: float) -> float:
    assert 0 <= percent <= 100
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


class Row:
    """Statistics of one figure. All are exact up to `kept` values; beyond, the percentiles are
    those of a random sample of so many (reservoir sampling), the others are still exact.
    """

    def __init__(self, kept: int = KEPT_VALUES) -> None:
        self.count = 0
        self._kept = kept
        self._values = array("d")
        self._mean = 0.0
        self._squares = 0.0  # of the distances from the mean (Welford)
        self._min, self._max = math.inf, -math.inf
        self._random = Random(0)

    def add(self, value: float) -> None:
        self.count += 1
        distance = value - self._mean
        self._mean += distance / self.count
        self._squares += distance * (value - self._mean)
        self._min, self._max = min(self._min, value), max(self._max, value)
        if len(self._values) < self._kept:
            self._values.append(value)
        elif (place := self._random.randrange(self.count)) < self._kept:
            self._values[place] = value

    def to_json(self) -> dict[str, float]:
        """By the names in COLUMNS; {"count": 0} if there was no value."""
        if self.count == 0:
            return {"count": 0}
        ordered = sorted(self._values)
        spread = math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0
        numbers = [self._mean, spread, self._min]
        numbers += [_percentile(ordered, percent) for percent in PERCENTS]
        numbers.append(self._max)
        return {"count": self.count} | dict(
            zip(COLUMNS[1:], (round(n, 3) for n in numbers), strict=True)
        )


class Summary:
    """Takes records one by one and keeps none of them."""

    def __init__(self, kept: int = KEPT_VALUES) -> None:
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        names = [*ANSWERED_ROWS, *SENT_ROWS]
        names += [f"{name} {which}" for which in ("turn 1", "turn 2+") for name in BY_TURN]
        self._rows = {name: Row(kept) for name in names}
        self._first_ms, self._last_ms = math.inf, -math.inf
        self._tokens = {"input": 0, "output": 0}

    def add(self, record: TurnRecord) -> None:
        """Requests that warm up are only numbered."""
        outcome = "answered"
        if record.error is not None:
            outcome = "failed" if record.was_sent else "not_sent"
            outcome = "interrupted" if record.error == INTERRUPTED else outcome
        self.requests["all"] += 1
        if record.warmup:
            self.requests["warmup"] += 1
            self.requests["warmup_failed"] += outcome == "failed"
            return
        self.requests[outcome] += 1
        if record.was_sent:
            self._add_sent(record)
        if record.error is None:
            self._add_answered(record)
        else:
            known = record.error in self.errors or len(self.errors) < ERROR_KINDS
            self.errors[record.error if known else OTHER] += 1

    def _add_sent(self, record: TurnRecord) -> None:
        assert record.start_time_ms is not None
        self._first_ms = min(self._first_ms, record.start_time_ms)
        self._last_ms = max(self._last_ms, record.start_time_ms + (record.latency_ms or 0))
        if record.due_ms is not None:
            for name in SENT_ROWS:
                self._rows[name].add(getattr(record, name))

    def _add_answered(self, record: TurnRecord) -> None:
        self.requests["without_usage"] += not record.has_usage
        self._tokens["input"] += record.input_num_tokens or 0
        self._tokens["output"] += record.output_num_tokens or 0
        for name in ANSWERED_ROWS:
            if (value := getattr(record, name)) is not None:
                self._rows[name].add(value)
                if name in BY_TURN:
                    which = "turn 1" if record.turn == 1 else "turn 2+"
                    self._rows[f"{name} {which}"].add(value)

    @property
    def num_failed(self) -> int:
        """Requests that were sent and not answered, those of the warm-up too."""
        return self.requests["failed"] + self.requests["warmup_failed"]

    def to_json(self) -> dict[str, Any]:
        names = (
            "all",
            "warmup",
            "warmup_failed",
            "answered",
            "failed",
            "not_sent",
            "interrupted",
            "without_usage",
        )
        runtime_s = max(0.0, self._last_ms - self._first_ms) / 1e3 if self._last_ms > 0 else 0.0
        answered = self.requests["answered"]
        return {
            "runtime_sec": round(runtime_s, 3),
            "requests_per_sec": _over(answered, runtime_s),
            "input_tokens_per_sec": _over(self._tokens["input"], runtime_s),
            "output_tokens_per_sec": _over(self._tokens["output"], runtime_s),
            "requests": {name: self.requests[name] for name in names},
            "errors": dict(self.errors.most_common()),
            "statistics": {name: row.to_json() for name, row in self._rows.items() if row.count},
        }


def summary_text(summary: Mapping[str, Any]) -> str:
    """The JSON of a summary as a table, with what failed and why below it."""
    rows: list[Sequence[str]] = [("", *COLUMNS)]
    for name, numbers in summary["statistics"].items():
        cells = [f"{numbers[column]:.2f}" for column in COLUMNS[1:]]
        rows.append((name, str(numbers["count"]), *cells))
    lines = [
        f"runtime_sec = {summary['runtime_sec']:.3f}",
        f"requests_per_sec = {summary['requests_per_sec']:.3f}",
    ]
    if len(rows) > 1:
        lines.append(table(rows))
    count = summary["requests"]
    told = [
        f"{count[name]} {words}"
        for name, words in (
            ("warmup", "warmed up"),
            ("warmup_failed", "of these failed"),
            ("answered", "answered"),
            ("failed", "failed"),
            ("not_sent", "not sent"),
            ("interrupted", "interrupted"),
        )
        if count[name] or name in ("answered", "failed")
    ]
    lines.append(f"{count['all']} requests: {', '.join(told)}")
    if count["without_usage"]:
        lines.append(
            f"{count['without_usage']} answers came without usage: the length of their prompts is "
            "not known, that of the answers is in ids or pieces"
        )
    lines += [f"  {number} x {error}" for error, number in summary["errors"].items()]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right. The first row is a head."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)


def _over(amount: float, seconds: float) -> float:
    return round(amount / seconds, 3) if seconds > 0 else 0.0
