# SPDX-License-Identifier: Apache-2.0
"""Redis, or Valkey, by a small client of our own.

redis-py copies each value several times, which takes three times as long, and retries behind its
caller's back: a stopped server cost 26 s with a timeout of 2 s. What is needed of the protocol
(RESP 2) is a few commands, and values that are received where they are to lie.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from attnstore_vllm.tiers.shared.backend import FAILED, MISSING, WRONG_SIZE, Backend, BackendError

LINE_MAX = 64 << 10
DEFAULT_PORT = 6379
SCAN_NAMES = 1000
"""Names that Redis looks at for one SCAN, in which no other client is served."""
SCAN_S = 3600.0
"""A look at all names is given up after so long: a server could tell of more without end ..."""
NAMES_MAX = 1 << 22
"""... and where so many begin alike, which are counted here, and at so many in one answer."""
NAME_MORE = 512
"""A name of ours is no longer than what it begins with, and so much."""
DRAIN_MAX = 1 << 30
"""A value of another size is read away, up to this."""


class RedisBackend(Backend):
    """One connection. Any failure closes it; the next call makes another.

    Args:
        settings: url, timeout_s; password, ca, cert, key where they are given.
    """

    @classmethod
    def secrets(cls, options: Mapping[str, Any]) -> Collection[str]:
        in_url = urlsplit(options.get("url", "")).password or ""
        return {options.get("password", ""), in_url, unquote(in_url)}

    def __init__(self, settings: Mapping[str, Any], *_: object) -> None:
        self._url = urlsplit(settings["url"])
        self._settings = settings
        self._timeout_s = float(settings["timeout_s"])
        self._socket: socket.socket | None = None
        self._buffer = bytearray(LINE_MAX)
        self._start = self._end = 0
        self._deadline = time.monotonic() + self._timeout_s
        try:
            self._connect()
        except (OSError, BackendError):
            self.close()  # the first command tries again, and says why

    # ---- commands ----------------------------------------------------------------------

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._send([_command("EXISTS", name) for name in names])
        return [self._integer() == 1 for _ in names]

    def get(self, names: Sequence[str], places: Sequence[memoryview]) -> list[int]:
        self._send([_command("GET", name) for name in names])
        return [self._receive(place) for place in places]

    def put(
        self, names: Sequence[str], values: Sequence[memoryview], *, overwrite: bool
    ) -> list[int]:
        results = []
        for name, value in zip(names, values, strict=True):
            head = _command("SET", name)[4:]  # of three parts instead of two
            self._send([b"*3\r\n" + head + b"$%d\r\n" % len(value), value, b"\r\n"])
            results.append(0 if self._reply()[0] == "+" else FAILED)
        return results

    def delete(self, names: Sequence[str]) -> list[int]:
        self._send([_command("UNLINK", name) for name in names])
        replies = [self._reply() for _ in names]
        return [0 if kind == ":" else FAILED for kind, _ in replies]

    def read(self, name: str, at_most: int) -> bytes | None:
        self._send([_command("GET", name)])
        place = memoryview(bytearray(at_most))
        size = self._receive(place, exact=False)
        return bytes(place[:size]) if size >= 0 else None

    def write(self, name: str, value: bytes, *, overwrite: bool) -> None:
        words = b"*3\r\n" if overwrite else b"*4\r\n"
        head = words + _command("SET", name)[4:] + b"$%d\r\n%s\r\n" % (len(value), value)
        self._send([head if overwrite else head + b"$2\r\nNX\r\n"])
        kind, text = self._reply()
        if kind == "-":
            raise BackendError(f"Redis does not let us write the generation: {text}")

    def count(self, prefix: str) -> tuple[int, int]:
        names = set[str]()  # SCAN may tell one twice
        for some in self._scan(prefix):
            names.update(some)
            if len(names) > NAMES_MAX:
                self.close()
                raise BackendError(f"Redis has more than {NAMES_MAX} names that begin so")
        num_bytes, listed = 0, list(names)
        for at in range(0, len(listed), SCAN_NAMES):
            some = listed[at : at + SCAN_NAMES]
            self._send([_command("STRLEN", name) for name in some])
            num_bytes += sum(self._length() for _ in some)
        return len(names), num_bytes

    def remove(self, prefix: str) -> int:
        removed = 0
        for names in self._scan(prefix):
            self._send([_command("UNLINK", name) for name in names])
            removed += sum(self._integer() for _ in names)
        return removed

    def _scan(self, prefix: str) -> Iterator[list[str]]:
        """Names: those that are there from the first to the last look at least once.

        Raises: BackendError, also where the server tells no end within SCAN_S.
        """
        ends, longest = time.monotonic() + SCAN_S, len(prefix) + NAME_MORE
        pattern, cursor = re.sub(r"([*?\[\]\\^-])", r"\\\1", prefix) + "*", "0"
        while True:
            self._send([_command("SCAN", cursor, "MATCH", pattern, "COUNT", str(SCAN_NAMES))])
            self._items()
            cursor = self._bulk()
            number = self._items()
            if number > NAMES_MAX:
                raise self._refused("*", "")
            told = (self._bulk() for _ in range(number))
            names = [name for name in told if name.startswith(prefix) and len(name) <= longest]
            if names:
                yield names
            if cursor == "0":
                return
            if time.monotonic() > ends:
                self.close()
                raise BackendError(f"Redis has not told all of its names in {SCAN_S:.0f} s")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._start = self._end = 0

    # ---- the connection ----------------------------------------------------------------

    def _connect(self) -> socket.socket:
        url, settings = self._url, self._settings
        left = max(0.001, self._deadline - time.monotonic())
        if url.scheme == "unix":
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(left)
            made.connect(url.path)
        else:
            assert url.hostname is not None
            made = socket.create_connection((url.hostname, url.port or DEFAULT_PORT), left)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if url.scheme == "rediss":
            context = _tls(settings)
            made = context.wrap_socket(made, server_hostname=url.hostname)
        self._socket = made
        password = settings.get("password") or unquote(url.password or "")
        if password:
            user = [unquote(url.username)] if url.username else []
            self._expect_ok("AUTH", *user, password)
        database = url.path.strip("/") if url.scheme != "unix" else ""
        if database not in ("", "0"):  # 0 it is anyway: a user with three commands has no SELECT
            self._expect_ok("SELECT", database)
        return made

    def _expect_ok(self, *words: str) -> None:
        # Not by _send: it would connect anew if the server has ended this connection already.
        self._at_deadline().sendall(_command(*words))
        kind, text = self._reply()
        if kind != "+":
            # Its first word alone: a server without the command tells what it was sent.
            raise BackendError(f"Redis refuses {words[0]}: {text.split(' ')[0]}")

    def _send(self, parts: list[bytes | memoryview]) -> None:
        """Connect if need be, and send. Each call of a command has timeout_s for all of it."""
        try:
            if self._is_stale():
                self.close()
            if self._socket is None:
                self._deadline = time.monotonic() + self._timeout_s
                self._connect()
            self._deadline = time.monotonic() + self._timeout_s
            made = self._at_deadline()
            small = b"".join(part for part in parts if isinstance(part, bytes))
            if len(parts) == 1 or all(isinstance(part, bytes) for part in parts):
                made.sendall(small)
                return
            for part in parts:
                made.sendall(part)
        except (OSError, ssl.SSLError) as error:
            self.close()
            raise BackendError(f"Redis cannot be reached: {error}") from error
        except BackendError:
            self.close()
            raise

    def _is_stale(self) -> bool:
        """Whether the server has ended an idle connection, also one with TLS. Readable is its end,
        or an answer that is not waited for: tickets of TLS come before the first answer."""
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _at_deadline(self) -> socket.socket:
        assert self._socket is not None
        self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
        return self._socket

    # ---- replies -----------------------------------------------------------------------

    def _line(self) -> bytes:
        while True:
            found = self._buffer.find(b"\r\n", self._start, self._end)
            if found >= 0:
                line = bytes(self._buffer[self._start : found])
                self._start = found + 2
                return line
            if self._start:
                held = self._end - self._start
                self._buffer[:held] = self._buffer[self._start : self._end]
                self._start, self._end = 0, held
            if self._end == len(self._buffer):
                self.close()
                raise BackendError("Redis answers with what is no answer")
            self._end += self._receive_into(memoryview(self._buffer)[self._end :])

    def _receive_into(self, place: memoryview) -> int:
        try:
            size = self._at_deadline().recv_into(place)
        except (OSError, ssl.SSLError) as error:
            self.close()
            raise BackendError(f"Redis does not answer: {error}") from error
        if not size:
            self.close()
            raise BackendError("Redis has closed the connection")
        return size

    def _reply(self) -> tuple[str, str]:
        """One line: its kind, and the rest."""
        line = self._line()
        return chr(line[0]) if line else "?", line[1:].decode(errors="replace")

    def _integer(self) -> int:
        kind, text = self._reply()
        if kind == ":" and text.lstrip("-").isdecimal():
            return int(text)
        raise self._refused(kind, text)

    def _items(self) -> int:
        """How many items an array has, which follow."""
        kind, text = self._reply()
        if kind == "*" and text.isdecimal():
            return int(text)
        raise self._refused(kind, text)

    def _bulk(self) -> str:
        """A short string; empty for a longer one, which is no name of ours."""
        kind, text = self._reply()
        if kind != "$" or not text.isdecimal():
            raise self._refused(kind, text)
        if int(text) > LINE_MAX:
            self._read_away(int(text) + 2)
            return ""
        place = memoryview(bytearray(int(text) + 2))
        self._fill(place)
        return bytes(place[:-2]).decode(errors="surrogateescape")

    def _length(self) -> int:
        """In answer to STRLEN. What is there may be no string."""
        kind, text = self._reply()
        if kind == "-" and text.startswith("WRONGTYPE"):
            return 0
        if kind == ":" and text.isdecimal():
            return int(text)
        raise self._refused(kind, text)

    def _refused(self, kind: str, text: str) -> BackendError:
        self.close()  # replies to what was sent with it may still come
        if kind == "-":
            return BackendError(f"Redis refuses: {text}")
        return BackendError("Redis answers with what is no answer")

    def _receive(self, place: memoryview, *, exact: bool = True) -> int:
        kind, text = self._reply()
        if kind != "$" or not text.lstrip("-").isdecimal():
            raise self._refused(kind, text)
        size = int(text)
        if size < 0:
            return MISSING
        if size > len(place) or (exact and size != len(place)):
            self._read_away(size + 2)
            return WRONG_SIZE
        self._fill(place[:size])
        self._read_away(2)
        return size

    def _fill(self, place: memoryview) -> None:
        held = min(self._end - self._start, len(place))
        place[:held] = memoryview(self._buffer)[self._start : self._start + held]
        self._start += held
        while held < len(place):
            held += self._receive_into(place[held:])

    def _read_away(self, size: int) -> None:
        if size > DRAIN_MAX:
            self.close()
            raise BackendError(f"a value in Redis has {size} bytes: it is not ours")
        waste = memoryview(bytearray(min(size, LINE_MAX)))
        while size:
            part = waste[: min(size, len(waste))]
            self._fill(part)
            size -= len(part)


def _tls(settings: Mapping[str, Any]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.get("ca"))
        if settings.get("cert"):
            # Without "" OpenSSL asks the terminal for a key's password.
            context.load_cert_chain(settings["cert"], settings.get("key"), password="")
    except (OSError, ssl.SSLError) as error:
        raise BackendError(
            f"shared.ca, cert or key cannot be used ({error}); they must be PEM files that the "
            "server's user may read, and the key one without a password"
        ) from error
    return context


def _command(*words: str) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word.encode(errors="surrogateescape")
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)
