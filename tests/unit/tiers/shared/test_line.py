# SPDX-License-Identifier: Apache-2.0
"""A silent connection that shows whether a server is there."""

from __future__ import annotations

import socket
import time

import pytest

from attnstore_vllm.tiers.shared.backend import BackendError, NoAnswerError
from attnstore_vllm.tiers.shared.mooncake_backend import CONNECT_S, Line


def listening(port: int = 0, backlog: int = 8) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    made.listen(backlog)
    return made


def test_a_server_that_ends_and_comes_back() -> None:
    server = listening()
    port = server.getsockname()[1]
    line = Line("a store", f"127.0.0.1:{port}")
    line.check()
    accepted, _ = server.accept()
    began = time.monotonic()
    for _ in range(50):
        line.check()
    assert time.monotonic() - began < CONNECT_S, "it waits for nothing"
    accepted.close()
    server.close()
    with pytest.raises(BackendError, match=rf"a store at 127\.0\.0\.1:{port} is not there"):
        line.check()
    server = listening(port)
    line.check()
    accepted, _ = server.accept()
    accepted.close()  # one that closes idle connections is there all the same
    line.check()
    line.close()
    server.close()


def test_a_server_that_takes_no_connection() -> None:
    server = listening(backlog=0)
    address = server.getsockname()
    waiting = socket.create_connection(address)  # the one that its queue has room for
    line = Line("a store", f"127.0.0.1:{address[1]}")
    with pytest.raises(NoAnswerError, match="takes no connection"):
        line.check()
    waiting.close()
    server.close()
