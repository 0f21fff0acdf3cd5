# SPDX-License-Identifier: Apache-2.0
"""What a chunk costs in the index, and what it takes to find a long prompt among a million.

    python -m benchmarks.index_size [--chunks N] [--tokens N] [--json]

Conversations of 16 chunks share a system prompt of one chunk and are otherwise random. Each
chunk is entered and bound to an NVMe slot as the store does it, and is then no object any more:
so it is for all chunks but those in DRAM. A look-up is timed twice: `first` hashes the prompt's
tokens as for a new request; `again` has the keys, as when the scheduler asks once more.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.policy.eviction.departures import Departures, departures
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.types import NVME, Key

ROOT = Path(__file__).resolve().parent.parent
CHUNK_TOKENS = 256
CONVERSATION_CHUNKS = 16
VOCABULARY = 128_000
TENANT = bytes(32)
SYSTEM = np.random.default_rng(0).integers(0, VOCABULARY, CHUNK_TOKENS).tolist()


def lru(num_slots: int) -> Departures:
    return departures("lru", num_slots, ReturnEstimator())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def sequence(seed: int, num_tokens: int) -> SequenceKeys:
    rest = np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens - CHUNK_TOKENS)
    return SequenceKeys(Key(bytes(32)), SYSTEM + rest.tolist(), CHUNK_TOKENS, ())


def enter(residency: Residency, keys: SequenceKeys, num_chunks: int) -> int:
    """Save the chunks, write them back and let them leave DRAM; returns how many were new."""
    new = 0
    for number in range(num_chunks):
        chunk = residency.begin_save(keys.name(number, TENANT))
        if chunk is None:
            continue
        residency.finish_save(chunk)
        written = residency.begin_store(residency.nvme)
        assert written is chunk
        residency.finish_store(residency.nvme, chunk, bytes(16))
        new += 1
    return new


def fill(residency: Residency, count: int) -> None:
    entered = seed = 0
    with tqdm(total=count, desc="chunks", unit="chunk", unit_scale=True) as bar:
        while entered < count:
            seed += 1
            keys = sequence(seed, CONVERSATION_CHUNKS * CHUNK_TOKENS)
            new = enter(residency, keys, min(CONVERSATION_CHUNKS, count - entered + 1))
            entered += new
            bar.update(new)


def look_up(residency: Residency, seed: int, num_tokens: int) -> tuple[float, float]:
    """Seconds for a prompt that is all there: the first time, and with its keys known."""
    tokens = [*sequence(seed, num_tokens).token_ids, 1]
    keys = SequenceKeys(Key(bytes(32)), tokens, CHUNK_TOKENS, ())
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        keys.keys(0, num_tokens // CHUNK_TOKENS)
        pieces = residency.index.match(keys, 0, num_tokens)
        seconds.append(time.perf_counter() - started)
        assert pieces[-1].stop == num_tokens
        assert all(piece.chunk.at(NVME).state is State.READY for piece in pieces)
        del pieces  # or the next look-up would find them as objects
    return seconds[0], seconds[1]


def measure(num_chunks: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    gc.collect()
    before = resident_bytes()
    slots = num_chunks + rounds * (num_tokens // CHUNK_TOKENS)
    residency = Residency(
        16,
        slots,
        lru,
        chunk_tokens=CHUNK_TOKENS,
        seed=1,
    )
    residency.nvme.open(0, slots)
    fill(residency, num_chunks)
    gc.collect()
    memory = (resident_bytes() - before) / num_chunks
    seeds = [Random(2).randrange(1 << 40, 1 << 50) + i for i in range(rounds)]
    for seed in seeds:
        enter(residency, sequence(seed, num_tokens), num_tokens // CHUNK_TOKENS)
    times = [look_up(residency, seed, num_tokens) for seed in seeds]
    first, again = (sorted(1000 * t[i] for t in times) for i in (0, 1))
    return {
        "chunks": residency.nvme.num_used,
        "bytes_per_chunk": round(memory, 1),
        "prompt_tokens": num_tokens,
        "rounds": rounds,
        "first_ms": {"median": round(statistics.median(first), 3), "max": round(first[-1], 3)},
        "again_ms": {"median": round(statistics.median(again), 3), "max": round(again[-1], 3)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The index: memory and look-up; see the module.")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the prompt looked up")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "index_size.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_args()
    report = measure(args.chunks, args.tokens, args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    print(f"{report['chunks']} chunks: {report['bytes_per_chunk']} bytes each")
    print(
        f"a prompt of {report['prompt_tokens']} tokens: {report['first_ms']['median']} ms "
        f"(hashing included), {report['again_ms']['median']} ms once its keys are known"
    )


if __name__ == "__main__":
    main()
