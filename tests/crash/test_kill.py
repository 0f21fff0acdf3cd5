# SPDX-License-Identifier: Apache-2.0
"""Kill a writing process at a random moment; the next process must find only whole chunks.

This is a process crash: what the kernel was given lives on. Power loss is PowerLossDevice's
business (tests/property).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from attnstore_vllm.cli.verify import verify
from attnstore_vllm.io.choose import DeviceKind
from attnstore_vllm.preflight import SHM_DIR, lock_directory
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.pool import SharedPool
from tests.crash.writer import DRAM_SLOTS, open_pool, open_store, payload, region_name, sequence
from tests.helpers import CHUNK_TOKENS, wait_until


def run_and_kill(
    directory: Path, kind: DeviceKind, num_records: int, first: int, num_lines: int
) -> list[str]:
    """Let the writer say some lines, and a random moment more; returns what it said."""
    arguments = (directory, kind, num_records, first)
    command = [sys.executable, "-m", "tests.crash.writer", *map(str, arguments)]
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            said.append(line.strip())
            if len(said) == num_lines:
                break
        # Not to hide a race but to move it: the writer goes on, and the kill falls anywhere.
        time.sleep(Random(first + num_lines).random() * 0.005)
        child.kill()  # SIGKILL: no handler, no atexit, no flush
        said += child.stdout.read().split()
    assert len(said) >= num_lines, "the writer ended on its own"
    return said


def start_again(directory: Path, kind: DeviceKind, num_records: int) -> tuple[Store, SharedPool]:
    os.close(lock_directory(directory))  # the dead process has let go of it
    worker, pool = open_pool(directory)
    worker.close()
    assert not (SHM_DIR / region_name(directory)).exists(), "a region was left behind"
    store = open_store(directory, kind, num_records, pool)
    wait_until(store.is_idle, store)  # recovery is over
    return store, pool


def found_bytes(store: Store, pool: SharedPool, n: int) -> bytes | None:
    pieces = store.find(Lookup(sequence(n)), 0, CHUNK_TOKENS)
    if not pieces:
        return None
    wait_until(
        lambda: (
            pieces[0].chunk.dropped or bool(store.hold_ready(pieces, sequence(n), CHUNK_TOKENS))
        ),
        store,
    )
    if pieces[0].chunk.dropped:
        return None
    found = bytes(pool.slot(pieces[0].chunk.dram.slot))
    store.loaded([pieces[0].chunk])
    return found


@pytest.mark.parametrize(
    ("kind", "num_records"),
    [("aiofiles", 250), ("auto", 250), ("auto", 12)],
    ids=["with room, aiofiles", "with room", "overwriting"],
)
@pytest.mark.parametrize("lines", [(1, 2, 3), (5, 14, 30), (25, 35, 45)])
def test_kills_leave_only_whole_chunks(
    tmp_path: Path, lines: tuple[int, ...], kind: DeviceKind, num_records: int
) -> None:
    """One kill after another, each while the next chunks are written over what is there."""
    directory = tmp_path / "kv"
    first = 0
    for num_lines in lines:
        said = run_and_kill(directory, kind, num_records, first, num_lines)
        written = [int(line) for line in said if line.isdecimal()]
        last = max(written, default=first - 1)
        store, pool = start_again(directory, kind, num_records)
        found = {n: found_bytes(store, pool, n) for n in range(first, last + 2 * DRAM_SLOTS)}
        for n, raw in found.items():
            assert raw in (None, payload(n)), f"chunk {n} has foreign bytes"
        if num_records > last + 2 * DRAM_SLOTS:
            lost = [n for n in written if found[n] is None]
            assert not lost, f"chunks {lost} were on NVMe and are gone"
        elif last - first > num_records:
            assert any(found.values()), "nothing at all was found"
        store.check_integrity()
        assert store.residency.num_held() == 0
        store.close()
        assert not verify(directory, quiet=True).bad
        first = last + 2 * DRAM_SLOTS
