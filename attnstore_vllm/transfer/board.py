# SPDX-License-Identifier: Apache-2.0
"""The board: a page of shared memory on which an engine writes figures while it plans no step.

    0   length, CRC-32       of what follows
    8   JSON                 totals of what has left this way since the engine began

vLLM hands figures to its server with each step, and an engine without requests takes none; but
write-back, scrubbing and a failing disk go on. A figure leaves by a step or by the board, never by
both. The page has totals, so that a reader that comes late, or that meets a half-written page,
misses nothing. Of several server processes one reads: who has the lock on the page's first byte. It
takes the name away, so that nothing is left behind by a kill.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from attnstore_vllm.own_files import NotOursError
from attnstore_vllm.preflight import SHM_DIR
from attnstore_vllm.transfer import region

logger = logging.getLogger(__name__)

BOARD_BYTES = 256 * 1024
"""Up to 40 KiB are of quotas: two values of 64 tenants in each of three tiers."""
PERIOD_S = 1.0
"""Between two looks at a board, and between two writes to it."""
VALUES_MAX = 256
"""Values of a histogram that are on the board, the newest: what is more between two looks is
counted, and not shown."""
_HEAD = struct.Struct("<II")


def board_path(engine_id: str) -> Path:
    return SHM_DIR / f"{region.PREFIX}{blake3(f'board {engine_id}'.encode()).hexdigest()[:24]}"


class Board:
    """The engine's side. One thread writes.

    Raises: OSError if shared memory has no room, or another engine of this name lives.
    """

    def __init__(self, engine_id: str) -> None:
        self._path = board_path(engine_id)
        self._fd = region.create_anew(self._path)
        try:
            # Its memory is taken here, where a lack of it is an error: later it were a SIGBUS.
            os.posix_fallocate(self._fd, 0, BOARD_BYTES)
            self._page = mmap.mmap(self._fd, BOARD_BYTES)
        except OSError:
            region.leave(self._fd, self._path, is_creator=True)
            raise
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, list[float]] = {}
        self._observed: dict[str, tuple[int, list[float]]] = {}

    def write(self, data: dict[str, Any]) -> None:
        """Add figures. `data` is that of StepStats."""
        for key, amount in data["counters"].items():
            self._counters[key] = self._counters.get(key, 0) + amount
        self._gauges.update(data["gauges"])
        for name, values in data["observed"].items():
            number, kept = self._observed.get(name, (0, []))
            self._observed[name] = number + len(values), [*kept, *values][-VALUES_MAX:]
        text = json.dumps([self._counters, self._gauges, self._observed]).encode()
        assert _HEAD.size + len(text) <= BOARD_BYTES, "names and values are bounded"
        self._page[: _HEAD.size + len(text)] = _HEAD.pack(len(text), zlib.crc32(text)) + text

    def close(self) -> None:
        self._page.close()
        region.leave(self._fd, self._path, is_creator=True)


class BoardReader:
    """The server's side: what has come since the last look.

    Args:
        names: that the engine may have.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._paths = [board_path(name) for name in names]
        self._fd = -1
        self._page: mmap.mmap | None = None
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, list[float]] = {}
        self._numbers: dict[str, int] = {}
        self._refused: set[Path] = set()
        """Boards that are no engine's of this user; said once."""

    def take(self) -> dict[str, Any] | None:
        """As StepStats.data, what is new; None if nothing is, or another process reads."""
        if self._page is None and not self._open():
            return None
        assert self._page is not None
        length, checksum = _HEAD.unpack(self._page[: _HEAD.size])
        text = self._page[_HEAD.size : _HEAD.size + length]
        if not length or zlib.crc32(text) != checksum:
            return None  # nothing yet, or half of it: the next look has it
        try:
            counters, gauges, observed = _figures(text)
        except (ValueError, RecursionError) as error:
            logger.warning("figures stand still while the engine is idle: %s", error)
            self._paths = []
            self.close()
            return None
        found = {
            "counters": _grown(counters, self._counters),
            "gauges": {k: v for k, v in gauges.items() if self._gauges.get(k) != v},
            "observed": {
                name: values[max(0, len(values) - (number - self._numbers.get(name, 0))) :]
                for name, (number, values) in observed.items()
                if number > self._numbers.get(name, 0)
            },
        }
        self._counters, self._gauges = counters, gauges
        self._numbers = {name: number for name, (number, _) in observed.items()}
        return found if any(found.values()) else None

    def _open(self) -> bool:
        for path in self._paths:
            try:
                fd = region.find(path)
            except NotOursError as error:
                if path not in self._refused:
                    self._refused.add(path)
                    logger.warning("figures stand still while the engine is idle: %s", error)
                continue
            if fd is None:
                continue
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                if os.fstat(fd).st_size == BOARD_BYTES:
                    self._fd, self._page = fd, mmap.mmap(fd, BOARD_BYTES, prot=mmap.PROT_READ)
                    path.unlink(missing_ok=True)
                    return True
            except OSError:  # another process of the server reads it
                pass
            os.close(fd)
        return False

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
            os.close(self._fd)
            self._page = None


def _figures(
    text: bytes,
) -> tuple[dict[str, float], dict[str, list[float]], dict[str, tuple[int, list[float]]]]:
    """Counters, gauges and observed values of a board. Raises: ValueError for another content."""
    found = json.loads(text)
    match found:
        case [dict(counters), dict(gauges), dict(observed)] if (
            all(map(_is_number, counters.values()))
            and all(map(_is_pair, gauges.values()))
            and all(map(_is_observed, observed.values()))
        ):
            return counters, gauges, observed
    raise ValueError("the board has other content than figures")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_observed(value: object) -> bool:
    match value:
        case [int(), list(values)]:
            return all(map(_is_number, values))
    return False


def _grown(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    grown = {key: value - before.get(key, 0) for key, value in now.items()}
    return {key: more for key, more in grown.items() if more > 0}
