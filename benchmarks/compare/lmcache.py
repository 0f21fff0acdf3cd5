# SPDX-License-Identifier: Apache-2.0
"""LMCache's daemon beside a server, as LMCache 0.5.6 has it (nothing of it is imported)."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from benchmarks.compare.sizes import CHUNK_TOKENS, Sizes
from benchmarks.server import Process, ServerError, VllmServer, free_port, unbroken

DEADLINE_S: Final = 120.0
GB: Final = 1e9
QUIET: Final = {"LMCACHE_TRACK_USAGE": "false"}


def command(sizes: Sizes, directory: Path, port: int, http_port: int) -> list[str]:
    """DRAM and chunks of the store's sizes; its files have no bound. Nothing is sent anywhere."""
    files = {"type": "fs", "base_path": str(directory / "kv")}
    size_gb = str(sizes.dram_bytes / GB)
    return [
        sys.executable, "-m", "lmcache.cli.main", "server",
        "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port),
        "--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", size_gb, "--no-l1-use-lazy",
        "--eviction-policy", "LRU", "--l2-adapter", json.dumps(files), "--disable-observability",
        "--supported-transfer-mode", "auto",  # vLLM's CPU build is served by one of the two alone
    ]  # fmt: skip


@contextmanager
def _daemon(sizes: Sizes, directory: Path, port: int, log: Path) -> Iterator[None]:
    (directory / "kv").mkdir()
    daemon: Process | None = None
    try:
        with unbroken():
            daemon = Process(command(sizes, directory, port, free_port()), log, QUIET)
        deadline = time.monotonic() + DEADLINE_S
        while not _listens(port):
            if daemon.exit_code is not None or time.monotonic() > deadline:
                raise ServerError(f"LMCache's daemon did not start\n{daemon.log_tail()}")
            time.sleep(0.2)
        yield
    finally:
        if daemon is not None:
            daemon.stop()


@contextmanager
def with_daemon(
    server: VllmServer, sizes: Sizes, directory: Path, port: int
) -> Iterator[VllmServer]:
    """The server, with a daemon that starts before it and ends after it."""
    log = server.log.with_name("lmcache-daemon.log")
    with _daemon(sizes, directory, port, log), server:
        yield server


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
