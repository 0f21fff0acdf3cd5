# SPDX-License-Identifier: Apache-2.0
"""`attnstore simulate`: formats, policies, and what is said of bad input."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.one_pool import replay
from attnstore_lab.sim.pools import POLICIES
from attnstore_lab.sim.trace import Trace, TraceError, TraceRequest, make_trace
from attnstore_vllm.cli.main import main

MOONCAKE = (
    Path(__file__).resolve().parents[4] / "shared/data/traces/mooncake_fast25_conversation.jsonl"
)


def trace_of(requests: Sequence[Sequence[int]], size: int = 4) -> Trace:
    """Whole chunks, a request a second."""
    return make_trace("t", size, [
        TraceRequest(
            float(n), np.array(chunks, np.int64), size * len(chunks), 1, size * len(chunks)
        )
        for n, chunks in enumerate(requests)
    ])  # fmt: skip


def chats(seed: int, seconds: float = 4000.0) -> Trace:
    """Conversations that come back after about a minute, among as many that never do."""
    rng, requests, number = Random(seed), [], 0
    now = 0.0
    while now < seconds:
        number += 1000
        turns, at = rng.choice((1, 1, 1, 6)), now
        chunks = rng.randint(2, 6)
        for _ in range(turns):
            ids = np.arange(number, number + chunks)
            requests.append(TraceRequest(at, ids, 256 * chunks, 10, 256 * chunks))
            at += rng.lognormvariate(4, 0.5)
            chunks += rng.randint(1, 3)
        now += rng.expovariate(0.5)
    return make_trace("chats", 256, requests)


# ---- policies -----------------------------------------------------------------------------------


def test_chunks_are_renumbered_in_the_order_of_arrival() -> None:
    trace = make_trace(
        "t",
        1,
        [
            TraceRequest(2.0, np.array([70, 90]), 2, 1, 2),
            TraceRequest(1.0, np.array([70, 5, 90]), 3, 1, 3),
        ],
    )
    assert [r.chunks.tolist() for r in trace.requests] == [[0, 1, 2], [0, 2]]
    assert (trace.num_chunks, trace.num_tokens, trace.duration_s) == (3, 5, 1.0)


def test_lru_and_fifo_by_hand() -> None:
    trace = trace_of([[0], [1], [0], [2], [0], [1]])
    # Two slots. LRU keeps 0, which is used again and again; FIFO loses it to 2.
    assert replay(trace, "lru", 2 / 3).hit_tokens == 2 * 4
    assert replay(trace, "fifo", 2 / 3).hit_tokens == 1 * 4
    assert replay(trace, "infinite", 2 / 3).hit_tokens == 3 * 4


def best_possible(trace: Trace, num_slots: int) -> int:
    """Tries all ways to keep chunks, for single-chunk requests."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace.requests:
        (chunk,) = request.chunks.tolist()
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            for size in range(num_slots + 1):
                for new in itertools.combinations(kept | {chunk}, size):
                    key = frozenset(new)
                    after[key] = max(after.get(key, 0), hits + (chunk in kept))
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_best_possible(seed: int) -> None:
    rng = Random(seed)
    trace = trace_of([[rng.randrange(6)] for _ in range(16)])
    slots = rng.randint(1, 3)
    run = replay(trace, "belady", slots / trace.num_chunks + 1e-9)
    assert run.num_slots == slots
    assert run.hit_tokens == 4 * best_possible(trace, slots)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_pool_holds_more_than_its_slots_or_finds_what_was_not_stored(policy: str) -> None:
    trace, slots = chats(3, 600.0), 40
    pool, ever = POLICIES[policy](slots, trace), set[int]()
    for request in trace.requests:
        chunks = request.chunks.tolist()
        found = next((n for n, chunk in enumerate(chunks) if chunk not in pool), len(chunks))
        assert ever.issuperset(chunks[:found])
        pool.store(request, chunks, found)
        ever.update(chunks)
        if policy != "infinite":
            assert sum(chunk in pool for chunk in range(trace.num_chunks)) <= slots


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("capacity", [0.01, 0.03, 0.1, 0.4])
def test_attnstore_keeps_what_returns(seed: int, capacity: float) -> None:
    trace = chats(seed)
    hits = {p: replay(trace, p, capacity).hit_tokens for p in POLICIES}
    assert hits["attnstore"] >= 0.99 * hits["lru"]
    assert max(hits["lru"], hits["attnstore"]) <= hits["belady"] <= hits["infinite"]
    if capacity <= 0.03:
        assert hits["attnstore"] >= 1.3 * hits["lru"]


