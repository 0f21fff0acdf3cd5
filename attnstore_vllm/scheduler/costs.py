# SPDX-License-Identifier: Apache-2.0
"""Costs: whether a request waits for its KV, loads it or computes it, by how long steps and copies
take (policy/cost.py) and by what the store says of its disk."""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.prefix import Piece, gaps_of
from attnstore_vllm.policy.cost import (
    OUTLIER,
    USUAL_STEPS,
    CopyCost,
    LoadRate,
    StepCost,
    ahead_pays,
    ahead_seconds,
    layers_before,
    pieces_to_wait_for,
)
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.vllm_types import SchedulerOutput
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.plan import CHOSEN_TOGETHER, PassPlan
from attnstore_vllm.types import Cause, Clock

BEYOND_MAX = 64
"""Pieces beyond DRAM that one decision looks at: how many there are is for clients to say."""
LONG_LOAD_S = 0.001
"""A load that takes less hides no pass."""


class Chosen(NamedTuple):
    """Tokens of documents that are computed anew, once some layers of all have told which."""

    num_tokens: int
    compared_share: float
    """The share of the model's layers."""


class Costs:
    """Whether a request waits for its KV, loads it or computes it.

    Args:
        load_deadline_s: how long a request waits for its chunks to come up from NVMe, at most.
        computes_if_sooner: else what is stored is loaded, even if that is slower.
        ahead_layers: of the model, where loads run beside it; else 0.
        step_tokens, step_rows: what a step computes, at most: tokens, sequences.
        leaves: tokens that a long load leaves to compute, at least (EngineFacts).
    """

    def __init__(
        self,
        store: Store,
        load_deadline_s: float,
        computes_if_sooner: bool,
        *,
        ahead_layers: int = 0,
        step_tokens: int = 1 << 30,
        step_rows: int = 1 << 30,
        leaves: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._store = store
        self.load_deadline_s = load_deadline_s
        self._computes_if_sooner = computes_if_sooner
        self._steps = StepCost()
        self.times = StepTimes(self._steps, clock)
        self._copies = CopyCost()
        self._loads = LoadRate()
        self.ahead_layers = ahead_layers
        self._step_tokens, self._step_rows = step_tokens, step_rows
        self._leaves = leaves

    # ---- steps -------------------------------------------------------------------------

    def step_ended(self, report: StepReport, stats: StepStats) -> None:
        wrong, loaded = self.times.ended(report.number, report.load_wait_s)
        if wrong is not None:
            stats.observe("step_forecast_ratio", 1 + wrong)
        if loaded and report.load_wait_s:
            self._copies.observe(loaded, report.load_wait_s)
        for num_bytes, seconds in report.measured:
            self._loads.observe(num_bytes, seconds)

    def measured(self) -> dict[str, float] | None:
        """The costs that were learned, by their names in a machine file; None before they are
        known. From any thread."""
        step_s, token_s, context_s, sequence_s = self._steps.parts()
        if not self._steps.is_known or not token_s:
            return None
        least = 1e-9  # a fit may say that a part costs nothing; a machine file may not
        found = {"prefill_tokens_per_s": 1 / token_s, "decode_step_s": max(step_s, least)}
        found["decode_sequence_s"] = max(sequence_s, least)
        if context_s:
            found["prefill_context"] = token_s / context_s
        if self._loads.is_known:
            found["rank_bandwidth"] = 1 / max(self._loads.seconds(1), 1e-15)
        return found

    # ---- decisions ---------------------------------------------------------------------

    def leaves(self, num_bytes: int) -> int:
        """Tokens that a load of so many bytes, of one rank, leaves to compute, at least."""
        is_long = self._loads.is_known and self._loads.seconds(num_bytes) >= LONG_LOAD_S
        return self._leaves if is_long else 1

    def computing_s(self, start: int, stop: int) -> float | None:
        """Seconds for tokens [start, stop) of a prompt, on the mean; None before it is known, and
        where all that is stored is waited for. From any thread."""
        is_weighed = self._computes_if_sooner and self._steps.is_known
        return self._steps.seconds(start, stop) if is_weighed else None

    def num_that_pay(self, state: RequestState, pieces: Sequence[Piece]) -> int:
        """How many of these pieces, more than DRAM has room for, are worth waiting for; those that
        are in DRAM are. Cost: a look at each that DRAM has room for, and at BEYOND_MAX of the
        others, evenly spaced. Arrivals rise there by as much for each piece, and computing by more
        and more: so the gain is greatest where they begin or end."""
        near, beyond = pieces[: self._store.num_slots], pieces[self._store.num_slots :]
        every = -(-len(beyond) // BEYOND_MAX) or 1
        numbers = [*range(len(beyond), 0, -every)][::-1]
        ready = list(takewhile(lambda p: p.chunk.dram.state is State.READY, near))
        arrivals = self._store.arrivals(state.request.request_id, near[len(ready) :])
        beyond_s = self._store.read_s(len(beyond))
        is_weighed = self._computes_if_sooner and self._steps.is_known
        if not is_weighed or arrivals is None or beyond_s is None:
            return len(pieces)
        near_s = arrivals[-1] if arrivals else 0.0
        arrivals += [near_s + beyond_s * number / len(beyond) for number in numbers]
        start = ready[-1].stop if ready else pieces[0].start
        stops = [piece.stop for piece in near[len(ready) :]]
        stops += [beyond[number - 1].stop for number in numbers]
        best = len(ready) + pieces_to_wait_for(start, stops, arrivals, self._steps)
        return best if best <= len(near) else len(near) + numbers[best - len(near) - 1]

    def count_loaded(
        self, stats: StepStats, pieces: Sequence[Piece], start: int, stop: int
    ) -> Counter[str]:
        """A load of tokens [start, stop) is planned. Returns them by the tier they were in."""
        sources, saved_s = self._store.tiers(pieces, start), self.saved_s(start, stop)
        for tier, tokens in sources.items():
            stats.add("loaded_tokens", tier, tokens)
            stats.add("prefill_seconds_saved", tier, saved_s * tokens / (stop - start))
        return sources

    def saved_s(self, start: int, stop: int) -> float:
        """Seconds that loaded KV of these tokens saves; 0 before that is known."""
        return self._steps.seconds(start, stop) if self._steps.is_known else 0.0

    def copy_pays(self, start: int, stop: int, ahead_s: float | None = None) -> bool:
        """Whether KV of tokens [start, stop) that is in DRAM should be loaded.

        Args:
            ahead_s: see CopyCost.pays().
        """
        return not self._computes_if_sooner or self._copies.pays(start, stop, self._steps, ahead_s)

    def passes_pay(
        self, pieces: Sequence[Piece], start: int, num_bytes: int, chosen: Chosen | None = None
    ) -> bool:
        """Whether it is sooner to load these documents' KV, and to compute what lies between them
        in steps of its own, than to compute all from token `start` on. True while that is unknown.

        Args:
            num_bytes: that are loaded; a rank's.
            chosen: of the documents' tokens, to be computed anew.
        """
        if not (self._computes_if_sooner and self._steps.is_known):
            return True
        stop = pieces[-1].stop
        gaps = gaps_of(pieces, start, stop)
        computing = sum(self._steps.seconds(gap.start, gap.stop) for gap in gaps)
        num_tokens, most = sum(map(len, gaps)), self._step_tokens
        num_passes = len(gaps) // self._step_rows
        if chosen is not None:
            num_tokens += chosen.num_tokens
            most = min(most, self._step_rows * CHOSEN_TOGETHER)
        num_passes = 1 + max(num_passes, num_tokens // most)
        loading = self._loads.seconds(num_bytes) if self._loads.is_known else 0.0
        more = num_passes * self._steps.parts()[0]
        all_s = self._steps.seconds(start, stop)
        if chosen is not None:
            computing += (chosen.compared_share + chosen.num_tokens / (stop - start)) * all_s
        return computing + more + loading <= all_s

    def ahead_s(self, num_bytes: int, layers: int, num_layers: int) -> float | None:
        """How long a request waits for so many layers that are loaded ahead; None if there are
        none, if copies do not run beside the model, or if nothing is known of them.

        Args:
            num_bytes: of all layers, and of loads that may be before them; a rank's.
        """
        if not (layers and self.ahead_layers and self._loads.is_known):
            return None
        step_s = self.times.usual_s if self.times.num_running else 0.0
        return ahead_seconds(self._loads.seconds(num_bytes), layers, num_layers, step_s)

    def state_pays(self, start: int, stop: int, num_groups: int) -> bool:
        """Whether computing tokens [start, stop) takes longer than reading the states behind them
        from NVMe. True as long as that is not known."""
        read_s = self._store.read_s(num_groups)
        if read_s is None or not self._steps.is_known:
            return True
        return self._steps.seconds(start, stop) > read_s

    def layers_before(self, num_bytes: int, queued_bytes: int, stop: int, end: int) -> int:
        """How many layers of a load should be in HBM before the step that computes from `stop` on;
        0: the step itself hides it, or those that run lose less by waiting for it, or nothing is
        known of it.

        By the means, with no margin for doubt: a layer too many keeps the request waiting for it,
        while one too few is waited for in the forward pass, which ends no later for it.

        Args:
            num_bytes, queued_bytes: of the load, and of those that may be before it; a rank's.
            end: of the request's tokens.
        """
        if not self.ahead_layers or not self._loads.is_known or not self._steps.is_known:
            return 0
        load_s = self._loads.seconds(num_bytes + queued_bytes)
        compute_s = self._steps.step_seconds(stop, min(end, stop + self._step_tokens))
        others, step_s = self.times.num_running, self.times.usual_s
        if not ahead_pays(load_s, compute_s, self.ahead_layers, others, step_s):
            return 0
        return layers_before(load_s, compute_s, self.ahead_layers)

    def deadline(self, state: RequestState, now: float) -> float:
        """Until when the request waits at most, from when it was first asked for."""
        if state.waiting.deadline is None:
            state.waiting.deadline = now + self.load_deadline_s
        return state.waiting.deadline

    def why_not_wait(
        self, state: RequestState, ready_stop: int, coming: Sequence[Piece]
    ) -> Cause | None:
        """None if the request should wait for (some of) these, which are on their way."""
        if state.is_at_once:
            return Cause.SLOWER
        now = self._clock()
        if now >= self.deadline(state, now):
            is_full = self._store.thread.reader.lacks_room
            return Cause.DRAM_FULL if is_full else Cause.DEADLINE
        arrivals = self._store.arrivals(state.request.request_id, coming)
        number = 0
        if arrivals is not None and self._steps.is_known:
            stops = [piece.stop for piece in coming]
            number = pieces_to_wait_for(ready_stop, stops, arrivals, self._steps)
            if number == 0 and self._computes_if_sooner:
                return Cause.SLOWER
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
        state.counted.waited_s += now - state.waiting.since
        stats.observe("wait_seconds", now - state.waiting.since)
        if state.waiting.forecast is not None:
            said_at, seconds = state.waiting.forecast
            stats.observe("wait_forecast_ratio", (now - said_at) / max(seconds, 1e-6))
        state.waiting.since = state.waiting.forecast = None


OPEN_MAX = 16
"""Steps that were planned and have not come back. More than vLLM has in flight."""


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
        self.load_tokens = 0
        """Tokens that the step loads which is being planned."""
        self.num_running = 0
        """Requests of which the step computes something that was planned last."""
        self.usual_s = 0.0
        """How long a step has taken lately, of any size. One that is far longer counts in
        part."""

    def planned(self, output: SchedulerOutput, passes: Sequence[PassPlan] = ()) -> int:
        """A step was planned. Returns its number, which its output is to come back with.

        Args:
            passes: of our own, which the step makes too.
        """
        number = next(self._numbers)
        loads, self.load_tokens = self.load_tokens, 0
        self.num_running = len(output.num_scheduled_tokens)
        # Of passes that choose tokens no counts say what they compute, nor in which layers.
        is_told = all(one.selection is None for one in passes)
        if not ((output.total_num_scheduled_tokens or passes) and is_told):
            return number
        prompts, num_generating = [(r.start, r.stop) for p in passes for r in p.runs], 0
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
        counted = min(seconds, OUTLIER * self.usual_s) if self.usual_s else seconds
        self.usual_s += (counted - self.usual_s) / (USUAL_STEPS if self.usual_s else 1)
        wrong = self._cost.observe(seconds, step.prompts, step.num_generating)
        return wrong, step.num_loaded
