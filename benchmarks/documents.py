# SPDX-License-Identifier: Apache-2.0
"""Time to first token of prompts that bring documents in any order (retrieval-augmented
generation), with `truncation: {documents: true}` and with vLLM's own prefix cache alone.

    python -m benchmarks.documents [--rounds N] [--documents 24] [--chosen 6] [--layers 8]

Real servers and their completions API, one client. Documents have 512 tokens and have been asked
for once, each behind another text. Each prompt has some of them, drawn by Zipf's law, in a random
order, with 24 new tokens before each and a question behind. The same prompts go to

    vLLM            its own prefix cache, without the store
    first 15 %      the first 15 % of each document are computed anew
    none            no token of a document is

one server after the other, on the same processors. How many tokens were moved is read from
/metrics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.bench.summary import table
from attnstore_lab.testing.tiny_model import ModelShape, make_model
from attnstore_vllm.prometheus import total
from benchmarks.hit_latency import Client
from benchmarks.report import machine
from benchmarks.server import VllmServer

ROOT = Path(__file__).resolve().parent.parent
LENGTH, GAP, QUESTION = 512, 24, 40
SYSTEMS = {"vLLM": None, "first 15 %": 0.15, "none": "off"}
"""What `truncation.recompute` is; None: there is no store."""
GOALS = {"first 15 %": 0.33, "none": 0.15}
MOVED = "vllm:attnstore_moved_tokens_total"
ASKS = {"kv_transfer_params": {"attnstore": {"truncation": True}}}


def shape_of(layers: int) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=1024, intermediate=2816, heads=16, kv_heads=4, head_dim=64,
        vocab=2048, max_position=8192,
    )  # fmt: skip


class Texts:
    """Documents, and prompts that have some of them. The same for each system."""

    def __init__(self, documents: int, chosen: int) -> None:
        self._random = Random(7)
        self._documents = [self._words(LENGTH) for _ in range(documents)]
        self._weights = [1 / (rank + 1) for rank in range(documents)]
        self._chosen = chosen

    def _words(self, count: int) -> list[int]:
        return [self._random.randrange(300, 2000) for _ in range(count)]

    def ahead(self) -> list[list[int]]:
        """Prompts that leave each document behind."""
        return [
            [*self._words(self._random.randrange(20, 200)), *document, *self._words(130)]
            for document in self._documents
        ]

    def prompt(self) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < self._chosen:
            (one,) = self._random.choices(range(len(self._documents)), self._weights)
            if one not in chosen:
                chosen.append(one)
        parts = [[*self._words(GAP), *self._documents[one]] for one in chosen]
        return [token for part in parts for token in part] + self._words(QUESTION)


def measure(name: str, model: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    texts, recompute = Texts(args.documents, args.chosen), SYSTEMS[name]
    ahead, prompts = texts.ahead(), [texts.prompt() for _ in range(args.rounds)]
    arguments = ["--max-model-len", "8192", "--max-num-batched-tokens", "8192"]
    arguments += ["--num-gpu-blocks-override", "256"]
    if recompute is not None:
        config = work / f"{name}.yaml"
        moved = f"{{share: everyone, documents: true, recompute: {recompute}}}"
        nvme = f"{{path: {work / name}, capacity: 1GiB}}"
        config.write_text(f"dram: 1GiB\nnvme: {nvme}\ntruncation: {moved}\n")
        arguments += ["--kv-transfer-config", str(config)]
    fields: dict[str, Any] = {} if recompute is None else ASKS
    with VllmServer(str(model), arguments, work / f"{name}.log") as server:
        client = Client(server)
        for prompt in tqdm(ahead, desc=f"{name}, ahead", unit="document"):
            client.ttft_ms(prompt, **fields)
        before = server.metrics()
        times = [
            client.ttft_ms(prompt, **fields) for prompt in tqdm(prompts, desc=name, unit="prompt")
        ]
        moved_tokens = total(server.metrics(), MOVED) - total(before, MOVED)
    return {
        "name": name, "ttft_ms": round(statistics.median(times), 1),
        "moved_share": round(moved_tokens / sum(map(len, prompts)), 3),
        "all_ms": [round(ms, 1) for ms in times],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT of documents in any order.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--chosen", type=int, default=6, help="documents in a prompt")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "documents.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = make_model(work / "model", shape_of(args.layers))
        results = [measure(name, model, work, args) for name in SYSTEMS]
    plain = results[0]["all_ms"]
    for result in results:
        ratios = [ms / alone for ms, alone in zip(result["all_ms"], plain, strict=True)]
        result["over_vllm"] = round(statistics.median(ratios), 3)
    settings = {name: getattr(args, name) for name in ("rounds", "documents", "chosen", "layers")}
    report = {"machine": machine(), **settings, "goals": GOALS, "results": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    rows = [("", "median TTFT, ms", "over vLLM", "goal", "moved of the prompts")]
    for one in results:
        goal = str(GOALS.get(one["name"], "-"))
        moved = f"{100 * one['moved_share']:.0f} %"
        rows.append((one["name"], f"{one['ttft_ms']:.0f}", f"{one['over_vllm']:.3f}", goal, moved))
    print(f"\n{args.chosen} of {args.documents} documents a prompt, {args.layers} layers")
    print(table(rows))


if __name__ == "__main__":
    main()
