# SPDX-License-Identifier: Apache-2.0
"""How long a start takes to find what earlier runs left, and how much memory that needs.

    python -m benchmarks.recovery [--records N] [--rounds N] [--directory DIR] [--json]

A slab file of N records is made whose headers are real and whose payloads are holes. Each round
times fio reading the same pages (same stride, O_DIRECT, io_uring, same depth), then a store
that opens the file, until its scan is over. The pages are read with O_DIRECT: no cache helps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import chunk_key, encode_tokens
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES, Header, Root, SegmentHeader
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.types import Key

ROOT = Path(__file__).resolve().parent.parent
CHUNK_TOKENS = 256
PAYLOAD_BYTES = 60 * 1024
CONVERSATION_CHUNKS = 16
DEPTH = 64
SHAPE = SegmentHeader(0, CHUNK_TOKENS, PAYLOAD_BYTES, b"n" * 32, b"g" * 16, 0, "benchmark")


def make_file(path: Path, num_records: int) -> Slab:
    """One segment; conversations of CONVERSATION_CHUNKS chunks each."""
    slab = Slab(path, PAGE_BYTES + num_records * SHAPE.record_bytes, SHAPE, own={0: SHAPE})
    random = Random(1)
    with path.open("wb") as file:
        os.ftruncate(file.fileno(), PAGE_BYTES + slab.segment_bytes)
        os.pwrite(file.fileno(), Root(slab.segment_bytes).encode(), 0)
        os.pwrite(file.fileno(), SHAPE.encode(), slab.segment_offset(0))
        parent = Key(bytes(32))
        for record in tqdm(range(num_records), desc="headers", unit="record", unit_scale=True):
            number = record % CONVERSATION_CHUNKS
            if number == 0:
                parent = Key(random.randbytes(32))
            tokens = encode_tokens([random.randrange(128_000) for _ in range(CHUNK_TOKENS)])
            key = chunk_key(parent, b"", tokens)
            name = ChunkName(
                key, parent, b"", bytes(32), number * CHUNK_TOKENS, CHUNK_TOKENS, tokens
            )
            header = Header(
                name,
                SHAPE.namespace,
                SHAPE.generation,
                record,
                record + 1,
                PAYLOAD_BYTES,
                random.randbytes(16),
                0,
            )
            os.pwrite(file.fileno(), header.encode(CHUNK_TOKENS), slab.offset(record))
            parent = key
        os.fsync(file.fileno())
    return slab


def fio_seconds(slab: Slab, num_records: int) -> float:
    """fio's time for the pages that the scan reads. Raises: FileNotFoundError without fio."""
    skip = slab.record_bytes - PAGE_BYTES
    command = [
        "fio", "--name=scan", f"--filename={slab.path}", f"--rw=read:{skip}", "--bs=4k",
        "--direct=1", "--ioengine=io_uring", f"--iodepth={DEPTH}", "--readonly",
        f"--offset={slab.offset(0)}", f"--io_size={num_records * PAGE_BYTES}",
        f"--size={num_records * slab.record_bytes}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    assert read["total_ios"] >= 0.99 * num_records, "fio read something else"
    return float(read["runtime"]) / 1000 * num_records / float(read["total_ios"])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def scan_once(slab: Slab, num_records: int) -> dict[str, float]:
    """Open a store on the file in this process; the caller runs it in a process of its own."""
    name = f"attnstore-bench-{os.getpid()}"
    members = [SharedPool(name, 4, PAYLOAD_BYTES, num_ranks=1, member=m) for m in (0, 1)]
    device, kind = open_device(slab.path, DEPTH, "auto")
    before, started, used = resident_bytes(), time.perf_counter(), time.process_time()
    store = open_store(members[1], slab, device)
    while not store.is_idle():
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    figures = {
        "seconds": seconds,
        "cpu_s": time.process_time() - used,
        "bytes_per_record": (resident_bytes() - before) / num_records,
        "found": store.residency.counts["recovered"],
    }
    print(kind, file=sys.stderr)
    store.close()
    members[0].close()
    return figures


def scan(slab: Slab, num_records: int) -> dict[str, float]:
    """In a process of its own, so that its memory is its own."""
    code = (
        "import json; from pathlib import Path; from benchmarks.recovery import *\n"
        f"slab = Slab(Path({str(slab.path)!r}), {slab.segment_bytes}, SHAPE, own={{0: SHAPE}})\n"
        f"print(json.dumps(scan_once(slab, {num_records})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert figures["found"] == num_records, f"{figures['found']} of {num_records} found"
    return figures


def measure(num_records: int, rounds: int, directory: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir=directory) as work:
        slab = make_file(Path(work) / "slab", num_records)
        ours: list[dict[str, float]] = []
        fio: list[float] = []
        for _ in tqdm(range(rounds), desc="recovery", unit="round"):
            if shutil.which("fio"):
                fio.append(fio_seconds(slab, num_records))
            ours.append(scan(slab, num_records))
    seconds = [figures["seconds"] for figures in ours]
    return {
        "records": num_records,
        "rounds": rounds,
        "depth": DEPTH,
        "seconds": {"median": round(statistics.median(seconds), 2),
                    "all": [round(s, 2) for s in sorted(seconds)]},
        "cpu_s": round(statistics.median(f["cpu_s"] for f in ours), 2),
        "bytes_per_record": round(statistics.median(f["bytes_per_record"] for f in ours), 1),
        "fio_seconds": [round(s, 2) for s in sorted(fio)],
        "fio_over_ours": round(statistics.median(f / s for f, s in zip(fio, seconds, strict=True)),
                               3) if fio else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of a recovery.")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "recovery.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_args()
    result = measure(args.records, args.rounds, args.directory)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return
    fio = result["fio_seconds"]
    print(
        f"\n{result['records']:,} records found in {result['seconds']['median']} s "
        f"({result['cpu_s']} s of processor), {result['bytes_per_record']} bytes of memory each"
    )
    if fio:
        print(
            f"fio reads the same pages in {statistics.median(fio)} s: "
            f"{result['fio_over_ours']} of our time"
        )
    else:
        print("fio is not installed (apt install fio): nothing to compare with")


if __name__ == "__main__":
    main()
