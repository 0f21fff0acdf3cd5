# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine and its child process, one packet each, over one socket a lane.

    request   op, count, names of 32 bytes; WRITE: its value behind the name
    answer    OK and a number for each name (READ: the value), or ERROR and a sentence;
              NO_ANSWER and a sentence: the client waited for the store in vain

Values lie in the lane's places of the bounce buffer: the first name's in the first place.

It has nothing in common with peers/wire.py: an engine trusts its child and waits for it, on a
socket that keeps packets whole; peers frame a stream, wait for nothing and check each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from attnstore_vllm.tiers.shared.record import (
    HEADER_AT,
    HEADER_BYTES,
    NAME_BYTES,
    place_bytes,
)

_REQUEST = struct.Struct("<BI")
OK, ERROR, NOTHING, NO_ANSWER = b"\0", b"\1", b"\2", b"\3"
PACKET_MAX = 64 << 10
NAMES_MAX = 1024
"""In one message."""
SMALL_MAX = 256
"""Bytes of a value that is read or written by itself."""


class LaneOp(IntEnum):
    HELLO = 0
    EXIST = 1
    GET = 2
    PUT = 3
    OVERWRITE = 4
    READ = 5
    WRITE = 6
    OVERWRITE_SMALL = 7
    DELETE = 8


TRANSFERS = (LaneOp.GET, LaneOp.PUT, LaneOp.OVERWRITE)


class Turns:
    """When transfers were over. The child makes one of each way at a time: so who waits for one has
    the deadline from the end of the one before it, once."""

    def __init__(self) -> None:
        self._ended_at: dict[bool, float] = {}

    def end(self, op: LaneOp, now: float) -> None:
        if op in TRANSFERS:
            self._ended_at[op is LaneOp.GET] = now

    def left(self, op: LaneOp, sent_at: float, deadline_s: float, now: float) -> float:
        """Seconds that a transfer still has whose deadline is over. 0: none."""
        ended_at = self._ended_at.get(op is LaneOp.GET, sent_at) if op in TRANSFERS else sent_at
        return max(0.0, ended_at + deadline_s - now) if ended_at > sent_at else 0.0


def request(op: LaneOp, names: Sequence[bytes], value: bytes = b"") -> bytes:
    assert len(names) <= NAMES_MAX
    assert all(len(name) == NAME_BYTES for name in names)
    return _REQUEST.pack(op, len(names)) + b"".join(names) + value


def parse_request(packet: bytes) -> tuple[LaneOp, list[bytes], bytes]:
    op, count = _REQUEST.unpack_from(packet)
    at, end = _REQUEST.size, _REQUEST.size + count * NAME_BYTES
    names = [packet[i : i + NAME_BYTES] for i in range(at, end, NAME_BYTES)]
    return LaneOp(op), names, packet[end:]


def numbers(values: Sequence[int]) -> bytes:
    return OK + struct.pack(f"<{len(values)}i", *values)


def parse_numbers(answer: bytes, count: int) -> list[int]:
    return list(struct.unpack(f"<{count}i", answer[1:]))


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where each lane's places are in the bounce buffer: lane 0 asks, and has none."""

    payload_bytes: int
    num_lanes: int
    num_places: int
    """Places of each lane but the first."""

    @property
    def buffer_bytes(self) -> int:
        return (self.num_lanes - 1) * self.num_places * place_bytes(self.payload_bytes)

    def place(self, buffer: memoryview, lane: int, number: int) -> memoryview:
        """A record's place: its header, and its payload behind it."""
        stride = place_bytes(self.payload_bytes)
        start = ((lane - 1) * self.num_places + number) * stride + HEADER_AT
        return buffer[start : start + HEADER_BYTES + self.payload_bytes]
