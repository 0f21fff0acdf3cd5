# SPDX-License-Identifier: Apache-2.0
"""How far a long command is: a bar on a terminal, else a line every so often. On stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich import progress as bars
from rich.console import Console

from attnstore_vllm.types import Clock

LINE_S = 10.0
"""Where there is no terminal: a command that is over by then says nothing."""
BAR_S = 0.1


class Progress:
    """See the module. Cost of a step: a look at the clock.

    Args:
        what: is done now; may be set anew.
        every_s: it is shown.
        bar: None: lines are printed.
    """

    def __init__(
        self,
        what: str,
        total: int,
        unit: str,
        out: TextIO,
        clock: Clock,
        every_s: float,
        bar: bars.Progress | None = None,
    ) -> None:
        self.what, self.done, self.total, self._unit = what, 0, total, unit
        self._out, self._clock = out, clock
        self._began = self._shown_at = clock()
        self._bar, self._every_s = bar, every_s
        self._task = bars.TaskID(0) if bar is None else bar.add_task(what, total=total)

    def step(self, number: int = 1) -> None:
        self.done += number
        now = self._clock()
        if now - self._shown_at >= self._every_s:
            self._shown_at = now
            self._show(now - self._began)

    def _show(self, seconds: float) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self.done, total=self.total, description=self.what
            )
            return
        count = f"{self.done:,} of {self.total:,} {self._unit}s"
        print(f"{self.what}: {count} after {seconds:.0f} s", file=self._out, flush=True)


@contextmanager
def progress(
    what: str,
    total: int,
    unit: str = "request",
    *,
    out: TextIO | None = None,
    clock: Clock = time.monotonic,
    is_shown: bool = True,
) -> Iterator[Progress]:
    """Args: is_shown: False: not even a line."""
    out = out or sys.stderr
    if not (is_shown and out.isatty()):
        yield Progress(what, total, unit, out, clock, LINE_S if is_shown else math.inf)
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn(f"{unit}s,"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(file=out), transient=True) as bar:
        yield Progress(what, total, unit, out, clock, BAR_S, bar)
