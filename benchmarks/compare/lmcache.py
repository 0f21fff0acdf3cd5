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


def command(dram_bytes: int, directory: Path, port: int, http_port: int) -> list[str]:
    """Chunks of the store's size; its files have no bound. Nothing is sent anywhere."""
    files = {"type": "fs", "base_path": str(directory / "kv")}
    size_gb = str(dram_bytes / GB)
    return [
        sys.executable, "-m", "lmcache.cli.main", "server",
        "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port),
        "--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", size_gb, "--no-l1-use-lazy",
        "--eviction-policy", "LRU", "--l2-adapter", json.dumps(files), "--disable-observability",
        "--supported-transfer-mode", "auto",  # vLLM's CPU build is served by one of the two alone
    ]  # fmt: skip


@contextmanager
def daemon(dram_bytes: int, directory: Path, port: int, log: Path) -> Iterator[None]:
    """A daemon over the files of a directory, which may have some from an earlier one.

    Raises: ServerError if it does not start.
    """
    (directory / "kv").mkdir(exist_ok=True)
    process: Process | None = None
    try:
        with unbroken():
            process = Process(command(dram_bytes, directory, port, free_port()), log, QUIET)
        deadline = time.monotonic() + DEADLINE_S
        while not _listens(port):
            if process.exit_code is not None or time.monotonic() > deadline:
                raise ServerError(f"LMCache's daemon did not start\n{process.log_tail()}")
            time.sleep(0.2)
        yield
    finally:
        if process is not None:
            process.stop()


@contextmanager
def with_daemon(
    server: VllmServer, sizes: Sizes, directory: Path, port: int
) -> Iterator[VllmServer]:
    """The server, with a daemon that starts before it and ends after it."""
    log = server.log.with_name("lmcache-daemon.log")
    with daemon(sizes.dram_bytes, directory, port, log), server:
        yield server


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
