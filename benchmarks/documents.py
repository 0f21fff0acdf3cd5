# SPDX-License-Identifier: Apache-2.0
"""Prompts that bring documents in any order (retrieval-augmented generation): time to first token
with `truncation: {documents: true}` and with vLLM's own prefix cache alone.

    python -m benchmarks.documents [--rounds N] [--documents 24] [--chosen 6] [--layers 8]
    python -m benchmarks.documents --corpus DIR    # documents are parts of DIR's texts
    python -m benchmarks.documents --beside 8      # what requests that decode meanwhile feel

Real servers and their completions API, one client. Documents have 512 tokens and have been asked
for once, each behind another text. Each prompt has some of them, drawn by Zipf's law, in a random
order, with 24 new tokens before each and a question behind. The same prompts go to

    vLLM             its own prefix cache, without the store
    none             no token of a document is computed anew
    first 15 %       the first 15 % of each document are
    deviation 15 %   as many tokens of all documents are, those whose K differs most

one server after the other, on the same processors. With the store each prompt is asked for in
turns: whole, under a salt of its own, and with its documents. How many tokens were moved is read
from /metrics.

With --beside some requests decode all the time. Prompts with documents and plain new prompts of as
many computed tokens come in turns, and the gaps between the others' tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.bench.summary import table
from attnstore_lab.testing.tiny_model import ModelShape, make_model
from attnstore_vllm.prometheus import total
from attnstore_vllm.scheduler.documents import COMPARED_LAYERS
from benchmarks.hit_latency import Client
from benchmarks.report import machine
from benchmarks.server import NO_AUDIT, VllmServer

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "logs"
LENGTH, GAP, QUESTION = 512, 24, 40
SYSTEMS = {
    "vLLM": None,
    "none": ("off", "first"),
    "first 15 %": (0.15, "first"),
    "deviation 15 %": (0.15, "deviation"),
}
"""`truncation.recompute` and `recompute_by`; None: there is no store."""
GOALS = {
    8: {"none": 0.15, "first 15 %": 0.33, "deviation 15 %": 0.55},
    24: {"first 15 %": 0.30, "deviation 15 %": 0.35},
}
"""Time to first token over vLLM's, by layers."""
BESIDE_GOAL = 1.1
STORED_DEADLINE_S = 60.0
MOVED = "vllm:attnstore_moved_tokens_total"
CHUNKS = "vllm:attnstore_chunks_total"
ASKS: dict[str, Any] = {"kv_transfer_params": {"attnstore": {"truncation": True}}}
LEAVES_NOTHING: dict[str, Any] = {"kv_transfer_params": {"attnstore": {"store": False}}}
FIRST_WORD, END_WORD = 300, 2000


def shape_of(layers: int) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=1024, intermediate=2816, heads=16, kv_heads=4, head_dim=64,
        vocab=2048, max_position=8192,
    )  # fmt: skip


class Texts:
    """Documents, and prompts that have some of them. The same for each system.

    Args:
        corpus: texts whose words are taken in their order; none: words are drawn.
    """

    def __init__(self, documents: int, chosen: int, corpus: Path | None) -> None:
        self._random = Random(7)
        words = _words_of(corpus) if corpus is not None else None
        self._documents = [
            self._words(LENGTH) if words is None else [next(words) for _ in range(LENGTH)]
            for _ in range(documents)
        ]
        self._weights = [1 / (rank + 1) for rank in range(documents)]
        self._chosen = chosen

    def _words(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_WORD, END_WORD) for _ in range(count)]

    def ahead(self) -> list[list[int]]:
        """Prompts that leave each document behind."""
        return [
            [*self._words(self._random.randrange(20, 200)), *document, *self._words(130)]
            for document in self._documents
        ]

    def new(self, num_tokens: int) -> list[int]:
        return self._words(num_tokens)

    def prompt(self) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < self._chosen:
            (one,) = self._random.choices(range(len(self._documents)), self._weights)
            if one not in chosen:
                chosen.append(one)
        parts = [[*self._words(GAP), *self._documents[one]] for one in chosen]
        return [token for part in parts for token in part] + self._words(QUESTION)


