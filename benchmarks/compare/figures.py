# SPDX-License-Identifier: Apache-2.0
"""What is compared: pure functions of a run's records, its server's /metrics and its log.

Times to first token and hits are of the requests that are counted; time in prefill and tokens by
source are of the whole run, with those that warm up, since a server does not tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from attnstore_lab.bench.summary import percentile
from attnstore_lab.bench.traffic import traffic
from attnstore_vllm.prometheus import Metrics, total
from benchmarks.compare.steps import LoggedStep

Record = Mapping[str, Any]
"""A line of --records."""
NOTHING_KEPT: Final = "re"
BOUND: Final = "bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one server. None: not known. Times in ms from when a request was sent, else seconds.

    Args:
        hit_tokens: of prompts, what the server did not compute, as it reports it by request.
        unlimited_hit_tokens: what a cache that loses nothing would find: the session's history.
        prefill_s: time of the accelerator in prefill; `prefill_by` says what that is.
        request_prefill_s: vLLM's own sum over requests, each from when it was first scheduled to
            its first token. Requests that share a step count it several times.
        whole_prompt_tokens: of the whole run; what `prefill_s` is the time of.
        by_source: prompt tokens of the whole run, computed, from HBM, and so on.
    """

    requests: int
    failed: int
    ttft_first_p50: float | None
    ttft_first_p95: float | None
    ttft_later_p50: float | None
    ttft_later_p95: float | None
    prompt_tokens: int
    hit_tokens: int
    unlimited_hit_tokens: int
    whole_prompt_tokens: int
    prefill_s: float | None
    prefill_by: str
    request_prefill_s: float
    runtime_s: float
    by_source: dict[str, int]

    @property
    def hit_share(self) -> float | None:
        return _over(self.hit_tokens, self.prompt_tokens)

    @property
    def hit_over_unlimited(self) -> float | None:
        return _over(self.hit_tokens, self.unlimited_hit_tokens)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return _over(self.whole_prompt_tokens, self.prefill_s)

    def to_json(self) -> dict[str, Any]:
        derived = ("hit_share", "hit_over_unlimited", "prefill_tokens_per_s")
        values = asdict(self) | {name: getattr(self, name) for name in derived}
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}


def figures(
    records: Sequence[Record],
    before: Metrics,
    after: Metrics,
    steps: Sequence[LoggedStep],
    *,
    own_history: bool,
) -> Figures:
    """
    Args:
        before, after: the server's /metrics around the run.
        steps: of the run; empty where their times are not those of the accelerator.
        own_history: answers stand in the history as they were generated.
    """
    counted = [r for r in records if not r["warmup"]]
    answered = [r for r in counted if r["error"] is None]
    first = [r["ttft_ms"] for r in answered if r["turn"] == 1]
    later = [r["ttft_ms"] for r in answered if r["turn"] > 1]
    sources = traffic(before, after).prompt_tokens
    requests_s = _grown(before, after, "vllm:request_prefill_time_seconds_sum")
    steps_s = sum(step.seconds for step in steps if step.prompt_tokens)
    starts = [r["start_time_ms"] for r in answered]
    ends = [r["start_time_ms"] + r["latency_ms"] for r in answered]
    return Figures(
        requests=len(answered),
        failed=len(counted) - len(answered),
        ttft_first_p50=_percentile(first, 50),
        ttft_first_p95=_percentile(first, 95),
        ttft_later_p50=_percentile(later, 50),
        ttft_later_p95=_percentile(later, 95),
        prompt_tokens=sum(r["input_num_tokens"] or 0 for r in answered),
        hit_tokens=sum(r["cached_tokens"] or 0 for r in answered),
        unlimited_hit_tokens=unlimited_hits(records, own_history=own_history),
        whole_prompt_tokens=sum(sources.values()),
        prefill_s=(steps_s if steps else requests_s) or None,
        prefill_by="steps" if steps else "requests",
        request_prefill_s=requests_s,
        runtime_s=(max(ends) - min(starts)) / 1e3 if answered else 0.0,
        by_source=sources,
    )


def unlimited_hits(records: Sequence[Record], *, own_history: bool) -> int:
    """Tokens that a cache which loses nothing would find for the requests that are counted.

    The prompt before and, if it stands in the history as it was generated, its answer (without
    its last token, whose KV nobody computed); one token of each prompt is always computed. What
    sessions share with each other is left out: a server that finds it has more than 100 %.
    """
    by_session: dict[int, list[Record]] = {}
    for record in records:
        if record["error"] is None:
            by_session.setdefault(record["session"], []).append(record)
    found = 0
    for session in by_session.values():
        session.sort(key=lambda r: r["turn"])
        for last, now in pairwise(session):
            kept = last["input_num_tokens"] or 0
            if own_history:
                kept += max(0, (last["output_num_tokens"] or 0) - 1)
            if not now["warmup"]:
                found += min(kept, max(0, (now["input_num_tokens"] or 0) - 1))
    return found


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of a system over that of another."""

    name: str
    words: str
    of: Callable[[Figures], float | None]
    over: str


RATIOS: Final = (
    Ratio("ttft_later_over_re", "TTFT 2+ / re", lambda f: f.ttft_later_p50, NOTHING_KEPT),
    Ratio("ttft_later_over_bound", "TTFT 2+ / bound", lambda f: f.ttft_later_p50, BOUND),
    Ratio("throughput_over_re", "tok/s / re", lambda f: f.prefill_tokens_per_s, NOTHING_KEPT),
    Ratio("prefill_over_re", "prefill / re", lambda f: f.prefill_s, NOTHING_KEPT),
    Ratio("prefill_over_bound", "prefill / bound", lambda f: f.prefill_s, BOUND),
)


def ratios(by_name: Mapping[str, Figures]) -> dict[str, dict[str, float | None]]:
    """By system and by the names of RATIOS; None where the other one was not run."""
    found: dict[str, dict[str, float | None]] = {}
    for name, figures in by_name.items():
        found[name] = {}
        for ratio in RATIOS:
            other = by_name.get(ratio.over)
            value = _over(ratio.of(figures), ratio.of(other) if other else None)
            found[name][ratio.name] = None if value is None else round(value, 4)
    return found


def table_rows(by_name: Mapping[str, Figures]) -> list[list[str]]:
    """The one table of a comparison, its head first."""
    head = [
        "",
        "TTFT 1 p50",
        "p95",
        "TTFT 2+ p50",
        "p95",
        "prefill tok/s",
        "hits",
        "of unlimited",
        "prefill s",
        *(ratio.words for ratio in RATIOS),
        "failed",
    ]
    all_ratios = ratios(by_name)
    rows = [head]
    for name, f in by_name.items():
        times = (f.ttft_first_p50, f.ttft_first_p95, f.ttft_later_p50, f.ttft_later_p95)
        cells = [_cell(value, ".1f") for value in times]
        cells += [
            _cell(f.prefill_tokens_per_s, ",.0f"),
            _cell(f.hit_share, ".1%"),
            _cell(f.hit_over_unlimited, ".1%"),
            _cell(f.prefill_s, ".2f"),
        ]
        cells += [_cell(all_ratios[name][ratio.name], ".3f") for ratio in RATIOS]
        rows.append([name, *cells, str(f.failed)])
    return rows


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _grown(before: Metrics, after: Metrics, name: str) -> float:
    return total(after, name) - total(before, name)
