# SPDX-License-Identifier: Apache-2.0
"""Streams of copies, as a GPU has them, for attnstore_lab/testing/memory_engine.py.

ThrottledStream makes copies take their time beside the model; SteppedStream carries each one out
when the test says so, so that every interleaving can be forced.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from attnstore_vllm.errors import CopyError

PENDING_MAX = 1 << 16
CLOSE_DEADLINE_S = 60.0


class Stream(Protocol):
    """Carries out pieces of work, one after the other."""

    def submit(self, work: Callable[[], None], num_bytes: int) -> StreamPiece:
        """Append a piece; never waits. `work` is called once, and raises nothing."""

    def close(self) -> None:
        """Carry out what is pending, at once. Nothing is submitted after it."""


class StreamPiece:
    """One piece of a stream's work, and its event: that of this piece alone."""

    def __init__(self, queue: _Queue, work: Callable[[], None], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.submitted_at = time.monotonic()
        self.worked_s = 0.0
        """How long the stream worked at it; known when it is over."""
        self._queue = queue
        self._work: Callable[[], None] | None = work
        self._error: CopyError | None = None
        self._over = threading.Event()

    def done(self) -> bool:
        if self._over.is_set() and self._error is not None:
            raise self._error
        return self._over.is_set()

    def is_over(self) -> bool:
        """Whether it was carried out or has failed. Never raises."""
        return self._over.is_set()

    def has_failed(self) -> bool:
        return self._over.is_set() and self._error is not None

    def wait(self, timeout_s: float) -> None:
        """Return when it is done. Raises CopyError; also if it is not over after `timeout_s`."""
        self._queue.is_waited_for(self)
        if not self._over.wait(timeout_s):
            raise CopyError(f"a copy of {self.num_bytes} bytes is not over after {timeout_s} s")
        self.done()

    def carry_out(self, failure: CopyError | None) -> None:
        """Do the work, or, if `failure` hits it, nothing. It is over when end() says so."""
        assert self._work is not None, "a piece is carried out once"
        work, self._work, self._error = self._work, None, failure
        if failure is None:
            work()

    def end(self, worked_s: float) -> None:
        assert self._work is None
        self.worked_s = worked_s
        self._over.set()


class _Queue:
    """Things that the streams have in common. A piece is pending until it is over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: deque[StreamPiece] = deque()
        self._failures: deque[CopyError] = deque()
        self._is_closed = False

    @property
    def pending(self) -> int:
        """Pieces that are not over."""
        return len(self._pending)

    def fail_next(self, error: CopyError) -> None:
        """The next piece that is carried out copies nothing and fails; later ones go on."""
        with self._changed:
            self._failures.append(error)

    def submit(self, work: Callable[[], None], num_bytes: int) -> StreamPiece:
        """Never waits: more than PENDING_MAX pieces are the bug of a caller that awaits none."""
        piece = StreamPiece(self, work, num_bytes)
        with self._changed:
            assert not self._is_closed
            assert len(self._pending) < PENDING_MAX, "these copies are not waited for"
            self._pending.append(piece)
            self._changed.notify_all()
        return piece

    def is_waited_for(self, piece: StreamPiece) -> None:
        """This piece is about to be waited for."""

    def _next_failure(self) -> CopyError | None:
        with self._changed:
            return self._failures.popleft() if self._failures else None


class ThrottledStream(_Queue):
    """One thread of its own carries out the pieces, `bytes_per_s` fast; it sleeps in between.

    A piece ends no sooner than its bytes take, counted from its submission or from when the piece
    before was due, whichever is later: a busy processor makes single pieces late, as it does the
    news of a real copy, and the rate no lower. The bytes move late in that time, as real ones may:
    as long before its end as those of the piece before took to be copied.

    Args:
        bytes_per_s: may be assigned to at any time; holds for the pieces that begin after it.
            math.inf: as fast as this machine copies.
    """

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s
        self._thread = threading.Thread(target=self._run, name="throttled-copies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What is pending is carried out without the throttle."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            raise CopyError(f"copies are not over {CLOSE_DEADLINE_S} s after their stream's close")

    def _run(self) -> None:
        due = ended_at = 0.0
        copied_s = 0.0  # what the copying itself took for the piece before
        while (piece := self._first()) is not None:
            due = max(piece.submitted_at, due) + piece.num_bytes / self.bytes_per_s
            start = max(piece.submitted_at, ended_at)
            self._sleep_until(due - copied_s)
            began_at = time.monotonic()
            piece.carry_out(self._next_failure())
            copied_s = time.monotonic() - began_at
            self._sleep_until(due)
            ended_at = time.monotonic()
            with self._changed:
                self._pending.popleft()
            piece.end(ended_at - start)

    def _first(self) -> StreamPiece | None:
        """The oldest pending piece; None if there is none and will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closed)
            return self._pending[0] if self._pending else None

    def _sleep_until(self, due: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, max(0.0, due - time.monotonic()))


class SteppedStream(_Queue):
    """Nothing is copied before step(), or before it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.forced = 0
        """Pieces that were carried out because they were waited for, or for a later one."""

    def step(self, n: int = 1) -> None:
        """Carry out the next n pieces, on the calling thread."""
        with self._changed:
            assert n <= self.pending, f"only {self.pending} pieces are pending"
            for _ in range(n):
                self._carry_out_first()

    def is_waited_for(self, piece: StreamPiece) -> None:
        """In the end a GPU would come to it: so all up to this piece are carried out here."""
        with self._changed:
            while not piece.is_over():
                self._carry_out_first()
                self.forced += 1

    def close(self) -> None:
        """These are not `forced`."""
        with self._changed:
            self.step(self.pending)
            self._is_closed = True

    def _carry_out_first(self) -> None:
        piece = self._pending[0]
        began_at = time.monotonic()
        piece.carry_out(self._next_failure())
        self._pending.popleft()
        piece.end(time.monotonic() - began_at)
