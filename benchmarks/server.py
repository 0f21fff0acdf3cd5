# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` as a child process. vLLM is not imported: it is run.

The server runs in a session of its own, so that stopping it takes its workers with it and
touches nothing else. Its output goes to a log file; when it dies, the end of it is shown.
Should this program be killed, the kernel sends the server SIGTERM, and vLLM ends its workers.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final

from attnstore_vllm.errors import AttnStoreError
from attnstore_vllm.prometheus import Metrics, parse_metrics

START_DEADLINE_S: Final = 900.0
STOP_DEADLINE_S: Final = 30.0
GROUP_DEADLINE_S: Final = 5.0
"""For what a program leaves behind it: Python's resource tracker removes its shared memory then."""
POLL_S: Final = 0.5
HTTP_TIMEOUT_S: Final = 10.0
LOG_TAIL_LINES: Final = 40
NO_AUDIT: Final = "audit: off\n"
"""In settings of benchmarks that count or time hits: none is drawn to be computed, and a start
serves what it finds at once."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a program: Ctrl-C, kill, a closed terminal."""
ENDS_WITH_PARENT: Final = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; exec keeps it
if os.getppid() == int(sys.argv[1]):  # else it has died already
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""A program that becomes another one. (Popen's preexec_fn is not safe beside threads.)"""


class ServerError(AttnStoreError):
    """The server did not start, or died. The message ends with the end of its log."""


@contextmanager
def unbroken() -> Iterator[None]:
    """What would end this program comes when the block is left: no process is lost in it.

    A signal mask would not do: another thread takes the signal, and its handler runs in this one.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in that one
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDING}
    # The others are ignored, or end us without our help.
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


class Process:
    """A program with a log file, in a session of its own.

    It gets SIGTERM when the thread that made this ends, however that ends. To be made in
    `unbroken`, or a signal could lose it.

    Args:
        environment: is added to this process's own.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        added = [f"{name}={value}" for name, value in (environment or {}).items()]
        first = [sys.executable, "-ISc", ENDS_WITH_PARENT, str(os.getpid())]
        with log.open("wb") as output:
            output.write((" ".join(command) + "\n").encode())
            output.flush()
            self._process = subprocess.Popen(
                [*first, "env", *added, *command],  # each becomes the next: the pid is the same
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End it and everything it started: first politely, then not. Again does nothing."""
        process = self._process
        if process.returncode is not None and not _group_lives(process.pid):
            return
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_DEADLINE_S)
            if process.returncode is not None:
                _wait_for_group(process.pid)
        finally:  # also if somebody did not want to wait and pressed Ctrl-C
            with suppress(ProcessLookupError):  # its workers, should any have outlived it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def kill(self) -> None:
        """End it at once, with what it started: for a program that hangs. From any thread."""
        if self._process.returncode is None:  # not reaped yet: its number is nobody else's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- the end of {self.log} ---", *lines])


class VllmServer:
    """`vllm serve MODEL ARGUMENTS` on a free port of 127.0.0.1, as a context manager.

    Entering starts it and waits until it is healthy; leaving stops it.
    `environment` is added to this process's own.
    """

    def __init__(
        self,
        model: str,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        self.model = model
        self.log = log
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self._start_deadline_s = start_deadline_s
        self._process: Process | None = None

    def __enter__(self) -> VllmServer:
        command = [
            *vllm_command(),
            "serve",
            self.model,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *self._arguments,
        ]
        environment = quiet_cpu_environment() | self._environment
        with ExitStack() as undo:
            undo.callback(self.stop)
            with unbroken():
                self._process = Process(command, self.log, environment)
            self._wait_until_healthy(self._process)
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def stop(self) -> None:
        """End the server and everything it started: first politely, then not."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        """End a server that hangs, at once. From any thread; stop() is still to be called."""
        if (process := self._process) is not None:
            process.kill()

    def metrics(self) -> Metrics:
        """Read /metrics. Raises: ServerError if the server does not answer."""
        try:
            return read_metrics(self.base_url)
        except OSError as error:
            raise ServerError(f"no answer from /metrics: {error}\n{self.log_tail()}") from error

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- the end of {self.log} ---", *lines])

    def _wait_until_healthy(self, process: Process) -> None:
        deadline = time.monotonic() + self._start_deadline_s
        while time.monotonic() < deadline:
            if (code := process.exit_code) is not None:
                raise ServerError(f"vllm serve ended with exit code {code}\n{self.log_tail()}")
            try:
                get(f"{self.base_url}/health")
                return
            except OSError:
                time.sleep(POLL_S)
        raise ServerError(
            f"vllm serve is not healthy after {self._start_deadline_s:.0f} s\n{self.log_tail()}"
        )


def read_metrics(base_url: str) -> Metrics:
    """Read /metrics of any server. Raises: OSError if it does not answer."""
    return parse_metrics(get(f"{base_url}/metrics"))


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def vllm_command() -> list[str]:
    """The `vllm` of this very interpreter's environment, whatever PATH says."""
    program = Path(sys.executable).with_name("vllm")
    if program.exists():
        return [str(program)]
    if find_spec("vllm") is None:
        raise ServerError(f"there is no {program}; install vLLM beside this Python")
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]  # it is on PYTHONPATH


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed beside this Python is its build for CPUs."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return False


def quiet_cpu_environment() -> dict[str, str]:
    """No downloads, no telemetry, and on the CPU build one thread a core that we may use."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def get(url: str) -> str:
    """Raises: OSError (URLError and HTTPError are ones) unless the answer is 200, and whole."""
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
            if answer.status != 200:
                raise urllib.error.URLError(f"{url} answered {answer.status}")
            text: str = answer.read().decode()
            return text
    except http.client.HTTPException as error:  # as of a server that dies while it answers
        raise urllib.error.URLError(f"{url}: {error!r}") from error


def _group_lives(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wait_for_group(pid: int) -> None:
    deadline = time.monotonic() + GROUP_DEADLINE_S
    while _group_lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