def test_one_off_prompts_do_not_push_out_what_all_share() -> None:
    """A system prompt of two chunks before prompts that never come again."""
    trace = trace_of([[0, 1, *range(10 * n, 10 * n + 8)] for n in range(1, 400)])
    assert replay(trace, "attnstore", 12 / trace.num_chunks).hit_tokens == 398 * 2 * 4


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the trace is not here")
@pytest.mark.parametrize(
    ("capacity", "ratio"), [(0.005, 1.5), (0.01, 1.5), (0.02, 1.5), (0.05, 1.0), (0.4, 0.99)]
)
def test_the_mooncake_trace(capacity: float, ratio: float) -> None:
    trace = read_trace(MOONCAKE, Arrivals())
    hits = {policy: replay(trace, policy, capacity).hit_tokens for policy in ("attnstore", "lru")}
    assert hits["attnstore"] >= ratio * hits["lru"]


# ---- formats ------------------------------------------------------------------------------------


def write(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def mooncake(timestamp: float, tokens: int, hashes: list[int]) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": 7,
        "hash_ids": hashes,
    }


def test_requests(tmp_path: Path) -> None:
    file = write(tmp_path / "t", mooncake(2000, 600, [9, 8]), mooncake(1000, 512, [9]))
    trace = read_trace(file, Arrivals())
    assert trace.chunk_tokens == 512
    assert [(r.arrival_s, r.num_tokens, r.chunks.tolist()) for r in trace.requests] == [
        (1.0, 512, [0]),
        (2.0, 600, [0, 1]),
    ]
    # What is found is what was stored: of the last block its part, in multiples of 16.
    again = write(tmp_path / "u", mooncake(1, 600, [9, 8]), mooncake(2, 600, [9, 8]))
    assert replay(read_trace(again, Arrivals()), "lru", 1.0).hit_tokens == 592


def test_sessions_and_agents_within_them(tmp_path: Path) -> None:
    request = {"t": 1.5, "in": 700, "out": 5, "hash_rle": [[1, 8], [40, 2]]}
    agent = {"requests": [{"t": 2.0, "in": 256, "out": 5, "hash_rle": [[100, 4]]}]}
    session = {"block_size": 64, "requests": [request, agent, {**request, "t": 9}]}
    file = tmp_path / "t.gz"
    file.write_bytes(gzip.compress((json.dumps(session) + "\n" + json.dumps(session)).encode()))
    trace = read_trace(file, Arrivals(sessions_s=0.001))
    assert trace.chunk_tokens == 256
    assert [r.chunks.tolist() for r in trace.requests] == [
        [0, 1],
        [2],
        [0, 1],
        [3, 4],
        [5],
        [3, 4],
    ]
    assert [r.num_tokens for r in trace.requests[:2]] == [700, 256]


def test_an_agent_within_a_session_has_a_beginning_of_its_own(tmp_path: Path) -> None:
    def at(time_s: float) -> dict[str, Any]:
        return {"t": time_s, "in": 256, "out": 5, "hash_rle": [[1, 4]]}

    inner = {"t": 10.0, "requests": [at(0.5)]}
    agent = {"t": 100.0, "requests": [at(0.0), at(7.0), inner]}
    session = {"block_size": 64, "requests": [at(1.0), agent, at(200.0)]}
    file = write(tmp_path / "t", session)
    arrivals = [r.arrival_s for r in read_trace(file, Arrivals()).requests]
    assert arrivals == [1.0, 100.0, 107.0, 110.5, 200.0]


