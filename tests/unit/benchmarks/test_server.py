# SPDX-License-Identifier: Apache-2.0
"""Child processes of `python -m benchmarks.compare`: none is lost, whatever ends the command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import server
from benchmarks.compare import lmcache
from benchmarks.compare.sizes import Sizes
from benchmarks.server import (
    ENDING,
    Process,
    ServerError,
    VllmServer,
    free_port,
    get,
    unbroken,
)

SLEEP = "import time; time.sleep(60)"
DEADLINE_S = 10.0


def lines_of(log: Path, count: int) -> list[str]:
    """Of a log, when it has so many: the first one is the command."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if log.exists() and len(lines := log.read_text().splitlines()) >= count:
            return lines
        time.sleep(0.01)
    raise AssertionError(f"{log} has not {count} lines")


def has_ended(pid: int) -> bool:
    """Within the deadline. A zombie has ended, whoever reaps it."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_a_process_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid)"
    code += f"; sys.stdout.flush(); {SLEEP}"
    process = Process([sys.executable, "-c", code], tmp_path / "log", {"NAME": "a value"})
    lines = lines_of(process.log, 2)
    process.stop()
    process.stop()
    assert process.exit_code == -signal.SIGTERM
    assert not psutil.pid_exists(process.pid)
    assert has_ended(int(lines[1]))


def test_a_process_gets_its_environment_and_its_signals(tmp_path: Path) -> None:
    code = "import os, signal; print(os.environ['NAME'], 'PATH' in os.environ)"
    code += "; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGTERM)"
    code += " is signal.SIG_DFL)"
    with unbroken():
        process = Process([sys.executable, "-c", code], tmp_path / "log", {"NAME": "a value"})
    os.waitpid(process.pid, 0)
    assert process.log.read_text().splitlines()[-2:] == ["a value True", "set() True"]
    process.stop()


def test_a_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = "import os, signal, sys, time\n"
    child += "signal.signal(signal.SIGTERM, lambda *_: (print('SIGTERM'), sys.exit()))\n"
    child += "print(os.getpid(), flush=True)\ntime.sleep(60)"
    code = "import sys, time; from pathlib import Path; "
    code += "from benchmarks.server import Process; "
    code += f"Process([sys.executable, '-c', {child!r}], Path({str(log)!r})); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        pid = int(lines_of(log, 1 + child.count("\n") + 1)[-1])
    finally:
        parent.kill()
        parent.wait()
    try:
        assert has_ended(pid)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise
    assert log.read_text().splitlines()[-1] == "SIGTERM"


# ---- a signal while one starts -----------------------------------------------------------


def a_server(tmp_path: Path) -> AbstractContextManager[Any]:
    return VllmServer("model", [], tmp_path / "log")


def a_daemon(tmp_path: Path) -> AbstractContextManager[Any]:
    return lmcache.daemon(1, tmp_path, 1, tmp_path / "log")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Stands for vLLM and LMCache what sleeps; a Ctrl-C comes just when it has been started."""
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(server, "vllm_command", lambda: [str(program)])
    monkeypatch.setattr(lmcache, "command", lambda *_: [str(program)])
    found: list[Any] = []
    popen = subprocess.Popen

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        found.append(popen(*args, **kwargs))
        # By another thread, as a mask of the main one would let it.
        thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
        thread.start()
        thread.join()
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    yield found
    for process in found:
        process.kill()
        process.wait()


@pytest.mark.parametrize("make", [a_server, a_daemon])
def test_ctrl_c_while_a_process_starts_does_not_lose_it(
    tmp_path: Path, started: list[Any], make: Callable[[Path], AbstractContextManager[Any]]
) -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with pytest.raises(KeyboardInterrupt), make(tmp_path):
        raise AssertionError("it was not interrupted")
    assert len(started) == 1
    assert started[0].returncode is not None
    assert [signal.getsignal(number) for number in ENDING] == before


def test_unbroken_in_another_thread_does_nothing() -> None:
    found: list[int] = []

    def run() -> None:
        with unbroken():
            found.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [1]


# ---- HTTP --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx", b"no HTTP\r\n"]
)
def test_an_answer_that_breaks_off_is_an_oserror(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError, match=r"IncompleteRead|BadStatusLine"):
            get(f"http://127.0.0.1:{listening.getsockname()[1]}/metrics")
        thread.join()


def test_what_outlives_a_process_may_tidy_up(tmp_path: Path) -> None:
    done = tmp_path / "done"
    late = f"import time; time.sleep(0.5); open({str(done)!r}, 'w')"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {late!r}])"
    code += "; print('up', flush=True); time.sleep(60)"
    process = Process([sys.executable, "-c", code], tmp_path / "log")
    while "up" not in process.log.read_text().splitlines():
        assert process.exit_code is None
    process.stop()
    assert done.exists()


@pytest.mark.skipif(find_spec("lmcache") is not None, reason="its daemon would start")
def test_a_daemon_that_does_not_start_is_told_and_no_server_is_started(tmp_path: Path) -> None:
    sizes = Sizes(
        kv_bytes_per_token=1024,
        context_tokens=512,
        block_tokens=16,
        working_set_tokens=1,
        hbm_tokens=1024,
        bound_tokens=1024,
        dram_bytes=3 << 20,
        nvme_bytes=1 << 30,
        written_bytes=1,
    )
    given = lmcache.command(sizes.dram_bytes, tmp_path, 5, 6)
    assert given[given.index("--l1-size-gb") + 1] == str((3 << 20) / 1e9)
    assert str(tmp_path) in given[given.index("--l2-adapter") + 1]
    asked = VllmServer("no-model", [], tmp_path / "server.log")
    with (
        pytest.raises(ServerError, match=r"daemon did not start\n(.|\n)*No module named"),
        lmcache.with_daemon(asked, sizes, tmp_path, free_port()),
    ):
        pytest.fail("a server was started")
    assert not asked.log.exists()
