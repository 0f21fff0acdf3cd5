# SPDX-License-Identifier: Apache-2.0
"""The hit curve by sampling, against pools that hold every chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from blake3 import blake3

from attnstore_vllm.cli.curve import shares_of
from attnstore_vllm.policy.hit_curve import HitCurve
from attnstore_vllm.sim.formats import Arrivals, read_trace
from attnstore_vllm.sim.one_pool import replay
from attnstore_vllm.sim.trace import Trace, TraceRequest, make_trace
from tests import helpers

CAPACITIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DATA = Path(__file__).parents[3] / "shared" / "data"
WITHIN = 0.02
CORE_MAX = 0.01


def curve_of(
    trace: Trace, capacities: Sequence[float], **options: int
) -> tuple[list[float], float]:
    """(shares, seconds of processor) of the trace; in them are those for making its keys."""
    began = time.process_time()
    return shares_of(trace, capacities, **options), time.process_time() - began


def made(seed: int, *, sessions: int = 2000, turns: int = 6) -> Trace:
    """Conversations that begin with one of a few system prompts and come back after a while."""
    rng = Random(seed)
    requests, number = [], 100
    for _ in range(sessions):
        at = rng.uniform(0, 40_000)
        chunks = [[0, 1, 2], [3], [4, 5]][rng.randrange(3)].copy()
        for _ in range(rng.randint(1, turns)):
            more = rng.randint(1, 8)
            chunks += range(number, number + more)
            number += more
            tokens = 16 * len(chunks)
            requests.append(TraceRequest(at, np.array(chunks, dtype=np.int64), tokens, 0, tokens))
            at += rng.expovariate(1 / 600)
    return make_trace(f"made {seed}", 16, requests)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_sample_says_what_whole_pools_hold(seed: int) -> None:
    trace, capacities = made(seed), (0.01, 0.05, 0.2)
    shares, seconds = curve_of(trace, capacities)
    for capacity, share in zip(capacities, shares, strict=True):
        whole = replay(trace, "lru", capacity).hit_tokens_share
        assert share == pytest.approx(whole, abs=WITHIN), capacity
    assert seconds < CORE_MAX * trace.duration_s


def test_all_chunks_followed_is_exact() -> None:
    trace = made(4, sessions=200)
    shares, _ = curve_of(trace, CAPACITIES, sampled_max=1 << 20)
    whole = [replay(trace, "lru", capacity).hit_tokens_share for capacity in CAPACITIES]
    assert shares == pytest.approx(whole, abs=1e-3)


def test_what_is_long_ago_is_forgotten() -> None:
    curve = HitCurve([100], 16, tokens_kept=16 * 1000)
    rng = Random(1)
    for _ in range(2000):
        curve.use([5], 16)
    assert curve.shares() == pytest.approx([1.0], abs=0.01)
    for _ in range(10_000):
        curve.use([rng.getrandbits(64)], 16)
    assert curve.shares()[0] < 0.05


def test_memory_is_bounded_and_nothing_looked_up_is_nothing_found() -> None:
    curve = HitCurve.around(100, 16)
    assert [share for _, share in curve.by_times()] == [0.0] * 6
    for number in range(20_000):
        key = blake3(b"%d" % number).digest()
        curve.store(key, 16)
        curve.store(key, 15)
    assert curve.num_followed <= 8192


def test_news_count_late_as_they_would_have_at_once() -> None:
    at_once, late = HitCurve.around(10, 16), HitCurve.around(10, 16)
    rng = Random(1)
    for _ in range(500):
        chunks = [rng.randrange(30) << 57 for _ in range(4)]
        key = (rng.randrange(30) << 57).to_bytes(8, "big")
        at_once.use(chunks, 64)
        at_once.store(key, 16)
        late.news += (chunks, 64), (key, 16)
    late.catch_up(700)
    assert late.shares() != at_once.shares()
    late.catch_up()
    assert late.shares() == at_once.shares()
    assert not late.news


def test_a_store_shows_it_for_sizes_around_its_own() -> None:
    rig = helpers.memory_rig(dram_slots=8)
    sequence = helpers.sequence_of(helpers.tokens_of(1, 4 * helpers.CHUNK_TOKENS))
    for name in ("a", "b"):
        rig.store.arrive(name, sequence, len(sequence.token_ids))
    gauges = rig.store.gauges()
    shares = [gauges["dram_curve_ratio", times] for times in ("0.25", "0.5", "1", "8")]
    assert shares == [0.25, 0.375, 0.375, 0.375], "3 whole chunks of 4, at the second time"
    rig.close()


TRACES = (
    "traces/mooncake_fast25_conversation.jsonl",
    "traces/claude_code_weka_sessions.jsonl.gz",
    pytest.param(
        "conversations/sharegpt_multiturn.json",
        marks=pytest.mark.xfail(
            strict=True, reason="its turns end inside chunks, and the curve counts whole ones"
        ),
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("name", TRACES)
def test_published_traces(name: str) -> None:
    if not (DATA / name).exists():
        pytest.skip("the traces are not here (python -m benchmarks.data fetch)")
    arrivals = Arrivals(sessions_s=0.2, num_sessions=3000, think_s=60.0, seed=1)
    trace = read_trace(DATA / name, arrivals, None, 256)
    shares, seconds = curve_of(trace, CAPACITIES)
    lines = []
    for capacity, share in zip(CAPACITIES, shares, strict=True):
        whole = replay(trace, "lru", capacity).hit_tokens_share
        lines.append(f"{capacity}: {share:.3f}, simulated {whole:.3f}")
        print(lines[-1])
        assert share == pytest.approx(whole, abs=WITHIN), lines
    print(f"{seconds:.2f} s for {trace.duration_s:.0f} s")
    assert seconds < CORE_MAX * trace.duration_s
