# SPDX-License-Identifier: Apache-2.0
"""Does a codec bring hits later than the disk alone would? Learned while serving, pure.

Reading and decoding go on beside each other, so the slower of the two decides:

    as it is    raw bytes * seconds a byte of the disk
    encoded     the greater of    encoded bytes * seconds a byte of the disk
                                  raw bytes * seconds a byte of decoding / threads

Encoded bytes are fewer, so a codec brings hits later where decoding a byte takes longer than
reading one. Of a hit's chunks the last is decoded when all are read, beside nothing.
"""

from __future__ import annotations

SEEN_MIN = 64
"""Reads and decodings before anything is said."""
LATER = 1.02
"""So much later counts."""
LAST = 1 / 16
"""The part of a hit that is decoded after its last read: a chunk of 4,000 tokens."""


class CodecCost:
    """Args: threads: that decode beside each other."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._read_s = self._decode_s = 0.0
        self._read_bytes = self._decoded_bytes = 0
        self._num_reads = self._num_decodings = 0

    def read(self, seconds: float, num_bytes: int) -> None:
        """A read ended so long after the one before it, for which it had waited: one that the disk
        had been idle before tells of delays, not of the disk's speed."""
        self._read_s += seconds
        self._read_bytes += num_bytes
        self._num_reads += 1

    def decoded(self, seconds: float, num_bytes: int) -> None:
        """Args: num_bytes: when decoded."""
        self._decode_s += seconds
        self._decoded_bytes += num_bytes
        self._num_decodings += 1

    @property
    def speeds(self) -> tuple[float, float]:
        """Bytes a second of the disk, and of all threads that decode; infinite if not known."""
        infinite = float("inf")
        read = self._read_bytes / self._read_s if self._read_s > 0 else infinite
        decode = self._decoded_bytes / self._decode_s if self._decode_s > 0 else infinite
        return read, decode * self._threads

    @property
    def is_later(self) -> bool:
        if min(self._num_reads, self._num_decodings) < SEEN_MIN:
            return False
        read, decode = self.speeds
        return read * (1 + LAST) > LATER * decode
