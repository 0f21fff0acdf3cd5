# SPDX-License-Identifier: Apache-2.0
"""Time to the first token, by where a request's KV came from. vLLM's own does not tell them apart.

It runs from when the engine has the request to the output of the step that computes the end of its
prompt. What a server does before and behind that, vLLM's own has too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.request import Counted
from attnstore_vllm.types import DRAM, NVME, PEERS, SHARED, Clock

OPEN_MAX: Final = 64
"""The most steps whose output has not come: vLLM has a few at a time."""
FURTHEST: Final = (SHARED, NVME, PEERS, DRAM)
"""A request counts under the first of these that its load came from: it waits for that one."""


class FirstTokens:
    """On the scheduler's thread. Cost: a dictionary's look-up a request and step.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._came: dict[str, float] = {}
        """By request: when it came. Those without a first token."""
        self._open: OrderedDict[int, list[tuple[float, str]]] = OrderedDict()
        self._next: list[tuple[float, str]] = []
        """Arrivals and sources of those whose prompt ends in the step that is being planned."""

    def __len__(self) -> int:
        """All that is kept: requests, and steps that are open."""
        return len(self._came) + len(self._open) + len(self._next)

    def came(self, request_id: str) -> None:
        self._came[request_id] = self._clock()

    def left(self, request_id: str) -> None:
        self._came.pop(request_id, None)

    def computes_all(self, request_id: str, counted: Counted) -> None:
        """The step that is being planned computes up to the prompt's end, or beyond it."""
        came = self._came.pop(request_id, None)
        if came is not None:
            self._next.append((came, source_of(counted)))

    def planned(self, number: int) -> None:
        if self._next:
            self._open[number], self._next = self._next, []
            if len(self._open) > OPEN_MAX:
                self._open.popitem(last=False)

    def ended(self, number: int, stats: StepStats) -> None:
        """The step's output has come."""
        for came, source in self._open.pop(number, ()):
            stats.observe("ttft_seconds", self._clock() - came, source)


def source_of(counted: Counted) -> str:
    """Where the KV of a request came from, that it computes behind."""
    loaded = (tier for tier in FURTHEST if counted.sources.get(tier))
    return next(loaded, "hbm" if counted.in_hbm else "computed")
