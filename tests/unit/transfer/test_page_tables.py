# SPDX-License-Identifier: Apache-2.0
"""Pages that are mapped ahead of the first copies: counted as the faults that these then cost."""

from __future__ import annotations

import mmap
import os
import resource
import threading
import time

import pytest

from attnstore_vllm.transfer import page_tables
from attnstore_vllm.transfer.page_tables import PIECE_BYTES, MapAhead, Unmapped

SIZE = PIECE_BYTES + (4 << 20)


def shared_memory(writes: bool = True) -> mmap.mmap:
    """Memory that is there, and that this process has not mapped."""
    fd = os.memfd_create("attnstore-test")
    os.ftruncate(fd, SIZE)
    os.posix_fallocate(fd, 0, SIZE)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
    try:
        return mmap.mmap(fd, SIZE, mmap.MAP_SHARED, protection)
    finally:
        os.close(fd)


def faults_of_touching(mapped: mmap.mmap, *, writes: bool) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for at in range(0, len(mapped), mmap.PAGESIZE):
        if writes:
            mapped[at] = mapped[at] | 1
        else:
            assert mapped[at] == 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("writes", [True, False])
def test_what_is_mapped_ahead_costs_no_faults(writes: bool) -> None:
    late = faults_of_touching(shared_memory(writes), writes=writes)
    mapped = shared_memory(writes)
    unmapped = Unmapped([mapped], writes=writes)
    assert [unmapped.map_some() for _ in range(3)] == [True, True, False], "piece by piece"
    assert faults_of_touching(mapped, writes=writes) < late / 4


def test_it_changes_no_byte() -> None:
    mapped = shared_memory()
    mapped[:5] = b"bytes"
    mapped[SIZE - 5 :] = b"bytes"
    ahead = MapAhead(memoryview(mapped))
    while not ahead.is_over:
        time.sleep(0.001)
    assert (mapped[:5], mapped[SIZE - 5 :]) == (b"bytes", b"bytes")
    assert faults_of_touching(mapped, writes=True) < SIZE // mmap.PAGESIZE // 4


def test_it_ends_when_it_is_closed_and_keeps_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "PAUSE_S", 60.0)
    mapped = shared_memory()
    ahead = MapAhead(memoryview(mapped))
    assert not ahead.is_over
    ahead.close()
    assert ahead.is_over
    mapped.close()  # BufferError if something views it


def test_it_ends_with_who_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "PAUSE_S", 60.0)
    ahead = MapAhead(memoryview(shared_memory()))
    del ahead
    assert "attnstore-map" not in [thread.name for thread in threading.enumerate()]
