# SPDX-License-Identifier: Apache-2.0
"""Many records in few numbers: percentiles, what is counted, and what is said of failures."""

from __future__ import annotations

import statistics
from random import Random

import numpy as np
import pytest

from attnstore_lab.bench.records import INTERRUPTED, TurnRecord
from attnstore_lab.bench.summary import COLUMNS, Row, Summary, percentile, summary_text, table


def record(turn: int = 1, *, ttft_ms: float = 10, warmup: bool = False) -> TurnRecord:
    """Due at 100 ms, sent 5 ms later, of which the limit took 3."""
    return TurnRecord(
        conversation_id="c", turn=turn, warmup=warmup, due_ms=100, start_time_ms=105,
        wait_limit_ms=3, ttft_ms=ttft_ms, latency_ms=ttft_ms + 20, tpot_ms=2,
        input_num_tokens=30, output_num_tokens=11, has_usage=True,
    )  # fmt: skip


def summary_of(*records: TurnRecord) -> Summary:
    summary = Summary()
    for one in records:
        summary.add(one)
    return summary


def test_percentiles_interpolate_between_ranks() -> None:
    assert percentile([5], 95) == 5
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3], 0) == 1
    assert percentile([1, 2, 3], 100) == 3


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_row_has_the_statistics_of_numpy(count: int) -> None:
    random = Random(count)
    values = [random.lognormvariate(3, 1) for _ in range(count)]
    row = Row()
    for value in values:
        row.add(value)
    wanted = [
        np.mean(values),
        np.std(values, ddof=1) if count > 1 else 0,
        min(values),
        *np.percentile(values, [25, 50, 75, 90, 99]),
        max(values),
    ]
    found = row.to_json()
    assert list(found) == list(COLUMNS)
    assert found["count"] == count
    assert [found[name] for name in COLUMNS[1:]] == pytest.approx(wanted, abs=6e-4)


def test_row_of_many_values_keeps_a_sample() -> None:
    """Their second half is larger: a row that kept the first ones would not see it."""
    row = Row(kept=1000)
    values = [float(n) for n in range(20_000)]
    for value in values:
        row.add(value)
    found = row.to_json()
    assert found["mean"] == pytest.approx(statistics.mean(values))
    assert found["std"] == pytest.approx(statistics.stdev(values))
    assert (found["count"], found["min"], found["max"]) == (20_000, 0, 19_999)
    assert found["50%"] == pytest.approx(10_000, rel=0.1)
    assert found["90%"] == pytest.approx(18_000, rel=0.1)


def test_row_without_values() -> None:
    assert Row().to_json() == {"count": 0}


def test_both_clocks_are_reported() -> None:
    found = summary_of(record()).to_json()["statistics"]
    means = {name: row["mean"] for name, row in found.items()}
    assert (means["ttft_ms"], means["latency_ms"]) == (10, 30)
    assert (means["due_ttft_ms"], means["due_latency_ms"]) == (15, 35)
    assert (means["delay_ms"], means["wait_limit_ms"], means["lag_ms"]) == (5, 3, 2)


def test_first_turns_and_later_ones_have_rows_of_their_own() -> None:
    found = summary_of(record(1, ttft_ms=1), record(2, ttft_ms=5), record(9, ttft_ms=7))
    rows = found.to_json()["statistics"]
    assert rows["ttft_ms"]["count"] == 3
    assert rows["ttft_ms turn 1"]["max"] == 1
    assert rows["ttft_ms turn 2+"]["mean"] == 6
    assert rows["due_ttft_ms turn 2+"]["mean"] == 11


def test_what_warms_up_is_left_out() -> None:
    slow = record(ttft_ms=9e9, warmup=True)
    slow.start_time_ms = 1
    lost = TurnRecord(conversation_id="c", turn=2, warmup=True, start_time_ms=0, error="lost")
    found = summary_of(slow, lost, record())
    assert found.num_failed == 1  # a run with a failure is a failed run, wherever it was
    result = found.to_json()
    assert result["statistics"] == summary_of(record()).to_json()["statistics"]
    assert result["runtime_sec"] == 0.03
    assert result["errors"] == {}
    assert result["requests"]["all"] == 3
    assert (result["requests"]["warmup"], result["requests"]["warmup_failed"]) == (2, 1)
    assert result["requests"]["answered"] == 1


def test_rates_are_over_the_time_from_the_first_to_the_last() -> None:
    last = record()
    last.start_time_ms = 2075
    result = summary_of(record(), last).to_json()  # 105 ms to 2,105 ms
    assert result["runtime_sec"] == 2
    assert result["requests_per_sec"] == 1
    assert (result["input_tokens_per_sec"], result["output_tokens_per_sec"]) == (30, 11)


def test_failures_are_numbered_by_kind_and_their_times_left_out() -> None:
    def failed(error: str, sent: bool = True) -> TurnRecord:
        one = TurnRecord(conversation_id="c", turn=1, error=error)
        if sent:
            one.due_ms, one.start_time_ms, one.ttft_ms, one.latency_ms = 0, 50, 1, 9
        return one

    found = summary_of(
        record(),
        failed("HTTP 500"),
        failed("HTTP 500"),
        failed("not sent, because turn 1 failed", sent=False),
        failed(INTERRUPTED),
    )
    requests = found.to_json()["requests"]
    wanted = {"all": 5, "answered": 1, "failed": 2, "not_sent": 1, "interrupted": 1}
    assert wanted.items() <= requests.items()
    assert found.num_failed == 2
    rows = found.to_json()["statistics"]
    assert rows["ttft_ms"]["count"] == 1
    assert rows["delay_ms"]["count"] == 4  # it took them as long to be sent
    text = summary_text(found.to_json())
    assert "5 requests: 1 answered, 2 failed, 1 not sent, 1 interrupted" in text
    assert "2 x HTTP 500" in text


def test_kinds_of_errors_are_few() -> None:
    found = summary_of(
        *(TurnRecord(conversation_id="c", turn=1, error=f"error {n}") for n in range(1000))
    )
    assert len(found.to_json()["errors"]) == 21
    assert found.to_json()["errors"]["other errors"] == 980


def test_summary_of_nothing_is_printed() -> None:
    assert summary_text(Summary().to_json()).endswith("0 requests: 0 answered, 0 failed")


def test_text_has_the_columns_of_vllm() -> None:
    lines = summary_text(summary_of(record()).to_json()).splitlines()
    assert lines[:2] == ["runtime_sec = 0.030", "requests_per_sec = 33.333"]
    assert lines[2].split() == list(COLUMNS)
    assert lines[4].split()[:3] == ["ttft_ms", "1", "10.00"]


def test_answers_without_usage_are_told() -> None:
    guessed = record()
    guessed.has_usage = False
    assert "1 answers came without usage" in summary_text(summary_of(guessed).to_json())


def test_table_is_aligned() -> None:
    rows = [("", "a", "bb"), ("row", "1,000", "2")]
    assert table(rows) == "         a  bb\n--------------\nrow  1,000   2"
