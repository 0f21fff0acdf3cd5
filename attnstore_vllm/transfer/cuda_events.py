# SPDX-License-Identifier: Apache-2.0
"""Points in CUDA streams: when copies are over, and how long streams took between two of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from attnstore_vllm.errors import CopyError

_PAIRS_MAX = 4096


def copy_error(error: RuntimeError) -> CopyError:
    return CopyError(f"the GPU could not copy between HBM and DRAM: {error}")


class CudaEvent:
    """Implements transfer.engine.StreamEvent: behind a copy, on one of the engine's streams.

    Args:
        lane: names the stream.
        number: how many events the stream had before it.
        check: called once, when the copy is over; raises CopyError if it failed all the same.
    """

    __slots__ = ("_check", "_error", "_is_over", "event", "lane", "number")

    def __init__(
        self,
        event: torch.cuda.Event,
        lane: str,
        number: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.event = event
        self.lane = lane
        self.number = number
        self._is_over = False
        self._check = check
        self._error: CopyError | None = None

    def done(self) -> bool:
        if not self._is_over:
            try:
                self._is_over = bool(self.event.query())
            except RuntimeError as error:
                raise copy_error(error) from error
            if self._is_over:
                self._look()
        if self._error is not None:
            raise self._error
        return self._is_over

    def wait(self) -> None:
        if not self._is_over:
            try:
                self.event.synchronize()
            except RuntimeError as error:
                raise copy_error(error) from error
            self._is_over = True
            self._look()
        if self._error is not None:
            raise self._error

    def _look(self) -> None:
        check, self._check = self._check, None
        try:
            if check is not None:
                check()
        except CopyError as error:
            self._error = error


class FailedEvent:
    """Implements transfer.engine.StreamEvent: of a copy that CUDA refused to begin."""

    __slots__ = ("_error",)

    def __init__(self, error: CopyError) -> None:
        self._error = error

    def done(self) -> bool:
        raise self._error

    def wait(self) -> None:
        raise self._error


class StopWatch:
    """Times between pairs of points in streams, read when these have come past them; 0 for a pair
    whose end came first.

    At most so many pairs are kept unread; what is beyond them is not measured.
    """

    def __init__(self, pairs_max: int = _PAIRS_MAX) -> None:
        self._pairs_max = pairs_max
        self._pairs: deque[tuple[int, torch.cuda.Event, torch.cuda.Event, bool]] = deque()
        """Tag, start, end, and whether the end may come first."""

    def start(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def stop(
        self, start: torch.cuda.Event, stream: torch.cuda.Stream, tag: int
    ) -> torch.cuda.Event:
        event = self.start(stream)
        if len(self._pairs) < self._pairs_max:
            self._pairs.append((tag, start, event, False))
        return event

    def add(self, start: torch.cuda.Event, end: torch.cuda.Event, tag: int) -> None:
        """Both are recorded, in two streams; `end` may come first."""
        if len(self._pairs) < self._pairs_max:
            self._pairs.append((tag, start, end, True))

    def take(self) -> list[tuple[int, float]]:
        """Tag and seconds of each pair that is over, once. Never waits.

        After a failure of the device nothing is known of any pair.
        """
        found: list[tuple[int, float]] = []
        try:
            while self._pairs:
                tag, begun, ended, is_across = self._pairs[0]
                if not ended.query() or (is_across and not begun.query()):
                    break
                self._pairs.popleft()
                found.append((tag, max(0.0, begun.elapsed_time(ended) / 1000)))
        except RuntimeError:
            self._pairs.clear()
        return found
