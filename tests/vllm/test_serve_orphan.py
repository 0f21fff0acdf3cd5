# SPDX-License-Identifier: Apache-2.0
"""The first process of a real `vllm serve` is killed alone, as by the kernel for want of memory.

What it started ends too, and lets go of the directory: a supervisor's restart works, and finds what
was stored. tests/crash/test_orphan.py has the ways in which that may go wrong.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.errors import MachineError
from attnstore_vllm.preflight import lock_directory
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm.serve_helpers import FLAG, ask, ask_and_count, ask_and_store, story

ENDS_S = 5.0


def is_free(directory: Path) -> bool:
    try:
        os.close(lock_directory(directory))
    except MachineError:
        return False
    return True


@contextmanager
def generating(server: VllmServer) -> Iterator[None]:
    """Steps go on for longer than the test: answers of 1,500 tokens, asked for again and again."""

    def go_on() -> None:
        with suppress(OSError):  # the server is gone
            while True:
                ask(server, "on and on", max_tokens=1500, ignore_eos=True)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    yield
    thread.join(serving.END_DEADLINE_S)
    assert not thread.is_alive()


def kill_first(server: VllmServer, directory: Path) -> float:
    """Kill it alone; the seconds until all that it started has ended and the directory is free."""
    os.kill(server.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    while serving.members(server.pid) or not is_free(directory):
        seconds = time.monotonic() - killed_at
        names = [" ".join(one.cmdline()) for one in serving.members(server.pid)]
        assert seconds < ENDS_S, f"{names} live on\n{server.log_tail()}"
        time.sleep(0.02)
    return time.monotonic() - killed_at


@pytest.mark.long
def test_what_it_started_ends_and_a_restart_works(models: Path, tmp_path: Path) -> None:
    model, store = make_model(models / "serve", TINY), tmp_path / "store"
    transfer = serving.in_yaml(tmp_path / "a.yaml", serving.settings(store))
    with serving.server(model, tmp_path / "log", FLAG, transfer) as first:
        answer = ask_and_store(first, story("kept"))
        with generating(first):
            time.sleep(1.0)
            print(f"free again after {kill_first(first, store):.2f} s")
        assert "which started this engine, is gone" in first.log.read_text()
    serving.assert_no_region()
    with serving.server(model, tmp_path / "log2", FLAG, transfer) as second:
        again, tokens = ask_and_count(second, story("kept"))
        assert again == answer
        assert tokens["nvme"] > 0
        kill_first(second, store)
    serving.assert_no_region()


@pytest.mark.long
def test_workers_of_several_ranks_end_too(models: Path, tmp_path: Path) -> None:
    model, store = make_model(models / "serve", TINY), tmp_path / "store"
    transfer = serving.in_yaml(tmp_path / "a.yaml", serving.settings(store))
    arguments = (FLAG, transfer, "--tensor-parallel-size", "2")
    with serving.server(model, tmp_path / "log", *arguments, cores="0|1") as server:
        ask(server, story("two"))
        assert len(serving.members(server.pid)) > 3
        kill_first(server, store)
    serving.assert_no_region()
