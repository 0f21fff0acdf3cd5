# SPDX-License-Identifier: Apache-2.0
"""What moving KV costs those who wait for it: the store's overlap of copies and computation.

    python -m benchmarks.overlap [--only NAME] [--quick] [--json] [--out results/overlap.json]

    hits         TTFT of hits in DRAM over hits in HBM
    exposed      what of a load is seen, layer by layer over all layers at once
    read_buffer  a long load while another request generates, with the read buffer over without
    throughput   everything is saved and nothing reused, over no connector
    block_reuse  from the end of requests to the reuse of their blocks, over no connector

benchmarks/overlap_parts has how each is measured. Whatever is compared binds the same processors.
What --only leaves out stays in the file as it was; each part says of which machine and commit it
is, and when it was measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnstore_lab.bench.environment import machine
from attnstore_lab.bench.summary import table
from benchmarks.overlap_parts import block_reuse, hits, loads, picture, throughput
from benchmarks.overlap_parts.common import Line, Settings, say
from benchmarks.quick import RESULTS, destination


@dataclass(frozen=True)
class Part:
    measure: Callable[[Settings], dict[str, Any]]
    lines: Callable[[dict[str, Any]], list[Line]]


PARTS = {
    "hits": Part(hits.measure, hits.lines),
    "exposed": Part(loads.measure_exposed, loads.exposed_lines),
    "read_buffer": Part(loads.measure_buffer, loads.buffer_lines),
    "throughput": Part(throughput.measure, throughput.lines),
    "block_reuse": Part(block_reuse.measure, block_reuse.lines),
}


def run(name: str, *, quick: bool) -> dict[str, Any]:
    """One part, with what its figures depend on."""
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as work:
        result = PARTS[name].measure(Settings(Path(work), quick))
    return {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "took_s": round(time.time() - began),
        "quick": quick,
        "machine": machine(),
        "result": result,
    }


def show(parts: dict[str, dict[str, Any]]) -> str:
    rows = [("", "measured", "goal", "")]
    for name, part in parts.items():
        for line in PARTS[name].lines(part["result"]):
            rows.append((line.what, f"{line.value:.3f}", line.goal, line.detail))
    text = [table(rows)]
    if "hits" in parts:
        text.append(hits.text(parts["hits"]["result"]))
    if any(part["quick"] for part in parts.values()):
        text.append("--quick: these figures only show that it works")
    return "\n\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(PARTS), action="append", help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    parser.add_argument("--out", type=Path, help="(results/overlap.json; of --quick, .cache/quick)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    args.out = destination(RESULTS / "overlap.json", args.out, is_quick=args.quick)
    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    done = {}
    for name in args.only or list(PARTS):
        done[name] = report[name] = run(name, quick=args.quick)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        say(f"{name}: {done[name]['took_s']} s")
    if "hits" in done:
        picture.draw(done["hits"]["result"], hits.GOAL, args.out.with_suffix(".svg"))
    print(json.dumps(done) if args.json else f"\n{show(done)}")


if __name__ == "__main__":
    main()
