# SPDX-License-Identifier: Apache-2.0
"""Is a server with NVMe ever worse than one without? A simulated sweep over its size and speed.

    python -m benchmarks.nvme_sizes [--draws 8] [--trace FILE --requests 1000]

Conversations that think, grow and end come to a server that makes 0.7 GB of KV a second, which is
more than the slow ones of these disks can write. For each order of eviction, and each size (times
DRAM) and speed (GB/s, each way) of the disk: by how many points the part of the history that is
found is above that without NVMe.

One draw says little: what is found without NVMe alone may change by some points where DRAM has a
slot more. So the mean of several draws is what counts: of a recorded trace, with DRAM of so many
sizes, 1 % apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np

from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace

CHUNK = 64
KV = 1_000_000
"""Bytes a token."""
FILE_KV = 160_000
"""The same, for a recorded trace."""
MACHINE = Machine(
    kv_bytes_per_token=KV, hbm=KV * 16_000, dram=KV * CHUNK * 200, nvme=1,
    prefill_tokens_per_s=2000, prefill_context=4000, decode_step_s=0.02, max_num_seqs=8,
    max_num_batched_tokens=1024, prefix_cache=False, hbm_bandwidth=26_000_000_000,
    chunk_tokens=CHUNK, load_deadline_s=5.0,
)  # fmt: skip
POLICIES = ("attnstore", "lru-ahead", "lru", "fifo")
"""lru-ahead is what `eviction: lru` is; lru and fifo are as with `look_ahead: false`."""
SIZES = (0.1, 0.3, 0.5, 1.0, 2.0, 10.0)
SPEEDS = (0.1, 0.5, 1.0, 5.0)


def conversations(count: int, seed: int = 1) -> Trace:
    """Of one to six turns. A third ends after the first."""
    rng, requests, now = Random(seed), list[TraceRequest](), 0.0
    for session in range(count):
        tokens, think, at = 0, 0.0, now
        for _ in range(1 if rng.random() < 1 / 3 else rng.randint(2, 6)):
            tokens += rng.randint(50, 400)
            answer = rng.randint(10, 60)
            known = tokens + answer
            chunks = np.arange(-(-known // CHUNK), dtype=np.int64) + session * 1000
            requests.append(TraceRequest(at, chunks, tokens, answer, known, session, think))
            tokens, think = known, rng.expovariate(1 / 20)
            at += think + 1
        now += rng.expovariate(0.9)
    return make_trace("conversations", CHUNK, requests)


def read(path: Path, count: int) -> tuple[Trace, Machine]:
    """The first requests of a recorded trace, on a machine that keeps up with them. DRAM has a
    sixteenth of all of their KV."""
    trace = read_trace(path, Arrivals(), chunk_tokens=512)
    requests = trace.requests[:count]
    chunk = trace.chunk_tokens
    num_chunks = 1 + max(int(request.chunks.max()) for request in requests)
    machine = replace(
        MACHINE, chunk_tokens=chunk, kv_bytes_per_token=FILE_KV, hbm=FILE_KV * 2_000_000,
        dram=FILE_KV * chunk * (num_chunks // 16), prefill_tokens_per_s=50_000,
        prefill_context=float("inf"), max_num_seqs=64, max_num_batched_tokens=8192,
    )  # fmt: skip
    return replace(trace, requests=requests, num_chunks=num_chunks), machine


def found(trace: Trace, policy: str, size: float | None, speed: float, machine: Machine) -> float:
    """The part of the history that is found, in percent; of all prompts, where the trace does not
    say what goes on with what.

    Args:
        size: of NVMe, times DRAM; None: without NVMe.
        speed: GB/s.
    """
    nvme, rate = int(machine.dram * (size or 0.1)), int(speed * 1e9)
    machine = replace(machine, nvme=nvme, nvme_read=rate, nvme_write=rate)
    server = Server(trace, machine, policy)
    assert server.store is not None
    if size is None:
        server.store.residency.lose(server.store.residency.nvme)
    outcome = server.run()
    has_sessions = any(request.session >= 0 for request in trace.requests)
    return 100 * (outcome.history_hit_share if has_sessions else outcome.hit_tokens_share)


def sizes_of_dram(machine: Machine, count: int) -> list[Machine]:
    """So many, whose DRAM is 1 % apart, around that of this one."""
    return [
        replace(machine, dram=int(machine.dram * (1 + (number - (count - 1) / 2) / 100)))
        for number in range(count)
    ]


def sweep(
    draws: Sequence[tuple[Trace, Machine]],
    policy: str,
    sizes: Sequence[float],
    speeds: Iterable[float],
) -> tuple[float, dict[float, list[float]]]:
    """What is found without NVMe, and by speed how much more it is with each size. Means of the
    draws."""

    def mean(size: float | None, speed: float = 1.0) -> float:
        return fmean(found(trace, policy, size, speed, machine) for trace, machine in draws)

    without = mean(None)
    return without, {speed: [mean(size, speed) - without for size in sizes] for speed in speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="a recorded one, instead of conversations")
    parser.add_argument("--requests", type=int, default=1000, help="of the recorded one")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES)
    parser.add_argument("--speeds", nargs="+", type=float, default=SPEEDS)
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.draws)
    draws = [(conversations(args.conversations, seed), MACHINE) for seed in seeds]
    if args.trace is not None:
        trace, machine = read(args.trace, args.requests)
        draws = [(trace, size) for size in sizes_of_dram(machine, args.draws)]
    worst = 0.0
    for policy in args.policies:
        without, more = sweep(draws, policy, args.sizes, args.speeds)
        print(f"{policy}: {without:.1f} % without NVMe; with one of so many times DRAM:")
        print("   GB/s  " + "".join(f"{size:>8}" for size in args.sizes))
        for speed, points in more.items():
            print(f"  {speed:>5}  " + "".join(f"{p:>+8.1f}" for p in points), flush=True)
            worst = min(worst, *points)
    print(f"worst: {worst:+.1f} points (goal: none below -1)")


if __name__ == "__main__":
    main()
