# SPDX-License-Identifier: Apache-2.0
"""Recorded agents with hints and without: how much is evicted that comes back.

    python -m benchmarks.agent_hints --trace claude_code_weka_sessions.jsonl.gz [--quick]

Each request is replayed at its time against one pool of chunks, whose order of departure is the
server's own. A chunk that was evicted and is asked for again counts. What clients tell:

    none       nothing
    tool       `agent` and `tool`, before the answer: the model, and whether a tool has answered
    ending     `session`: the server reads how each answer ends, a call of a tool or words
    ended      the same, and the last request of each session has `ended: true`

The recorded sessions have no tools' names. So `tool` tells that it was a tool, and not which.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from attnstore_lab.bench.environment import machine
from attnstore_lab.bench.summary import table
from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.trace import Trace, TraceRequest
from attnstore_vllm.policy.eviction.departures import departures
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.told import Told
from attnstore_vllm.policy.visits import NO_TERMS, Terms, answer, visit_of
from benchmarks.quick import RESULTS, destination

ARMS: Final = ("none", "tool", "ending", "ended")
CAPACITIES: Final = (0.05, 0.2)
"""Shares of all distinct chunks that the pool holds."""
SESSIONS_S: Final = 0.02
CHUNK_TOKENS: Final = 1024
GOAL: Final = 0.5
QUICK_REQUESTS: Final = 600


@dataclass(frozen=True, slots=True)
class Evicted:
    chunks: int
    came_back: int


def terms_of(request: TraceRequest, arm: str) -> Terms:
    words = request.words
    if words is None or arm == "none":
        return NO_TERMS
    if arm == "tool":
        return Terms(told=Told(b"", words.agent, words.tool))
    is_over = arm == "ended" and words.is_last
    return Terms(Priority.ENDED if is_over else Priority.NORMAL, told=Told(b""))


def replay(trace: Trace, arm: str, capacity: float) -> Evicted:
    """Replay the trace; a request's chunks are in the pool once it was served."""
    num_slots = max(1, int(trace.num_chunks * capacity))
    estimator = ReturnEstimator()
    order = departures("attnstore", trace.num_chunks, estimator)
    gone = set[int]()
    evicted = came_back = 0
    for request in tqdm(trace.requests, desc=f"{arm} {capacity}", leave=False):
        now, chunks = request.arrival_s, request.chunks.tolist()
        came_back += sum(chunk in gone for chunk in chunks)
        gone.difference_update(chunks)
        found = next((n for n, chunk in enumerate(chunks) if chunk not in order), len(chunks))
        last_runs = [order.run_of(chunk) for chunk in chunks[:found]]
        whole = chunks[: request.num_tokens // trace.chunk_tokens]
        terms = terms_of(request, arm)
        visit = visit_of(estimator, last_runs, whole, request.num_tokens, now, terms)
        reads_ending = arm in ("ending", "ended") and request.words is not None
        ending = request.words.ending if reads_ending and request.words is not None else None
        answer(visit.own, request.answer_tokens, estimator, ending)
        if estimator.is_due:
            estimator.refit(now)
        shared = visit.num_shared
        for part, run in ((chunks[:shared], visit.shared), (chunks[shared:], visit.own)):
            order.use([chunk for chunk in part if chunk in order], run)
            for chunk in part:
                if chunk not in order:
                    order.add(chunk, run)
        while len(order) > num_slots:
            victim = order.victim(now, lambda _: True)
            assert victim is not None
            order.remove(victim)
            gone.add(victim)
            evicted += 1
    return Evicted(evicted, came_back)


def measure(trace: Trace, arms: Sequence[str] = ARMS) -> list[dict[str, Any]]:
    """A row for each capacity and arm; the first arm is what the others are compared with."""
    rows: list[dict[str, Any]] = []
    for capacity in CAPACITIES:
        without: int | None = None
        for arm in arms:
            found = replay(trace, arm, capacity)
            without = found.came_back if without is None else without
            over = round(found.came_back / without, 3) if without else None
            rows.append(
                {
                    "capacity": capacity, "hints": arm, "evicted": found.chunks,
                    "came_back": found.came_back, "over_without": over,
                }
            )  # fmt: skip
    return rows


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Whether all that a client can tell reaches the goal, at each capacity."""
    with_all = [row for row in rows if row["hints"] == ARMS[-1]]
    missed = [row for row in with_all if row["over_without"] is None or row["over_without"] > GOAL]
    if not missed:
        return f"goal of {GOAL} reached"
    where = ", ".join(f"{row['over_without']} at {row['capacity']}" for row in missed)
    return f"goal of {GOAL} missed: {where}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Evictions of what comes back, by hints.")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="the first requests; not published")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = destination(RESULTS / "agent_hints.json", args.out, is_quick=args.quick)
    trace = read_trace(args.trace, Arrivals(sessions_s=SESSIONS_S), chunk_tokens=CHUNK_TOKENS)
    if args.quick:
        first = trace.requests[:QUICK_REQUESTS]
        trace = Trace(trace.name, trace.chunk_tokens, first, trace.num_chunks)
    rows = measure(trace)
    report = {
        "machine": machine(), "trace": trace.name, "requests": len(trace.requests),
        "sessions_per_s": SESSIONS_S, "goal": GOAL, "verdict": verdict(rows), "results": rows,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    cells = [("pool", "hints", "evicted", "of it came back", "over without")]
    cells += [
        (f"{row['capacity']:.2f}", row["hints"], str(row["evicted"]), str(row["came_back"]),
         "-" if row["over_without"] is None else f"{row['over_without']:.3f}")
        for row in rows
    ]  # fmt: skip
    print(table(cells))
    print(report["verdict"])


if __name__ == "__main__":
    main()
