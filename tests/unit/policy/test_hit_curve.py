# SPDX-License-Identifier: Apache-2.0
"""The hit curve by sampling, against pools that hold every chunk."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from blake3 import blake3

from attnstore_lab.cli.curve import shares_of
from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.one_pool import replay
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace
from attnstore_vllm.policy.hit_curve import HitCurve, LookedUp, NewChunk, mark_of
from attnstore_vllm.store.lookup import Lookup
from tests import helpers

CAPACITIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DATA = Path(__file__).parents[4] / "shared" / "data"
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


def chats(seed: int, *, sessions: int = 1500, size: int = 256) -> Trace:
    """Conversations of any lengths. Some turns are asked anew, and the talk parts there."""
    rng = Random(seed)
    requests, number = [], 100
    for _ in range(sessions):
        at, num_tokens = rng.uniform(0, 40_000), size * rng.randrange(4)
        chunks = list(range(num_tokens // size))
        for _ in range(rng.randint(1, 8)):
            before, begun = chunks.copy(), num_tokens
            for _ in range(1 + (rng.random() < 0.2)):
                # The second time other tokens follow: the chunk that both begin in is two.
                prompt = begun + rng.randint(1, 2 * size)
                num_tokens = prompt + rng.randint(1, 2 * size)
                more = -(-num_tokens // size) - len(before)
                chunks = before + list(range(number, number + more))
                number += more
                known = np.array(chunks, dtype=np.int64)
                requests.append(TraceRequest(at, known, prompt, num_tokens - prompt, num_tokens))
                at += rng.expovariate(1 / 600)
                before = before[: begun // size]
    return make_trace(f"chats {seed}", size, requests)


@pytest.mark.parametrize(("sampled_max", "within"), [(1 << 20, 0.004), (4096, WITHIN)])
@pytest.mark.parametrize("seed", [1, 2])
def test_tails_count_as_a_pool_finds_them(seed: int, sampled_max: int, within: float) -> None:
    trace = chats(seed)
    shares, _ = curve_of(trace, CAPACITIES, sampled_max=sampled_max)
    whole = [replay(trace, "lru", capacity).hit_tokens_share for capacity in CAPACITIES]
    assert shares == pytest.approx(whole, abs=within)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_store_finds_what_its_curve_says(seed: int) -> None:
    """Turns of random lengths against the real store, whose DRAM holds a part of them."""
    rng, talks = Random(seed), list[list[int]]()
    rig = helpers.memory_rig(num_records=1, dram_slots=150, eviction="lru", threaded=False)
    found = looked_up = 0
    for number in range(1500):
        goes_on = bool(talks) and rng.random() < 0.8
        back = min(len(talks) - 1, int(rng.expovariate(1 / 15)))
        talk = talks.pop(-1 - back) if goes_on else []
        talk = talk + [rng.getrandbits(30) for _ in range(rng.randint(2, 30))]
        sequence = helpers.sequence_of(talk)
        pieces, _ = rig.store.arrive(str(number), Lookup(sequence), len(talk))
        rig.store.leave_queue([str(number)])
        held = rig.store.hold_ready(pieces, sequence, len(talk) - 1)
        rig.store.loaded(piece.chunk for piece in held)
        found += held[-1].stop if held else 0
        looked_up += len(talk)
        gauges = rig.store.gauges()  # counts what was looked up
        talk = talk + [rng.getrandbits(30) for _ in range(rng.randint(2, 30))]
        for name in helpers.names_of(helpers.sequence_of(talk)):
            if name.num_tokens >= helpers.GRAIN:
                rig.put(name)
        if len(talk) < 150:
            talks.append(talk)
    rig.pool.close()
    assert gauges["dram_curve_ratio", "1"] == pytest.approx(found / looked_up, abs=WITHIN)
    assert gauges["dram_curve_ratio", "0.25"] < 0.8 * gauges["dram_curve_ratio", "1"]


@pytest.mark.parametrize("num_whole", [0, 1])
@pytest.mark.parametrize("differs", [None, "place", "tokens", "extra"])
def test_a_tail_is_found_by_what_goes_on_from_it(differs: str | None, num_whole: int) -> None:
    """By its own conversation alone, whether the next prompt ends within the chunk or beyond."""
    curve = HitCurve([1], 16)
    curve.store(NewChunk(b"the tail", b"before's", b"", b"okay" * 10))
    tokens = b"okay" * 9 + (b"else" if differs == "tokens" else b"okay") + b"more" * 6
    extra = b"image" if differs == "extra" else b""
    place = mark_of(b"other's " if differs == "place" else b"before's")
    curve.use(LookedUp(place, [7] * num_whole, 16, lambda _: (extra, tokens[: 4 * 16])))
    assert curve.shares() == pytest.approx([0.0 if differs else 10 / 16])


def test_what_goes_on_from_a_tail_takes_its_slot() -> None:
    curve = HitCurve([2], 16)
    for size in (5, 9, 16):
        curve.store(NewChunk(b"tail %3d" % size, b"before's", b"", b"okay" * size))
        assert len(curve.used_at) == 1
    curve.store(NewChunk(b"sibling ", b"before's", b"", b"else" * 7))
    curve.store(NewChunk(b"other   ", b"elsewhere", b"", b"okay" * 16))
    assert len(curve.used_at) == 3
    curve.use(
        LookedUp(mark_of(b"before's"), [mark_of(b"whole   ")], 16, lambda _: (b"", b"else" * 16))
    )
    assert len(curve.used_at) == 3


def test_tails_that_come_and_go_take_no_memory() -> None:
    curve = HitCurve([10], 16, sampled_max=64)
    for number in range(20_000):
        size = 1 + number % 15
        key = blake3(b"%d" % number).digest()
        curve.store(NewChunk(key, bytes(32), b"", b"okay" * size))
        if size == 15:
            curve.use(LookedUp(0, [7], 16, lambda _: (b"", b"okay" * 16)))
    assert len(curve.used_at) <= 64
    assert len(pickle.dumps(curve)) < 5000, "nothing else grows either"


def used(*chunks: int, num_tokens: int = 16) -> LookedUp:
    return LookedUp(0, chunks, num_tokens)


def stored(key: bytes, num_tokens: int = 16) -> NewChunk:
    return NewChunk(key, bytes(32), b"", key[:4] * num_tokens)


def test_what_is_long_ago_is_forgotten() -> None:
    curve = HitCurve([100], 16, tokens_kept=16 * 1000)
    rng = Random(1)
    for _ in range(2000):
        curve.use(used(5))
    assert curve.shares() == pytest.approx([1.0], abs=0.01)
    for _ in range(10_000):
        curve.use(used(rng.getrandbits(64)))
    assert curve.shares()[0] < 0.05


def test_memory_is_bounded_and_nothing_looked_up_is_nothing_found() -> None:
    curve = HitCurve.around(100, 16)
    assert [share for _, share in curve.by_times()] == [0.0] * 6
    for number in range(20_000):
        key = blake3(b"%d" % number).digest()
        curve.store(stored(key))
        curve.store(stored(blake3(key).digest(), 15))
    assert len(curve.used_at) <= 8192


def test_news_count_late_as_they_would_have_at_once() -> None:
    at_once, late = HitCurve.around(10, 16), HitCurve.around(10, 16)
    rng = Random(1)
    for _ in range(500):
        chunks = [rng.randrange(30) << 57 for _ in range(4)]
        key = (rng.randrange(30) << 57).to_bytes(8, "big")
        events = used(*chunks, num_tokens=64), stored(key)
        at_once.use(events[0])
        at_once.store(events[1])
        late.news += events
    late.catch_up(700)
    assert late.shares() != at_once.shares()
    late.catch_up()
    assert late.shares() == at_once.shares()
    assert not late.news


def test_a_store_shows_it_for_sizes_around_its_own() -> None:
    rig = helpers.memory_rig(dram_slots=8)
    sequence = helpers.sequence_of(helpers.tokens_of(1, 4 * helpers.CHUNK_TOKENS))
    for name in ("a", "b"):
        rig.store.arrive(name, Lookup(sequence), len(sequence.token_ids))
    gauges = rig.store.gauges()
    shares = [gauges["dram_curve_ratio", times] for times in ("0.25", "0.5", "1", "8")]
    assert shares == [0.25, 0.375, 0.375, 0.375], "3 whole chunks of 4, at the second time"
    rig.close()


TRACES = (
    "traces/mooncake_fast25_conversation.jsonl",
    "traces/claude_code_weka_sessions.jsonl.gz",
    "conversations/sharegpt_multiturn.json",
)


@pytest.mark.long
@pytest.mark.timeout(3600)
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
