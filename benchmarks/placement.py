# SPDX-License-Identifier: Apache-2.0
"""Where KV lies and what that is worth, in simulation: look-ahead and eviction by return over LRU.

    python -m benchmarks.placement [--dataset FILE] [--only paper,sweep,exposed,slow]
                                   [--sessions 9000] [--loads 0.3,0.5] [--seeds N]

paper   CachedAttention's set-up: its four models, 128 GB of DRAM, 10 TB of SSD, 1.0 sessions/s
sweep   one of them at 0.3 to 1.3 of what it can serve: TTFT and accelerator time over LRU's,
        and how much of what was wanted was in DRAM in time
exposed the same where no load hides behind computation, as on the CPU
slow    an NVMe of 0.3 GB/s: TTFT over that of a server that computes everything (by bandwidth,
        and beside no NVMe: python -m benchmarks.experiments slow_disk)

ShareGPT conversations (or the sample of this repository), each session with KV of its own.
What is assumed of the machines: configs/machines/*.yaml.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.outcome import Outcome
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.trace import Trace
from benchmarks.data import FOLDER, SOURCES
from benchmarks.hit_latency import ROOT

DATASETS = (
    SOURCES["sharegpt"].where(FOLDER),  # where `python -m benchmarks.data fetch sharegpt` put it
    ROOT.parent / "shared/data/conversations/sharegpt_multiturn.json",
    ROOT / "benchmarks/data/conversations.json",
)
MACHINES = ROOT / "configs" / "machines"
PAPER_HITS = {
    "llama-13b-2xa100": 0.86,
    "llama-65b-4xa100": 0.71,
    "llama2-70b-4xa100": 0.89,
    "falcon-40b-4xa100": 0.90,
}
PAPER_WARMUP = 10 / 52
LOADS = (0.3, 0.5, 0.7, 0.9, 1.0, 1.1, 1.2, 1.3)
SEEDS = 6
"""Draws of the conversations at each load, taken together: p99 of one moves by 5 per cent. A draw
takes two to ten minutes for each of three policies: give fewer, or fewer loads, for a look."""
SWEPT = "llama-65b-4xa100"
THINK_S = 60.0


def trace_of(dataset: Path, sessions: int, rate: float, seed: int = 1) -> Trace:
    arrivals = Arrivals(sessions_s=rate, num_sessions=sessions, think_s=THINK_S, seed=seed)
    return read_trace(dataset, arrivals)


def simulate(trace: Trace, machine: Machine, policy: str, until_s: float = float("inf")) -> Outcome:
    warmup = int(PAPER_WARMUP * len(trace.requests))
    with tqdm(total=len(trace.requests), desc=policy, unit="request", leave=False) as bar:
        server = Server(trace, machine, policy, warmup=warmup, until_s=until_s, step=bar.update)
        return server.run()


def last_session(trace: Trace) -> float:
    """When it begins: from then on the load falls."""
    first: dict[int, float] = {}
    for request in trace.requests:
        first.setdefault(request.session, request.arrival_s)
    return max(first.values())


def pooled(outcomes: Sequence[Outcome]) -> Outcome:
    """All requests of several runs as one."""
    whole = Outcome(outcomes[0].policy)
    for field in fields(Outcome):
        values = [getattr(outcome, field.name) for outcome in outcomes]
        if field.name == "gave_up_at_s":
            whole.gave_up_at_s = min((at for at in values if at is not None), default=None)
        elif field.name == "sessions":  # each run's are others
            whole.sessions = dict(enumerate(span for some in values for span in some.values()))
        elif field.name != "policy":
            setattr(whole, field.name, sum(values[1:], start=values[0]))
    return whole


def paper(dataset: Path, sessions: int) -> Iterator[dict[str, Any]]:
    trace = trace_of(dataset, sessions, rate=1.0)
    for name, hits in PAPER_HITS.items():
        machine = Machine.read(MACHINES / f"{name}.yaml")
        for policy in ("attnstore", "lru-ahead", "lru"):
            started = time.perf_counter()
            out = simulate(trace, machine, policy)
            yield {
                "model": name,
                "paper_hit_rate": hits,
                "simulated_hours": round(out.duration_s / 3600, 2),
                "seconds": round(time.perf_counter() - started, 1),
                **out.as_json(),
            }


def capacity(dataset: Path, machine: Machine, sessions: int) -> float:
    """Sessions a second that it can serve: all of them come at once."""
    trace = trace_of(dataset, sessions, rate=1e6)
    quick = replace(trace, requests=[replace(r, think_s=0.0) for r in trace.requests])
    return sessions / Server(quick, machine, "attnstore").run().duration_s


def sweep(
    dataset: Path,
    sessions: int,
    *,
    overlap: bool = True,
    loads: Sequence[float] = LOADS,
    seeds: int = SEEDS,
) -> Iterator[dict[str, Any]]:
    machine = replace(Machine.read(MACHINES / f"{SWEPT}.yaml"), overlap=overlap)
    # The tiers of the paper for as many sessions as the paper's, scaled with them.
    machine = machine.with_sizes(nvme=machine.nvme * sessions // 9000)
    rate = capacity(dataset, machine, sessions)
    for load in loads:
        found: dict[str, list[Outcome]] = {"attnstore": [], "lru": [], "lru-ahead": []}
        for seed in range(1, seeds + 1):
            trace = trace_of(dataset, sessions, rate=load * rate, seed=seed)
            for policy, outcomes in found.items():
                outcomes.append(simulate(trace, machine, policy, last_session(trace)))
        ours, lru, ahead = (pooled(outcomes) for outcomes in found.values())
        yield {
            "load": load,
            "sessions_per_s": round(load * rate, 4),
            "seeds": seeds,
            "requests": ours.num_requests,
            "ready_share": round(ours.ready_share, 4),
            "lru_ready_share": round(lru.ready_share, 4),
            "hit_share": round(ours.history_hit_share, 4),
            "lru_hit_share": round(lru.history_hit_share, 4),
            "lru_ahead_hit_share": round(ahead.history_hit_share, 4),
            "ttft_p50_over_lru_ahead": round(ours.ttft(50) / ahead.ttft(50), 4),
            "ttft_p99_over_lru_ahead": round(ours.ttft(99) / ahead.ttft(99), 4),
            "ttft_p50_over_lru": round(ours.ttft(50) / lru.ttft(50), 4),
            "ttft_p99_over_lru": round(ours.ttft(99) / lru.ttft(99), 4),
            "prefill_over_lru": round(ours.prefill_s / lru.prefill_s, 4),
            "busy_over_lru": round(ours.busy_s / lru.busy_s, 4),
            "lru_prefill_share": round(lru.prefill_s / lru.busy_s, 4),
            "ttft_s": [round(ours.ttft(q), 4) for q in (50, 99)],
            "lru_ttft_s": [round(lru.ttft(q), 4) for q in (50, 99)],
        }


def slow(dataset: Path, sessions: int) -> Iterator[dict[str, Any]]:
    for name in PAPER_HITS:
        machine = replace(
            Machine.read(MACHINES / f"{name}.yaml"), nvme_read=300_000_000, nvme_write=300_000_000
        )
        rate = capacity(dataset, machine, sessions)
        for load in (0.5, 0.8):
            trace = trace_of(dataset, sessions, rate=load * rate)
            until = last_session(trace)
            ours, none = (
                simulate(trace, machine, policy, until) for policy in ("attnstore", "recompute")
            )
            yield {
                "model": name,
                "load": load,
                "hit_share": round(ours.history_hit_share, 4),
                **{f"ttft_p{q}_over_recompute": round(ours.ttft(q) / none.ttft(q), 4)
                   for q in (50, 90, 99)},
            }  # fmt: skip


PARTS: dict[str, Callable[[Path, int], Iterator[dict[str, Any]]]] = {
    "paper": paper,
    "sweep": sweep,
    "exposed": partial(sweep, overlap=False),
    "slow": slow,
}
COLUMNS = {
    "paper": ("model", "policy", "stored_history_share", "history_hit_share", "paper_hit_rate",
              "dram_share", "ready_share", "queued_ready_share", "waited_s", "prefill_s",
              "accelerator_s", "seconds"),
    "sweep": ("load", "ready_share", "lru_ready_share", "hit_share", "lru_hit_share",
              "lru_ahead_hit_share", "ttft_p50_over_lru_ahead", "ttft_p99_over_lru_ahead",
              "ttft_p50_over_lru", "ttft_p99_over_lru", "prefill_over_lru", "busy_over_lru",
              "lru_prefill_share"),
    "exposed": (),
    "slow": ("model", "load", "hit_share", "ttft_p50_over_recompute", "ttft_p90_over_recompute",
             "ttft_p99_over_recompute"),
}  # fmt: skip


def show(part: str, rows: list[dict[str, Any]]) -> None:
    columns = COLUMNS[part] or COLUMNS["sweep"]
    print(f"\n{part}\n" + " ".join(f"{name:>{max(9, len(name))}}" for name in columns))
    for row in rows:
        cells = (f"{row[c]:.4g}" if isinstance(row[c], float) else str(row[c]) for c in columns)
        print(" ".join(f"{cell:>{max(9, len(c))}}" for cell, c in zip(cells, columns, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Placement policies in simulation.")
    parser.add_argument("--dataset", type=Path, help="conversations in ShareGPT format")
    parser.add_argument(
        "--sessions",
        type=int,
        default=9000,
        help="of the paper's set-up; the other parts take a ninth",
    )
    parser.add_argument("--loads", help="of sweep and exposed, as in 0.3,0.5")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of sweep and exposed")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "placement.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    args = parser.parse_args()
    dataset = args.dataset or next(path for path in DATASETS if path.exists())
    report: dict[str, Any] = {"dataset": dataset.name, "sessions": args.sessions}
    if args.out.exists():  # what was not asked for stays, if it is of the same conversations
        before = json.loads(args.out.read_text())
        if report.items() <= before.items():
            report = before
    for part in args.only.split(","):
        sessions = args.sessions if part == "paper" else max(1, args.sessions // 9)
        rows = []
        act: Callable[..., Iterator[dict[str, Any]]] = PARTS[part]
        if part in ("sweep", "exposed"):
            given = args.loads.split(",") if args.loads else LOADS
            act = partial(act, loads=[float(load) for load in given], seeds=args.seeds)
        for row in act(dataset, sessions):
            rows.append(row)
            if not args.json:
                tqdm.write(f"{part}: {row}")
        report[part] = rows
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    for part in args.only.split(","):
        show(part, report[part])


if __name__ == "__main__":
    main()
