# SPDX-License-Identifier: Apache-2.0
"""How long KV takes from NVMe to DRAM, encoded and as it is, on disks of several speeds.

    python -m benchmarks.codec_latency [--rounds 9] [--speeds 0.2 1 5] [--tokens 3968]

The store itself over files in memory, behind a throttle that lets so many GB/s through; no model
computes beside it. A prompt has KV of 24 KiB a token (24 layers), in chunks of 256 tokens, of bf16
numbers around zero. A time is from the look-up to the last chunk in DRAM. The stores take turns;
before each look-up another prompt has pushed this one out of DRAM.

`small` writes by its small coding alone. `adaptive` is lossless as it is: prompts are written and
asked for until its rule (policy/codec_cost.py) has seen enough or changes the coding; then others
are written, by the coding that it has chosen, and these are measured. Goal for adaptive over none:
1.02 at most, at each speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnstore_lab.bench.summary import table
from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import SequenceKeys, chunk_key, root_key, tenant_hash
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.io.codec import CODECS, NONE
from attnstore_vllm.io.device import Completion, Device, IoRequest
from attnstore_vllm.policy.codec_cost import CodecCost
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.nvme.format import Encoding, SegmentHeader, pages
from attnstore_vllm.tiers.nvme.nvme_io import NvmeIo
from attnstore_vllm.tiers.nvme.slab import open_slab
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.types import NVME
from benchmarks.report import machine

CHUNK_TOKENS = 256
TOKEN_BYTES = 24 << 10
CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
DEPTH = 8
NAMESPACE = bytes(32)
DEADLINE_S = 60.0
GOAL = 1.02
SMALL, ADAPTIVE = "small", "adaptive"
WARM_UP_MAX = 20


class Throttle:
    """A device that moves `bytes_per_s` at most: completions are told when they would be due."""

    def __init__(self, inner: Device, bytes_per_s: float) -> None:
        self._inner = inner
        self._rate = bytes_per_s
        self._due: dict[int, float] = {}
        self._free_at = 0.0
        self._ended: deque[tuple[float, Completion]] = deque()
        self._woken = False

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def submit(self, requests: Sequence[IoRequest]) -> None:
        for request in requests:
            seconds = sum(map(len, request.buffers)) / self._rate
            self._free_at = max(self._free_at, time.monotonic()) + seconds
            self._due[request.tag] = self._free_at
        self._inner.submit(requests)

    def cancel(self, tags: Collection[int]) -> None:
        self._inner.cancel(tags)

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        while True:
            until = min([deadline, *(at for at, _ in self._ended)])
            for completion in self._inner.poll(max(0.0, until - time.monotonic())):
                self._ended.append((self._due.pop(completion.tag), completion))
            now = time.monotonic()
            told = [completion for at, completion in self._ended if at <= now]
            self._ended = deque((at, c) for at, c in self._ended if at > now)
            if told or self._woken or now >= deadline:
                self._woken = False
                return told

    def wake(self) -> None:
        self._woken = True
        self._inner.wake()

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s)


def numbers(seed: int) -> bytes:
    normal = np.random.default_rng(seed).standard_normal(CHUNK_BYTES // 2, np.float32)
    return (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes()


class Side:
    """One store, and what is asked of it."""

    def __init__(self, work: Path, name: str, bytes_per_s: float, num_chunks: int) -> None:
        encoding = None
        if name != NONE:
            codec = CODECS["lossless"]
            room = pages(codec.room(CHUNK_BYTES, "bfloat16"))
            encoding = Encoding(codec.name, codec.version, room)
        shape = SegmentHeader(
            -1, CHUNK_TOKENS, CHUNK_BYTES, NAMESPACE, b"", 0, "benchmark", encoding
        )
        path = work / f"slab-{name}-{bytes_per_s:.0f}"
        slab = open_slab(path, 5 * num_chunks * shape.record_bytes, shape)
        device, _ = open_device(path, 2 * DEPTH, "auto")
        pool = f"attnstore-bench-{path.name}"
        worker = SharedPool(pool, num_chunks, CHUNK_BYTES, num_ranks=1, member=0)
        self.pool = SharedPool(pool, num_chunks, CHUNK_BYTES, num_ranks=1, member=1)
        worker.close()
        slow = Throttle(device, bytes_per_s)
        self.store = open_store(self.pool, slab, slow, io_depth=DEPTH, eviction="lru")
        self._num_chunks = num_chunks
        if name == SMALL:
            self.cost.is_fast = False
        self._write(1)
        if name == ADAPTIVE:
            self._warm_up()
            self._write(3)

    def _write(self, first: int) -> None:
        """Two prompts, which are asked for by turns."""
        self.prompts = [self._prompt(number, self._num_chunks) for number in (first, first + 1)]
        for prompt in self.prompts:
            self._save(prompt)
        self._turn = 0

    def _warm_up(self) -> None:
        for _ in range(WARM_UP_MAX):
            self.ask()
            if not self.cost.is_fast:
                return

    def _prompt(self, number: int, num_chunks: int) -> SequenceKeys:
        first = number * 1_000_000
        tokens = list(range(first, first + num_chunks * CHUNK_TOKENS + 1))
        return SequenceKeys(root_key(NAMESPACE, None, b""), tokens, CHUNK_TOKENS)

    def _save(self, prompt: SequenceKeys) -> None:
        for number in range(len(prompt.token_ids) // CHUNK_TOKENS):
            start = number * CHUNK_TOKENS
            tokens = prompt.tokens(start, start + CHUNK_TOKENS)
            parent, extra = prompt.parent(number), prompt.extra(number)
            key = chunk_key(parent, extra, tokens)
            name = ChunkName(key, parent, extra, tenant_hash(None), start, CHUNK_TOKENS, tokens)
            self._wait(self.store.is_idle)
            chunk = self.store.begin_save(name)
            assert chunk is not None
            self.pool.slot(chunk.dram.slot)[:] = numbers(number)
            self.store.finish_saves([chunk])
        self._wait(self.store.is_idle)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the store did not get there"
            time.sleep(0.0002)

    def ask(self) -> float:
        """Seconds until all of the prompt that was not asked for last is in DRAM."""
        prompt = self.prompts[self._turn]
        self._turn = 1 - self._turn
        stop = len(prompt.token_ids) - 1
        started = time.perf_counter()
        pieces = self.store.find(Lookup(prompt), 0, stop)
        chunks: list[Chunk] = [piece.chunk for piece in pieces]
        assert len(chunks) == stop // CHUNK_TOKENS
        self._wait(lambda: all(chunk.dram.state is State.READY for chunk in chunks))
        took = time.perf_counter() - started
        assert all(chunk.came_from == NVME for chunk in chunks)
        return took

    @property
    def cost(self) -> CodecCost:
        """The rule of this store."""
        nvme = self.store.thread.tiers[0]
        assert isinstance(nvme, NvmeIo)
        assert nvme.codec_watch is not None
        return nvme.codec_watch.cost

    def close(self) -> None:
        self.store.close()


def compare(work: Path, gigabytes: float, num_chunks: int, rounds: int) -> dict[str, Any]:
    names = (NONE, SMALL, ADAPTIVE)
    sides = {name: Side(work, name, gigabytes * 1e9, num_chunks) for name in names}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.ask()
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side.ask())
    cost = sides[ADAPTIVE].cost
    for side in sides.values():
        side.close()
    ms = {name: statistics.median(found) * 1000 for name, found in times.items()}
    ratios = {
        name: statistics.median(b / a for a, b in zip(times[NONE], times[name], strict=True))
        for name in (SMALL, ADAPTIVE)
    }
    return {
        "ms": ms,
        "ratio": ratios,
        "is_fast": cost.is_fast,
        "says_later": cost.is_later,
        "read_gb_per_s": cost.read_speed / 1e9,
        "small_gb_per_s": cost.decode_speed(False) / 1e9,
        "fast_gb_per_s": cost.decode_speed(True) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--speeds", type=float, nargs="+", default=[0.2, 0.5, 1.0, 2.0, 5.0])
    parser.add_argument("--tokens", type=int, default=3968)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = {}
    for gigabytes in args.speeds:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
            count = args.tokens // CHUNK_TOKENS
            rows[gigabytes] = compare(Path(work), gigabytes, count, args.rounds)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return
    print(machine())
    columns = ["GB/s", "none, ms", "small, ms", "adaptive, ms", "small over none"]
    columns += ["adaptive over none", "seen: read", "decoded, small", "fast", "writes", "says"]
    told = [
        [
            *(f"{speed:g}", *(f"{r['ms'][name]:.1f}" for name in (NONE, SMALL, ADAPTIVE))),
            *(f"{r['ratio'][name]:.2f}" for name in (SMALL, ADAPTIVE)),
            *(f"{r[f'{what}_gb_per_s']:.2f}" for what in ("read", "small", "fast")),
            *("fast" if r["is_fast"] else "small", "later" if r["says_later"] else "not later"),
        ]
        for speed, r in rows.items()
    ]
    print(table([columns, *told]))
    worst = max(r["ratio"][ADAPTIVE] for r in rows.values())
    verdict = "reached" if worst <= GOAL else "MISSED"
    print(f"largest of adaptive over none: {worst:.2f} (goal {GOAL}: {verdict})")


if __name__ == "__main__":
    main()
