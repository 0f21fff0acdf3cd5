# SPDX-License-Identifier: Apache-2.0
"""The connector over a disk that goes bad on demand, while the server runs.

    {"kv_connector": "OnFaultyDisk", "kv_connector_module_path": "tests.vllm.faulty_disk", ...}

The file that FAULTS_FILE names says what is wrong with the disk, as JSON, and is read again when
it changes: {"effect": "EIO" or "ENOSPC" or "hang", "every": n, "ops": ["read", "write"], "hang_s":
seconds}. A hanging request is carried out, and said to be done `hang_s` later.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from attnstore_vllm.connector import AttnStoreConnector
from attnstore_vllm.connector import build as built_by
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.io import choose
from attnstore_vllm.io.device import Completion, Device, IoRequest
from attnstore_vllm.tiers.nvme import node_disk

FAULTS_FILE = "ATTNSTORE_TEST_FAULTS"


class FaultyDisk:
    """Wraps a device. Hanging requests are cancelled by nothing, as with a real one."""

    def __init__(self, inner: Device, file: Path) -> None:
        self._inner = inner
        self._file = file
        self._lock = threading.Lock()
        self._seen = 0
        self._hanging: dict[int, float] = {}  # tag -> seconds
        self._ended: list[tuple[float, Completion]] = []  # (when it may be told, what)
        self._stamp = -1
        self._fault: dict[str, Any] = {}

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def submit(self, requests: Sequence[IoRequest]) -> None:
        forwarded = []
        with self._lock:
            self._read_file()
            for request in requests:
                effect = self._effect(request)
                if effect in ("EIO", "ENOSPC"):
                    why = os.strerror(getattr(errno, effect))
                    text = f"injected at byte {request.offset}: {why}"
                    error = DeviceError(text, getattr(errno, effect))
                    self._ended.append((0.0, Completion(request.tag, error)))
                    continue
                if effect == "hang":
                    self._hanging[request.tag] = self._fault["hang_s"]
                forwarded.append(request)
        self._inner.submit(forwarded)
        self._inner.wake()

    def _read_file(self) -> None:
        stamp = self._file.stat().st_mtime_ns
        if stamp != self._stamp:
            self._stamp, self._fault, self._seen = stamp, json.loads(self._file.read_text()), 0

    def _effect(self, request: IoRequest) -> str | None:
        if request.op.value not in self._fault.get("ops", ()):
            return None
        self._seen += 1
        return self._fault["effect"] if self._seen % self._fault["every"] == 0 else None

    def cancel(self, tags: Collection[int]) -> None:
        with self._lock:
            self._inner.cancel([tag for tag in tags if tag not in self._hanging])

    def poll(self, timeout_s: float) -> list[Completion]:
        now = time.monotonic()
        with self._lock:
            next_s = min((when for when, _ in self._ended), default=now + timeout_s) - now
        for completion in self._inner.poll(max(0.0, min(timeout_s, next_s))):
            with self._lock:
                hang_s = self._hanging.pop(completion.tag, None)
                when = 0.0 if hang_s is None else time.monotonic() + hang_s
                self._ended.append((when, completion))
        now = time.monotonic()
        with self._lock:
            due = [completion for when, completion in self._ended if when <= now]
            self._ended = [(when, c) for when, c in self._ended if when > now]
        return due

    def wake(self) -> None:
        self._inner.wake()

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s) and not self._ended


def open_faulty(*arguments: Any) -> tuple[Device, str]:
    device, kind = choose.open_device(*arguments)
    return FaultyDisk(device, Path(os.environ[FAULTS_FILE])), f"faulty {kind}"


if FAULTS_FILE in os.environ:  # the tests' own process imports this too, for the names above
    for opens in (built_by, node_disk):
        setattr(opens, "open_device", open_faulty)  # noqa: B010


class OnFaultyDisk(AttnStoreConnector):
    """Importing this module has made the disk faulty."""
