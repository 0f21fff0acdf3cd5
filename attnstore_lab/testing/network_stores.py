# SPDX-License-Identifier: Apache-2.0
"""Real network stores, each of its own processes on 127.0.0.1, for tests and benchmarks."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_S = 15.0
SEGMENT = """
import sys, time
import mooncake.store
store = mooncake.store.MooncakeDistributedStore()
size, master = int(sys.argv[1]), sys.argv[2]
assert store.setup("127.0.0.1", "P2PHANDSHAKE", size, 16 << 20, "tcp", "", master) == 0
print("ready", flush=True)
sys.stdin.read()
"""
KINDS = ("redis", "mooncake")


def missing(kind: str) -> str | None:
    """Why tests of this store are skipped."""
    if kind == "redis":
        return None if shutil.which("redis-server") else "there is no redis-server"
    found = importlib.util.find_spec("mooncake")
    if found is None:
        return "pip install attnstore-vllm[mooncake]"
    probe = [sys.executable, "-I", "-c", "import mooncake.store"]
    if subprocess.run(probe, check=False, capture_output=True, timeout=60).returncode:
        return "mooncake.store cannot be loaded (libibverbs1, libnl-3-200, libnl-route-3-200)"
    return None


def no_tls() -> str | None:
    """Why tests of Redis over TLS are skipped."""
    programs = [name for name in ("redis-server", "openssl") if not shutil.which(name)]
    if programs:
        return f"there is no {programs[0]}"
    # Without a certificate it does not start; one that was built without TLS knows no such setting.
    command = ["redis-server", "--port", "0", "--tls-port", str(free_port())]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return None if "tls-cert-file" in done.stdout else "this redis-server has no TLS"


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class NetworkStore:
    """One store. `settings` is what a client takes.

    Args:
        memory: of all of it, in bytes.
        owners: of Mooncake: processes that hold a part of the memory each.
        tls: of Redis: settings of its certificate. Then it speaks TLS alone.
    """

    def __init__(
        self,
        kind: str,
        *arguments: str,
        url: str = "",
        memory: int = 64 << 20,
        owners: int = 1,
        tls: Sequence[str] = (),
    ) -> None:
        self.kind = kind
        self.port = free_port()
        at = ["--port", "0", "--tls-port"] if tls else ["--port"]
        self._arguments = [*at, str(self.port), *tls, *arguments] if kind == "redis" else arguments
        self._memory = memory
        self._owners = owners
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start()
        if kind == "redis":
            where = url or "redis://127.0.0.1"
            self.settings: dict[str, Any] = {
                "prefix": "as1/",
                "redis": {"url": f"{where}:{self.port}", "timeout_s": 3.0},
            }
        else:
            self.settings = {"prefix": "as1/", "mooncake": {"master": f"127.0.0.1:{self.port}"}}

    def start(self) -> None:
        if self.kind == "redis":
            self._run(
                "redis-server", "--bind", "127.0.0.1", "--save", "",
                "--maxmemory", str(self._memory), *self._arguments,
            )  # fmt: skip
        else:
            spec = importlib.util.find_spec("mooncake")
            assert spec is not None and spec.origin is not None
            master = str(Path(spec.origin).parent / "mooncake_master")
            self._run(
                master, f"--rpc_port={self.port}", "--rpc_address=127.0.0.1",
                f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1", "--logtostderr",
                *self._arguments,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                break
            except OSError:
                assert time.monotonic() < deadline, f"{self.kind} does not start"
                time.sleep(0.02)
        if self.kind == "mooncake":
            for _ in range(self._owners):
                self.start_owner()

    def start_owner(self) -> None:
        """One more of Mooncake's: with its part of the memory, and empty."""
        address = f"127.0.0.1:{self.port}"
        self._run(sys.executable, "-I", "-c", SEGMENT, str(self._memory // self._owners), address)
        owner = self.processes[-1]
        assert owner.stdout is not None
        assert owner.stdout.readline().strip(), "the segment's owner does not start"

    def kill_owner(self) -> None:
        """The youngest one of Mooncake's."""
        owner = self.processes.pop()
        owner.kill()
        _reap(owner)

    def _run(self, *command: str) -> None:
        is_owner = command[0] == sys.executable
        self.processes.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if is_owner else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def signal(self, which: signal.Signals) -> None:
        """All processes of it."""
        for process in self.processes:
            process.send_signal(which)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            _reap(process)
        self.processes.clear()


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
