# SPDX-License-Identifier: Apache-2.0
"""What a comparison computes: figures, ratios, its table, and how large its servers are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attnstore_lab.bench.client import RequestSettings
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.schedule import Load
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.prometheus import Metrics, parse_metrics
from benchmarks.compare.figures import figures, ratios, table_rows, unlimited_hits
from benchmarks.compare.sizes import Sizes, prompt_lengths, sized
from benchmarks.compare.steps import LoggedStep, parse_steps
from benchmarks.compare.systems import (
    BOUND,
    RE,
    SYSTEMS,
    Here,
    arguments,
    check_more,
    chosen,
    environment,
    why_not,
)

GIB = 1 << 30
LOG = """\
(APIServer pid=7) INFO 01-02 [loggers.py:199] Engine 000: Iteration(4): 2 context requests, 285 \
context tokens, 3 generation requests, 3 generation tokens, iteration elapsed time: 9.50 ms, CPU \
KV cache usage: 0.0%
(APIServer pid=7) INFO: 127.0.0.1:40284 - "GET /metrics HTTP/1.1" 200 OK
(APIServer pid=7) INFO 01-02 [loggers.py:199] Engine 000: Iteration(5): 0 context requests, 0 \
context tokens, 4 generation requests, 4 generation tokens, iteration elapsed time: 1000.00 ms, \
CPU KV cache usage: 0.0%
"""


def record(session: int, turn: int, prompt: int, **values: Any) -> dict[str, Any]:
    return {
        "session": session, "turn": turn, "warmup": False, "error": None, "ttft_ms": 10.0 * turn,
        "start_time_ms": 1000.0 * turn, "latency_ms": 500.0, "input_num_tokens": prompt,
        "output_num_tokens": 10, "cached_tokens": 0, **values,
    }  # fmt: skip


def counters(computed: float, prefill_s: float) -> Metrics:
    return parse_metrics(
        f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {computed}\n'
        f"vllm:request_prefill_time_seconds_sum {prefill_s}\n"
    )


def run(*records: dict[str, Any], steps: tuple[LoggedStep, ...] = ()) -> Any:
    return figures(records, counters(50, 1), counters(350, 4), steps, own_history=True)


def test_steps_are_read_from_the_log() -> None:
    assert parse_steps(LOG.splitlines()) == [
        LoggedStep(2, 285, 3, 3, 0.0095),
        LoggedStep(0, 0, 4, 4, 1.0),
    ]


def test_only_steps_with_prompts_are_prefill() -> None:
    found = run(
        record(0, 1, 100), steps=(LoggedStep(1, 100, 2, 2, 0.5), LoggedStep(0, 0, 3, 3, 9.0))
    )
    assert (found.prefill_s, found.prefill_by) == (0.5, "steps")
    assert found.prefill_tokens_per_s == 600  # 300 tokens of the whole run


def test_without_steps_vllms_own_sum_is_taken() -> None:
    found = run(record(0, 1, 100))
    assert (found.prefill_s, found.prefill_by) == (3.0, "requests")


def test_first_and_later_turns_are_apart_and_what_warms_up_is_left_out() -> None:
    found = run(
        record(0, 1, 100, ttft_ms=1.0, warmup=True),
        record(1, 1, 100, ttft_ms=7.0),
        record(1, 2, 200, ttft_ms=20.0, cached_tokens=64),
        record(2, 2, 200, ttft_ms=40.0, error="it broke"),
        record(1, 3, 300, ttft_ms=30.0, cached_tokens=128),
    )
    assert (found.requests, found.failed) == (3, 1)
    assert (found.ttft_first_p50, found.ttft_later_p50) == (7.0, 25.0)
    assert found.ttft_later_p95 == pytest.approx(29.5)
    assert (found.prompt_tokens, found.hit_tokens) == (600, 192)
    assert found.runtime_s == pytest.approx(2.5)


def test_an_unlimited_cache_finds_the_history_and_the_answer_but_for_its_last_token() -> None:
    session = [record(0, 1, 100), record(0, 2, 105), record(0, 3, 400)]
    assert unlimited_hits(session, own_history=True) == 104 + 114  # at most all but one
    assert unlimited_hits(session, own_history=False) == 100 + 105


def test_the_bound_counts_no_other_session_and_nothing_before_the_count_begins() -> None:
    others = [record(0, 1, 100), record(1, 1, 100), record(2, 2, 100)]
    assert unlimited_hits(others, own_history=True) == 0
    warm = [record(0, 1, 100, warmup=True), record(0, 2, 150, warmup=True), record(0, 3, 400)]
    assert unlimited_hits(warm, own_history=False) == 150


def test_ratios_are_over_re_and_over_the_bound() -> None:
    slow = run(
        record(0, 1, 9), record(0, 2, 99, ttft_ms=100.0), steps=(LoggedStep(1, 9, 0, 0, 3.0),)
    )
    fast = run(
        record(0, 1, 9), record(0, 2, 99, ttft_ms=10.0), steps=(LoggedStep(1, 9, 0, 0, 1.5),)
    )
    found = ratios({"re": slow, "attnstore": fast, "bound": fast})["attnstore"]
    assert found == {
        "ttft_later_over_re": 0.1,
        "ttft_later_over_bound": 1.0,
        "throughput_over_re": 2.0,
        "prefill_over_re": 0.5,
        "prefill_over_bound": 1.0,
    }
    assert ratios({"attnstore": fast})["attnstore"]["ttft_later_over_re"] is None


def test_table_has_a_row_a_system_and_says_what_it_does_not_know() -> None:
    head, row = table_rows({"attnstore": run(record(0, 1, 100))})
    assert len(head) == len(row)
    by_name = dict(zip(head, row, strict=True))
    assert by_name["TTFT 1 p50"] == "10.0"
    assert by_name["TTFT 2+ p50"] == "-"
    assert by_name["of unlimited"] == "-"
    assert json.dumps(run(record(0, 1, 100)).to_json())


# ---- sizes -------------------------------------------------------------------------------

TALK = Conversation("a", ("q" * 92, "w" * 192), answers=("r" * 42, None))


def test_lengths_of_prompts() -> None:
    own = RequestSettings(model="m", max_tokens=16)
    data = RequestSettings(model="m", max_tokens=16, history="data")
    assert list(prompt_lengths(TALK, own, None, len)) == [100, 316, 332]
    assert list(prompt_lengths(TALK, data, None, len)) == [100, 350, 366]
    assert list(prompt_lengths(TALK, own, 1, len)) == [100, 116]


def sizes(conversations: int = 1, **given: Any) -> Sizes:
    talks = [Conversation(str(n), TALK.questions) for n in range(conversations)]
    values = {"kv_bytes_per_token": 1024, "context_tokens": 512, "block_tokens": 16} | given
    load, settings = Load(sessions=conversations), RequestSettings(model="m", max_tokens=16)
    return sized(talks, load, settings, len, **values)


def test_sizes_are_scaled_with_the_working_set() -> None:
    small, large = sizes(), sizes(1000)
    assert small.working_set_tokens == 332
    assert large.working_set_tokens == 332_000
    assert small.hbm_tokens == 1024  # two contexts
    assert small.hbm_holds_all
    assert large.hbm_tokens == 33_200
    assert not large.hbm_holds_all
    assert large.bound_tokens >= large.working_set_tokens * 1.25
    assert large.dram_bytes < large.working_set_tokens * 1024 < large.nvme_bytes
    assert large.written_bytes == 1000 * (100 + 316) * 1024


def test_sessions_that_do_not_fit_the_context_take_no_room() -> None:
    talks = [TALK, Conversation("long", ("z" * 900,))]
    found = sized(
        talks,
        Load(),
        RequestSettings(model="m", max_tokens=16),
        len,
        kv_bytes_per_token=1024,
        context_tokens=512,
        block_tokens=16,
    )
    assert found.working_set_tokens == 332


def test_what_is_given_is_taken_and_what_cannot_work_is_refused() -> None:
    found = sizes(hbm_tokens=600, dram_bytes=1 << 20, nvme_bytes=1 << 21)
    assert (found.hbm_tokens, found.dram_bytes, found.nvme_bytes) == (600, 1 << 20, 1 << 21)
    with pytest.raises(ConfigError, match="--hbm-tokens is 512"):
        sizes(hbm_tokens=512)


# ---- systems -----------------------------------------------------------------------------


def connector(flags: list[str]) -> dict[str, Any] | None:
    flag = "--kv-transfer-config"
    return json.loads(flags[flags.index(flag) + 1]) if flag in flags else None


def test_each_system_differs_in_what_it_is_named_for() -> None:
    size = sizes(1000)
    flags = {s.name: arguments(s, size, "/d", more=["--dtype", "x"]) for s in SYSTEMS}
    without = {name for name, f in flags.items() if "--no-enable-prefix-caching" in f}
    assert without == {"re"}
    blocks = {n: f[f.index("--num-gpu-blocks-override") + 1] for n, f in flags.items()}
    assert {n for n, b in blocks.items() if b != blocks["re"]} == {"bound"}
    assert int(blocks["bound"]) * 16 > size.working_set_tokens
    ours = {n: connector(flags[n]) for n in ("attnstore", "attnstore-lru", "attnstore-fifo")}
    extras = {n: c["kv_connector_extra_config"] for n, c in ours.items() if c}
    assert {n: e.pop("eviction") for n, e in extras.items()} == {
        "attnstore": "attnstore",
        "attnstore-lru": "lru",
        "attnstore-fifo": "fifo",
    }
    assert extras["attnstore"] == extras["attnstore-lru"] == extras["attnstore-fifo"]
    assert [connector(flags[name]) for name in ("re", "vllm", "bound")] == [None] * 3
    assert all(f[-2:] == ["--dtype", "x"] for f in flags.values())


def test_users_settings_of_the_store_count() -> None:
    ours = chosen("attnstore")[0]
    found = connector(arguments(ours, sizes(), "/d", store={"look_ahead": False}))
    assert found is not None
    assert found["kv_connector_extra_config"]["look_ahead"] is False


def test_what_compare_sets_itself_is_not_for_users() -> None:
    flags = {"--host", "--port"}
    for system in SYSTEMS:
        flags.update(f for f in arguments(system, sizes(), "/d") if f.startswith("--"))
    assert "--kv-transfer-config" in flags
    for flag in flags:
        with pytest.raises(ConfigError, match=f"--serve: '{flag}=1' is not for it"):
            check_more([f"{flag}=1"])
    check_more(["--dtype", "auto", "-tp", "2", "--model-impl=x", "--enforce-eager"])


def test_names_are_checked_and_run_in_one_order() -> None:
    assert [s.name for s in chosen("bound,re")] == ["re", "bound"]
    assert chosen("all") == list(SYSTEMS)
    with pytest.raises(ConfigError, match="'vlm' is unknown; there are re, vllm, attnstore"):
        chosen("re,vlm")


def test_what_cannot_run_says_why() -> None:
    cpu = Here(is_cpu_build=True, free_bytes=1 << 50)
    reasons = {s.name: why for s in SYSTEMS if (why := why_not(s, sizes(), cpu))}
    assert reasons == {"offloading": "needs a GPU", "lmcache": "LMCache is not installed"}
    gpu = Here(is_cpu_build=False, free_bytes=1 << 50, has_lmcache=True)
    assert not any(why_not(s, sizes(), gpu) for s in SYSTEMS)
    full = Here(is_cpu_build=False, free_bytes=0)
    assert "GiB free" in (why_not(chosen("example")[0], sizes(), full) or "")
    assert why_not(RE, sizes(), full) is None


def test_the_cpu_build_gets_room_for_its_hbm() -> None:
    size = sizes(1000, kv_bytes_per_token=GIB // 10_000)
    assert environment(RE, size)["VLLM_CPU_KVCACHE_SPACE"] == "4"  # 3.3 GiB
    assert int(environment(BOUND, size)["VLLM_CPU_KVCACHE_SPACE"]) > 40
