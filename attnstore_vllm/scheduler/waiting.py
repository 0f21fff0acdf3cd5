# SPDX-License-Identifier: Apache-2.0
"""Waiting for KV that comes up from NVMe: is it sooner than computing, and who looks when.

StepTimes measures how long vLLM's steps take. Costs decides by them, and by what the store says of
its disk (policy/cost.py), whether a request waits for its KV, loads it or computes it. Waits keeps
the requests that wait from being looked at more often than a step can afford.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.cost import CopyCost, LoadRate, StepCost, pieces_to_wait_for
from attnstore_vllm.policy.overlap import layers_before
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.stats import StepStats
from attnstore_vllm.scheduler.vllm_types import SchedulerOutput
from attnstore_vllm.store.store import Store

Clock = Callable[[], float]

OPEN_MAX = 16
"""Steps that were planned and have not come back. More than vLLM has in flight."""
WAITS_MAX = 4
"""Requests whose KV is not even on its way that are looked at in a step; for the others, what was
last said holds: vLLM goes through all of its queue, step after step, as long as it has a place."""
ROUND_S = 0.05
"""In a round each is looked at once. So long, at least, lies between the beginnings of two."""
EMPTY_STEP_WAIT_S = 0.002
"""How long a step that computes nothing waits for a read to end: bounded, and short enough
that a request that arrives meanwhile does not notice."""


class _Step(NamedTuple):
    planned_at: float
    prompts: list[tuple[int, int]]
    num_generating: int
    num_loaded: int
    """Tokens that were loaded for it."""


class StepTimes:
    """Feeds `cost`. A step begins when it is planned, or when the one before it ends if that is
    later, as with asynchronous scheduling; it ends when its output comes back with its number."""

    def __init__(self, cost: StepCost, clock: Clock = time.monotonic) -> None:
        self._cost = cost
        self._clock = clock
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
        new = (
            (request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs
        )
        for request_id, start in itertools.chain(new, starts):
            count = output.num_scheduled_tokens.get(request_id, 0)
            if count == 1 or request_id in output.scheduled_spec_decode_tokens:
                num_generating += 1
            elif count:
                prompts.append((start, start + count))
        self._open[number] = _Step(self._clock(), prompts, num_generating, loads)
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)
        return number

    def ended(self, number: int, load_wait_s: float) -> tuple[float | None, int]:
        """The step's output has come. Returns what StepCost.observe does, and tokens loaded.

        Args:
            load_wait_s: of the step's length, what its loads have cost.
        """
        now = self._clock()
        before, self._ended_at = self._ended_at, now
        step = self._open.pop(number, None)
        if step is None:
            return None, 0
        seconds = now - max(step.planned_at, before) - load_wait_s
        if seconds <= 0:  # seen too late: it says nothing
            return None, step.num_loaded
        wrong = self._cost.observe(seconds, step.prompts, step.num_generating)
        return wrong, step.num_loaded


class Costs:
    """Whether a request waits for its KV, loads it or computes it.

    Args:
        load_deadline_s: how long a request waits for its chunks to come up from NVMe, at most.
        computes_if_sooner: else what is stored is loaded, whatever that takes.
        ahead_layers: of the model, where loads run beside it; else 0.
        step_tokens: what a step computes of one prompt, at most.
    """

    def __init__(
        self,
        store: Store,
        load_deadline_s: float,
        computes_if_sooner: bool,
        *,
        ahead_layers: int = 0,
        step_tokens: int = 1 << 30,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self.load_tokens = 0
        """That the step which is being planned loads."""
        self._store = store
        self._load_deadline_s = load_deadline_s
        self._computes_if_sooner = computes_if_sooner
        self._steps = StepCost()
        self._times = StepTimes(self._steps, clock)
        self._copies = CopyCost()
        self._loads = LoadRate()
        self._ahead_layers = ahead_layers
        self._step_tokens = step_tokens

    # ---- steps -------------------------------------------------------------------------

    def step_planned(self, output: SchedulerOutput) -> int:
        """Returns the step's number, which its report is to have."""
        loads, self.load_tokens = self.load_tokens, 0
        return self._times.planned(output, loads=loads)

    def step_ended(self, report: StepReport, stats: StepStats) -> None:
        wrong, loaded = self._times.ended(report.number, report.load_wait_s)
        if wrong is not None:
            stats.observe("step_over_forecast", 1 + wrong)
        if loaded and report.load_wait_s:
            self._copies.observe(loaded, report.load_wait_s)
        for num_bytes, seconds in report.measured:
            self._loads.observe(num_bytes, seconds)

    # ---- decisions ---------------------------------------------------------------------

    def copy_pays(self, start: int, stop: int) -> bool:
        """Whether KV of tokens [start, stop) that is in DRAM should be loaded."""
        return not self._computes_if_sooner or self._copies.pays(start, stop, self._steps)

    def layers_before(self, num_bytes: int, queued_bytes: int, stop: int, end: int) -> int:
        """How many layers of a load should be in HBM before the step that computes from `stop` on;
        0: the step itself hides it, or nothing is known of it.

        By the means, with no margin for doubt: a layer too many keeps the request waiting for it,
        while one too few is waited for in the forward pass, which ends no later for it.

        Args:
            num_bytes, queued_bytes: of the load, and of those that may be before it; a rank's.
            end: of the request's tokens.
        """
        if not self._ahead_layers or not self._loads.is_known or not self._steps.is_known:
            return 0
        load_s = self._loads.seconds(num_bytes + queued_bytes)
        compute_s = self._steps.step_seconds(stop, min(end, stop + self._step_tokens))
        return layers_before(load_s, compute_s, self._ahead_layers)

    def deadline(self, state: RequestState, now: float) -> float:
        """Until when the request waits at most, from when it was first asked for."""
        if state.waiting.deadline is None:
            state.waiting.deadline = now + self._load_deadline_s
        return state.waiting.deadline

    def why_not_wait(
        self, state: RequestState, ready_stop: int, coming: Sequence[Piece]
    ) -> str | None:
        """None if the request should wait for (some of) these, which are on their way."""
        now = self._clock()
        if now >= self.deadline(state, now):
            return "deadline"
        arrivals = self._store.arrivals(state.request.request_id, coming)
        number = 0
        if arrivals is not None and self._steps.is_known:
            stops = [piece.stop for piece in coming]
            number = pieces_to_wait_for(ready_stop, stops, arrivals, self._steps)
            if number == 0 and self._computes_if_sooner:
                return "slower"
        if state.waiting.since is None:
            state.waiting.since = now
        if state.waiting.forecast is None and number > 0 and arrivals is not None:
            state.waiting.forecast = now, arrivals[number - 1]
        return None

    def end_wait(self, state: RequestState, stats: StepStats) -> None:
        """The request has its answer."""
        if state.waiting.since is None:
            return
        now = self._clock()
        stats.observe("wait_seconds", now - state.waiting.since)
        if state.waiting.forecast is not None:
            said_at, seconds = state.waiting.forecast
            stats.observe("wait_over_forecast", (now - said_at) / max(seconds, 1e-6))
        state.waiting.since = state.waiting.forecast = None


