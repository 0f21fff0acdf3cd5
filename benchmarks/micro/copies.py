# SPDX-License-Identifier: Apache-2.0
"""Copies between paged KV and the pool's slots on the CPU, over a plain memcpy of the same bytes.

    python -m benchmarks.micro.copies [--rounds 40] [--only "16-token"] [--json]
                                      [--out results/copies.json]

The copies are those of CpuEngine: whole requests, all layers, from chunks' slots into blocks at
random places (load) and back (save), on the OpenMP threads that a model would have. The memcpy
moves as many bytes between the same two memories, from one contiguous region to another. It is
done in three ways, and the fastest of them is what the engine is measured against:

    memmove, 1 thread      ctypes.memmove
    memmove, N threads     as many as the engine has, each an equal part of the bytes; from the
                           first one's start to the last one's end
    torch copy_            Tensor.copy_ on the same OpenMP threads as the engine

Caches are cold: each copy goes on where the one before it ended, and comes back to the same bytes
only after it has been through a gigabyte and a half. All are timed in each round, in an order that
changes; a ratio is of one round. 1 means as fast as the memcpy, more is faster.

Where a page is many short runs of bytes, a memcpy of each run would not reach the one large memcpy
either: a C loop over the same runs, two threads that take 64 KiB of them at a time, on a Xeon: 0.75
of it with runs of 2 KiB, 0.65 to 0.7 with runs of 1 KiB.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from attnstore_lab.bench.summary import table
from attnstore_vllm._native import omp_team_size
from attnstore_vllm.transfer.engine import CpuEngine, Pages
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.plan import ChunkCopy, pages
from attnstore_vllm.transfer.pool import SharedPool
from benchmarks.report import machine

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent.parent
KIB, MIB = 1 << 10, 1 << 20
CHUNK_TOKENS = 256
CALM_S = 0.03
"""Before each copy: threads of the one before, which still spin, go to sleep."""
GOAL = 0.9
ENGINE, ONE, SEVERAL, TORCH = "engine", "memmove, 1 thread", "memmove, N threads", "torch copy_"


@dataclass(frozen=True)
class Shape:
    """What one request copies."""

    name: str
    layers: int
    block_tokens: int
    page_bytes: int
    runs: int
    blocks: int
    order: str = "LRB"
    """Of layers, runs of a page, and blocks in the KV tensors, outermost first."""

    @property
    def num_bytes(self) -> int:
        return self.layers * self.blocks * self.page_bytes


SHAPES = (
    Shape("8 layers, 128-token pages", 8, 128, 128 * KIB, 1, 15),
    Shape("24 layers, 128-token pages", 24, 128, 128 * KIB, 1, 31),
    Shape("32 layers, 16-token pages", 32, 16, 64 * KIB, 1, 32),
    Shape("80 layers, 16-token pages", 80, 16, 16 * KIB, 1, 64),
    Shape("32 layers, 16-token pages, K and V apart", 32, 16, 4 * KIB, 2, 256),
    Shape("2 heads of 64 dims, K and V apart", 32, 16, 8 * KIB, 2, 128),
    Shape("8 heads of 64 dims in fp8, heads apart", 32, 16, 16 * KIB, 8, 64),
    Shape("the same, K and V apart too", 32, 16, 16 * KIB, 16, 64),
    Shape("8 heads of 128 dims, layers within a head", 32, 16, 64 * KIB, 8, 16, "BRL"),
)
"""The last four are of 32 layers and 16-token pages too. As vLLM's KVCacheLayout names them: one
run a page is LBHNC or LBNHC, heads apart are LHBNC, layers within a head are BHLNC."""


class Memory:
    """The KV tensors of a worker, one after the other, and a pool; as large as each other.

    Args:
        num_bytes: of each of the two, at least.
    """

    def __init__(self, shape: Shape, num_bytes: int) -> None:
        import torch  # noqa: PLC0415

        page, layers = shape.page_bytes, shape.layers
        self.shape = shape
        self.num_blocks = -(-num_bytes // (page * layers))
        geometry = Geometry.uniform(1, layers, shape.block_tokens, page, CHUNK_TOKENS)
        self.num_slots = -(-num_bytes // geometry.slot_bytes)
        self.pool = SharedPool(
            f"attnstore-bench-{os.getpid()}",
            self.num_slots,
            geometry.slot_bytes,
            num_ranks=1,
            member=1,
        )
        self.pool._path.unlink()
        pool_bytes = self.num_slots * geometry.slot_bytes
        self.num_bytes = min(layers * self.num_blocks * page, pool_bytes)
        self.kv = torch.randint(256, (layers * self.num_blocks * page,), dtype=torch.uint8)
        slots = (ctypes.c_uint8 * pool_bytes).from_address(self.pool.address)
        self.slots: torch.Tensor = torch.from_numpy(np.ctypeslib.as_array(slots))
        self.slots.random_(256)
        sizes = {"L": layers, "R": shape.runs, "B": self.num_blocks}
        by_order = self.kv.view(*(sizes[axis] for axis in shape.order), -1)
        self.by_page = by_order.permute(*(shape.order.index(axis) for axis in "LBR"), 3)
        layouts = [
            describe(f"layer {layer}", blocks, self.num_blocks)
            for layer, blocks in enumerate(self.by_page)
        ]
        self.engine = CpuEngine(self.pool.address, self.num_slots, 0, geometry, layouts)
        self._blocks = _walk(self.num_blocks)
        self._slots = _walk(self.num_slots)
        self._at = 0

    def pages(self) -> Pages:
        """The next request's: slots and blocks that were not used for long."""
        within = CHUNK_TOKENS // self.shape.block_tokens
        copies, left = [], self.shape.blocks
        while left:
            count = min(within, left)
            ids = tuple(next(self._blocks) for _ in range(count))
            copies.append(ChunkCopy(next(self._slots), 0, ids))
            left -= count
        return pages(copies)

    def region(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As many bytes of the KV tensors and of the pool, contiguous, the next ones of each."""
        size = self.shape.num_bytes
        if self._at + size > self.num_bytes:
            self._at = 0
        at, self._at = self._at, self._at + size
        return self.kv[at : at + size], self.slots[at : at + size]

    def check(self) -> None:
        """A load and a save move what they should."""
        shape, table = self.shape, self.pages()
        layers, width = range(shape.layers), CHUNK_TOKENS // shape.block_tokens
        for move in (self.engine.load, self.engine.save):
            self.by_page[:, table[:, 2]] += 1
            move(table, layers)
            for slot, within, block in table[:: len(table) - 1]:
                for layer in layers:
                    at = slot * self.pool.slot_bytes + (layer * width + within) * shape.page_bytes
                    page = self.slots[at : at + shape.page_bytes]
                    assert bool((self.by_page[layer, block].flatten() == page).all())

    def close(self) -> None:
        self.engine.close()
        del self.slots
        self.pool.close()


def _walk(count: int) -> Iterator[int]:
    """All of them, again and again, in one random order."""
    return cycle(Random(count).sample(range(count), count))


class Threads:
    """Copies a region on so many threads; the calling one is the first of them."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._times = [(0.0, 0.0)] * count
        self._parts: list[tuple[int, int, int]] = []
        cores = sorted(os.sched_getaffinity(0))
        for number in range(1, count):
            core = cores[number % len(cores)]
            threading.Thread(target=self._run, args=(number, core), daemon=True).start()

    def seconds(self, target: int, source: int, num_bytes: int) -> float:
        """From the first thread's start to the last one's end."""
        count = len(self._times)
        self._parts = [(target, source, 0)] * count
        self._together()  # all wake up
        edges = [num_bytes * i // count // 4096 * 4096 for i in range(count)] + [num_bytes]
        self._parts = [(target + a, source + a, b - a) for a, b in pairwise(edges)]
        self._together()
        began, ended = zip(*self._times, strict=True)
        return float(max(ended) - min(began))

    def _together(self) -> None:
        self._barrier.wait()
        self._copy(0)
        self._barrier.wait()

    def _run(self, number: int, core: int) -> None:
        os.sched_setaffinity(0, {core})
        while True:
            self._barrier.wait()
            self._copy(number)
            self._barrier.wait()

    def _copy(self, number: int) -> None:
        target, source, num_bytes = self._parts[number]
        began = time.perf_counter()
        ctypes.memmove(target, source, num_bytes)
        self._times[number] = began, time.perf_counter()


def timed(copy: Callable[[], object]) -> float:
    began = time.perf_counter()
    copy()
    return time.perf_counter() - began


def one_round(memory: Memory, threads: Threads, random: Random) -> dict[str, dict[str, float]]:
    """Seconds by direction and way."""
    found: dict[str, dict[str, float]] = {"load": {}, "save": {}}
    layers = range(memory.shape.layers)

    def engine(way: str) -> float:
        table, move = memory.pages(), getattr(memory.engine, way)
        omp_team_size()  # its threads wake up, as behind a kernel of the model
        return timed(lambda: move(table, layers))

    def region(way: str) -> tuple[torch.Tensor, torch.Tensor]:
        kv, slots = memory.region()
        return (kv, slots) if way == "load" else (slots, kv)

    def memmove(way: str) -> float:
        target, source = region(way)
        return timed(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes))

    def on_threads(way: str) -> float:
        target, source = region(way)
        return threads.seconds(target.data_ptr(), source.data_ptr(), source.nbytes)

    def torch_copy(way: str) -> float:
        target, source = region(way)
        omp_team_size()
        return timed(lambda: target.copy_(source))

    ways = {ENGINE: engine, ONE: memmove, SEVERAL: on_threads, TORCH: torch_copy}
    cases = [(direction, name) for direction in found for name in ways]
    for direction, name in random.sample(cases, len(cases)):
        time.sleep(CALM_S)
        found[direction][name] = ways[name](direction)
    return found


def measure(shape: Shape, rounds: int, memory_bytes: int, threads: Threads) -> dict[str, Any]:
    memory = Memory(shape, memory_bytes)
    try:
        memory.check()
        random = Random(1)
        one_round(memory, threads, random)
        bar = tqdm(range(rounds), desc=shape.name, unit="round", leave=False)
        times = [one_round(memory, threads, random) for _ in bar]
    finally:
        memory.close()
    result: dict[str, Any] = {"shape": asdict(shape), "bytes": shape.num_bytes, "rounds": rounds}
    for direction in ("load", "save"):
        medians = {
            name: statistics.median(one[direction][name] for one in times)
            for name in times[0][direction]
        }
        best = min((name for name in medians if name != ENGINE), key=medians.__getitem__)
        ratios = sorted(one[direction][best] / one[direction][ENGINE] for one in times)
        result[direction] = {
            "median_ms": {name: round(1000 * s, 3) for name, s in medians.items()},
            "engine_gib_per_s": round(shape.num_bytes / medians[ENGINE] / 2**30, 2),
            "memcpy": best,
            "over_memcpy": round(statistics.median(ratios), 3),
            "quartiles": [round(r, 3) for r in statistics.quantiles(ratios, n=4)[::2]],
        }
    return result


def show(results: list[dict[str, Any]], num_threads: int) -> str:
    rows = [
        (
            "",
            "MiB",
            "engine ms",
            "GiB/s",
            "memmove 1",
            f"memmove {num_threads}",
            "torch",
            "over memcpy",
        )
    ]
    for result in results:
        for direction in ("load", "save"):
            one = result[direction]
            ms = one["median_ms"]
            rows.append(
                (
                    f"{direction}, {result['shape']['name']}", f"{result['bytes'] / MIB:.0f}",
                    f"{ms[ENGINE]:.2f}", f"{one['engine_gib_per_s']:.1f}", f"{ms[ONE]:.2f}",
                    f"{ms[SEVERAL]:.2f}", f"{ms[TORCH]:.2f}", f"{one['over_memcpy']:.3f}",
                )
            )  # fmt: skip
    return table(rows)


def bind_openmp() -> None:
    """A thread on each processor, as vLLM does for its workers; before PyTorch is loaded."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.environ["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))


def main() -> None:
    parser = argparse.ArgumentParser(description="Paged copies on the CPU over a plain memcpy.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--memory-mib", type=int, default=768, help="of the KV and of the pool")
    parser.add_argument("--only", help="shapes whose name has this; then --out has no default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    bind_openmp()
    import torch  # noqa: F401, PLC0415  (its OpenMP threads are the engine's)

    num_threads = omp_team_size()
    threads = Threads(num_threads)
    shapes = [shape for shape in SHAPES if (args.only or "") in shape.name]
    if not shapes:
        parser.error(f"no shape's name has {args.only!r} in it")
    results = [measure(shape, args.rounds, args.memory_mib * MIB, threads) for shape in shapes]
    lowest = min(one[direction]["over_memcpy"] for one in results for direction in ("load", "save"))
    report = {
        "machine": machine(),
        "threads": num_threads,
        "memory_mib": args.memory_mib,
        "goal": GOAL,
        "lowest": lowest,
        "results": results,
    }
    out = args.out or (None if args.only else ROOT / "results" / "copies.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    print(
        f"\nPaged copies over a memcpy of as many bytes, cold caches, {num_threads} threads, "
        f"median of {args.rounds} rounds"
    )
    print(show(results, num_threads))
    print(
        "over memcpy: the fastest of the three memcpys over the engine, in time; "
        f"lowest {lowest}, goal at least {GOAL}"
    )


if __name__ == "__main__":
    main()
