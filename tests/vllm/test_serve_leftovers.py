# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` that ends between the pool and its first step leaves no shared memory.

vLLM's engine takes no signal while it starts: told to end, the server kills it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.preflight import SHM_DIR
from attnstore_vllm.transfer.pool import pool_name
from benchmarks.server import Process, quiet_cpu_environment, unbroken, vllm_command
from tests.vllm import serve_helpers as serving


def ended(model: Path, home: Path, name: str, number: signal.Signals, *, all_of_it: bool) -> Path:
    """A start that gets a signal as soon as it has its pool; returns the pool's path."""
    store = home / name
    transfer = json.loads(serving.in_json(serving.settings(store))) | {"engine_id": name}
    command = [*vllm_command(), "serve", str(model), *serving.ARGUMENTS, "--port", "0"]
    command += [serving.FLAG, json.dumps(transfer)]
    environment = quiet_cpu_environment() | {"VLLM_CPU_OMP_THREADS_BIND": "0"}
    region = SHM_DIR / pool_name(name, store)
    with unbroken():
        server = Process(command, home / f"log-{name}", environment)
    try:
        deadline = time.monotonic() + serving.START_DEADLINE_S
        while not region.exists():
            assert server.exit_code is None and time.monotonic() < deadline, server.log_tail()
            time.sleep(0.002)
        vllms = mapped_shared_memory(server.pid) - {region}
        (os.killpg if all_of_it else os.kill)(server.pid, number)
        # Told at the wrong moment vLLM goes on: then all members come to have the region.
        while server.exit_code is None and region.exists():
            assert time.monotonic() < deadline, server.log_tail()
            time.sleep(0.01)
    finally:
        server.stop()
    for path in vllms:  # its own queues: hundreds of MiB that a killed one leaves
        path.unlink(missing_ok=True)
    return region


def mapped_shared_memory(pid: int) -> set[Path]:
    """Files of /dev/shm that a process or one of its children has mapped."""
    server = psutil.Process(pid)
    maps = [
        found.path
        for one in (server, *server.children(recursive=True))
        for found in one.memory_maps()
    ]
    return {Path(path) for path in maps if Path(path).parent == SHM_DIR}


@pytest.mark.long
def test_a_killed_start_and_then_an_interrupted_one(models: Path, tmp_path: Path) -> None:
    model = make_model(models / "leftovers", TINY)
    for attempt in range(3):  # on a busy machine the signal may come too late
        killed = ended(model, tmp_path, f"killed {attempt}", signal.SIGKILL, all_of_it=True)
        if killed.exists():
            break
    assert killed.exists(), "it had its pool under no name when it was killed: nothing is shown"
    interrupted = ended(model, tmp_path, "interrupted", signal.SIGINT, all_of_it=True)
    assert not killed.exists(), "the next start did not give back what the killed one had"
    assert not interrupted.exists(), "^C has left the pool behind"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_whose_first_process_alone_is_told_to_end(
    models: Path, tmp_path: Path, number: signal.Signals
) -> None:
    model = make_model(models / "leftovers", TINY)
    assert not ended(model, tmp_path, "told", number, all_of_it=False).exists()
