# SPDX-License-Identifier: Apache-2.0
"""What a replay records, one record a request, and the table made of it."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Token = str
"""A token as the server names it: "token_id:17" from vLLM, its text from other servers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token, and the log-probabilities of the best candidates at its place."""

    token: Token
    logprob: float
    top: dict[Token, float]


@dataclass(slots=True, kw_only=True)
class TurnRecord:
    """One request. Times are None if it failed before them; `turn` counts from 1."""

    conversation: str
    turn: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # as the server reports them; None if it does not
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None
    answer: str = ""
    steps: list[Step] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(step.token for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Everything but the log-probabilities, which are many."""
        record = asdict(self)
        record["tokens"] = [step["token"] for step in record.pop("steps")]
        return record


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile with linear interpolation between ranks. `values` must not be empty."""
    assert values
    assert 0 <= percent <= 100
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def failures(records: Sequence[TurnRecord]) -> list[TurnRecord]:
    return [record for record in records if record.error is not None]


def summary_table(records: Sequence[TurnRecord]) -> str:
    """Mean and percentiles of the times and sizes of the requests that succeeded.

    The rows and columns are those of vLLM's multi-turn benchmark.
    """
    columns = ("ttft_ms", "tpot_ms", "latency_ms", "prompt_tokens", "cached_tokens")
    rows: list[Sequence[str]] = [
        ("", "count", "mean", "std", "min", "50%", "90%", "95%", "99%", "max")
    ]
    for column in columns:
        values = [
            float(value)
            for record in records
            if record.error is None and (value := getattr(record, column)) is not None
        ]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            numbers = [statistics.mean(values), spread, min(values)]
            numbers += [percentile(values, p) for p in (50, 90, 95, 99)]
            rows.append((column, str(len(values)), *(f"{n:.1f}" for n in [*numbers, max(values)])))
    failed = failures(records)
    lines = [table(rows), f"{len(records)} requests, {len(failed)} failed"]
    lines += [f"  {r.conversation}, turn {r.turn}: {r.error}" for r in failed]
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
