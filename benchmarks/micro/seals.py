# SPDX-License-Identifier: Apache-2.0
"""What the shared tier's digest of a payload costs, with a secret and without, on one thread.

    python -m benchmarks.micro.seals [--rounds 200] [--json]

With a secret it is BLAKE3 with a key, without one XXH3-128. Payloads lie in 64 MiB, one behind the
other, so that caches have few of them. Time is the thread's own. Goal: 1 GB/s with a secret.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import cycle

from attnstore_lab.bench.summary import table
from attnstore_vllm.tiers.shared.secret import SharedKeys
from benchmarks.report import machine

GOAL = 1e9
MEMORY_BYTES = 64 << 20
SIZES = (64 << 10, 1 << 20, 2 << 20, 8 << 20)


def speeds(keys: SharedKeys, size: int, rounds: int) -> list[float]:
    """Bytes a second, round by round."""
    memory = memoryview(bytearray(b"\1" * MEMORY_BYTES))
    found = []
    for at, _ in zip(cycle(range(0, MEMORY_BYTES - size + 1, size)), range(rounds)):
        payload = memory[at : at + size]
        begun_at = time.thread_time()
        keys.digest(payload)
        found.append(size / max(1e-9, time.thread_time() - begun_at))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kinds = {"secret": SharedKeys.of(bytes(32)), "none": SharedKeys.of(None)}
    found = {
        (name, size): speeds(keys, size, args.rounds)
        for name, keys in kinds.items()
        for size in SIZES
    }
    medians = {which: statistics.median(each) for which, each in found.items()}
    if args.json:
        rows = [[name, size, median] for (name, size), median in medians.items()]
        print(json.dumps({"machine": machine(), "bytes_a_second": rows}))
        return
    lines = [
        [f"{name}, {size >> 10} KiB", *(f"{v / 1e9:.2f}" for v in (median, each[0], each[-1]))]
        for ((name, size), each), median in zip(found.items(), medians.values(), strict=True)
    ]
    print(table([["secret, payload", "median GB/s", "least", "most"], *lines]))
    least = min(median for (name, _), median in medians.items() if name == "secret")
    verdict = "met" if least >= GOAL else "MISSED"
    print(f"goal: {GOAL / 1e9:.0f} GB/s with a secret on one thread: {verdict}")


if __name__ == "__main__":
    main()
