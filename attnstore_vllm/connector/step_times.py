# SPDX-License-Identifier: Apache-2.0
"""How long the engine's steps take, as the scheduler side sees it: for policy/cost.py.

A step begins when it is planned, or when the one before it ends if that is later, as with
asynchronous scheduling; it ends when its output comes back with its number.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from attnstore_vllm.policy.cost import StepCost

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

OPEN_MAX = 16
"""Steps that were planned and have not come back. More than vLLM has in flight."""


class _Step(NamedTuple):
    planned_at: float
    prompts: list[tuple[int, int]]
    num_generating: int
    num_loaded: int
    """Tokens that were loaded for it."""


class StepTimes:
    """Feeds `cost`. All methods run on the scheduler's thread."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._numbers = itertools.count(1)
        self._open: OrderedDict[int, _Step] = OrderedDict()
        self._ended_at = 0.0

    def planned(self, output: SchedulerOutput, *, loads: int) -> int:
        """A step was planned. Returns its number, which its output is to come back with.

        Args:
            loads: tokens that it loads.
        """
        number = next(self._numbers)
        if not output.total_num_scheduled_tokens:
            return number
        prompts, num_generating = [], 0
        cached = output.scheduled_cached_reqs
        starts = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        new = ((request.req_id, request.num_computed_tokens) for request in
               output.scheduled_new_reqs)  # fmt: skip
        for request_id, start in itertools.chain(new, starts):
            count = output.num_scheduled_tokens.get(request_id, 0)
            if count == 1 or request_id in output.scheduled_spec_decode_tokens:
                num_generating += 1
            elif count:
                prompts.append((start, start + count))
        self._open[number] = _Step(time.monotonic(), prompts, num_generating, loads)
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)
        return number

    def ended(self, number: int, load_wait_s: float) -> tuple[float | None, int]:
        """The step's output has come. Returns what StepCost.observe does, and tokens loaded.

        Args:
            load_wait_s: of the step's length, what its loads have cost.
        """
        now = time.monotonic()
        before, self._ended_at = self._ended_at, now
        step = self._open.pop(number, None)
        if step is None:
            return None, 0
        seconds = now - max(step.planned_at, before) - load_wait_s
        if seconds <= 0:  # seen too late: it says nothing
            return None, step.num_loaded
        wrong = self._cost.observe(seconds, step.prompts, step.num_generating)
        return wrong, step.num_loaded
