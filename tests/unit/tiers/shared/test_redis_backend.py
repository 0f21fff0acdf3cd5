# SPDX-License-Identifier: Apache-2.0
"""Redis's client where no Redis is: what a server does that takes a connection and ends it."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from attnstore_vllm.tiers.shared.backend import BackendError
from attnstore_vllm.tiers.shared.redis_backend import RedisBackend

AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: close sends a reset."""


class Ending:
    """Takes connections, and ends each at once."""

    def __init__(self) -> None:
        self.taken = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        while True:
            one, _ = self._listening.accept()
            if self.taken < 0:
                one.close()
                return
            self.taken += 1
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            one.close()

    def close(self) -> None:
        self.taken = -1
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join(timeout=5)
        self._listening.close()


@pytest.fixture
def ending() -> Iterator[Ending]:
    server = Ending()
    yield server
    server.close()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes on when its new connection has ended, as on a machine with much to do."""
    connect = socket.create_connection

    def connect_late(*args: Any) -> socket.socket:
        made = connect(*args)
        select.select([made], [], [], 5)
        return made

    monkeypatch.setattr(socket, "create_connection", connect_late)


@pytest.mark.usefixtures("late")
def test_a_connection_that_ends_before_the_password_is_not_made_again(ending: Ending) -> None:
    settings = {"url": f"redis://kv:secret@127.0.0.1:{ending.port}", "timeout_s": 1.0}
    backend = RedisBackend(settings)
    rounds = 20
    for _ in range(rounds):
        with pytest.raises(BackendError, match="Redis"):
            backend.exist(["a"])
    assert ending.taken == 1 + rounds
