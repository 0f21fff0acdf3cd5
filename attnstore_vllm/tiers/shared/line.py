# SPDX-License-Identifier: Apache-2.0
"""Whether a server is there, by a connection to it that says nothing: it ends when the server does.

For a client that hangs where its server is dead. Mooncake's tries again for longer than any request
may wait, from the second call on.
"""

from __future__ import annotations

import socket

from attnstore_vllm.tiers.shared.backend import BackendError, NoAnswerError

CONNECT_S = 0.1
_KEEPALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 2),
)
"""A machine that is gone is seen after 3 s, and not at once like a process."""


class Line:
    """One connection, used by one thread.

    Args:
        what: the server, for errors.
        address: its host:port.
    """

    def __init__(self, what: str, address: str) -> None:
        self._what = f"{what} at {address}"
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._socket: socket.socket | None = None

    def check(self) -> None:
        """Cost: 2 us if it is there. Raises BackendError; NoAnswerError if nobody says no."""
        if self._is_up():
            return
        self.close()
        try:
            self._socket = socket.create_connection(self._address, CONNECT_S)
            self._socket.setblocking(False)
            for option, value in _KEEPALIVE:
                self._socket.setsockopt(*option, value)
        except TimeoutError:
            raise NoAnswerError(f"{self._what} takes no connection within {CONNECT_S} s") from None
        except (OSError, ValueError, OverflowError) as error:  # the last two: no such address
            raise BackendError(f"{self._what} is not there: {error}") from error

    def _is_up(self) -> bool:
        if self._socket is None:
            return False
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:  # nothing was said, and nothing has ended
            return True
        except OSError:
            return False

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
