# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the child process: starts it, asks it with a deadline, and ends it.

A client of a network store may hang in a call that nothing cancels. Then the whole child is ended,
which takes milliseconds, and another one is started when the tier is tried again.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from attnstore_vllm.errors import DeviceError
from attnstore_vllm.tiers.shared.backend import backend_of
from attnstore_vllm.tiers.shared.lanes import (
    ERROR,
    NO_ANSWER,
    NOTHING,
    PACKET_MAX,
    LaneOp,
    Lanes,
    Turns,
    parse_numbers,
    request,
)

_CHILD = """
import os, sys
sys.path[:] = sys.argv.pop(1).split(os.pathsep)
from attnstore_vllm.tiers.shared.child import main
main(sys.argv[1:])
"""
"""The child's program. Python is isolated (-I): with -m or -c alone it would import what it finds
in the working directory, beside the password. -P says the same, and Python 3.10 does not know it.
"""
START_S = 10.0
"""A child that has not answered by then does not start."""
TEXT_MAX = 2048
"""Characters that are told of what the child has said."""
_KEPT_BYTES = 4 * TEXT_MAX
_END_S = 0.2
"""How long the end of a process that was ended is waited for."""


def _import_path() -> list[str]:
    """Where the child finds modules: as this process, but never in its working directory."""
    return [place for place in sys.path if os.path.isabs(place)]


class LateError(DeviceError):
    """The store did not answer. A child that waited for it beyond the deadline was ended."""


class Helper:
    """One child at a time. Each lane is used by one thread at a time; start() by the first lane's.

    Args:
        settings: see open_backend(), and `prefix` of all names.
    """

    def __init__(self, settings: Mapping[str, Any], lanes: Lanes) -> None:
        self.lanes = lanes
        self._settings = settings
        self._backend, options = backend_of(settings)
        self._secrets = self._backend.secrets(options)
        memory = os.memfd_create("attnstore-shared", os.MFD_CLOEXEC)
        os.ftruncate(memory, lanes.buffer_bytes)
        self._memory = memory
        self.buffer = memoryview(mmap.mmap(memory, lanes.buffer_bytes))
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._last_words: LastWords | None = None
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        self._turns = Turns()

    @property
    def is_running(self) -> bool:
        return bool(self._sockets)

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Start a child, if there is none. Raises DeviceError; LateError if it does not answer."""
        with self._lock:
            if self._is_closed:
                raise DeviceError("the shared tier is closed")
            if self._sockets:
                return
            pairs: list[tuple[socket.socket, socket.socket]] = []
            try:
                for _ in range(self.lanes.num_lanes):
                    pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            except OSError as error:
                for pair in pairs:
                    pair[0].close()
                    pair[1].close()
                raise DeviceError(f"the shared tier's process does not start: {error}") from error
            theirs = [there.fileno() for _, there in pairs]
            variables = self._backend.environment().items()
            command = ["env", *(f"{name}={value}" for name, value in variables)]
            command += [sys.executable, "-I", "-c", _CHILD, os.pathsep.join(_import_path())]
            command += map(str, (os.getpid(), self._memory, *theirs))
            try:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=(self._memory, *theirs),
                )
            except OSError as error:
                for ours, _ in pairs:
                    ours.close()
                raise DeviceError(f"the shared tier's process does not start: {error}") from error
            finally:
                for _, there in pairs:
                    there.close()
            assert self._child.stderr is not None
            self._last_words = LastWords(self._child.stderr, self._secrets)
            self._sockets = [ours for ours, _ in pairs]
        hello = {
            "settings": self._settings,
            "payload_bytes": self.lanes.payload_bytes,
            "num_places": self.lanes.num_places,
        }
        self._exchange(0, json.dumps(hello).encode(), 1.0, is_hello=True)
        self._exchange(0, request(LaneOp.HELLO, ()), START_S)

    def stop(self) -> None:
        """End the child at once. A thread that waits for it is told. From any thread."""
        with self._lock:
            child, self._child = self._child, None
            sockets, self._sockets = self._sockets, []
        for ours in sockets:
            with suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)  # wakes who waits in recv()
            ours.close()
        if child is not None:
            child.send_signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # in uninterruptible sleep: it ends some time
                child.wait(1.0)

    def _ended(self, why: str = "") -> DeviceError:
        said = str(self._last_words or "")
        said = f"; the last that it said:\n{said}" if said else ""
        return DeviceError(f"the shared tier's process has ended{why}{said}")

    def close(self) -> None:
        self._is_closed = True
        self.stop()

    # ---- questions ---------------------------------------------------------------------

    def numbers(
        self, lane: int, op: LaneOp, names: Sequence[bytes], deadline_s: float
    ) -> list[int]:
        """EXIST, GET, PUT, OVERWRITE and DELETE: a number for each name. Raises DeviceError."""
        answer = self._exchange(lane, request(op, names), deadline_s, op=op)
        self._turns.end(op, time.monotonic())
        if len(answer) != 1 + 4 * len(names):
            raise DeviceError("the shared tier's process answers with what is no answer")
        return parse_numbers(answer, len(names))

    def read(self, name: bytes, deadline_s: float) -> bytes | None:
        answer = self._exchange(0, request(LaneOp.READ, (name,)), deadline_s)
        return None if answer[:1] == NOTHING else answer[1:]

    def write(self, name: bytes, value: bytes, deadline_s: float, *, overwrite: bool) -> None:
        op = LaneOp.OVERWRITE_SMALL if overwrite else LaneOp.WRITE
        self._exchange(0, request(op, (name,), value), deadline_s)

    def _receive(self, ours: socket.socket, deadline_s: float, op: LaneOp) -> bytes:
        """The answer. Raises TimeoutError, OSError."""
        sent_at = time.monotonic()
        try:
            return ours.recv(PACKET_MAX)
        except TimeoutError:
            left = self._turns.left(op, sent_at, deadline_s, time.monotonic())
            if left <= 0:
                raise
            ours.settimeout(left)
            return ours.recv(PACKET_MAX)

    def _exchange(
        self,
        lane: int,
        packet: bytes,
        deadline_s: float,
        *,
        is_hello: bool = False,
        op: LaneOp = LaneOp.HELLO,
    ) -> bytes:
        try:
            ours = self._sockets[lane]
        except IndexError:
            raise self._ended() from None
        try:
            ours.settimeout(deadline_s or None)
            ours.send(packet)
            if is_hello:
                return b""
            answer = self._receive(ours, deadline_s, op)
        except TimeoutError:
            self.stop()
            raise LateError(f"the shared tier has not answered for {deadline_s:.2f} s") from None
        except OSError as error:
            self.stop()
            raise self._ended(f": {error}") from error
        if not answer:
            self.stop()
            raise self._ended()
        if answer[:1] == NO_ANSWER:
            raise LateError(answer[1:].decode(errors="replace"))
        if answer[:1] == ERROR:
            raise DeviceError(answer[1:].decode(errors="replace"))
        return answer


class LastWords:
    """The end of what the child has written to its standard error, for the log. Reads the stream
    until the process has ended, and keeps little of it.

    Args:
        secrets: are not told.
    """

    def __init__(self, stream: IO[bytes], secrets: Collection[str]) -> None:
        self._stream = stream
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._kept = b""
        self._thread = threading.Thread(target=self._run, name="attnstore-shared-said", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._stream:
            while some := self._stream.read(4096):
                self._kept = (self._kept + some)[-_KEPT_BYTES:]

    def __str__(self) -> str:
        """Empty if it has said nothing."""
        self._thread.join(_END_S)
        text = self._kept.decode(errors="replace").strip()
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text[-TEXT_MAX:]
