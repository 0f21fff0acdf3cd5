# SPDX-License-Identifier: Apache-2.0
"""What it takes to find what is left of a truncated prompt among a million anchors.

    python -m benchmarks.micro.extents [--anchors 1000000] [--tokens 32768] [--rounds 50] [--gaps]
        [--json]

Each row has a store of its own, of chunks of 256 tokens (four anchors each), all of one tenant:

    oldest turns dropped     conversations as long as the prompt behind one system prompt; of a
                             prompt the system prompt is kept and then tokens are missing
    thinking removed         the same, and 40 pieces are cut out of one of them
    nothing stored           the same, and a prompt that nobody has asked before

    documents                the same, and a prompt of parts of them, 512 tokens each, with gaps

The others are made up by somebody who wants a search to be slow:

    one repeated token       store and prompt have no other
    chunks but a token       all chunks agree with one of the prompt in all but the last token
    prompts but a token      all conversations agree with the prompt, at many shifts, in all but
                             its last token
    thousands of children    eight such conversations; each chunk has hundreds of siblings that
                             agree with it in all but the last token
    one window               prompt and chunks have the same 32 tokens wherever an anchor is
    one period               store and prompt repeat the same 97 tokens, at all shifts
    short extents            64 extents of 96 tokens, each stored many times

With `--gaps` all that is stored of a prompt is searched for, as for documents, and not one cover
without a gap. A search is timed as the store does it, in Python, from encoded tokens to extents.
Between two of them 64 MiB are read and written, so that caches are as cold as in a server. Where
others use the machine, the worst may be one that they interrupted; `on CPU` is the most processor
time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from tqdm import tqdm

from attnstore_lab.bench.summary import table
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.index.token_search import ContentIndex
from attnstore_vllm.types import Key
from benchmarks.report import machine

ROOT = Path(__file__).resolve().parent.parent.parent
CHUNK = 256
CHUNK_ANCHORS = 4
VOCABULARY = 128_000
MIN_EXTENT = 64
DOMAIN = bytes(32)
GOAL_MS = 5.0
Tokens = npt.NDArray[np.uint32]
SYSTEM = np.random.default_rng(0).integers(0, VOCABULARY, CHUNK, np.uint32)


@dataclass(slots=True)
class Case:
    """A store that is being filled, and the prompts that it is asked."""

    num_chunks: int
    num_tokens: int
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    index: ContentIndex = field(init=False)
    min_extent: int = MIN_EXTENT
    entered: int = 0
    add_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.index = ContentIndex(CHUNK, self.num_chunks, seed=5)

    @property
    def is_full(self) -> bool:
        return self.entered >= self.num_chunks

    def add(self, tokens: Tokens, parent: Key | None = None) -> Key:
        key = Key(blake3(b"key %d" % self.entered).digest())
        above = parent or Key(blake3(b"parent %d" % self.entered).digest())
        encoded = tokens.astype(">u4").tobytes()
        name = ChunkName(key, above, b"", bytes(32), 0, len(tokens), encoded)
        began = time.perf_counter()
        self.index.add(name, DOMAIN)
        self.add_seconds += time.perf_counter() - began
        self.entered += 1
        return key

    def add_chain(self, tokens: Tokens) -> None:
        """A sequence, as far as there is room."""
        parent: Key | None = None
        for at in range(0, len(tokens), CHUNK):
            if self.is_full:
                return
            parent = self.add(tokens[at : at + CHUNK], parent)

    def draw(self, count: int, seed: int | None = None) -> Tokens:
        random = self.random if seed is None else np.random.default_rng(seed)
        return random.integers(1, VOCABULARY, count, np.uint32)


Prompts = Iterator[tuple[Tokens, int]]
"""Prompts, without end, and where in them the search begins."""


def _conversations(case: Case) -> int:
    """Fill the store; returns how many there are whole."""
    number = 0
    while not case.is_full:
        case.add_chain(_conversation(case, number))
        number += 1
    return max(number - 1, 1)


def _conversation(case: Case, number: int) -> Tokens:
    return np.concatenate([SYSTEM, case.draw(case.num_tokens, 100 + number)])


def dropped(case: Case) -> Prompts:
    count = _conversations(case)
    while True:
        stored = _conversation(case, int(case.random.integers(count)))
        cut = int(case.random.integers(CHUNK, len(stored) // 4))
        yield np.concatenate([SYSTEM, stored[CHUNK + cut :], case.draw(cut)]), CHUNK


def thinking(case: Case) -> Prompts:
    count, cuts = _conversations(case), 40
    while True:
        stored = _conversation(case, int(case.random.integers(count)))[CHUNK:]
        parts = np.array_split(stored, cuts)
        left = [part[int(case.random.integers(50, 300)) :] for part in parts]
        yield np.concatenate([SYSTEM, *left, case.draw(2000)]), CHUNK


def unknown(case: Case) -> Prompts:
    _conversations(case)
    while True:
        yield case.draw(case.num_tokens), 0


def documents(case: Case) -> Prompts:
    count = _conversations(case)
    while True:
        parts = [SYSTEM]
        for _ in range(case.num_tokens // (512 + 24)):
            stored = _conversation(case, int(case.random.integers(count)))
            at = int(case.random.integers(CHUNK, case.num_tokens - 512))
            parts += [case.draw(24), stored[at : at + 512]]
        yield np.concatenate(parts), CHUNK


def repeated(case: Case) -> Prompts:
    prompt = np.full(case.num_tokens, 7, np.uint32)
    while not case.is_full:
        case.add_chain(prompt)
    while True:
        yield prompt, 0


def but_a_token(case: Case) -> Prompts:
    prompt = case.draw(case.num_tokens)
    while not case.is_full:
        for at in range(0, case.num_tokens, CHUNK):
            if not case.is_full:
                chunk = prompt[at : at + CHUNK].copy()
                chunk[-1] = 0
                case.add(chunk)
    while True:
        yield prompt, 0


def long_walks(case: Case) -> Prompts:
    prompt = case.draw(case.num_tokens)
    number = 0
    while not case.is_full:
        number += 1
        before = case.draw(number * 11 % 96)
        case.add_chain(np.concatenate([before, prompt[:-1], case.draw(1)]))
    while True:
        yield prompt, 0


def children(case: Case) -> Prompts:
    prompt, ways = case.draw(case.num_tokens), 8
    steps = case.num_tokens // CHUNK
    siblings = max(case.num_chunks // (ways * steps), 1)
    for way in range(ways):
        stored = np.concatenate([case.draw(11 * way), prompt[:-1], case.draw(1)])
        parent: Key | None = None
        for at in range(0, steps * CHUNK, CHUNK):
            chunk = stored[at : at + CHUNK]
            for number in range(siblings - 1):
                other = chunk.copy()
                other[-1] = VOCABULARY + number
                case.add(other, parent)
            parent = case.add(chunk, parent)  # the newest, so that it is the one that is followed
    while True:
        yield prompt, 0


def one_window(case: Case) -> Prompts:
    window = case.draw(32)

    def spread(num_tokens: int) -> Tokens:
        tokens = case.draw(num_tokens)
        for at in range(0, num_tokens, 64):
            tokens[at : at + 32] = window
        return tokens

    prompt = spread(case.num_tokens)
    case.add_chain(prompt)
    while not case.is_full:
        case.add(spread(CHUNK))
    while True:
        yield prompt, 0


def one_period(case: Case) -> Prompts:
    pattern = case.draw(97)
    prompt = np.resize(pattern, case.num_tokens)
    shift = 0
    while not case.is_full:
        case.add_chain(np.resize(np.roll(pattern, shift), case.num_tokens))
        shift += 1
    while True:
        yield prompt, 0


def short(case: Case) -> Prompts:
    parts = [case.draw(96) for _ in range(64)]
    while not case.is_full:
        for part in parts:
            if not case.is_full:
                where = int(case.random.integers(CHUNK - 96))
                case.add(np.concatenate([case.draw(where), part, case.draw(CHUNK - 96 - where)]))
    prompt = np.concatenate([*parts, case.draw(case.num_tokens - 64 * 96)])
    while True:
        yield prompt, 0


CASES: dict[str, Callable[[Case], Prompts]] = {
    "oldest turns dropped": dropped,
    "thinking removed": thinking,
    "nothing stored": unknown,
    "documents": documents,
    "one repeated token": repeated,
    "chunks but a token": but_a_token,
    "prompts but a token": long_walks,
    "thousands of children": children,
    "one window": one_window,
    "one period": one_period,
    "short extents": short,
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(
    name: str, num_chunks: int, num_tokens: int, rounds: int, *, gaps: bool
) -> dict[str, Any]:
    gc.collect()
    before = resident_bytes()
    case = Case(num_chunks, num_tokens)
    prompts = CASES[name](case)
    next(prompts)
    gc.collect()
    taken = resident_bytes() - before
    search = case.index.find_all if gaps else case.index.find
    caches = np.zeros(64 << 20, np.uint8)
    times, on_cpu, covered, extents, works = [], [], [], [], []
    for _ in range(rounds):
        prompt, start = next(prompts)
        encoded = prompt.astype(">u4").tobytes()
        caches += 1
        began, began_cpu = time.perf_counter(), time.thread_time()
        found = search(DOMAIN, encoded, start, len(prompt), case.min_extent)
        times.append(1000 * (time.perf_counter() - began))
        on_cpu.append(1000 * (time.thread_time() - began_cpu))
        covered.append(sum(extent.stop - extent.start for extent in found))
        extents.append(len(found))
        works.append(case.index.work())
    most = {
        name: max(column)
        for name, column in zip(works[0]._fields, zip(*works, strict=True), strict=True)
    }
    return {
        "name": name, "chunks": len(case.index), "rounds": rounds,
        "median_ms": round(statistics.median(times), 3), "worst_ms": round(max(times), 3),
        "worst_cpu_ms": round(max(on_cpu), 3),
        "prompt_tokens": num_tokens, "covered_tokens": int(statistics.median(covered)),
        "extents": int(statistics.median(extents)), "most_work": most,
        "add_us": round(1e6 * case.add_seconds / case.entered, 2),
        "bytes_per_chunk": round(case.index.memory_bytes() / len(case.index)),
        "resident_bytes_per_chunk": round(taken / len(case.index)),
    }  # fmt: skip


def encode_ms(num_tokens: int) -> float:
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, num_tokens).tolist()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        encode_tokens(tokens)
        times.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(times), 3)


def show(results: list[dict[str, Any]]) -> str:
    rows = [
        (
            "",
            "median ms",
            "worst ms",
            "on CPU",
            "covered",
            "extents",
            "candidates",
            "walks",
            "looks",
            "tokens compared",
            "us to add",
        )
    ]
    for one in results:
        work = one["most_work"]
        rows.append(
            (
                one["name"], f"{one['median_ms']:.3f}", f"{one['worst_ms']:.3f}",
                f"{one['worst_cpu_ms']:.3f}", f"{one['covered_tokens']:,}", str(one["extents"]),
                f"{work['candidates']:,}",
                f"{work['walks']:,}", f"{work['looks']:,}", f"{work['compared_tokens']:,}",
                f"{one['add_us']:.1f}",
            )
        )  # fmt: skip
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Finding moved tokens; see the module.")
    parser.add_argument("--anchors", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--only", choices=CASES, help="one row")
    parser.add_argument("--gaps", action="store_true", help="search for all, as for documents")
    parser.add_argument("--out", type=Path, help="default: results/extents[_gaps].json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    num_chunks = max(args.anchors // CHUNK_ANCHORS, 1)
    names = [args.only] if args.only else list(CASES)
    results = [
        measure(name, num_chunks, args.tokens, args.rounds, gaps=args.gaps)
        for name in tqdm(names, unit="store")
    ]
    report = {
        "machine": machine(), "anchors": num_chunks * CHUNK_ANCHORS, "goal_ms": GOAL_MS,
        "worst_ms": max(one["worst_ms"] for one in results),
        "worst_cpu_ms": max(one["worst_cpu_ms"] for one in results),
        "encode_ms": encode_ms(args.tokens), "results": results,
    }  # fmt: skip
    out = args.out or ROOT / "results" / ("extents_gaps.json" if args.gaps else "extents.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    print(
        f"\nA prompt of {args.tokens:,} tokens among {report['anchors']:,} anchors, "
        f"{args.rounds} searches a row, caches cold"
    )
    print(show(results))
    print(
        f"worst {report['worst_ms']} ms, {report['worst_cpu_ms']} on the CPU, goal {GOAL_MS}; "
        f"encoding the prompt's tokens takes {report['encode_ms']} ms more; "
        f"{results[0]['bytes_per_chunk']} bytes a chunk, "
        f"{results[0]['resident_bytes_per_chunk']} resident"
    )


if __name__ == "__main__":
    main()