class Waits:
    """Requests that wait for their KV, in the step that is being planned."""

    def __init__(self, store: Store, costs: Costs, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._store = store
        self._costs = costs
        self._for: list[Sequence[Piece]] = []
        self._round = 1
        self._round_at: float | None = None
        self._num_looks = 0
        self._is_behind = False
        """Somebody has not had a look in this round."""
        self._looking = False
        """The request that is asked about now has a look."""

    def goes_on(self, state: RequestState) -> bool:
        """Whether the request waits on without another look. Cost: some microseconds."""
        self._looking = False
        # What had its answer does not wait: vLLM only had no room for it.
        if state.waiting.is_answered or not self._store.has_missing(state.request.request_id):
            return False
        if state.waiting.round < self._round:
            if self._num_looks < WAITS_MAX:
                self._num_looks += 1
                self._looking = True
                state.waiting.round = self._round
                return False
            self._is_behind = True
        now = self._clock()
        if now >= self._costs.deadline(state, now):
            return False
        if state.waiting.since is None:
            state.waiting.since = now
        self._note(state.waiting.coming)
        return True

    def answered(self, state: RequestState) -> None:
        """It was worked out that the request waits no longer. Its look is another's: how many
        have an answer in a step is limited by what vLLM can start."""
        self._num_looks -= self._looking
        self._looking = False
        state.waiting.is_answered, state.waiting.coming = True, ()

    def add(self, state: RequestState, pieces: Sequence[Piece]) -> None:
        """It was worked out that the request should wait for these."""
        state.waiting.is_answered, state.waiting.coming = False, pieces
        self._note(pieces)

    def _note(self, pieces: Sequence[Piece]) -> None:
        if len(self._for) < WAITS_MAX:
            self._for.append(pieces)

    def end_step(self, *, is_empty: bool) -> None:
        """The step is planned. If it computes nothing, wait a little for something to come."""
        if self._for and is_empty:
            self._store.wait_for_any(self._for, EMPTY_STEP_WAIT_S)
        self._for.clear()
        now = self._clock()
        if self._num_looks and self._round_at is None:
            self._round_at = now
        if not self._is_behind and self._round_at and now - self._round_at >= ROUND_S:
            self._round, self._round_at = self._round + 1, None
        self._num_looks, self._is_behind = 0, False
