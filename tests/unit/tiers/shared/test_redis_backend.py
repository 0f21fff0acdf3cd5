# SPDX-License-Identifier: Apache-2.0
"""Redis's client where no Redis is: what a server does that takes a connection and ends it."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from attnstore_vllm.tiers.shared import redis_backend
from attnstore_vllm.tiers.shared.backend import WORDS_MAX, BackendError
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


@pytest.fixture
def endless() -> Iterator[RedisBackend]:
    """A client of a server whose SCAN tells of one name after another, and never of an end. It also
    tells of a name that was not asked for, and answers no command with that one."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer_all() -> None:
        connection, _ = listening.accept()
        number = 0
        with connection, suppress(OSError):
            while asked := connection.recv(1 << 16):
                number += 1
                name = b"kv:%08d" % number
                found = b"*2\r\n$1\r\n1\r\n*2\r\n$5\r\nother\r\n$%d\r\n%s\r\n" % (len(name), name)
                connection.sendall(found if b"SCAN" in asked else b":1\r\n" * asked.count(b"kv:"))

    thread = threading.Thread(target=answer_all)
    thread.start()
    backend = RedisBackend(
        {"url": f"redis://127.0.0.1:{listening.getsockname()[1]}", "timeout_s": 5.0}
    )
    yield backend
    backend.close()
    thread.join(timeout=5)
    listening.close()


@pytest.mark.parametrize("what", ["count", "remove"])
def test_a_look_at_all_names_has_an_end(
    what: str, endless: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_backend, "SCAN_S", 0.2)
    began = time.monotonic()
    with pytest.raises(BackendError, match="has not told all of its names in"):
        getattr(endless, what)("kv:")
    assert time.monotonic() - began < 5


def test_names_that_are_counted_are_so_many_at_most(
    endless: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_backend, "NAMES_MAX", 50)
    with pytest.raises(BackendError, match="more than 50 names that begin so"):
        endless.count("kv:")


def test_one_answer_has_no_more_names_than_that(
    endless: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_backend, "NAMES_MAX", 1)
    with pytest.raises(BackendError, match="no answer"):
        endless.remove("kv:")


@pytest.mark.parametrize("text", ["\x1b" * 9999, "a\r\nb", "\u202e", "\udc80" * 600, "x" * 9999])
def test_what_an_error_quotes_is_printable_and_short(text: str) -> None:
    said = str(BackendError(f"Redis refuses: {text}"))
    assert said.startswith("Redis refuses: ")
    assert said.isprintable()
    assert said.encode()
    assert len(said) <= WORDS_MAX
