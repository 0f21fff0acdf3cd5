# SPDX-License-Identifier: Apache-2.0
"""How much of the disk our devices reach, beside fio on the same file.

    python -m benchmarks.device_speed [--rounds N] [--seconds S] [--directory DIR] [--json]

Each round measures fio, io_uring with checksums and without, and aiofiles with checksums, in
turn, so that all see the same noise; ratios are of one round. All move records of the same size
at random places of one file, O_DIRECT, with the same number of transfers in flight. Ours are as
the store's: a header page and a payload, whose checksum is put into the header before a write, and
taken after a read. fio moves as many bytes and takes no checksum.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tqdm import tqdm

from attnstore_vllm.io.choose import DeviceKind, open_device
from attnstore_vllm.io.device import ALIGNMENT_BYTES, CHECKSUM_BYTES, Device, IoRequest, Op, Seal

ROOT = Path(__file__).resolve().parent.parent
MIB, GIB = 1 << 20, 1 << 30
WARM_UP_S = 0.2


class Speed(NamedTuple):
    bytes_per_s: float
    cpu_s_per_gib: float  # of all threads, those that the kernel works with included


class Records:
    """`depth` buffers for records, and the memory that a device may pin."""

    def __init__(self, depth: int, record_bytes: int) -> None:
        self.payloads = mmap(-1, depth * record_bytes)
        self.headers = mmap(-1, depth * ALIGNMENT_BYTES)
        self.payloads[:] = Random(1).randbytes(MIB) * (len(self.payloads) // MIB)
        self.record_bytes, self.depth = record_bytes, depth

    @property
    def regions(self) -> list[tuple[int, int]]:
        return [
            (ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))
            for memory in (self.payloads, self.headers)
        ]

    def request(self, place: int, op: Op, offset: int, *, checksums: bool) -> IoRequest:
        payload_bytes = self.record_bytes - ALIGNMENT_BYTES
        payload = memoryview(self.payloads)[place * self.record_bytes :][:payload_bytes]
        header = memoryview(self.headers)[place * ALIGNMENT_BYTES :][:ALIGNMENT_BYTES]
        if op is Op.READ:
            return IoRequest(place, op, offset, (header, payload), checksum=checksums)
        header[:CHECKSUM_BYTES] = bytes(CHECKSUM_BYTES)
        seals = (Seal(1, 0),) if checksums else ()
        return IoRequest(place, op, offset, (header, payload), seals)


def device_speed(
    device: Device, records: Records, op: Op, seconds: float, *, checksums: bool
) -> Speed:
    """With `depth` records in flight."""
    random = Random(1)
    places = device.size_bytes // records.record_bytes
    started, cpu_from = time.perf_counter(), 0.0
    measured_from, moved, in_flight = started + WARM_UP_S, 0, 0
    ready = list(range(records.depth))
    while True:
        device.submit(
            [
                records.request(
                    place,
                    op,
                    random.randrange(places) * records.record_bytes,
                    checksums=checksums,
                )
                for place in ready
            ]
        )
        in_flight += len(ready)
        ended = device.poll(1.0)
        now = time.perf_counter()
        for completion in ended:
            assert completion.error is None, completion.error
            assert bool(completion.checksum) == checksums
        in_flight -= len(ended)
        ready = [completion.tag for completion in ended]
        if now > measured_from:
            cpu_from = cpu_from or time.process_time()
            moved += len(ended) * records.record_bytes
        if now - measured_from > seconds:
            break
    cpu_s = time.process_time() - cpu_from
    while in_flight:
        in_flight -= len(device.poll(1.0))
    return Speed(moved / (now - measured_from), cpu_s / (moved / GIB))


def fio_speed(
    file: Path, op: Op, seconds: float, *, depth: int, record_bytes: int, engine: str
) -> Speed:
    """As fio says."""
    command = [
        "fio", "--name=device_speed", f"--filename={file}", f"--size={file.stat().st_size}",
        f"--rw=rand{op.value}", f"--bs={record_bytes}", f"--iodepth={depth}", "--direct=1",
        f"--ioengine={engine}", "--time_based", f"--runtime={seconds}s",
        f"--ramp_time={WARM_UP_S * 1000:.0f}ms", "--norandommap", "--output-format=json",
    ]  # fmt: skip
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(answer.stdout)["jobs"][0]
    bytes_per_s = float(job[op.value]["bw_bytes"])
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return Speed(bytes_per_s, busy / (bytes_per_s / GIB))


def one_round(
    file: Path, records: Records, op: Op, seconds: float, random: Random, engine: str
) -> dict[str, Speed]:
    def ours(kind: DeviceKind, *, checksums: bool) -> Speed:
        device, _ = open_device(file, records.depth, kind, records.regions)
        try:
            return device_speed(device, records, op, seconds, checksums=checksums)
        finally:
            assert device.close(30)

    def fio() -> Speed:
        return fio_speed(
            file,
            op,
            seconds,
            depth=records.depth,
            record_bytes=records.record_bytes,
            engine=engine,
        )

    cases: dict[str, Callable[[], Speed]] = {
        "fio": fio,
        "uring": lambda: ours("uring", checksums=True),
        "uring_no_checksums": lambda: ours("uring", checksums=False),
        "aiofiles": lambda: ours("aiofiles", checksums=True),
    }
    order = random.sample(list(cases), len(cases))  # none always follows the same other
    return {name: cases[name]() for name in order}


def ratio(rounds: list[dict[str, Speed]], a: str, b: str) -> dict[str, Any]:
    ratios = sorted(one[a].bytes_per_s / one[b].bytes_per_s for one in rounds)
    return {"median": round(statistics.median(ratios), 3), "all": [round(r, 3) for r in ratios]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    record_bytes = args.record_mib * MIB
    records = Records(args.depth, record_bytes)
    random = Random(1)
    result: dict[str, Any] = {
        "record_bytes": record_bytes,
        "depth": args.depth,
        "file_bytes": args.file_mib * MIB,
        "rounds": args.rounds,
        "seconds": args.seconds,
        "fio_engine": args.engine,
    }
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir=args.directory) as directory:
        file = Path(directory) / "slab"
        fill = Random(2).randbytes(MIB)
        with file.open("wb") as out:
            for _ in range(args.file_mib):
                out.write(fill)
            out.flush()
            os.fsync(out.fileno())
        device, result["device"] = open_device(file, args.depth, "uring", records.regions)
        device.close(30)
        for op in (Op.READ, Op.WRITE):
            rounds = [
                one_round(file, records, op, args.seconds, random, args.engine)
                for _ in tqdm(range(args.rounds), desc=op.value, unit="round")
            ]
            result[op.value] = {
                "mib_per_s": {
                    name: round(statistics.median(one[name].bytes_per_s for one in rounds) / MIB, 1)
                    for name in sorted(rounds[0])
                },
                "cpu_s_per_gib": {
                    name: round(statistics.median(one[name].cpu_s_per_gib for one in rounds), 3)
                    for name in sorted(rounds[0])
                },
                "uring_over_fio": ratio(rounds, "uring", "fio"),
                "checksums_over_none": ratio(rounds, "uring", "uring_no_checksums"),
                "aiofiles_over_fio": ratio(rounds, "aiofiles", "fio"),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="The devices' speed beside fio.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--depth", type=int, default=16, help="records in flight")
    parser.add_argument("--record-mib", type=int, default=1)
    parser.add_argument("--file-mib", type=int, default=1024)
    parser.add_argument("--engine", choices=["io_uring", "libaio"], default="io_uring")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "device_speed.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed; it is what our devices are compared with (apt install fio)")
    result = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return
    for op in ("read", "write"):
        speeds, found = result[op]["mib_per_s"], result[op]
        print(f"\n{op}, MiB/s: " + ", ".join(f"{name} {speeds[name]}" for name in speeds))
        print(f"  processor seconds a GiB: {found['cpu_s_per_gib']}")
        for name in ("uring_over_fio", "checksums_over_none", "aiofiles_over_fio"):
            print(f"  {name}: median {found[name]['median']} of {found[name]['all']}")


if __name__ == "__main__":
    main()