def _words_of(corpus: Path) -> Iterator[int]:
    """A token for each word of the texts, one text after the other, again and again."""
    for path in cycle(sorted(corpus.glob("*.txt"))):
        for word in re.findall(r"\w+|[^\w\s]", path.read_text(encoding="utf-8", errors="replace")):
            yield FIRST_WORD + zlib.crc32(word.encode()) % (END_WORD - FIRST_WORD)


def store_ahead(server: VllmServer, client: Client, texts: Texts, name: str) -> None:
    """Ask for each document once. Raises TimeoutError if they are not stored then."""
    deadline = time.monotonic() + STORED_DEADLINE_S

    def saved() -> float:
        return total(server.metrics(), CHUNKS, event="saved")

    while not saved():  # the store does not know yet whose KV it would be
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing is stored after {STORED_DEADLINE_S:.0f} s: see the log")
        client.ttft_ms(texts.new(300))
        time.sleep(0.5)
    before, ahead = saved(), texts.ahead()
    for prompt in tqdm(ahead, desc=f"{name}, ahead", unit="document"):
        client.ttft_ms(prompt, **ASKS)
    while saved() - before < 2 * len(ahead):
        if time.monotonic() > deadline + STORED_DEADLINE_S:
            raise TimeoutError(
                f"{saved() - before:.0f} chunks of {len(ahead)} documents are stored"
            )
        time.sleep(0.5)


def started(name: str, model: Path, work: Path, args: argparse.Namespace) -> VllmServer:
    recompute = SYSTEMS[name]
    arguments = ["--max-model-len", "8192", "--max-num-batched-tokens", "8192"]
    arguments += ["--num-gpu-blocks-override", "512"]
    if recompute is not None:
        config = work / f"{name}.yaml"
        share, by = recompute
        moved = f"share: everyone, documents: true, recompute: {share}, recompute_by: {by}"
        nvme = f"{{path: {work / name}, capacity: 1GiB}}"
        config.write_text(f"dram: 1GiB\nnvme: {nvme}\ntruncation: {{{moved}}}\n{NO_AUDIT}")
        arguments += ["--kv-transfer-config", str(config)]
    return VllmServer(str(model), arguments, LOGS / f"documents_{name}.log".replace(" ", "_"))


