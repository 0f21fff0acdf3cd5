# SPDX-License-Identifier: Apache-2.0
"""How many servers: the runs of docs/simulate.md, into results/hosts_NAME.json and .svg.

    python -m benchmarks.hosts sharegpt SHAREGPT.json
    python -m benchmarks.hosts mooncake MOONCAKE.jsonl

Both are samples that take minutes. Mooncake's is one conversation in so many over the whole hour,
since the beginning of the file alone has hardly a second turn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attnstore_lab.cli import simulate, simulate_hosts
from attnstore_lab.sim.hosts import conversations
from attnstore_lab.sim.trace import Trace, make_trace

ROOT = Path(__file__).resolve().parent.parent
MACHINE = ROOT / "configs" / "machines" / "llama2-70b-4xa100.yaml"
ROUTERS = "round-robin,conversation,events,events-half,one-large"
OPTIONS = {
    "sharegpt": ["--sessions", "300", "--rate", "0.3", "--per-host"],
    "mooncake": [],
}
"""Mooncake's requests come at their times: N times as fast a turn would come before the answer."""


def one_in(trace: Trace, number: int) -> Trace:
    """One conversation in so many."""
    whose = conversations(trace)
    kept = [r for r, own in zip(trace.requests, whose, strict=True) if own % number == 0]
    return make_trace(trace.name, trace.chunk_tokens, kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=OPTIONS)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--hosts", default="1,2,4,8,16,32,100")
    parser.add_argument("--one-in", type=int, default=20, help="of Mooncake's conversations")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    given = parser.parse_args()

    options = argparse.ArgumentParser()
    simulate.add_arguments(options)
    simulate_hosts.add_arguments(options)
    fixed = ["--machine", str(MACHINE), "--router", ROUTERS, "--shared", "0,10TB"]
    args = options.parse_args(
        [str(given.trace), *fixed, "--hosts", given.hosts, *OPTIONS[given.name]]
    )
    trace = simulate.read(args)
    if given.name == "mooncake":
        trace = one_in(trace, given.one_in)
    outcomes = simulate_hosts.simulate(args, trace)
    simulate_hosts.show(trace, args.machine, outcomes)
    out = given.out / f"hosts_{given.name}.json"
    found = simulate_hosts.as_json(trace, args, outcomes)
    out.write_text(json.dumps(found, indent=1) + "\n")
    simulate_hosts.plot(found, out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
