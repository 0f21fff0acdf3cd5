# SPDX-License-Identifier: Apache-2.0
"""What a restart costs: the same conversations before it and after it.

    python -m benchmarks.restart [--dataset FILE] [--conversations N] [--json]

A server with the store replays the conversations once, so that all of their KV is stored; then
once more, which is `before`; it is ended by SIGTERM, started again on the same directory, and
replays them a third time, which is `after`. Hit tokens are the tokens of prompts that were not
computed, from HBM or from the store. After the restart HBM and DRAM are empty.

Later turns of a replay hit what its earlier ones have left, so the first replay, on an empty
store, is the floor: `kept` is what the restart left of what is above it. `written` is what the
first two replays wrote to NVMe, over the bytes of KV that they brought for the first time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnstore_lab.bench.client import RequestSettings
from attnstore_lab.bench.closed_loop import take_turns
from attnstore_lab.bench.conversations import Conversation, read_conversations
from attnstore_lab.bench.records import failures
from attnstore_lab.bench.tokens import fitting
from attnstore_lab.bench.traffic import Traffic, traffic
from attnstore_lab.testing.tiny_model import SMALL, make_model
from attnstore_vllm.prometheus import Metrics, total
from benchmarks.sample import SAMPLE
from benchmarks.server import NO_AUDIT, VllmServer

ROOT = Path(__file__).resolve().parent.parent
CONTEXT_TOKENS = 4096
HBM_BLOCKS = 40
FLAGS = (
    "--max-model-len",
    str(CONTEXT_TOKENS),
    "--block-size",
    "128",
    "--num-gpu-blocks-override",
    str(HBM_BLOCKS),
    "--enable-prompt-tokens-details",
)
MAX_TOKENS = 32
NUDGE = Conversation("nudge", ("hi",))


def hits(moved: Traffic) -> dict[str, int]:
    """Prompt tokens that were not computed, by where they were."""
    return {source: n for source, n in moved.prompt_tokens.items() if source != "computed"}


def num_hits(moved: Traffic) -> int:
    return sum(hits(moved).values())


def write_amplification(server: VllmServer) -> float:
    """Bytes written to NVMe over bytes of KV that was not there before."""
    metrics = server.metrics()
    written = total(metrics, "vllm:attnstore_bytes_total", direction="dram_to_nvme")
    return written / total(metrics, "vllm:attnstore_first_written_bytes_total")


def play(
    server: VllmServer, conversations: list[Conversation], settings: RequestSettings, title: str
) -> Traffic:
    """Replay all; returns what was moved for it. Raises: RuntimeError if a request fails."""
    before = settled_metrics(server, settings)
    records = asyncio.run(take_turns(server.base_url, conversations, settings, title=title))
    if failed := failures(records):
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0].error}")
    return traffic(before, settled_metrics(server, settings))


def settled_metrics(server: VllmServer, settings: RequestSettings) -> Metrics:
    """/metrics once what was moved has been counted: counters come a step later."""
    for _ in range(2):
        asyncio.run(
            take_turns(server.base_url, [NUDGE], replace(settings, max_tokens=1), progress=False)
        )
        time.sleep(0.5)
    return server.metrics()


def choose(server: VllmServer, args: argparse.Namespace, model: str) -> list[Conversation]:
    settings = RequestSettings(model=model, max_tokens=MAX_TOKENS, ignore_eos=True)
    found = asyncio.run(fitting(server.base_url, read_conversations(args.dataset), settings))
    return found[: args.conversations]


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    model = str(make_model(work / "model", SMALL))
    settings = RequestSettings(model=model, max_tokens=MAX_TOKENS, ignore_eos=True)
    yaml = work / "attnstore.yaml"
    (work / "store").mkdir()
    nvme = f"{{path: {work / 'store'}, capacity: 2GiB}}"
    yaml.write_text(f"dram: {args.dram}\nnvme: {nvme}\n{NO_AUDIT}")
    flags = [*FLAGS, "--kv-transfer-config", str(yaml)]
    with VllmServer(model, flags, work / "first.log") as server:
        conversations = choose(server, args, model)
        empty = play(server, conversations, settings, "stored")
        before = play(server, conversations, settings, "before")
        written = write_amplification(server)
        started = time.perf_counter()
        server.stop()
        stop_s = time.perf_counter() - started
    with VllmServer(model, flags, work / "second.log") as server:
        after = play(server, conversations, settings, "after")
    return {
        "conversations": len(conversations),
        "empty": hits(empty),
        "before": hits(before),
        "after": hits(after),
        "ratio": round(num_hits(after) / num_hits(before), 4),
        "kept": round(
            (num_hits(after) - num_hits(empty)) / (num_hits(before) - num_hits(empty)), 4
        ),
        "written": round(written, 3),
        "stop_seconds": round(stop_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Hits after a restart; see the module.")
    parser.add_argument("--dataset", type=Path, default=SAMPLE, help="a file in ShareGPT format")
    parser.add_argument("--conversations", type=int, default=12, help="at most so many")
    parser.add_argument("--dram", default="128MiB", help="DRAM of the store")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "restart.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as work:
        report = measure(args, Path(work))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    for when in ("empty", "before", "after"):
        print(f"{when:>7}: {report[when]}")
    print(f"hit tokens after over before: {report['ratio']}; above the floor: {report['kept']}")
    print(f"bytes written over bytes first stored: {report['written']}")


if __name__ == "__main__":
    main()
