# SPDX-License-Identifier: Apache-2.0
"""A network between a client and a TCP server: it delays, stalls, and breaks connections."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from random import Random

PART_BYTES = 1 << 16
STALL_S = 0.2
"""TCP's least pause before it sends a lost packet again."""


class SlowNetwork:
    """Listens on 127.0.0.1:`port` and passes everything on, both ways.

    Attributes:
        delay_s: of each part of at most 64 KiB.
        loss: the share of parts that come STALL_S later, as a lost packet does.
        breaks: the share of parts in whose place the connection ends.
    """

    def __init__(self, target_port: int, seed: int = 1) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self.breaks = 0.0
        self._target_port = target_port
        self._random = Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)

    def well(self) -> None:
        self.delay_s = self.loss = self.breaks = 0.0

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @staticmethod
    def _start(act: object, *arguments: object) -> None:
        threading.Thread(target=act, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target_port), 5.0)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                self._start(self._pass_on, client, server)
                self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(PART_BYTES):
                if self._random.random() < self.breaks:
                    break
                lost = self._random.random() < self.loss
                time.sleep(self.delay_s + (STALL_S if lost else 0.0))
                target.sendall(part)
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
