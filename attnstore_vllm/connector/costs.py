# SPDX-License-Identifier: Apache-2.0
"""Whether a request waits for its KV, loads it or computes it: policy/cost.py, fed by the steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnstore_vllm.connector.messages import StepReport
from attnstore_vllm.connector.metrics import AttnStoreStats
from attnstore_vllm.connector.requests import RequestState
from attnstore_vllm.connector.step_times import StepTimes
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.cost import CopyCost, StepCost, pieces_to_wait_for
from attnstore_vllm.policy.overlap import LoadRate, layers_before
from attnstore_vllm.store.store import Store

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Costs:
    """All methods run on the scheduler's thread.

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
    ) -> None:
        self.load_tokens = 0
        """That the step which is being planned loads."""
        self._store = store
        self._load_deadline_s = load_deadline_s
        self._computes_if_sooner = computes_if_sooner
        self._steps = StepCost()
        self._times = StepTimes(self._steps)
        self._copies = CopyCost()
        self._loads = LoadRate()
        self._ahead_layers = ahead_layers
        self._step_tokens = step_tokens

    # ---- steps -------------------------------------------------------------------------

    def step_planned(self, output: SchedulerOutput) -> int:
        """Returns the step's number, which its report is to have."""
        loads, self.load_tokens = self.load_tokens, 0
        return self._times.planned(output, loads=loads)

    def step_ended(self, report: StepReport, stats: AttnStoreStats) -> None:
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
        if state.deadline is None:
            state.deadline = now + self._load_deadline_s
        return state.deadline

    def why_not_wait(
        self, state: RequestState, ready_stop: int, coming: Sequence[Piece]
    ) -> str | None:
        """None if the request should wait for (some of) these, which are on their way."""
        now = time.monotonic()
        if now >= self.deadline(state, now):
            return "deadline"
        arrivals = self._store.arrivals(state.request.request_id, coming)
        number = 0
        if arrivals is not None and self._steps.is_known:
            stops = [piece.stop for piece in coming]
            number = pieces_to_wait_for(ready_stop, stops, arrivals, self._steps)
            if number == 0 and self._computes_if_sooner:
                return "slower"
        if state.waiting_since is None:
            state.waiting_since = now
        if state.wait_forecast is None and number > 0 and arrivals is not None:
            state.wait_forecast = now, arrivals[number - 1]
        return None

    def end_wait(self, state: RequestState, stats: AttnStoreStats) -> None:
        """The request has its answer."""
        if state.waiting_since is None:
            return
        now = time.monotonic()
        stats.observe("wait_seconds", now - state.waiting_since)
        if state.wait_forecast is not None:
            said_at, seconds = state.wait_forecast
            stats.observe("wait_over_forecast", (now - said_at) / max(seconds, 1e-6))
        state.waiting_since = state.wait_forecast = None
