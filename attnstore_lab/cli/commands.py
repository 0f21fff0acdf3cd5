# SPDX-License-Identifier: Apache-2.0
"""The commands that the laboratory adds to `attnstore`: simulate, plan, curve, bench.

`attnstore` finds add() by the entry point group attnstore.commands.
"""

from __future__ import annotations

import argparse
import json

from attnstore_lab.cli import bench, curve, simulate, simulate_hosts, simulate_server, size_plan
from attnstore_vllm.cli.main import EXIT_OK


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds their parsers; each names its handler."""
    replay = commands.add_parser(
        "simulate", help="what a trace's requests would find, by policy and capacity"
    )
    simulate.add_arguments(replay)
    simulate_hosts.add_arguments(replay)
    replay.set_defaults(handler=_simulate)
    sizes = commands.add_parser("plan", help="how much DRAM and NVMe a load wants, for a budget")
    size_plan.add_arguments(sizes)
    simulate.add_trace_arguments(sizes)
    sizes.set_defaults(handler=_plan)
    shares = commands.add_parser("curve", help="what DRAM of other sizes would have had")
    curve.add_arguments(shares)
    simulate.add_trace_arguments(shares)
    shares.set_defaults(handler=curve.run)
    benches = commands.add_parser("bench", help="measure servers").add_subparsers(
        dest="bench", required=True
    )
    bench.add_arguments(benches)
    for made in benches.choices.values():
        made.set_defaults(handler=bench.run)


def _plan(args: argparse.Namespace) -> int:
    trace = simulate.read(args)
    model, options = size_plan.plan(args, trace)
    if args.json:
        print(json.dumps([option.as_json() for option in options]))
    else:
        if len(model.shape.geometry.groups) > 1 or model.shape.packed is not None:
            size_plan.show_model(model)
        size_plan.show(trace, options)
    return EXIT_OK


def _simulate(args: argparse.Namespace) -> int:
    if args.plot:
        simulate.check_plot(args.plot)
    trace = simulate.read(args)
    if args.hosts is not None:
        simulate_hosts.run(args, trace)
        return EXIT_OK
    if args.machine is not None:
        outcomes = simulate_server.simulate(args, trace)
        if args.json:
            print(json.dumps(simulate_server.as_json(trace, args.machine, outcomes)))
        else:
            simulate_server.show(trace, args.machine, outcomes, args.patience)
        if args.plot:
            title = f"{trace.name} on {args.machine.stem}"
            simulate_server.plot(outcomes, title, args.plot)
        return EXIT_OK
    runs = simulate.simulate(args, trace)
    if args.json:
        print(json.dumps(simulate.as_json(trace, runs)))
    else:
        simulate.show(trace, runs)
    if args.plot:
        simulate.plot(trace, runs, args.plot)
    return EXIT_OK