def measure(name: str, model: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    texts = Texts(args.documents, args.chosen, args.corpus)
    with started(name, model, work, args) as server:
        client = Client(server)
        is_ours = SYSTEMS[name] is not None
        if is_ours:
            store_ahead(server, client, texts, name)
        else:
            for prompt in texts.ahead():
                client.ttft_ms(prompt)
        before = server.metrics()
        times: list[float] = []
        whole: list[float] = []
        tokens = 0
        for number in tqdm(range(args.rounds), desc=name, unit="prompt"):
            prompt = texts.prompt()
            tokens += len(prompt)
            if is_ours:
                whole.append(client.ttft_ms(prompt, cache_salt=f"whole {number}", **LEAVES_NOTHING))
            times.append(client.ttft_ms(prompt, **(ASKS if is_ours else {})))
        moved_tokens = total(server.metrics(), MOVED) - total(before, MOVED)
        beside = feel(server, client, texts, args, name) if is_ours and args.beside else None
    ratios = [ms / full for ms, full in zip(times, whole, strict=False)]
    return {
        "name": name, "ttft_ms": round(statistics.median(times), 1),
        "whole_ms": round(statistics.median(whole), 1) if whole else None,
        "over_whole": round(statistics.median(ratios), 3) if ratios else None,
        "moved_share": round(moved_tokens / tokens, 3),
        "all_ms": [round(ms, 1) for ms in times], "beside": beside,
    }  # fmt: skip


class Decoding:
    """Requests that decode without an end, each on a connection of its own."""

    def __init__(self, server: VllmServer, texts: Texts, number: int) -> None:
        self._ended = threading.Event()
        self.gaps: list[float] = []
        """Seconds between tokens since it was last emptied."""
        self._threads = [
            threading.Thread(target=self._run, args=(server, texts.new(64)), daemon=True)
            for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server: VllmServer, prompt: list[int]) -> None:
        client = Client(server)
        while not self._ended.is_set():
            for gap in client.gaps(prompt, max_tokens=400, ended=self._ended):
                self.gaps.append(gap)

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def computed_tokens(said: dict[str, int], length: int, *, layers: int, name: str) -> int:
    """Tokens of a plain prompt that take as long as what this one computes: the question, our
    passes, and two layers of all tokens where some are chosen by them.

    Args:
        said: the report of the prompt.
    """
    recompute = SYSTEMS[name]
    compares = recompute is not None and recompute[1] == "deviation" and said["own_pass_tokens"]
    compared = length * COMPARED_LAYERS // layers if compares else 0
    return max(said["computed_tokens"], QUESTION + said["own_pass_tokens"] + compared)


def feel(
    server: VllmServer, client: Client, texts: Texts, args: argparse.Namespace, name: str
) -> dict[str, float]:
    """The p99 gap between tokens of requests that decode beside prompts with documents, and beside
    plain prompts of as many computed tokens."""
    report = {"kv_transfer_params": {"attnstore": {"truncation": True, "report": True}}}
    decoding = Decoding(server, texts, args.beside)
    found: dict[str, list[float]] = {"documents": [], "plain": []}
    try:
        time.sleep(3.0)
        for number in tqdm(range(args.rounds), desc="beside", unit="prompt"):
            prompt = texts.prompt()
            decoding.gaps.clear()
            answer = client.ask(prompt, **report)
            found["documents"] += decoding.gaps
            said = answer["kv_transfer_params"]["attnstore"]
            computed = computed_tokens(said, len(prompt), layers=args.layers, name=name)
            decoding.gaps.clear()
            client.ask(texts.new(computed), cache_salt=f"plain {number}", **LEAVES_NOTHING)
            found["plain"] += decoding.gaps
    finally:
        decoding.close()
    p99 = {kind: statistics.quantiles(gaps, n=100)[-1] for kind, gaps in found.items()}
    return {
        "documents_p99_ms": round(1000 * p99["documents"], 1),
        "plain_p99_ms": round(1000 * p99["plain"], 1),
        "over_plain": round(p99["documents"] / p99["plain"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT of documents in any order.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--chosen", type=int, default=6, help="documents in a prompt")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--corpus", type=Path, help="a directory of texts, which documents are of")
    parser.add_argument("--beside", type=int, default=0, help="requests that decode meanwhile")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "documents.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = make_model(work / "model", shape_of(args.layers))
        results = []
        for name in args.systems:
            results.append(measure(name, model, work, args))
            shutil.rmtree(work / name, ignore_errors=True)
    plain = next((one["all_ms"] for one in results if SYSTEMS[one["name"]] is None), None)
    for one in results:
        ratios = [ms / alone for ms, alone in zip(one["all_ms"], plain or (), strict=False)]
        one["over_vllm"] = round(statistics.median(ratios), 3) if ratios else None
    names = ("rounds", "documents", "chosen", "layers", "beside")
    settings = {name: getattr(args, name) for name in names} | {"corpus": bool(args.corpus)}
    goals = GOALS.get(args.layers, {})
    report = {"machine": machine(), **settings, "goals": goals, "results": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    rows = [("", "TTFT, ms", "whole, ms", "over it", "goal", "over vLLM alone", "moved")]
    for one in results:
        cells = (one["ttft_ms"], one["whole_ms"], one["over_whole"], goals.get(one["name"]))
        shown = ["-" if cell is None else str(cell) for cell in (*cells, one["over_vllm"])]
        rows.append((one["name"], *shown, f"{100 * one['moved_share']:.0f} %"))
    print(f"\n{args.chosen} of {args.documents} documents a prompt, {args.layers} layers; medians")
    print(table(rows))
    for one in results:
        if (felt := one["beside"]) is not None:
            print(
                f"{one['name']}: {args.beside} others' tokens come {felt['documents_p99_ms']} ms "
                f"apart (p99), beside plain prompts {felt['plain_p99_ms']}: {felt['over_plain']} "
                f"(goal {BESIDE_GOAL})"
            )


if __name__ == "__main__":
    main()
