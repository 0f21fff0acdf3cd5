# SPDX-License-Identifier: Apache-2.0
"""Agents on one GPU: a public comparison's load, its published arms beside this store.

    python -m benchmarks.agents --simulated [--sweep] [--seed N] [--out FILE]
    python -m benchmarks.agents --servers [--quick] [--seed N] [--out FILE]
    python -m benchmarks.agents --gpu [--dry-run] [--seed N] [--out FILE]

Simulated: the store and its policies are the server's own code, the machine is the page's H100
(attnstore_lab/sim/agents.py). The published arms ran on that H100. Each is over plain vLLM's job
time: ours over ours simulated, theirs over theirs.

The page's takeaway is that undersized DRAM is worse than none. So this fails where a job takes
longer with any tier of ours than without, or with holding, where lengths and tools are drawn too.
--sweep tries sizes from 1 GB on, slow disks and rates.

--servers: a small matrix on real servers of vLLM's CPU build, one after the other. Plain vLLM is
asked first and last: how far apart the two are is the noise. It fails where a job takes longer with
a tier of ours than without, beyond that.

--gpu: the published load of 8 turns, cut to 380 seconds of one GPU (agents_parts/gpu.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attnstore_lab.bench.environment import machine
from attnstore_lab.sim.agents import (
    EIGHT,
    EIGHTEEN,
    H100,
    HBM_TOKENS,
    TOKEN_BYTES,
    Load,
    agents,
    drawn,
)
from attnstore_lab.sim.holding_hbm import HoldingHbm
from attnstore_lab.sim.holding_server import HoldingServer
from attnstore_lab.sim.outcome import Outcome
from attnstore_lab.sim.server import Server
from attnstore_vllm.policy.holding import Holding
from benchmarks.agents_parts import arms, gpu, servers
from benchmarks.agents_parts.arms import FULL, QUICK
from benchmarks.quick import RESULTS, destination

GB = 1_000_000_000
NVME_BYTES = 1000 * GB
RATES = (1, 3, 6, 10)
DRAWS = 4
"""Of arrivals, whose mean counts where the first says that a tier is worse than none."""
DRAWN_RATES = (1, 3, 10)
DRAWN_TOOLS_S = (0.5, 1, 3, 10, 30)
SWEEP_RATES = (1, 3, 10)
SWEEP_DRAM_GB = (1, 4, 16, 64)
SWEEP_DISKS_GB_S = (None, 0.2, 1.0, 5.0)
"""Reads; writes are half as fast. None: no NVMe."""

PUBLISHED: dict[str, dict[int, dict[str, float]]] = {
    EIGHTEEN.name: {
        1: {"plain": 41.0, "Continuum": 41.3, "SimpleCPUOffload 16 GB": 50.5,
            "SimpleCPUOffload 128 GB": 41.6, "LMCache 16 GB": 57.9, "LMCache 128 GB": 53.1},
        3: {"plain": 232.9, "Continuum": 69.0, "SimpleCPUOffload 16 GB": 232.3,
            "SimpleCPUOffload 128 GB": 79.8, "LMCache 16 GB": 260.6, "LMCache 128 GB": 96.3},
        6: {"plain": 276.0, "Continuum": 75.8, "SimpleCPUOffload 16 GB": 268.4,
            "SimpleCPUOffload 128 GB": 85.3, "LMCache 16 GB": 297.5, "LMCache 128 GB": 105.0},
        10: {"plain": 281.0, "Continuum": 79.1, "SimpleCPUOffload 16 GB": 290.3,
             "SimpleCPUOffload 128 GB": 91.8, "LMCache 16 GB": 319.4, "LMCache 128 GB": 105.7},
    },
    EIGHT.name: {
        3: {"plain": 68.9, "Continuum": 39.8, "LMCache 400 GB": 27.5},
        6: {"plain": 244.0, "Continuum": 100.0, "LMCache 400 GB": 65.9},
    },
}  # fmt: skip
"""Mean job seconds, of the pages that attnstore_lab/sim/agents.py names."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A store of so much DRAM, and with an NVMe of so many GB a second."""

    name: str
    policy: str
    dram_gb: float = 0
    disk_gb_s: float | None = None
    hbm_tokens: int = HBM_TOKENS
    holds: bool = False
    """Holds HBM for sessions that are away, and defers new ones."""


