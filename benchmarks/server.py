# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` as a child process, for benchmarks.

The server runs in a session of its own, so that stopping it takes its workers with it and
touches nothing else. Its output goes to a log file; when it dies, the end of it is shown.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

START_DEADLINE_S: Final = 300.0
STOP_DEADLINE_S: Final = 30.0
POLL_S: Final = 0.5
HTTP_TIMEOUT_S: Final = 10.0
LOG_TAIL_LINES: Final = 40

Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Samples of /metrics: (name, labels) to value."""

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class ServerError(Exception):
    """The server did not start, or died. The message ends with the end of its log."""


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
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "VllmServer":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            vllm_program(), "serve", self.model,
            "--host", "127.0.0.1", "--port", str(self.port), *self._arguments,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **quiet_cpu_environment(), **self._environment},
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
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
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_DEADLINE_S)
        with suppress(ProcessLookupError):  # its workers, should any have outlived it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def metrics(self) -> Metrics:
        """Read /metrics. Raises: ServerError if the server does not answer."""
        try:
            return parse_metrics(_get(f"{self.base_url}/metrics"))
        except OSError as error:
            raise ServerError(f"no answer from /metrics: {error}\n{self.log_tail()}") from error

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- the end of {self.log} ---", *lines])

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_deadline_s
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise ServerError(f"vllm serve ended with exit code {code}\n{self.log_tail()}")
            try:
                _get(f"{self.base_url}/health")
                return
            except OSError:
                time.sleep(POLL_S)
        raise ServerError(
            f"vllm serve is not healthy after {self._start_deadline_s:.0f} s\n{self.log_tail()}"
        )


def read_metrics(base_url: str) -> Metrics:
    """Read /metrics of any server. Raises: OSError if it does not answer."""
    return parse_metrics(_get(f"{base_url}/metrics"))


def parse_metrics(text: str) -> Metrics:
    """Parse the Prometheus text format. Lines that are no samples are left out."""
    metrics: Metrics = {}
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SAMPLE.fullmatch(line)):
            name, labels, value = match.groups()
            metrics[name, frozenset(_LABEL.findall(labels or ""))] = float(value)
    return metrics


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Sum the samples of that name which have at least these labels; 0 if there is none."""
    wanted = set(labels.items())
    return sum(v for (n, found), v in metrics.items() if n == name and wanted <= found)


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def vllm_program() -> str:
    """The `vllm` of this very interpreter's environment, whatever PATH says."""
    program = Path(sys.executable).with_name("vllm")
    if not program.exists():
        raise ServerError(f"there is no {program}; install vLLM beside this Python")
    return str(program)


def quiet_cpu_environment() -> dict[str, str]:
    """No downloads, no telemetry, and on the CPU build one thread a core that we may use."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def _get(url: str) -> str:
    """Raises: OSError (URLError and HTTPError are ones) unless the answer is 200."""
    with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
        if answer.status != 200:
            raise urllib.error.URLError(f"{url} answered {answer.status}")
        text: str = answer.read().decode()
        return text
