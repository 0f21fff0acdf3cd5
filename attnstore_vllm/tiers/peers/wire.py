# SPDX-License-Identifier: Apache-2.0
"""Messages between engines of one host, over a Unix socket that only their user may open. Each end
looks at the other's user, and who connects at the socket's: in a user namespace others may seem to
be this one (own_files.py).

    frame    length u32 | kind u8 | number u64 | fields: each length u32 | bytes

A socket's path may be 107 bytes long, and a store's may be longer: so sockets are named by way of
their directory's descriptor. No call waits: what a peer does not read piles up to a limit, and then
the connection ends.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from attnstore_vllm.errors import AttnStoreError
from attnstore_vllm.own_files import is_ours, owner_of

SOCKET_NAME = "peers.sock"
FRAME_MAX = 8 << 20
PENDING_MAX = 16 << 20
"""Bytes that a peer has not read yet, at most."""
FDS_MAX = 64
_HEAD = struct.Struct("<IBQ")
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")


class MessageKind(IntEnum):
    HELLO = 1  # what the asker is
    WELCOME = 2  # the pool, with its descriptors
    FIND = 3  # which of these chunks have you?
    FOUND = 4
    GET = 5  # hold these chunks, and say where they are
    PIECES = 6  # where some of them are
    RELEASE = 7  # what a GET holds


class WireError(AttnStoreError):
    """The peer has gone, or is none of ours."""


class Message(NamedTuple):
    kind: int
    number: int
    fields: list[bytes]


def _frame(kind: MessageKind, number: int, fields: Sequence[bytes]) -> bytes:
    body = b"".join(part for field in fields for part in (_LENGTH.pack(len(field)), field))
    return _HEAD.pack(len(body), kind, number) + body


class Wire:
    """One connection, used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            connection.close()
            raise WireError(f"the other end is of user {uid}")
        self.socket = connection
        self.fds: list[int] = []
        """Descriptors that have come."""
        self._in, self._out = bytearray(), bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_output(self) -> bool:
        return bool(self._out)

    def send(
        self, kind: MessageKind, number: int, fields: Sequence[bytes] = (), fds: Sequence[int] = ()
    ) -> None:
        """Raises: WireError."""
        frame = _frame(kind, number, fields)
        if len(frame) > FRAME_MAX or len(self._out) + len(frame) > PENDING_MAX:
            raise WireError("the other end does not read")
        if fds:
            assert not self._out
            try:
                sent = socket.send_fds(self.socket, [frame], list(fds))
            except OSError as error:
                raise WireError(str(error)) from error
            frame = frame[sent:]
        self._out += frame
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now. Raises: WireError."""
        try:
            while self._out:
                with memoryview(self._out) as view:
                    sent = self.socket.send(view)
                del self._out[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            raise WireError(str(error)) from error

    def receive(self) -> Iterator[Message]:
        """Messages that have come. Raises: WireError at the end, and for what is no frame."""
        is_over = False
        try:
            while not is_over and len(self._in) <= FRAME_MAX:
                data, fds, _, _ = socket.recv_fds(self.socket, _READ_BYTES, FDS_MAX)
                self.fds += fds
                self._in += data
                is_over = not data
        except BlockingIOError:
            pass
        except OSError as error:
            raise WireError(str(error)) from error
        while (message := self._next()) is not None:
            yield message
        if is_over:
            raise WireError("the other end has gone")

    def _next(self) -> Message | None:
        if len(self._in) < _HEAD.size:
            return None
        length, kind, number = _HEAD.unpack_from(self._in)
        if length > FRAME_MAX:
            raise WireError(f"a frame of {length} bytes")
        end = _HEAD.size + length
        if len(self._in) < end:
            return None
        body = bytes(self._in[_HEAD.size : end])
        del self._in[:end]
        fields, at = list[bytes](), 0
        while at < length:
            if at + _LENGTH.size > length:
                raise WireError("a torn frame")
            (size,) = _LENGTH.unpack_from(body, at)
            at += _LENGTH.size
            if at + size > length:
                raise WireError("a torn frame")
            fields.append(body[at : at + size])
            at += size
        return Message(kind, number, fields)

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


@contextmanager
def _address(directory: Path) -> Iterator[str]:
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)


def listen(directory: Path) -> socket.socket:
    """The socket of the engine that owns the directory, whose lock the caller holds.

    Raises: OSError.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(directory) as address:
            path = Path(address)
            if path.is_socket() or path.is_symlink():  # of a run that was killed
                path.unlink()
            before = os.umask(0o177)
            try:
                listening.bind(address)
            finally:
                os.umask(before)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        listening.listen(64)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def connect(directory: Path) -> Wire | None:
    """None if nothing listens there now. Raises: WireError if it is another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        with _address(directory) as address:
            fd = os.open(address, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not is_ours(fd, found):
                raise WireError(f"its socket is of {owner_of(found)}")
            connection.connect(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
    except WireError:
        connection.close()
        raise
    except OSError:  # also: its queue of connections is full
        connection.close()
        return None
    return Wire(connection)
