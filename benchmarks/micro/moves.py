# SPDX-License-Identifier: Apache-2.0
"""Loads of moved tokens (K rotated) over plain loads of as many tokens, on the CPU.

    python -m benchmarks.micro.moves [--rounds 60] [--json] [--out results/moves.json]

A plain load copies whole pages from chunks' slots into blocks at random places: CpuEngine's. A
moved load brings as many tokens to positions that differ by a number that is no multiple of
anything, so that they begin and end within a block, and each block gets tokens of two pages; V is
copied, K is rotated. Both read K and V once and write them once, on the OpenMP threads that a model
would have.

Caches are cold, as in benchmarks.micro.copies: each load goes on where the one before it ended. The
loads take turns, in an order that changes; a ratio is of one round. 1 means that the rotation costs
nothing, more is slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.bench.summary import table
from attnstore_vllm._native import PageRotator, PageShape, RotationShape, omp_team_size
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.page_content import ContentMap, ContentSide
from attnstore_vllm.transfer.plan import Moved, StoredTokens, moved_table, plan_moves
from benchmarks.micro.copies import (
    CALM_S,
    CHUNK_TOKENS,
    MIB,
    Memory,
    Shape,
    bind_openmp,
    timed,
)
from benchmarks.report import machine

ROOT = Path(__file__).resolve().parent.parent.parent
GOAL = 1.15
BLOCK_TOKENS = 128
HEADS = {64: 4, 128: 2}
"""Heads by dims of each: a page has 128 KiB."""
KINDS = ("vec", "AMX", "plain")
SIZES = ((8, 15), (24, 31), (32, 125))
"""Layers and blocks of a request: 15, 93 and 500 MiB."""


@dataclass(frozen=True)
class Case:
    kind: str
    head_dim: int
    layers: int
    blocks: int
    is_neox: bool = True
    shift: int = -1237

    @property
    def name(self) -> str:
        pairs = "NeoX" if self.is_neox else "GPT-J"
        return f"{self.kind}, {self.head_dim} dims, {pairs}, shift {self.shift}"

    @property
    def content(self) -> ContentMap:
        """As content.probe() finds it for vLLM's CPU kernels; plain is [head, token, K then V]."""
        tokens, dim = BLOCK_TOKENS, self.head_dim
        half = tokens * dim
        if self.kind == "vec":
            key = ContentSide(0, 2 * half, tokens, 0, 1, dim, 0, tokens)
            return ContentMap(key, ContentSide(half, 2 * half, tokens, 0, dim, dim, 0, 1))
        if self.kind == "AMX":
            key = ContentSide(0, 2 * half, 16, 16 * dim, 2, 2, 32, 1)
            return ContentMap(key, ContentSide(half, 2 * half, 2, 32, 1, 16, 16 * tokens, 2))
        key = ContentSide(0, 2 * half, tokens, 0, 2 * dim, dim, 0, 1)
        return ContentMap(key, replace(key, base=dim))