PLAIN = Arm("plain", "recompute")
HOLDING = Arm("holding, no tier", "recompute", holds=True)
ARMS = (
    Arm("HBM for all", "recompute", hbm_tokens=100 * HBM_TOKENS),
    Arm("LRU 16 GB", "lru", 16),
    Arm("attnstore 16 GB", "dram", 16),
    Arm("attnstore 16 GB + NVMe", "attnstore", 16, 5.0),
    Arm("LRU 128 GB", "lru", 128),
    Arm("attnstore 128 GB", "dram", 128),
    HOLDING,
    Arm("holding, 16 GB", "dram", 16, holds=True),
    Arm("holding, 16 GB + NVMe", "attnstore", 16, 5.0, holds=True),
    Arm("holding, 128 GB", "dram", 128, holds=True),
)


def ran(load: Load, rate: float, arm: Arm, seed: int, num_jobs: int | None = None) -> Outcome:
    """Cost: some seconds of one core."""
    hardware = H100.with_sizes(
        dram=max(1, round(arm.dram_gb * GB)), hbm=arm.hbm_tokens * TOKEN_BYTES
    )
    if arm.disk_gb_s:
        speed = round(arm.disk_gb_s * GB)
        hardware = hardware.with_sizes(nvme=NVME_BYTES, nvme_read=speed, nvme_write=speed // 2)
    trace = agents(load, rate, seed, num_jobs)
    if arm.holds:
        return HoldingServer(trace, hardware, arm.policy, Holding(HBM_TOKENS)).run()
    return Server(trace, hardware, arm.policy, hbm=HoldingHbm(hardware, trace.chunk_tokens)).run()


def figures(load: Load, rate: float, arm: Arm, out: Outcome, plain_s: float) -> dict[str, Any]:
    tokens = out.prompt_tokens
    return {
        "load": load.name,
        "jobs_per_s": rate,
        **asdict(arm),
        "job_s": round(out.session_s, 2),
        "over_plain": round(out.session_s / plain_s, 4),
        "found": round(out.hit_tokens_share, 4),
        "found_in_hbm": round(out.hbm_tokens / tokens, 4),
        "ttft_p50_s": round(out.ttft(50), 3),
        "ttft_p99_s": round(out.ttft(99), 3),
        "new_ttft_p99_s": round(float(np.percentile(out.first_ttft_s, 99)), 3),
        "run_s": round(out.duration_s, 1),
    }


def compared(
    load: Load, rates: tuple[int, ...], arms: tuple[Arm, ...], seed: int, num_jobs: int | None
) -> Iterator[dict[str, Any]]:
    """Each arm at each rate, plain vLLM first."""
    for rate in rates:
        plain_s = 0.0
        for arm in (PLAIN, *arms):
            out = ran(load, rate, arm, seed, num_jobs)
            plain_s = plain_s or out.session_s
            run = figures(load, rate, arm, out, plain_s)
            if is_worse(run):
                more = [draw(load, rate, arm, seed + n, num_jobs) for n in range(1, DRAWS)]
                run["over_plain"] = round(float(np.mean([run["over_plain"], *more])), 4)
                run["draws"] = DRAWS
            yield run


def draw(load: Load, rate: float, arm: Arm, seed: int, num_jobs: int | None) -> float:
    """The job time over plain of other arrivals: which request meets which moves a mean by up to a
    hundredth."""
    plain = ran(load, rate, PLAIN, seed, num_jobs)
    return ran(load, rate, arm, seed, num_jobs).session_s / plain.session_s


def sweep_arms() -> tuple[Arm, ...]:
    return tuple(
        Arm(f"attnstore {dram} GB{f' + NVMe {disk} GB/s' if disk else ''}",
            "attnstore" if disk else "dram", dram, disk)
        for dram, disk in itertools.product(SWEEP_DRAM_GB, SWEEP_DISKS_GB_S)
    )  # fmt: skip


def is_worse(run: dict[str, Any]) -> bool:
    """Whether a job takes longer with a tier or with holds of ours than without, by a hundredth."""
    is_ours = run["policy"] in ("attnstore", "dram") or run["holds"]
    return is_ours and round(run["over_plain"], 2) > 1.0


def line(run: dict[str, Any]) -> str:
    return (
        f"{run['load']:<20}{run['jobs_per_s']:>4}/s  {run['name']:<28}{run['job_s']:>8.1f} s"
        f"{run['over_plain']:>7.2f}{run['found']:>8.1%}{run['found_in_hbm']:>8.1%} in HBM"
        f"{run['ttft_p50_s']:>8.2f}{run['ttft_p99_s']:>8.2f}{run['new_ttft_p99_s']:>8.2f} s"
    )


def published_lines() -> Iterator[str]:
    for load, rates in PUBLISHED.items():
        for rate, by_arm in rates.items():
            for name, seconds in by_arm.items():
                over = seconds / by_arm["plain"]
                yield f"{load:<20}{rate:>4}/s  {name:<28}{seconds:>8.1f} s{over:>7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--simulated", action="store_true")
    way.add_argument("--servers", action="store_true", help="real ones, CPU build")
    way.add_argument("--gpu", action="store_true", help="380 seconds of one GPU")
    parser.add_argument("--dry-run", action="store_true", help="of --gpu: say what would run")
    parser.add_argument("--quick", action="store_true", help="of --servers: fewer and shorter")
    parser.add_argument("--logs", type=Path, help="of --servers: keep their logs there")
    parser.add_argument("--sweep", action="store_true", help="sizes, disks and rates; minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, help="so many (100 of 18 turns, 127 of 8)")
    parser.add_argument("--out", type=Path, help="in results/; of --quick in .cache/quick/")
    args = parser.parse_args()
    if args.gpu and args.dry_run:
        print(f"{gpu.planned_s():.0f} of {gpu.BUDGET_S:.0f} s")
        for turn, flags in zip(gpu.TURNS, gpu.commands(Path("WORK")), strict=True):
            print(f"{turn.arm.name}, {turn.limit_s:.0f} s: vllm serve MODEL {shlex.join(flags)}")
    elif args.servers or args.gpu:
        real(args)
    else:
        simulated(args)


def real(args: argparse.Namespace) -> None:
    name = "agents_gpu.json" if args.gpu else "agents_servers.json"
    out = destination(RESULTS / name, args.out, is_quick=args.quick)
    plan = gpu.PLAN if args.gpu else QUICK if args.quick else FULL
    if args.jobs and not args.gpu:
        plan = servers.cut(plan, args.jobs)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    print(
        f"{plan.load.name}: {plan.load.num_jobs} jobs, {plan.jobs_per_s:g} a second, "
        f"{plan.session_tokens:,} tokens of sessions; HBM {plan.hbm_tokens:,}", flush=True,
    )  # fmt: skip
    tell = partial(print, flush=True)
    if args.gpu:
        logs = args.logs or Path(tempfile.mkdtemp(prefix="agents-logs-"))
        runs, not_run = gpu.run(args.seed, tell, logs)
    else:
        runs, not_run = servers.run(plan, args.seed, tell, args.logs)
    arms.compare(runs)
    bad, said = arms.worse(runs), arms.verdicts(runs, not_run)
    report = {
        "seed": args.seed, "is_quick": args.quick, "machine": machine(), "plan": asdict(plan),
        "noise": round(arms.noise(runs), 4), "runs": runs, "not_run": not_run,
        "verdicts": said, "worse_than_none": [run["name"] for run in bad],
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(arms.table(runs), f"noise (plain asked twice): {report['noise']:.2f}", sep="\n")
    print(*(f"not run: {name}: {why}" for name, why in not_run.items()), sep="\n")
    print(*(f"{what}: {verdict}" for what, verdict in said.items()), f"written: {out}", sep="\n")
    if bad:
        names = ", ".join(f"{run['name']} ({run['over_plain']:.2f})" for run in bad)
        raise SystemExit(f"a tier is worse than none, beyond the noise: {names}")


def simulated(args: argparse.Namespace) -> None:
    out = args.out or RESULTS / "agents_simulated.json"
    print("published, on an H100: job seconds, over plain", *published_lines(), sep="\n")
    print("simulated: job seconds, over plain, prompt tokens found, TTFT p50, p99, p99 of new ones")
    found: dict[str, list[dict[str, Any]]] = {"matrix": [], "drawn": [], "sweep": []}
    plans: list[tuple[str, Load, tuple[int, ...], tuple[Arm, ...]]]
    plans = [("matrix", EIGHTEEN, RATES, ARMS), ("matrix", EIGHT, (3, 6), ARMS)]
    plans += [("drawn", drawn(tool_s), DRAWN_RATES, (HOLDING,)) for tool_s in DRAWN_TOOLS_S]
    if args.sweep:
        plans += [("sweep", load, SWEEP_RATES, sweep_arms()) for load in (EIGHTEEN, EIGHT)]
    for part, load, rates, some in plans:
        for run in compared(load, rates, some, args.seed, args.jobs):
            found[part].append(run)
            print(line(run), flush=True)
    runs = [run for part in found.values() for run in part]
    bad = [run for run in runs if is_worse(run)]
    report = {"seed": args.seed, "published": PUBLISHED, **found, "worse_than_none": len(bad)}
    out.write_text(json.dumps(report, indent=1) + "\n")
    if bad:
        raise SystemExit("a tier is worse than none:\n" + "\n".join(map(line, bad)))


if __name__ == "__main__":
    main()
