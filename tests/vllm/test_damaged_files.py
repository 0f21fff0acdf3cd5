# SPDX-License-Identifier: Apache-2.0
"""The files of a stopped server are damaged at random; the next one answers right, and counts.

What cannot be counted is a record whose header says no more that it ever was one: zeroes, and
headers whose magic number or generation is not that of the segment (a record of another segment
may be a stale one). Such a place is free, and its chunk a miss.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.cli.slab_file import Record, RecordState, SlabFile, opened
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES, SegmentHeader, header_bytes
from benchmarks.server import VllmServer
from tests.vllm import kill_loop, soak
from tests.vllm import serve_helpers as serving
from tests.vllm.load import complete
from tests.vllm.prompts import random_tokens
from tests.vllm.serve_helpers import FLAG, count, loaded, nudge

pytestmark = pytest.mark.long
# By default test_serve_faults.py damages the file of a running server, and
# tests/unit/tiers/nvme/test_slab.py and test_store_file.py what a start finds.
PROMPTS = 10
COUNTED_FROM = 48
"""Of a header: what is before it (magic, version, checksum, generation) makes it no record."""
DAMAGES = ("header bit", "payload bit", "payload page", "padding", "swap", "zeroes", "none")
UNCOUNTED = ("zeroes", "none", "swap of segments")


@dataclass
class Disk:
    """A directory of a server, an untouched copy of it, and what is asked."""

    home: Path
    model: Path
    jobs: list[soak.Job]
    answers: list[soak.Job] = field(default_factory=list)
    """Of all tests: the last one compares them."""

    @property
    def store(self) -> Path:
        return self.home / "store"

    def restore(self) -> None:
        shutil.rmtree(self.store, ignore_errors=True)
        shutil.copytree(self.home / "copy", self.store)

    @contextmanager
    def serve(self, *arguments: str) -> Iterator[VllmServer]:
        settings = serving.in_json(serving.settings(self.store, dram="16MiB"))
        log = self.home / "log"
        with serving.server(self.model, log, FLAG, settings, *arguments) as server:
            yield server

    def ask(self, server: VllmServer) -> list[soak.Job]:
        found = [complete(server, job) for job in self.jobs]
        self.answers += found
        return found


@pytest.fixture(scope="module")
def disk(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Disk:
    home = tmp_path_factory.mktemp("damaged")
    shared = random_tokens("shared", 300)
    jobs = [
        soak.Job(tokens=shared + random_tokens(i, 400), salt=None, sampling={"max_tokens": 4})
        for i in range(PROMPTS)
    ]
    disk = Disk(home, make_model(models / "serve", TINY), jobs)
    with disk.serve() as server:
        disk.jobs = disk.ask(server)

        def is_clean() -> bool:
            nudge(server)
            written, saved = (count(server, "chunks", event=e) for e in ("written", "saved"))
            return written == saved > 2 * PROMPTS

        serving.wait_until(is_clean, "all is on NVMe")
    shutil.copytree(disk.store, home / "copy")
    return disk


def damage(slab: SlabFile, rng: Random) -> Counter[str]:
    """Damage every record in some way or none; returns how many in which."""
    done: Counter[str] = Counter()
    records = [
        record
        for _, segment in slab.segments()
        if isinstance(segment, SegmentHeader)
        for record in slab.records(segment, payloads=True)
        if record.state is RecordState.GOOD
    ]
    rng.shuffle(records)
    while records:
        record, how = records.pop(), rng.choice(DAMAGES)
        if how == "swap" and records:
            other = records.pop()
            swap(slab, record, other)
            within = record.segment.number == other.segment.number
            done["swap" if within else "swap of segments"] += 2
        elif how != "swap":
            damage_one(slab, record, how, rng)
            done[how] += 1
    os.fsync(slab.fd)
    return done


def damage_one(slab: SlabFile, record: Record, how: str, rng: Random) -> None:
    assert record.header is not None
    at, size = record.offset, header_bytes(record.segment.chunk_tokens)
    used = 264 + 4 * record.header.name.num_tokens
    payload = at + size
    if how == "header bit":
        flip(slab, at + rng.randrange(COUNTED_FROM, used), rng)
    elif how == "padding":
        flip(slab, at + rng.randrange(used, size), rng)
    elif how == "payload bit":
        flip(slab, payload + rng.randrange(record.segment.payload_bytes), rng)
    elif how == "payload page":
        page = rng.randrange(record.segment.payload_bytes // PAGE_BYTES)
        os.pwrite(slab.fd, rng.randbytes(PAGE_BYTES), payload + page * PAGE_BYTES)
    elif how == "zeroes":
        os.pwrite(slab.fd, bytes(record.segment.record_bytes), at)


def flip(slab: SlabFile, at: int, rng: Random) -> None:
    (byte,) = os.pread(slab.fd, 1, at)
    os.pwrite(slab.fd, bytes([byte ^ 1 << rng.randrange(8)]), at)


def swap(slab: SlabFile, one: Record, other: Record) -> None:
    size = one.segment.record_bytes
    a, b = os.pread(slab.fd, size, one.offset), os.pread(slab.fd, size, other.offset)
    os.pwrite(slab.fd, b, one.offset)
    os.pwrite(slab.fd, a, other.offset)


def test_records_damaged_at_random(disk: Disk) -> None:
    disk.restore()
    with opened(disk.store / SLAB_NAME, writable=True) as slab:
        done = damage(slab, Random(1))
    countable = sum(n for how, n in done.items() if how not in UNCOUNTED)
    assert countable >= 8, done
    with disk.serve() as server:
        disk.ask(server)

        def all_counted() -> bool:
            nudge(server)
            return count(server, "errors", kind="corrupt") >= countable

        # Those that are behind a missing chunk nobody asks for: the scrubber finds them.
        serving.wait_until(all_counted, f"{countable} of {done} are counted")
        disk.ask(server)  # once more: nothing is counted twice
        nudge(server)
        assert count(server, "errors", kind="corrupt") == countable
        assert serving.is_healthy(server)


@pytest.mark.parametrize("damaged", ["segment headers", "truncated", "another model's"])
def test_the_whole_file(disk: Disk, damaged: str) -> None:
    disk.restore()
    rng, hit = Random(damaged), 0.0
    file = disk.store / SLAB_NAME
    if damaged == "another model's":
        shutil.rmtree(disk.store)
        with disk.serve("--dtype", "float32") as server:  # the same tokens, other bytes
            for job in disk.jobs:
                complete(server, job)
    elif damaged == "truncated":
        os.truncate(file, rng.randrange(PAGE_BYTES, 4 << 20))
    else:
        with opened(file, writable=True) as slab:
            for number in range(slab.num_segments):
                flip(slab, slab.segment_offset(number) + rng.randrange(360), rng)
    with disk.serve() as server:
        disk.ask(server)
        nudge(server)
        hit = loaded(server)["nvme"]
        assert serving.is_healthy(server)
    if damaged != "truncated":
        assert hit == 0


def test_every_answer_was_right(disk: Disk, models: Path) -> None:
    assert disk.answers and len(disk.answers) % PROMPTS == 0
    verdict = kill_loop.judge(disk.home, models, disk.answers)
    assert verdict.wrong == [], verdict
