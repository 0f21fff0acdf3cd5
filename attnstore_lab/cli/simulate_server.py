# SPDX-License-Identifier: Apache-2.0
"""`attnstore simulate --machine`: a trace through a simulated server, by policy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attnstore_lab import palette
from attnstore_lab.cli.simulate import PATIENCE_S, read_model_shape
from attnstore_lab.progress import progress
from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.one_pool import replay
from attnstore_lab.sim.outcome import Outcome
from attnstore_lab.sim.server import POLICIES, Server
from attnstore_lab.sim.trace import Trace
from attnstore_vllm.errors import ConfigError

DEFAULT_POLICIES = "attnstore,lru,fifo,belady,infinite,recompute"
BOUND = "belady"
"""One pool of DRAM and NVMe together, whose owner knows the future: a bound for hits alone."""


LESS_LOAD = (
    "Less load: --speed 0.5, or --rate for files without times of arrival. A faster machine: "
    "--machine. --patience inf goes on all the same."
)


def check_policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in (*POLICIES, BOUND):
            raise ConfigError(
                f"--policy: {name!r} is unknown; with --machine there are "
                f"{', '.join((*POLICIES, BOUND))}"
            )
    return names


def simulate(args: argparse.Namespace, trace: Trace) -> list[Outcome]:
    """Raises: ConfigError."""
    machine = read_machine(args, trace)
    policies = check_policies(args.policy or DEFAULT_POLICIES)
    if machine.shape is not None and BOUND in policies:
        if args.policy:
            raise ConfigError(f"--policy: {BOUND} knows no groups; leave it out with --model")
        policies.remove(BOUND)
    if not 0 <= args.warmup < len(trace.requests):
        raise ConfigError(
            f"--warmup is {args.warmup}; the trace has {len(trace.requests)} requests"
        )
    total = len(policies) * len(trace.requests)
    outcomes = []
    with progress("simulate", total) as shown:
        for number, policy in enumerate(policies):
            shown.what, shown.done = policy, number * len(trace.requests)
            if policy == BOUND:
                outcomes.append(bound(trace, machine, shown.step))
                continue
            server = Server(
                trace,
                machine,
                policy,
                warmup=args.warmup,
                patience_s=args.patience,
                step=shown.step,
            )
            outcomes.append(server.run())
    return outcomes


def why_no_result(out: Outcome, patience_s: float) -> str:
    return (
        f"cannot serve this load: after {out.gave_up_at_s:,.0f} s a request had waited "
        f"{patience_s:,.0f} s, so it stopped"
    )


def read_machine(args: argparse.Namespace, trace: Trace) -> Machine:
    """With the model of --model, if it is given. Raises: ConfigError."""
    machine = Machine.read(args.machine)
    if args.model is not None:
        return machine.with_model(read_model_shape(args, args.chunk_tokens))
    return replace(machine, chunk_tokens=trace.chunk_tokens)


def bound(trace: Trace, machine: Machine, step: Any = lambda: None) -> Outcome:
    """The most that could be found, by any order of eviction. Nothing takes time in it."""
    slots = machine.dram / machine.chunk_bytes + machine.nvme / machine.nvme_chunk_bytes
    share = slots / trace.num_chunks
    run = replay(trace, BOUND, min(1.0, share), step)
    return Outcome(
        BOUND,
        num_requests=len(trace.requests),
        prompt_tokens=run.prompt_tokens,
        dram_tokens=run.hit_tokens,
    )


def as_json(trace: Trace, machine: Path, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "machine": machine.stem,
        "requests": len(trace.requests),
        "prompt_tokens": trace.num_tokens,
        "chunk_tokens": trace.chunk_tokens,
        "distinct_chunks": trace.num_chunks,
        "runs": [outcome.as_json() for outcome in outcomes],
    }


def show(
    trace: Trace, machine: Path, outcomes: Sequence[Outcome], patience_s: float = PATIENCE_S
) -> None:
    print(
        f"{trace.name} on {machine.stem}: {len(trace.requests):,} requests, "
        f"{trace.num_tokens:,} prompt tokens"
    )
    print(
        f"{'':<12}{'found':>8}{'history':>9}{'HBM':>8}{'DRAM':>8}{'NVMe':>8}{'in DRAM':>9}"
        f"{'waits':>10}{'TTFT p50':>10}{'p99':>10}{'prefill':>10}{'busy':>10}{'read':>9}"
        f"{'written':>9}"
    )
    for out in outcomes:
        tokens = max(1, out.prompt_tokens)
        tiers = [n / tokens for n in (out.hbm_tokens, out.dram_tokens, out.nvme_tokens)]
        line = f"{out.policy:<12}{out.hit_tokens_share:>8.1%}"
        if not out.is_served:
            print(f"{out.policy:<12}{why_no_result(out, patience_s)}")
            continue
        if out.policy == BOUND:
            print(line)
            continue
        line += f"{out.history_hit_share:>9.1%}" + "".join(f"{share:>8.1%}" for share in tiers)
        line += f"{out.ready_share:>9.1%}{out.waited_s:>9.1f}s"
        line += (
            f"{out.ttft(50):>9.3f}s{out.ttft(99):>9.2f}s{out.prefill_s:>9.0f}s{out.busy_s:>9.0f}s"
        )
        print(line + f"{out.bytes_read / 1e12:>7.2f}TB{out.bytes_written / 1e12:>7.2f}TB")
        if out.by_group:
            told = (f"{name} {n:,}" for name, n in sorted(out.by_group.items()))
            print(f"{'':<12}  {', '.join(told)}")
    print(
        "found: of all prompt tokens. history: of what a conversation had before. in DRAM: of "
        "what was stored\nand wanted, when a request was first offered a place. prefill: the "
        "accelerator's time for prompts."
    )
    if not all(out.is_served for out in outcomes):
        print(LESS_LOAD)


def plot(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """TTFT by share of requests. simulate.check_plot() has said that it can be written."""
    figure, ((axes,),) = palette.figure((8, 4.5), title)
    colors = palette.colors(out.policy for out in outcomes)
    for out in outcomes:
        if out.ttft_s and out.is_served:
            share = np.arange(1, len(out.ttft_s) + 1) / len(out.ttft_s)
            axes.plot(
                sorted(out.ttft_s),
                100 * share,
                color=colors[out.policy],
                label=palette.name(out.policy),
            )
    axes.set(xscale="log", xlabel="TTFT, s", ylabel="requests, %", ylim=(0, 100))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    palette.save(figure, path)
    print(f"plot: {path}", file=sys.stderr)
