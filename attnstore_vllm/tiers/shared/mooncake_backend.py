# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store, by its own client, which has no segment here: others' memory keeps the values.

Its `put` returns 0 for a name that exists, and for one whose writer died half-way, although a get
fails then. Memory that is registered with it is open to the network for writing. So it is given
none but the bounce buffer, and that only where RDMA cannot do without.
"""

from __future__ import annotations

import importlib.util
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from attnstore_vllm.tiers.shared.backend import (
    FAILED,
    MISSING,
    WRONG_SIZE,
    Backend,
    BackendError,
    NoAnswerError,
)

NOT_THERE = (-703, -704)
"""Not ready (its writer is at it, or died), and not there."""
TOO_SMALL = -600
GONE, TIMED_OUT = -900, -901
"""The master is dead, or was started anew; it let the client's own time pass: it hangs."""
TRIES = 3
"""How often a call is made whose connection, of the client's own, is to the master before."""
LOCAL_BUFFER_BYTES = 16 << 20
"""Memory of the client itself, for small values."""
QUIET = {
    "MC_LOG_LEVEL": "ERROR",
    # Without these a call waits for 4 to 60 s where a process of Mooncake is dead or hangs.
    "MC_RPC_TIMEOUT_MS": "300",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_SLICE_TIMEOUT": "1",
}
CONNECT_S = 0.1
_KEEPALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 2),
)
"""A machine that is gone is seen after 3 s, and not at once like a process."""


class Line:
    """Whether a server is there, by a connection that says nothing: it ends when the server does.

    Mooncake's client hangs where its master is dead: it tries again for longer than any request may
    wait, from the second call on. Used by one thread.

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
        """Cost: 2 us if it is there. Raises BackendError; NoAnswerError if no answer comes."""
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


class MooncakeBackend(Backend):
    """One client for all lanes: it is safe for threads, and has 30 of its own.

    Args:
        settings: master, metadata, protocol, devices, host.
        buffer, shared: see Backend.
    """

    def __init__(
        self, settings: Mapping[str, Any], buffer: memoryview | None, shared: dict[str, Any]
    ) -> None:
        has_one_master = "://" not in settings["master"]  # else the client finds it
        self._line = Line("Mooncake's master", settings["master"]) if has_one_master else None
        self._check()
        if "client" not in shared:
            shared["client"] = _connect(settings, buffer)
        self._made = shared["client"]

    @classmethod
    def environment(cls) -> dict[str, str]:
        """As PyPI has it, the client asks for the time in a loop until a transfer is over. That
        takes a core. With another clock (csrc/io/pausing_clock.cpp) the loop sleeps. What our own
        process was started with in LD_PRELOAD, such as an allocator, that one does without.
        """
        clock = importlib.util.find_spec("attnstore_vllm._pausing_clock")
        preloaded = {"LD_PRELOAD": clock.origin} if clock is not None and clock.origin else {}
        return {**QUIET, **preloaded}

    @property
    def _client(self) -> Any:
        """For one call. Raises BackendError at once where the master is dead."""
        self._check()
        return self._made

    def _check(self) -> None:
        if self._line is not None:
            self._line.check()

    def _call(self, method: str, names: Sequence[str], *arguments: Any) -> list[int]:
        """A result for each name."""
        results: list[int] = []
        for _ in range(TRIES):
            results = list(getattr(self._client, method)(list(names), *arguments))
            if not results or any(result != GONE for result in results):
                break
        return results

    def exist(self, names: Sequence[str]) -> list[bool]:
        found = self._call("batch_is_exist", names)
        if len(found) != len(names) or min(found, default=0) < 0:
            raise _silence("Mooncake's master does not answer", min(found, default=0))
        return [one == 1 for one in found]

    def get(self, names: Sequence[str], places: Sequence[memoryview]) -> list[int]:
        sizes = [len(place) for place in places]
        got = self._call("batch_get_into", names, [*map(_address, places)], sizes)
        return [_result(one, size) for one, size in zip(got, sizes, strict=True)]

    def put(
        self, names: Sequence[str], values: Sequence[memoryview], *, overwrite: bool
    ) -> list[int]:
        sizes = [len(value) for value in values]
        put = "batch_upsert_from" if overwrite else "batch_put_from"
        results = self._call(put, names, [*map(_address, values)], sizes)
        if results and all(_is_down(one) for one in results):
            raise _silence("Mooncake does not take anything", min(results))
        return [0 if one == 0 else FAILED for one in results]

    def delete(self, names: Sequence[str]) -> list[int]:
        # By force: else what was read in the last seconds stays, since a lease protects it.
        results = [int(self._client.remove(name, True)) for name in names]
        if results and all(_is_down(one) for one in results):
            raise _silence("Mooncake does not delete anything", min(results))
        return [0 if one in (0, *NOT_THERE) else FAILED for one in results]

    def read(self, name: str, at_most: int) -> bytes | None:
        if not self.exist([name])[0]:
            return None
        place = bytearray(at_most)
        size = self._client.get_into(name, _address(memoryview(place)), at_most)
        if size in NOT_THERE:
            return None
        if size < 0:
            raise BackendError(f"Mooncake fails to read a value of a few bytes ({size})")
        return bytes(place[:size])

    def write(self, name: str, value: bytes, *, overwrite: bool) -> None:
        result = (self._client.upsert if overwrite else self._client.put)(name, value)
        if result:
            raise BackendError(f"Mooncake does not let us write the generation ({result})")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._made.close()

    def count(self, prefix: str) -> None:
        """Its client lists no names."""

    def remove(self, prefix: str) -> int:
        if not hasattr(self._client, "remove_by_regex"):
            raise BackendError(
                "this version of Mooncake cannot delete by name; see [mooncake]'s pin"
            )
        # By force: else what was read in the last seconds stays, since a lease protects it.
        result = int(self._client.remove_by_regex(f"^{re.escape(prefix)}.*", True))
        if result < 0:
            raise BackendError(f"Mooncake's master does not delete what it is told to ({result})")
        return result


def own_address(master: str) -> str:
    """The address that this machine has towards the master. Nothing is sent."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BackendError(f"there is no way to Mooncake's master at {master}: {error}") from error


