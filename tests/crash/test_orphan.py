# SPDX-License-Identifier: Apache-2.0
"""The process that started an engine is killed alone: the engine ends, and its directory is free.

What a test of a real `vllm serve` shows of it is in tests/vllm/test_serve_orphan.py.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from attnstore_vllm import parent_watch
from attnstore_vllm.errors import MachineError
from attnstore_vllm.parent_watch import end_with_parent, parent_pid
from attnstore_vllm.preflight import lock_directory
from tests.crash.orphan import FLUSHED

ENDS_S = 5.0
START_S = 60.0


@contextmanager
def server(directory: Path, method: str, fault: str) -> Iterator[tuple[psutil.Process, int, int]]:
    """(The process that the user started, the engine's number, a worker's)."""
    command = [sys.executable, "-m", "tests.crash.orphan", str(directory), method, fault]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        engine, worker = map(int, child.stdout.readline().split())
        family = [
            psutil.Process(engine),
            psutil.Process(worker),
            *psutil.Process(child.pid).children(recursive=True),
        ]
        try:
            yield psutil.Process(child.pid), engine, worker
        finally:
            child.kill()
            for one in family:
                if one.is_running():
                    one.kill()


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def refusal(directory: Path) -> str:
    """Empty: it is free."""
    try:
        os.close(lock_directory(directory))
    except MachineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("method", "fault"),
    [("spawn", "none"), ("fork", "none"), ("forkserver", "none"), ("spawn", "flush"),
     ("spawn", "step")],
)  # fmt: skip
def test_an_engine_ends_with_its_parent(tmp_path: Path, method: str, fault: str) -> None:
    directory = tmp_path / "kv"
    with server(directory, method, fault) as (parent, engine, worker):
        assert f"process {engine})" in refusal(directory)
        parent.kill()
        killed_at = time.monotonic()
        while fault == "flush" and f"{engine}, whose parent {parent.pid} is gone" not in refusal(
            directory
        ):
            assert time.monotonic() - killed_at < ENDS_S
        while not (has_ended(engine) and has_ended(worker) and not refusal(directory)):
            assert time.monotonic() - killed_at < ENDS_S
            time.sleep(0.01)
        assert (directory / FLUSHED).exists() == (fault != "flush")


def test_without_pidfds_the_parent_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel, or a sandbox, that has none."""

    def none(pid: int, flags: int = 0) -> int:
        raise OSError(38, "no such call")

    monkeypatch.setattr(os, "pidfd_open", none)
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    middle = context.Process(target=_start_one_and_die, args=(writer, tmp_path / "ended"))
    middle.start()
    pid = reader.recv()
    middle.join(START_S)
    deadline = time.monotonic() + START_S
    while not has_ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / "ended").read_text() == str(parent_watch.FLUSH_S)


def _start_one_and_die(writer: multiprocessing.connection.Connection, note: Path) -> None:
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_engine, args=(note,), name="EngineCore_DP3")
    child.start()
    writer.send(child.pid)
    os._exit(0)


def _engine(note: Path) -> None:
    def flush(grace_s: float) -> None:
        note.write_text(str(grace_s))

    end_with_parent(flush, "nothing")
    time.sleep(3600.0)


def test_who_started_its_own_engine_is_left_alone(tmp_path: Path) -> None:
    """An engine within the user's process, be that a child of another one or not."""
    assert parent_pid() is None
    end_with_parent(lambda _: None, "nothing")
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writer.send(parent_pid()), name="a user's")
    child.start()
    assert reader.recv() is None
    child.join(START_S)
