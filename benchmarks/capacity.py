# SPDX-License-Identifier: Apache-2.0
"""Does the directory stay within its capacity? Asked of the file system, all the time.

    python -m benchmarks.capacity [--minutes N] [--capacity SIZE] [--json]

A store on a real file serves conversations whose KV is five times what it may keep: each is
looked up, loaded or saved, grows, and comes again. Meanwhile another thread sums what the file
system has allocated for the directory (as `du` does), a hundred times a second. Now and then the
store is closed and opened again, as by a restart, sometimes as another model's, which takes
segments from the first.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.config.values import format_size, parse_size
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.preflight import SLAB_NAME, lock_directory
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.nvme.format import SegmentHeader
from attnstore_vllm.tiers.nvme.slab import open_slab
from attnstore_vllm.transfer.pool import SharedPool

ROOT = Path(__file__).resolve().parent.parent
CHUNK_TOKENS = 256
TENANT = bytes(32)
WORKING_SET = 5
"""Times the capacity."""
CONVERSATION_CHUNKS = 12
DRAM_SLOTS = 48
RUN_S = 60.0
"""Between two restarts."""
SAMPLE_S = 0.01


class Du:
    """Sums allocated bytes of a directory in a thread of its own. `largest` is what it saw."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._over = threading.Event()
        self.largest = self.samples = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            try:
                self.look()
            except FileNotFoundError:  # renamed or removed between listing and asking
                continue

    def look(self) -> None:
        self.largest = max(self.largest, self.now())
        self.samples += 1

    def now(self) -> int:
        paths = [self._directory, *self._directory.iterdir()]
        return sum(os.lstat(path).st_blocks * 512 for path in paths)

    def stop(self) -> None:
        assert self._thread.is_alive(), "nobody has looked"
        self._over.set()
        self._thread.join()
        self.look()


class Load:
    """Conversations that come again and again, each time a little longer."""

    def __init__(self, namespace: bytes, count: int, rate: float, rng: Random) -> None:
        self._root = root_key(namespace, None, b"")
        self._count = count
        self._rate = rate  # chunks a second: leaves the machine to others
        self._rng = rng
        self._chunks: dict[int, int] = {}
        self.hits = self.saves = 0

    def turn(self, store: Store, pool: SharedPool) -> None:
        number = self._rng.randrange(self._count)
        before = self._chunks.get(number, 0)
        after = min(CONVERSATION_CHUNKS, before + self._rng.randint(1, 4))
        self._chunks[number] = after if before < CONVERSATION_CHUNKS else 0
        rng = Random(number)
        tokens = [rng.randrange(128_000) for _ in range(after * CHUNK_TOKENS)]
        keys = SequenceKeys(self._root, tokens, CHUNK_TOKENS)
        pieces = store.find(Lookup(keys), 0, len(tokens))
        deadline, held = time.monotonic() + 0.1, pieces[:0]
        while time.monotonic() < deadline:
            held = store.hold_ready(pieces, keys, len(tokens))
            store.release(piece.chunk for piece in held)
            if len(held) == len(pieces):
                break
            time.sleep(0.005)
        self.hits += len(held)
        for i in range(len(held), after):
            chunk = store.begin_save(keys.name(i, TENANT))
            if chunk is not None:
                pool.slot(chunk.dram.slot)[:32] = chunk.name.key
                store.finish_saves([chunk])
                self.saves += 1
        time.sleep(after / self._rate)


def run(directory: Path, args: argparse.Namespace, load: Load, model: int, until: float) -> None:
    """One life of a server on the directory."""
    lock = lock_directory(directory)
    payload = parse_size("record", args.record)
    shape = SegmentHeader(
        -1, CHUNK_TOKENS, payload, bytes([model]) * 32, b"", int(time.time()), f"model {model}"
    )
    slab = open_slab(directory / SLAB_NAME, parse_size("capacity", args.capacity), shape)
    name = f"attnstore-capacity-{os.getpid()}"
    pools = [SharedPool(name, DRAM_SLOTS, payload, num_ranks=1, member=m) for m in (0, 1)]
    device, _ = open_device(slab.path, 64, "auto")
    store = open_store(pools[1], slab, device)
    try:
        while time.monotonic() < until:
            load.turn(store, pools[1])
    finally:
        counts = store.figures().counts
        store.close()
        pools[0].close()
        os.close(lock)
    for event in ("corrupt", "read_failed", "write_failed"):
        assert counts.get(event, 0) == 0, f"{counts[event]} {event}"


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    capacity, rng = parse_size("capacity", args.capacity), Random(args.seed)
    chunks = WORKING_SET * capacity // parse_size("record", args.record)
    loads = [Load(bytes([m]) * 32, chunks // CONVERSATION_CHUNKS, args.rate, rng) for m in (1, 2)]
    du, lives, started = Du(directory), 0, time.monotonic()
    end = started + 60 * args.minutes
    with tqdm(total=int(60 * args.minutes), unit="s", desc="soak") as bar:
        while (now := time.monotonic()) < end:
            model = 1 if rng.random() < 0.7 else 2
            run(directory, args, loads[model - 1], model, min(end, now + RUN_S))
            lives += 1
            bar.update(int(time.monotonic() - started) - bar.n)
            bar.set_postfix(largest=format_size(du.largest))
    du.stop()
    return {
        "minutes": round((time.monotonic() - started) / 60, 1),
        "restarts": lives - 1,
        "capacity": capacity,
        "largest": du.largest,
        "largest_over_capacity": round(du.largest / capacity, 5),
        "samples": du.samples,
        "working_set_over_capacity": WORKING_SET,
        "chunks_saved": sum(load.saves for load in loads),
        "chunks_hit": sum(load.hits for load in loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Capacity, measured by du; see the module.")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--capacity", default="512MiB")
    parser.add_argument("--record", default="512KiB", help="payload of a chunk")
    parser.add_argument("--rate", type=float, default=40, help="chunks a second, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "capacity.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a line")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir=args.directory) as work:
        report = measure(args, Path(work))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['minutes']} min, {report['restarts']} restarts: at most "
            f"{format_size(report['largest'])} of {format_size(report['capacity'])} "
            f"({report['largest_over_capacity']:.4f}) in {report['samples']} looks"
        )
    if report["largest"] > report["capacity"]:
        raise SystemExit("MORE THAN THE CAPACITY was allocated")


if __name__ == "__main__":
    main()