def _connect(settings: Mapping[str, Any], buffer: memoryview | None) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415
    except ImportError as error:
        raise BackendError(
            f"Mooncake's client cannot be loaded ({error}); pip install attnstore-vllm[mooncake], "
            "and libibverbs1, libnl-3-200 and libnl-route-3-200 of the distribution"
        ) from error
    client = MooncakeDistributedStore()
    for needed in ("batch_get_into", "batch_put_from", "batch_upsert_from", "batch_is_exist"):
        if not hasattr(client, needed):
            raise BackendError(f"this version of Mooncake has no {needed}; see [mooncake]'s pin")
    result = client.setup(
        settings.get("host") or own_address(settings["master"]),
        settings.get("metadata", "P2PHANDSHAKE"),
        0,
        LOCAL_BUFFER_BYTES,
        settings.get("protocol", "tcp"),
        settings.get("devices", ""),
        settings["master"],
    )
    if result:
        raise BackendError(f"Mooncake's master at {settings['master']} does not answer ({result})")
    if buffer is not None and settings.get("protocol", "tcp") != "tcp":
        result = client.register_buffer(_address(buffer), len(buffer))
        if result:
            raise BackendError(f"Mooncake cannot register the bounce buffer ({result})")
    return client


def _result(got: int, size: int) -> int:
    if got == size:
        return got
    if got in NOT_THERE:
        return MISSING
    return WRONG_SIZE if got >= 0 or got == TOO_SMALL else FAILED


def _silence(what: str, result: int) -> BackendError:
    kind = NoAnswerError if result == TIMED_OUT else BackendError
    return kind(f"{what} ({result})")


def _is_down(result: int) -> bool:
    return result <= -900


def _address(place: memoryview) -> int:
    import numpy as np  # noqa: PLC0415 - the Redis child does without it

    return int(np.frombuffer(place, np.uint8).ctypes.data)
