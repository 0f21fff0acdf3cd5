# SPDX-License-Identifier: Apache-2.0
"""The child process that owns the client of a network store; helper.py starts it.

A process of its own, since such a client brings threads, logs and calls that cannot be cancelled.
It trusts its engine, and no engine trusts it: what it has put into the bounce buffer is verified
after it was copied out. It ends with its engine, at any moment.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import Any

from attnstore_vllm.tiers.shared.backend import Backend, BackendError, NoAnswerError, open_backend
from attnstore_vllm.tiers.shared.lanes import (
    ERROR,
    NO_ANSWER,
    NOTHING,
    OK,
    PACKET_MAX,
    SMALL_MAX,
    LaneOp,
    Lanes,
    numbers,
    parse_request,
)

_PR_SET_PDEATHSIG = 1


class Lane:
    """One thread, and one socket of the engine's."""

    def __init__(
        self,
        number: int,
        given: socket.socket,
        lanes: Lanes,
        buffer: memoryview | None,
        settings: dict[str, Any],
        shared: dict[str, Any],
    ) -> None:
        self._number = number
        self._socket = given
        self._lanes = lanes
        self._buffer = buffer
        self._settings = settings
        self._shared = shared
        self._backend: Backend | None = None

    def open(self) -> None:
        """Make what the first question would wait for. A store that cannot be reached is told
        then."""
        with suppress(BackendError):
            self._backend = self._open()

    def run(self) -> None:
        try:
            while packet := self._socket.recv(PACKET_MAX):
                self._socket.send(self._answer(packet))
        finally:
            os._exit(0)  # the engine is gone, or this process is of no more use

    def _answer(self, packet: bytes) -> bytes:
        try:
            if self._backend is None:  # it failed at the start
                self._backend = self._open()
            return self.do(self._backend, *parse_request(packet))
        except BackendError as error:
            kind = NO_ANSWER if isinstance(error, NoAnswerError) else ERROR
            return kind + str(error).encode()[: PACKET_MAX - 1]

    def _open(self) -> Backend:
        with self._shared["lock"]:
            return open_backend(self._settings, self._buffer, self._shared)

    def do(self, backend: Backend, op: LaneOp, raw: list[bytes], value: bytes) -> bytes:
        """The answer to a request. Raises BackendError."""
        names = [self._settings["prefix"] + name.hex() for name in raw]
        if op is LaneOp.HELLO:
            return OK
        if op is LaneOp.EXIST:
            return numbers([int(found) for found in backend.exist(names)])
        if op is LaneOp.DELETE:
            return numbers(backend.delete(names))
        if op is LaneOp.READ:
            found = backend.read(names[0], SMALL_MAX)
            return NOTHING if found is None else OK + found
        if op in (LaneOp.WRITE, LaneOp.OVERWRITE_SMALL):
            backend.write(names[0], value, overwrite=op is LaneOp.OVERWRITE_SMALL)
            return OK
        assert self._buffer is not None
        places = [
            self._lanes.place(self._buffer, self._number, number) for number in range(len(names))
        ]
        # Two transfers at once share a network and a store's cores: both end later than in turn.
        if op is LaneOp.GET:
            with self._shared["getting"]:
                return numbers(backend.get(names, places))
        with self._shared["putting"]:
            return numbers(backend.put(names, places, overwrite=op is LaneOp.OVERWRITE))


def locks() -> dict[str, Any]:
    """The locks that all lanes share."""
    return {name: threading.Lock() for name in ("lock", "getting", "putting")}


def main(arguments: list[str]) -> None:
    """Args: the engine's process id, the memory's file descriptor, those of the sockets."""
    engine, memory, *fds = map(int, arguments)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != engine:
        return  # it ended before we asked to end with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the engine, which ends us
    with suppress(OSError):  # a worker's own may be one processor
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    sockets = [socket.socket(fileno=fd) for fd in fds]
    hello = json.loads(sockets[0].recv(PACKET_MAX))
    lanes = Lanes(hello["payload_bytes"], len(fds), hello["num_places"])
    buffer = memoryview(mmap.mmap(memory, lanes.buffer_bytes))
    shared = locks()
    made = [
        Lane(number, given, lanes, buffer, hello["settings"], shared)
        for number, given in enumerate(sockets)
    ]
    for lane in made:
        lane.open()
    for lane in made[1:]:
        threading.Thread(target=lane.run, daemon=True).start()
    made[0].run()