class Moves:
    """Both kinds of load, over one memory."""

    def __init__(self, memory: Memory, case: Case) -> None:
        import torch  # noqa: PLC0415

        self.memory, self.case = memory, case
        shape = memory.shape
        by_layer = memory.kv.view(shape.layers, memory.num_blocks, -1)
        layouts = [describe("layer", kv, memory.num_blocks) for kv in by_layer]
        pages = CHUNK_TOKENS // BLOCK_TOKENS
        pages_shape = PageShape(
            slots_base=memory.pool.address,
            num_slots=memory.num_slots,
            slot_bytes=memory.pool.slot_bytes,
            layer_bytes=pages * shape.page_bytes,
            page_bytes=shape.page_bytes,
            layer_bases=[layout.base for layout in layouts],
            num_blocks=memory.num_blocks,
            block_stride=shape.page_bytes,
            run_offsets=[0],
            run_bytes=shape.page_bytes,
        )
        rotation = RotationShape(
            key=case.content.key.numbers(),
            value=case.content.value.numbers(),
            num_heads=HEADS[case.head_dim],
            head_dim=case.head_dim,
            block_tokens=BLOCK_TOKENS,
            dtype=str(torch.bfloat16).removeprefix("torch."),
            is_neox=case.is_neox,
            theta=[10_000.0 ** (-2 * i / case.head_dim) for i in range(case.head_dim // 2)],
        )
        self.rotator = PageRotator(pages_shape, rotation)

    def moved(self) -> Moved:
        """As many tokens as a plain load has, to slots and blocks that were not used for long."""
        memory, shift = self.memory, self.case.shift
        before = -(-max(shift, 0) // BLOCK_TOKENS)  # blocks of the request that nothing comes to
        start = before * BLOCK_TOKENS + 11
        stop = start + memory.shape.blocks * BLOCK_TOKENS
        num_blocks = -(-stop // BLOCK_TOKENS) - before
        block_ids = [0] * before + [next(memory._blocks) for _ in range(num_blocks)]
        pieces, at = [], start
        while at < stop:
            first = (at - shift) % CHUNK_TOKENS
            end = min(stop, at + CHUNK_TOKENS - first)
            pieces.append(StoredTokens(next(memory._slots), first, at - shift, at, end))
            at = end
        runs = plan_moves(pieces, block_ids, block_tokens=BLOCK_TOKENS, chunk_tokens=CHUNK_TOKENS)
        return moved_table(runs)

    def one_round(self, random: Random) -> dict[str, float]:
        """Seconds by kind of load."""
        layers = self.case.layers

        def plain() -> Callable[[], object]:
            pages = self.memory.pages()
            return lambda: self.memory.engine.load(pages, range(layers))

        def moved() -> Callable[[], object]:
            tokens = self.moved()
            return lambda: self.rotator.load(tokens, 0, layers)

        ways, found = {"plain": plain, "moved": moved}, {}
        for name in random.sample(list(ways), len(ways)):
            load = ways[name]()
            time.sleep(CALM_S)
            omp_team_size()  # its threads wake up, as behind a kernel of the model
            found[name] = timed(load)
        return found


def measure(case: Case, rounds: int, memory_bytes: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    page_bytes = 2 * BLOCK_TOKENS * HEADS[case.head_dim] * case.head_dim * 2
    shape = Shape(case.name, case.layers, BLOCK_TOKENS, page_bytes, 1, case.blocks)
    memory = Memory(shape, max(memory_bytes, 2 * shape.num_bytes))
    try:
        for side in (memory.kv, memory.slots):
            side.view(torch.bfloat16).normal_()  # random bits would be numbers that slow it down
        moves, random = Moves(memory, case), Random(1)
        moves.one_round(random)
        bar = tqdm(range(rounds), desc=case.name, unit="round", leave=False)
        times = [moves.one_round(random) for _ in bar]
        del side
    finally:
        memory.close()
    medians = {name: statistics.median(one[name] for one in times) for name in times[0]}
    ratios = sorted(one["moved"] / one["plain"] for one in times)
    return {
        "case": asdict(case),
        "name": case.name,
        "bytes": shape.num_bytes,
        "rounds": rounds,
        "median_ms": {name: round(1000 * s, 3) for name, s in medians.items()},
        "moved_over_plain": round(statistics.median(ratios), 3),
        "quartiles": [round(r, 3) for r in statistics.quantiles(ratios, n=4)[::2]],
    }


def cases(*, short: bool) -> list[Case]:
    """All sizes of what vLLM's kernels have by default; the rest at the size of a short request."""
    found = []
    for kind in KINDS:
        for dim in HEADS:
            sizes = SIZES[:1] if short or kind == "plain" else SIZES
            found += [Case(kind, dim, layers, blocks) for layers, blocks in sizes]
    for kind in KINDS:
        found.append(Case(kind, 64, *SIZES[0], is_neox=False))
        found.append(Case(kind, 64, *SIZES[0], shift=-1236))
        found.append(Case(kind, 64, *SIZES[0], shift=-1280))
    return found


def show(results: list[dict[str, Any]]) -> str:
    rows = [("", "MiB", "plain ms", "moved ms", "moved over plain", "quartiles")]
    for one in results:
        ms = one["median_ms"]
        rows.append(
            (
                one["name"], f"{one['bytes'] / MIB:.0f}", f"{ms['plain']:.2f}",
                f"{ms['moved']:.2f}", f"{one['moved_over_plain']:.3f}",
                "{} to {}".format(*one["quartiles"]),
            )
        )  # fmt: skip
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Moved loads over plain ones.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--memory-mib", type=int, default=768, help="of the KV and of the pool")
    parser.add_argument("--short", action="store_true", help="15 MiB only")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "moves.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    bind_openmp()
    import torch  # noqa: F401, PLC0415  (its OpenMP threads are the engine's)

    results = [measure(c, args.rounds, args.memory_mib * MIB) for c in cases(short=args.short)]
    highest = max(one["moved_over_plain"] for one in results)
    report = {
        "machine": machine(),
        "threads": omp_team_size(),
        "memory_mib": args.memory_mib,
        "goal": GOAL,
        "highest": highest,
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    print(
        f"\nMoved loads over plain loads of as many tokens, cold caches, {omp_team_size()} "
        f"threads, median of {args.rounds} rounds"
    )
    print(show(results))
    print(f"moved over plain: highest {highest}, goal at most {GOAL}")


if __name__ == "__main__":
    main()
