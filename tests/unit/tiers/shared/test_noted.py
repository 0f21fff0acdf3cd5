# SPDX-License-Identifier: Apache-2.0
"""The shared tier's generation is noted once NVMe has nothing of before a reset."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_vllm.tiers.shared.shared_generation import GenerationId, file_name
from tests.helpers import NAMESPACE, Rig, memory_rig
from tests.shared.rigs import io_of, make

MINE = GenerationId(bytes(16), 3)


class Failed:
    """A reset of NVMe."""

    is_over, succeeded = True, False


@dataclass
class Pending:
    """A reset of NVMe that is not over yet."""

    is_over: bool = False
    succeeded: bool = False


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Its store's thread does not run, and so no child is started."""
    tier = make({"redis": {"url": "redis://nowhere:1"}}, NAMESPACE, directory=tmp_path)
    made = memory_rig(more_tiers=(tier,), threaded=False)
    io = io_of(made)
    io.weights_seen(True)
    io.generation.see(MINE)
    io.save_generation()
    assert io.generation.usable == MINE.raw
    yield made
    for moves in made.store.thread.tiers:
        moves.cancel()
        moves.close(1.0)


def test_nothing_is_noted_while_nvme_may_have_what_was_before(rig: Rig, tmp_path: Path) -> None:
    """A kill between the two would bring KV of before back, as that of after the reset."""
    io, noted = io_of(rig), tmp_path / file_name(NAMESPACE)
    assert isinstance(rig.device, MemoryDevice)
    before = noted.read_bytes()
    rig.device.hold()
    resets = rig.store.thread.reset()
    io.weights_seen(True)
    after = io.generation.see(MINE)
    assert after is not None and io.generation.see(after) is None
    io.generation.is_unsaved = True  # as _see_generation() has it
    io.save_generation()
    assert noted.read_bytes() == before
    assert io.generation.usable is None, "a restart would be of the one before"
    rig.device.release()
    until = time.monotonic() + 10.0
    while not resets[0].is_over and time.monotonic() < until:
        rig.store.thread.tiers[0].poll(0.01)
    with io.context.progress:
        io.context.progress.notify_all()  # as the store's thread does after a poll
        io.context.progress.wait_for(lambda: resets[1].is_over, 10.0)
    assert resets[1].succeeded
    assert noted.read_bytes() != before
    assert io.generation.usable == after.raw


def test_nothing_is_noted_after_a_reset_of_nvme_that_failed(rig: Rig, tmp_path: Path) -> None:
    """Until one succeeds: a restart finds KV of before, and is behind the others."""
    io, noted = io_of(rig), tmp_path / file_name(NAMESPACE)
    before = noted.read_bytes()
    io.context.disk_reset = Failed()
    with io.context.progress:
        failed = io.reset()
        io.context.progress.wait_for(lambda: failed.is_over, 10.0)
    io.weights_seen(True)
    io.save_generation()
    assert not failed.succeeded
    assert noted.read_bytes() == before


def test_a_reset_that_noted_nothing_has_failed(rig: Rig, tmp_path: Path) -> None:
    """NVMe's was done, but the next one began before it was noted, and failed."""
    io, noted = io_of(rig), tmp_path / file_name(NAMESPACE)
    before = noted.read_bytes()
    with io.context.progress:
        io.context.disk_reset = first = Pending()
        older = io.reset()
        io.context.disk_reset = second = Pending()
        newer = io.reset()
        first.is_over = first.succeeded = True
        second.is_over = True
        io.context.progress.notify_all()
        io.context.progress.wait_for(lambda: older.is_over and newer.is_over, 10.0)
    assert noted.read_bytes() == before
    assert not (older.succeeded or newer.succeeded)
    io.context.disk_reset = first
    assert io.save_generation() is True
    io.context.disk_reset = second
    assert io.save_generation() is False


def test_a_stop_waits_until_it_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next start of this directory finds there what was before the reset."""
    tier = make({"redis": {"url": "redis://nowhere:1"}}, NAMESPACE, directory=tmp_path)
    rig = memory_rig(more_tiers=(tier,))
    io, noted = io_of(rig), list[bool]()
    save = io.save_generation

    def slow() -> bool:
        time.sleep(0.3)
        noted.append(save())
        return noted[-1]

    monkeypatch.setattr(io, "save_generation", slow)
    rig.store.thread.reset()
    rig.close()
    assert noted[:1] == [True]
