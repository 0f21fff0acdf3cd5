# SPDX-License-Identifier: Apache-2.0
"""`attnstore simulate --hosts`: a trace through many servers, by router and shared tier."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from attnstore_lab import palette
from attnstore_lab.cli.simulate import PATIENCE_S
from attnstore_lab.cli.simulate_server import LESS_LOAD, read_machine, why_no_result
from attnstore_lab.progress import progress
from attnstore_lab.sim.hosts import ROUTERS, Hosts, HostsOutcome, one_large
from attnstore_lab.sim.server import POLICIES
from attnstore_lab.sim.shared_tier import Network
from attnstore_lab.sim.trace import Trace, at_speed
from attnstore_vllm.config.values import parse_size
from attnstore_vllm.errors import ConfigError

ONE = "one-large"
"""In place of a router: one server with all that the hosts have."""
HOSTS_MAX = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("many servers, with --machine (docs/simulate.md)")
    group.add_argument("--hosts", metavar="N,...", help="so many servers, each such a machine")
    group.add_argument(
        "--router",
        default=",".join(ROUTERS),
        metavar="R,...",
        help=f"of {','.join(ROUTERS)}; {ONE}: one server with all of it (all but that)",
    )
    group.add_argument(
        "--shared", default="0", metavar="SIZE,...", help="of the tier that they share; 0: none"
    )
    group.add_argument(
        "--network", default="10GB", metavar="SIZE", help="a second, of a host's link (10GB)"
    )
    group.add_argument(
        "--shared-bandwidth", metavar="SIZE", help="a second, of the tier in all (no limit)"
    )
    group.add_argument(
        "--network-latency", type=float, default=0.001, metavar="S", help="of a transfer (0.001)"
    )
    group.add_argument(
        "--per-host", action="store_true", help="let requests come N times as fast for N hosts"
    )


def run(args: argparse.Namespace, trace: Trace) -> None:
    """Simulate, and print what is asked for. Raises: ConfigError."""
    outcomes = simulate(args, trace)
    if args.json:
        print(json.dumps(as_json(trace, args, outcomes)))
    else:
        show(trace, args.machine, outcomes, args.patience)
    if args.plot:
        plot(as_json(trace, args, outcomes), args.plot)


def simulate(args: argparse.Namespace, trace: Trace) -> list[HostsOutcome]:
    """Raises: ConfigError."""
    if args.machine is None:
        raise ConfigError("--hosts: the machine of each is missing; add --machine YAML")
    machine = read_machine(args, trace)
    if machine.shape is not None:
        raise ConfigError("--hosts: a shared tier has one KV cache group; leave --model out")
    policy = args.policy or "attnstore"
    if policy not in POLICIES:
        raise ConfigError(f"--policy: {policy!r}; with --hosts it is one of {', '.join(POLICIES)}")
    if not 0 <= args.warmup < len(trace.requests):
        raise ConfigError(
            f"--warmup is {args.warmup}; the trace has {len(trace.requests)} requests"
        )
    routers = args.router.split(",")
    for router in routers:
        if router not in (*ROUTERS, ONE):
            raise ConfigError(f"--router: {router!r}; there are {', '.join((*ROUTERS, ONE))}")
    networks, numbers = list(_networks(args)), list(_numbers(args.hosts))
    runs = [
        (number, router, network)
        for number, router, network in product(numbers, routers, networks)
        if router != ONE or network is networks[0]
    ]
    outcomes = []
    with progress("simulate", len(runs) * len(trace.requests)) as shown:
        for done, (number, router, network) in enumerate(runs):
            shown.what, shown.done = f"{number} {router}", done * len(trace.requests)
            asked = at_speed(trace, number) if args.per_host else trace
            num_hosts, each, link = number, machine, network
            if router == ONE:
                num_hosts, each = 1, one_large(machine, number)
                link = replace(network, capacity=0)
            hosts = Hosts(
                asked,
                each,
                num_hosts,
                ROUTERS[0] if router == ONE else router,
                link,
                policy=policy,
                warmup=args.warmup,
                patience_s=args.patience,
                step=shown.step,
            )
            outcomes.append(replace(hosts.run(), num_hosts=number, router=router))
    return outcomes


def _numbers(text: str) -> Iterator[int]:
    for number in text.split(","):
        if not number.isdecimal() or not 0 < int(number) <= HOSTS_MAX:
            raise ConfigError(f"--hosts: {number!r} was found; expected 1 to {HOSTS_MAX}, as 1,4")
        yield int(number)


def _networks(args: argparse.Namespace) -> Iterator[Network]:
    if not args.network_latency >= 0:
        raise ConfigError(f"--network-latency is {args.network_latency}; expected seconds")
    total = float("inf")
    if args.shared_bandwidth is not None:
        total = float(parse_size("--shared-bandwidth", args.shared_bandwidth))
    for text in args.shared.split(","):
        yield Network(
            capacity=0 if text == "0" else parse_size("--shared", text),
            link=float(parse_size("--network", args.network)),
            bandwidth=total,
            latency_s=args.network_latency,
        )


def as_json(
    trace: Trace, args: argparse.Namespace, outcomes: Sequence[HostsOutcome]
) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "machine": args.machine.stem,
        "requests": len(trace.requests),
        "prompt_tokens": trace.num_tokens,
        "chunk_tokens": trace.chunk_tokens,
        "per_host": args.per_host,
        "network": {
            "link": parse_size("--network", args.network),
            "bandwidth": args.shared_bandwidth and parse_size("", args.shared_bandwidth),
            "latency_s": args.network_latency,
        },
        "runs": [
            {
                "hosts": out.num_hosts,
                "router": out.router,
                "shared": out.network.capacity,
                "network_read": out.network_read,
                "network_written": out.network_written,
                "requests_by_host": [min(out.requests), max(out.requests)],
                **out.total.as_json(),
            }
            for out in outcomes
        ],
    }


def show(
    trace: Trace,
    machine: Path,
    outcomes: Sequence[HostsOutcome],
    patience_s: float = PATIENCE_S,
) -> None:
    print(
        f"{trace.name} on {machine.stem}, many of them: {len(trace.requests):,} requests, "
        f"{trace.num_tokens:,} prompt tokens"
    )
    print(
        f"{'hosts':>6} {'router':<13}{'shared':>9}{'found':>8}{'history':>9}{'TTFT p50':>10}"
        f"{'p99':>9}{'prefill':>10}{'read':>10}{'written':>10}{'requests a host':>18}"
    )
    for out in outcomes:
        total, shared = out.total, out.network.capacity
        begins = (
            f"{out.num_hosts:>6} {out.router:<13}"
            f"{f'{shared / 1e12:.2f}TB' if shared else 'none':>9}"
        )
        if not total.is_served:
            print(f"{begins}  {why_no_result(total, patience_s)}")
            continue
        print(
            f"{begins}{total.hit_tokens_share:>8.1%}{total.history_hit_share:>9.1%}"
            f"{total.ttft(50):>9.3f}s{total.ttft(99):>8.2f}s{total.prefill_s:>9.0f}s"
            f"{out.network_read / 1e9:>8.1f}GB{out.network_written / 1e9:>8.1f}GB"
            f"{f'{min(out.requests)} to {max(out.requests)}':>18}"
        )
    print("read, written: over the network. found: of all prompt tokens. history: of what a")
    print("conversation had before. prefill: the accelerators' time for prompts.")
    if not all(out.total.is_served for out in outcomes):
        print(f"More servers: --hosts. {LESS_LOAD}")


def _message(runs: Sequence[Mapping[str, Any]]) -> str:
    """What a shared tier is worth where it is worth most: at the most hosts, by the router."""
    hosts = max((run["hosts"] for run in runs), default=0)
    share: dict[str, dict[bool, float]] = {}
    for run in runs:
        if run["hosts"] == hosts:
            share.setdefault(run["router"], {})[bool(run["shared"])] = run["hit_tokens_share"]
    both = {router: of[True] - of[False] for router, of in share.items() if len(of) > 1}
    if not both:
        return "Prompt tokens found by number of hosts"
    router = max(both, key=both.__getitem__)
    alone, shared = (100 * share[router][is_shared] for is_shared in (False, True))
    return (
        f"At {hosts} hosts {router} finds {alone:.0f} % of prompt tokens, "
        f"and {shared:.0f} % with the shared tier"
    )


def plot(found: Mapping[str, Any], path: Path) -> None:
    """What is found by number of hosts, of as_json(). simulate.check_plot() has said that it can be
    written."""
    runs = [run for run in found["runs"] if "cannot_serve_after_s" not in run]
    figure, ((axes,),) = palette.figure((9, 4.5), _message(runs))
    colors = palette.colors([palette.OURS, *(run["router"] for run in runs)])
    for router, shared in dict.fromkeys((run["router"], run["shared"]) for run in runs):
        mine = [run for run in runs if (run["router"], run["shared"]) == (router, shared)]
        axes.plot(
            [run["hosts"] for run in mine],
            [100 * run["hit_tokens_share"] for run in mine],
            color=colors[router],
            linestyle="-" if shared else "--",
            marker=palette.MARKS[list(colors).index(router) % len(palette.MARKS)],
            label=router + (f", {shared / 1e12:g} TB shared" if shared else ""),
        )
    axes.set(
        xscale="log", xlabel=f"hosts (simulated: {found['trace']})", ylabel="prompt tokens found, %"
    )
    axes.set_ylim(bottom=0)
    ticks = sorted({run["hosts"] for run in runs})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    palette.save(figure, path)
    print(f"plot: {path}", file=sys.stderr)
