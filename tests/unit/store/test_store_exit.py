# SPDX-License-Identifier: Apache-2.0
"""A process that ends while its store has work in flight ends as any other."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.io.choose import DeviceKind, open_device
from attnstore_vllm.io.codec import CODECS, NONE
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.nvme.format import Encoding
from attnstore_vllm.tiers.nvme.slab import open_slab
from attnstore_vllm.transfer.pool import SharedPool
from tests.helpers import GRAIN, SHAPE, names_of, sequence_of, tokens_of

MAY_WARN = ("is served by threads, not by io_uring: ", "which a start that was killed left behind")
"""Of a build or a kernel without io_uring; of what other tests left in shared memory."""
SLOT_BYTES = 4 << 20
NUM_SLOTS = 24
KINDS: tuple[DeviceKind, ...] = ("auto", "aiofiles")


def close(store: Store) -> None:
    started = time.monotonic()
    store.close()
    counts = store.figures().counts
    print(counts["saved"] - counts["written"], time.monotonic() - started < 2)


def leave_work_in_flight(
    path: Path, codec: str, seconds: float, *, io: DeviceKind, closes: bool = False
) -> None:
    """The child's program: 21 chunks are to be written when it ends.

    Args:
        closes: the store is closed as Python ends, as vLLM does it in its own process.
    """
    shape = replace(SHAPE, payload_bytes=SLOT_BYTES)
    if codec != NONE:
        made = CODECS[codec]
        encoding = Encoding(codec, made.version, made.room(SLOT_BYTES, "bfloat16"))
        shape = replace(shape, encoding=encoding)
    slab = open_slab(path, 64 * shape.record_bytes, shape)
    device, _ = open_device(path, 8, io)
    pools = [
        SharedPool(
            f"attnstore-exit-{path.parent.name}", NUM_SLOTS, SLOT_BYTES, num_ranks=1, member=n
        )
        for n in (0, 1)
    ]
    pools[0].close()
    store = open_store(pools[1], slab, device, io_depth=4, grain=GRAIN)
    if closes:
        weakref.finalize(device, close, store)
    normal = np.random.default_rng(1).standard_normal(SLOT_BYTES // 2, np.float32)
    payload = (normal.view(np.uint32) >> 16).astype("<u2").tobytes()
    for number in range(7):
        for name in names_of(sequence_of(tokens_of(number, 40))):
            chunk = store.begin_save(name)
            assert chunk is not None
            pools[1].slot(chunk.dram.slot)[:] = payload
            store.finish_saves([chunk])
    time.sleep(seconds)


def end(
    tmp_path: Path, codec: str, times: int, *, io: DeviceKind = "auto", closes: bool = False
) -> None:
    for number in range(times):
        path = tmp_path / f"slab{number}"
        arguments = (
            f"Path({str(path)!r}), {codec!r}, {number % 10 / 500}, io={io!r}, closes={closes}"
        )
        call = f"leave_work_in_flight({arguments})"
        code = f"from pathlib import Path; from {__name__} import leave_work_in_flight; {call}"
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        printed = "0 True\n" if closes else ""
        assert (child.returncode, child.stdout) == (0, printed), child.stderr
        said = child.stderr.splitlines()
        assert [line for line in said if not any(part in line for part in MAY_WARN)] == []
        path.unlink()


@pytest.mark.parametrize("io", KINDS)
@pytest.mark.parametrize("codec", [NONE, "lossless"])
def test_a_process_ends_beside_work_in_flight(tmp_path: Path, codec: str, io: DeviceKind) -> None:
    end(tmp_path, codec, 2, io=io)


@pytest.mark.parametrize("io", KINDS)
def test_what_is_dirty_is_written_if_the_store_is_closed_as_python_ends(
    tmp_path: Path, io: DeviceKind
) -> None:
    end(tmp_path, NONE, 1, io=io, closes=True)


@pytest.mark.long
@pytest.mark.parametrize("codec", [NONE, "lossless"])
def test_it_does_so_every_time(tmp_path: Path, codec: str) -> None:
    end(tmp_path, codec, 20)