def test_conversations_grow_and_are_their_own(tmp_path: Path) -> None:
    turns = [("human", 2000), ("gpt", 1000), ("human", 400), ("gpt", 4000)]
    entry = {"conversations": [{"from": who, "value": "x" * n} for who, n in turns]}
    file = tmp_path / "t.json"
    file.write_text(json.dumps([entry]))
    trace = read_trace(file, Arrivals(num_sessions=3, sessions_s=0.0001))
    first, second = trace.requests[:2]
    assert (first.num_tokens, first.answer_tokens, first.known_tokens) == (504, 254, 758)
    assert second.num_tokens == 758 + 104
    assert second.chunks.tolist()[:3] == first.chunks.tolist() == [0, 1, 2]
    assert second.arrival_s - first.arrival_s == pytest.approx(254 / 30 + second.think_s)
    assert trace.num_chunks == 3 * len(second.chunks)
    # The history is found to the token: prompt and answer of the first turn.
    assert replay(trace, "infinite", 1.0).hit_tokens == 3 * 758


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"timestamp": 1}', "line 2: 'input_length' is nothing; expected a number of tokens"),
        ("{", "line 2: not JSON"),
        ("7", "line 2: an object with 'timestamp' was expected, not 7"),
        (json.dumps(mooncake(-1, 512, [1])), "line 2: 'timestamp' is -1; expected milliseconds"),
        (json.dumps(mooncake(1, 512, [1, 2])), "line 2: 2 hashes for 512 tokens; expected 1"),
        (json.dumps(mooncake(1, 0, [])), "line 2: 0 hashes for 0 tokens"),
        (json.dumps(mooncake(1, 512, [1 << 64])), "line 2: 'hash_ids' is [18446744073709551616]"),
        (json.dumps(mooncake(float("nan"), 512, [1])), "line 2: 'timestamp' is NaN"),
    ],
)  # fmt: skip
def test_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str, says: str) -> None:
    file = tmp_path / "trace"
    file.write_text(json.dumps(mooncake(1, 512, [1])) + "\n" + bad + "\n")
    assert main(["simulate", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{file}, {says}" in error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("[1]", "conversation 0: an object with 'conversations' was expected, not 1"),
        ("[]", "there is no request in it"),
        ('[{"conversations": [{"from": "human"}]}]', "turn 0: 'value' is nothing"),
        ('{"block_size": 48, "requests": []}', "line 1: blocks of 48 tokens do not divide 256"),
        ('{"block_size": 64, "requests": [{"t": 1, "in": 1, "out": 1, "hash_rle": [[1]]}]}',
         "line 1, request 0: 'hash_rle' is [[1]]; expected a list of [first, count]"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(TraceError) as error:
        read_trace(file, Arrivals())
    assert says in str(error.value)


def test_damaged_gzip_and_no_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.gz"
    file.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(TraceError, match="neither text nor whole gzip data"):
        read_trace(file, Arrivals())
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none", Arrivals())


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "t", *(mooncake(n, 1024, [0, n % 3 + 1]) for n in range(20)))


def test_json(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", str(small), "--policy", "attnstore,lru", "--capacity", "0.5", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [run["policy"] for run in found["runs"]] == ["attnstore", "lru"]
    for run in found["runs"]:
        assert run["hit_tokens_share"] == run["hit_tokens"] / found["prompt_tokens"]
        assert run["num_slots"] == 2
    assert found["runs"][1]["hit_tokens"] == 19 * 512


def test_table_and_plot(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "p.png"
    assert main(["simulate", str(small), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "20 requests" in out
    assert "belady" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "lur"], "--policy: 'lur' is unknown; there are attnstore, lru"),
        (["--capacity", "2"], "--capacity: '2' was found; expected a share, as 0.01"),
        (["--capacity", "0.1,x"], "--capacity: 'x' was found"),
        (["--capacity", "nan"], "--capacity: 'nan' was found"),
        (["--rate", "0"], "--rate is 0.0; expected more than 0"),
        (["--chunk-tokens", "-1"], "--chunk-tokens is -1"),
    ],
)
def test_bad_arguments(
    small: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["simulate", str(small), *arguments]) == 2
    assert says in capsys.readouterr().err
