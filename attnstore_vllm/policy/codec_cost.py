# SPDX-License-Identifier: Apache-2.0
"""Which coding of a codec brings hits first, and does it bring them later than the disk alone?

Learned while serving, pure. Reading and decoding go on beside each other, so the slower one
decides. For a byte of KV a hit takes:

    as it is    a byte of the disk
    encoded     the greater of    what is read, and decoding the last chunk of it
                                  decoding by all threads, and reading the first chunk of it

A codec may have two codings: a small one, and a fast one of more bytes that are decoded faster.
The fast one is written at first: it is hardly ever later than the disk alone, and nothing that is
there is written anew. Where the disk proves slow the small one is written, which brings hits
earlier there. How fast each is decoded is tried at the start, and seen while serving.
"""

from __future__ import annotations

SEEN_MIN = 64
"""Reads before anything is said, and decodings of a coding before they count for its trial."""
RECENT = 512
"""Things seen that a mean is of; those before count for less and less."""
LATER = 1.02
"""So much later counts."""
BACK = 1.05
"""So much later than the small coding the fast one has to be to be given up: more than LATER, so
that it does not change to and fro."""
LAST = 1 / 16
"""The part of a hit that is a chunk, of 4,000 tokens."""


class _Seen:
    """Sums of what was seen."""

    def __init__(self) -> None:
        self.seconds = self.num_bytes = self.encoded_bytes = 0.0
        self.count = 0

    def add(self, seconds: float, num_bytes: int, encoded_bytes: int) -> None:
        if self.count == RECENT:
            self.seconds /= 2
            self.num_bytes /= 2
            self.encoded_bytes /= 2
            self.count //= 2
        self.seconds += seconds
        self.num_bytes += num_bytes
        self.encoded_bytes += encoded_bytes
        self.count += 1

    @property
    def seconds_a_byte(self) -> float:
        return self.seconds / self.num_bytes if self.num_bytes else 0.0

    @property
    def size(self) -> float:
        """Encoded bytes by bytes."""
        return self.encoded_bytes / self.num_bytes if self.num_bytes else 1.0


class CodecCost:
    """Args:
    threads: that decode beside each other.
    has_fast: the codec has a fast coding.
    """

    def __init__(self, threads: int, *, has_fast: bool = False) -> None:
        self._threads = threads
        self._reads = _Seen()
        self._decodings = {False: _Seen(), True: _Seen()}
        self._trials: dict[bool, _Seen] = {}
        self.is_fast = has_fast
        """Whether records are written by the fast coding."""

    def tried(self, is_fast: bool, seconds: float, num_bytes: int, encoded_bytes: int) -> None:
        """A sample was decoded at the start. It speaks for a coding that was hardly seen yet."""
        self._trials[is_fast] = _Seen()
        self._trials[is_fast].add(seconds, num_bytes, encoded_bytes)

    def read(self, seconds: float, num_bytes: int) -> None:
        """A read ended so long after the one before it, for which it had waited: one that the disk
        had been idle before tells of delays, not of the disk's speed."""
        self._reads.add(seconds, num_bytes, num_bytes)

    def decoded(self, is_fast: bool, seconds: float, num_bytes: int, encoded_bytes: int) -> None:
        """Args: num_bytes: when decoded."""
        self._decodings[is_fast].add(seconds, num_bytes, encoded_bytes)

    def decide(self) -> bool:
        """Whether the coding that is written changes. That needs a trial of the other one."""
        small, fast = self._known(False), self._known(True)
        if self._reads.count < SEEN_MIN or not (small and fast):
            return False
        if self.is_fast:
            changes = self._cost(fast) > BACK * self._cost(small)
        else:
            changes = self._cost(small) > LATER * self._cost(fast)
        if changes:
            self.is_fast = not self.is_fast
        return changes

    def _known(self, is_fast: bool) -> _Seen | None:
        seen = self._decodings[is_fast]
        return seen if seen.count >= SEEN_MIN else self._trials.get(is_fast)

    def _cost(self, coding: _Seen) -> float:
        """Seconds until a byte of KV is there."""
        read, decode = coding.size * self._reads.seconds_a_byte, coding.seconds_a_byte
        return max(read + LAST * decode, decode / self._threads + LAST * read)

    @property
    def read_speed(self) -> float:
        """Bytes a second of the disk; infinite if not known."""
        seconds = self._reads.seconds_a_byte
        return 1 / seconds if seconds else float("inf")

    def decode_speed(self, is_fast: bool) -> float:
        """Bytes a second that all threads decode; infinite if not known."""
        seconds = (self._known(is_fast) or self._decodings[is_fast]).seconds_a_byte
        return self._threads / seconds if seconds else float("inf")

    @property
    def is_later(self) -> bool:
        """Whether hits come later than from the disk alone, by what was seen of the coding that is
        written."""
        seen = self._decodings[self.is_fast]
        if min(self._reads.count, seen.count) < SEEN_MIN:
            return False
        return self._cost(seen) > LATER * self._reads.seconds_a_byte
