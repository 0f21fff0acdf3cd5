# SPDX-License-Identifier: Apache-2.0
"""Offers: the stored KV that a request gets when vLLM asks, or that it waits for.

It is long since costs, waits and offers make one answer together.

vLLM asks as often as it has a place for the request and no blocks. Costs decides whether a request
waits for its KV, loads it or computes it: by how long vLLM's steps take and by what the store says
of its disk (policy/cost.py). Waits keeps the requests that wait from being looked at more often
than a step can afford. Held chunks are let go when vLLM plans a step without having taken them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.policy.cost import (
    CopyCost,
    LoadRate,
    StepCost,
    ahead_pays,
    ahead_seconds,
    layers_before,
    pieces_to_wait_for,
)
from attnstore_vllm.scheduler.figures import GroupCounts, StepStats
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.scheduler.open_plans import OpenPlans, plan_groups, plan_states
from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS, Offered, RequestState
from attnstore_vllm.scheduler.stages import Stages
from attnstore_vllm.scheduler.truncation import Truncation
from attnstore_vllm.scheduler.untaken import Untaken
from attnstore_vllm.scheduler.vllm_types import Tables
from attnstore_vllm.scheduler.vllm_view import Clock, StepTimes, VllmQueue
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.remote_io import is_asked
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import last_blocks_last
from attnstore_vllm.types import DRAM, NVME

WAITS_MAX = 4
"""Requests whose KV is not even on its way that are looked at in a step; for the others, what was
last said holds: vLLM goes through all of its queue, step after step, as long as it has a place."""
ROUND_S = 0.05
"""In a round each is looked at once. So long, at least, lies between the beginnings of two."""
EMPTY_STEP_WAIT_S = 0.005
"""How long a step that computes nothing waits for a read to end: about as long as vLLM takes for
such a step, so that a request that arrives meanwhile does not notice."""
LOCKSTEP_WAIT_S = 0.002
"""The same where other engines' steps wait for this one's."""
LINGERS_MAX = 8
"""Looks at a request that is alone in a step, at most."""


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
        self._store = store
        self.load_deadline_s = load_deadline_s
        self._computes_if_sooner = computes_if_sooner
        self._steps = StepCost()
        self.times = StepTimes(self._steps, clock)
        self._copies = CopyCost()
        self._loads = LoadRate()
        self.ahead_layers = ahead_layers
        self._step_tokens = step_tokens

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

    def computing_s(self, start: int, stop: int) -> float | None:
        """Seconds for tokens [start, stop) of a prompt, on the mean; None before it is known, and
        where all that is stored is waited for. From any thread."""
        is_weighed = self._computes_if_sooner and self._steps.is_known
        return self._steps.seconds(start, stop) if is_weighed else None

    def num_that_pay(self, state: RequestState, pieces: Sequence[Piece]) -> int:
        """How many of these pieces, more than DRAM has room for, are worth waiting for; those that
        are in DRAM are. Cost: a look at each."""
        near, beyond = pieces[: self._store.num_slots], pieces[self._store.num_slots :]
        ready = list(takewhile(lambda p: p.chunk.dram.state is State.READY, near))
        arrivals = self._store.arrivals(state.request.request_id, near[len(ready) :])
        beyond_s = self._store.read_s(len(beyond))
        is_weighed = self._computes_if_sooner and self._steps.is_known
        if not is_weighed or arrivals is None or beyond_s is None:
            return len(pieces)
        near_s = arrivals[-1] if arrivals else 0.0
        arrivals += [near_s + beyond_s * n / len(beyond) for n in range(1, len(beyond) + 1)]
        start = ready[-1].stop if ready else pieces[0].start
        stops = [piece.stop for piece in pieces[len(ready) :]]
        return len(ready) + pieces_to_wait_for(start, stops, arrivals, self._steps)

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
    ) -> str | None:
        """None if the request should wait for (some of) these, which are on their way."""
        if state.is_at_once:
            return "slower"
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
        state.counted.waited_s += now - state.waiting.since
        stats.observe("wait_seconds", now - state.waiting.since)
        if state.waiting.forecast is not None:
            said_at, seconds = state.waiting.forecast
            stats.observe("wait_forecast_ratio", (now - said_at) / max(seconds, 1e-6))
        state.waiting.since = state.waiting.forecast = None


class Waits:
    """Requests that wait for their KV, in the step that is being planned.

    Args:
        queue: vLLM's; None: nobody knows it.
        wait_s: how long a step that computes nothing may wait.
    """

    def __init__(
        self,
        store: Store,
        costs: Costs,
        clock: Clock = time.monotonic,
        queue: VllmQueue | None = None,
        wait_s: float = EMPTY_STEP_WAIT_S,
    ) -> None:
        self._queue = queue
        self._wait_s = wait_s
        self._clock = clock
        self._store = store
        self._costs = costs
        self._for: list[Sequence[Piece]] = []
        self._asked: list[SequenceKeys] = []
        self._round = 1
        self._round_at: float | None = None
        self._num_looks = 0
        self._is_behind = False
        """Somebody has not had a look in this round."""
        self._looking = False
        """The request that is asked about now has a look."""
        self._waited_s = 0.0

    def goes_on(self, state: RequestState) -> bool:
        """Whether the request waits on without another look. Cost: some microseconds."""
        self._looking = False
        # What had its answer does not wait: vLLM only had no room for it.
        if state.waiting.is_answered or state.is_at_once:
            return False
        if not self._store.has_missing(state.request.request_id):
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
        self.note(state.waiting.coming)
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
        self.note(pieces)

    def awaits(self, state: RequestState) -> bool:
        """Whether the request waits for a tier's answer to what it has."""
        if not is_asked(state.sequence):
            state.sequence.asked = ()  # nor will it: what comes late finds its place alone
            return False
        if state.waiting.since is None:
            state.waiting.since = self._clock()
        self._num_looks -= self._looking
        self._looking = False
        if len(self._asked) < WAITS_MAX:
            self._asked.append(state.sequence)
        return True

    def note(self, pieces: Sequence[Piece]) -> None:
        """These are waited for: a step that computes nothing waits till one of them may come."""
        if len(self._for) < WAITS_MAX:
            self._for.append(pieces)

    def lingers(self, state: RequestState) -> bool:
        """Wait a little for what the request waits for, if nobody else runs or waits: until vLLM
        would ask again it sleeps. Returns whether something has come."""
        if self._queue is None or not self._queue.is_alone(state.request.request_id):
            return False
        if not self._wait():
            return False
        self._for.clear()
        self._asked.clear()
        return True

    def _wait(self) -> bool:
        """For something to come; `wait_s` at most, all of a step together."""
        left_s = self._wait_s - self._waited_s
        if left_s <= 0 or not (self._for or self._asked):
            return False
        began_at = self._clock()
        has_come = self._store.wait_for_any(self._for, left_s, self._asked)
        self._waited_s += self._clock() - began_at
        return has_come

    def end_step(self, *, is_empty: bool) -> None:
        """The step is planned. If it computes nothing, wait a little for something to come."""
        if is_empty:
            self._wait()
        self._waited_s = 0.0
        self._for.clear()
        self._asked.clear()
        now = self._clock()
        if self._num_looks and self._round_at is None:
            self._round_at = now
        if not self._is_behind and self._round_at and now - self._round_at >= ROUND_S:
            self._round, self._round_at = self._round + 1, None
        self._num_looks, self._is_behind = 0, False


class Offers:
    """See the module. All methods run on the scheduler's thread.

    Args:
        stages: of loads that are longer than DRAM; None: there are none.
    """

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        costs: Costs,
        waits: Waits,
        plans: OpenPlans,
        truncation: Truncation,
        counts: GroupCounts,
        stages: Stages | None = None,
    ) -> None:
        self._stages = stages
        self._needs = {need.group: need for need in store.needs}
        self.untaken = Untaken(store, geometry.block_tokens)
        self._store = store
        self._geometry = geometry
        self._rank_token_bytes = geometry.rank_bytes // geometry.chunk_tokens
        self._costs = costs
        self._waits = waits
        self._plans = plans
        self._truncation = truncation
        self._counts = counts
        self._open: list[RequestState] = []
        """Requests with an offer in this schedule()."""

    def ask(self, state: RequestState, local: int, stats: StepStats) -> tuple[int | None, bool]:
        """How many tokens the request is offered behind those that are in HBM, None: ask again;
        and whether they are loaded before its first step.

        Args:
            local: tokens that are in HBM already.
        """
        last = state.untaken
        if last is not None and last.rest and not (self._stages and self._stages.is_free(state)):
            state.untaken = None  # another load is in parts by now
        held = self.untaken.again(state, local)
        if last is not None and held is not None:
            return self._offer(state, held, last.rest, local)
        answer: tuple[int | None, bool] = (None, False)
        if self._waits.goes_on(state):
            if state.waiting.coming:  # else it has not had a look yet
                count_wanted(stats, state, state.waiting.coming)
        else:
            answer = self._look(state, local, stats)
        for _ in range(LINGERS_MAX):
            if answer[0] is not None or not self._waits.lingers(state):
                break
            answer = self._look(state, local, stats)
        return answer

    def _look(self, state: RequestState, local: int, stats: StepStats) -> tuple[int | None, bool]:
        request, sequence = state.request, state.sequence
        if sequence.asked and self._waits.awaits(state):
            return None, False  # before the answer a look finds what the last one has found
        # One token is left to compute: vLLM needs its logits.
        stop = max(local, min(request.num_tokens - 1, state.usable_tokens()))
        pieces = self._store.find(
            sequence, local, stop, MIN_LOAD_TOKENS, request_id=request.request_id, visit=state.visit
        )
        if sequence.asked and self._waits.awaits(state):
            return None, False
        state.expect(pieces)
        count_wanted(stats, state, pieces)
        pieces, rest = self._stages.split(state, pieces) if self._stages else (pieces, [])
        held = self._store.hold_ready(pieces, sequence, stop, local)
        ready_stop = held[-1].stop if held else local
        cause = "lost"
        if not has_all(held, pieces):
            rest = []
            coming = still_coming(held, pieces, local, walks=self._store.walks)
            late = self._costs.why_not_wait(state, ready_stop, coming)
            if late is None:
                self._store.release(piece.chunk for piece in held)
                self._waits.add(state, pieces)
                return None, False
            cause = late
        self._costs.end_wait(state, stats)
        self._waits.answered(state)
        ready_stop = rest[-1].stop if rest else ready_stop
        num_tokens = ready_stop - local
        ahead_s = self._ahead_s(state, held) if held and self._costs.ahead_layers else None
        if held and not self._costs.copy_pays(local, ready_stop, ahead_s):
            cause, num_tokens = "slower", 0
        state.computing.first = local
        if not state.counted.offered:  # the request's first answer
            state.counted.offered = True
            self._store.answered_with(request.request_id, pieces)
            state.counted.in_hbm = local
            # A rest that is too short to be loaded is computed in any case.
            computed = state.counted.stored_stop - local - num_tokens
            if computed >= MIN_LOAD_TOKENS:
                stats.add("recomputations", cause, 1)
                state.counted.why_computed = cause
            for group in sequence.short_of:
                self._counts.add("shortened_hits", group, 1)
            offers = num_tokens >= MIN_LOAD_TOKENS
            offered = self._store.tiers([*held, *rest] if offers else (), local)
            for source, number in {
                "hbm": local,
                **offered,
                "computed": request.num_tokens - local - offered.total(),
            }.items():
                stats.add("prompt_tokens", source, number)
        if num_tokens < MIN_LOAD_TOKENS:
            self._store.release(piece.chunk for piece in held)
            held, rest = [], []
        self.untaken.note(state, local, held, rest)
        return self._offer(state, held, rest, local)

    def _offer(
        self, state: RequestState, held: list[Piece], rest: list[Piece], local: int
    ) -> tuple[int | None, bool]:
        """The answer to vLLM: it may take what is held, and `rest` in parts."""
        if not held:
            return 0, False
        if state.finds_moved:
            spine = [piece for piece in held if piece.group == 0]
            self._truncation.offer(state, spine, self.untaken.kv_cache_manager)
        layers_before = self._layers_before(state, held)
        if self._stages and rest:
            layers_before, self._stages.offered = self._geometry.num_layers, state
        state.offered = Offered(held, local, layers_before, rest)
        self._open.append(state)
        return [*held, *rest][-1].stop - local, layers_before > 0

    def _layers_before(self, state: RequestState, held: Sequence[Piece]) -> int:
        """How many layers are loaded before the request's first step."""
        if state.moved is not None:  # it fills blocks token by token, before the forward pass
            return 0
        # vLLM copies states before it begins a step's loads. And for a load in a request's first
        # step vLLM 0.32 counts one block of each recurrent group too few, and may stop for it.
        if any(need.reach is Reach.STATE for need in self._needs.values()):
            return self._geometry.num_layers
        if not self._costs.ahead_layers:
            return 0
        return self._costs.layers_before(
            *self._load_bytes(held), held[-1].stop, state.request.num_tokens
        )

    def _ahead_s(self, state: RequestState, held: Sequence[Piece]) -> float | None:
        """How long a request would wait for a load ahead of its step; None: it is for its step."""
        if state.finds_moved:
            return None
        layers = self._layers_before(state, held)
        return self._costs.ahead_s(sum(self._load_bytes(held)), layers, self._geometry.num_layers)

    def _load_bytes(self, held: Sequence[Piece]) -> tuple[int, int]:
        """A rank's, of a load and of those that may be before it."""
        num_tokens = held[-1].stop - held[0].start
        queued = self._plans.loading_blocks() * self._geometry.block_tokens
        return num_tokens * self._rank_token_bytes, queued * self._rank_token_bytes

    def take(self, state: RequestState, tables: Tables, num_tokens: int, stats: StepStats) -> bool:
        """vLLM takes so many tokens of the offer, for these blocks: their load is planned.

        Returns whether it is carried out before the request's first step.
        """
        offered, state.offered = state.offered, None
        assert offered is not None, "vLLM takes what was not offered"
        start, stop = offered.start, offered.start + num_tokens
        sections = [piece for piece in offered.pieces if piece.group]
        spine = offered.pieces[: len(offered.pieces) - len(sections)]
        rest = [piece for piece in offered.rest if piece.start < stop]
        now = rest[0].start if rest else stop  # the others are loaded in parts
        used = [piece for piece in spine if piece.start < now]
        assert used and [*used, *rest][-1].stop >= stop, "vLLM takes more than was offered"
        assert not self._needs or used[-1].stop == stop, "sections back no shorter hit"
        states = [piece for piece in sections if self._needs[piece.group].reach is Reach.STATE]
        sections = [piece for piece in sections if piece not in states]
        planned = plan_groups([*used, *sections], tables, now, self._geometry)
        copies, num_partial = last_blocks_last(
            [
                (copies, now % self._geometry.groups[group].block_tokens != 0 and not moved)
                for group, (copies, moved) in planned.items()
            ]
        )
        moved = [run for _, runs in planned.values() for run in runs]
        if len(spine) > len(used):
            self._store.release(piece.chunk for piece in spine[len(used) :])
        if self._needs:
            self._count_loaded((*used, *sections, *states), stop)
        sources = self._costs.count_loaded(stats, used, start, now)
        state.counted.sources = dict(sources + self._store.tiers(rest, now))
        if moved:  # tokens count once, in whatever groups
            stats.add("moved_tokens", DRAM, sum(run.num_tokens for run in planned[0][1]))
        if not offered.layers_before:
            self._costs.times.load_tokens += num_tokens
        plan_id = self._plans.load(
            state.request.request_id,
            [piece.chunk for piece in (*used, *sections, *states)],
            (*plan_states(states, tables, self._geometry), *copies) if states else copies,
            tuple(moved),
            num_partial=num_partial,
            layers_before=offered.layers_before,
            has_more=bool(rest),
        )
        if self._stages and offered.rest:
            self._stages.offered = None
            if rest:
                self._stages.begin(state, plan_id, rest, tables[0], stop)
        state.waiting.deadline, state.computing.first = None, stop
        state.untaken = None
        state.forget_matches()
        if state.request.lora_request is not None:
            size = self._geometry.block_tokens
            state.computing.unchecked = tuple(tables[0][start // size : -(-stop // size)])
        if start == 0:  # whole chunks of it are stored, since that is where they come from
            whole = stop // self._geometry.chunk_tokens
            state.computing.go_on_from(max(state.computing.chunks_seen, whole))
        # Sections of moved KV are another prompt's: to go on here says nothing of them.
        state.computing.sections = tuple(
            (piece.chunk, self._needs[piece.group])
            for piece in (*used, *sections, *states)
            if piece.first is None and piece.group in self._needs
        )
        if state.finds_moved:
            self._truncation.taken(state, used, stop)
        return offered.layers_before > 0

    def _count_loaded(self, pieces: Iterable[Piece], stop: int) -> None:
        for piece in pieces:
            size = self._geometry.groups[piece.group].block_tokens
            num_blocks = -(-min(piece.stop, stop) // size) - piece.start // size
            self._counts.add_blocks("group_loaded_bytes", piece.group, num_blocks)

    def withdraw(self, state: RequestState) -> None:
        """The offer is not taken, or asked for anew."""
        assert state.offered is not None
        self._store.release(piece.chunk for piece in state.offered.pieces)
        if self._stages and state.offered.rest:
            self._stages.offered = None
        state.offered = None
        self._truncation.withdraw(state)

    def end_schedule(self, stats: StepStats, *, is_empty: bool) -> None:
        """A step is planned: what vLLM has not taken by now it does not take. A load in parts goes
        on.

        Args:
            is_empty: it computes nothing.
        """
        for state in self._open:
            if state.offered is not None:
                self.withdraw(state)
        self._open.clear()
        if self._stages and (waited_for := self._stages.go_on(stats)):
            self._waits.note(waited_for)
        self._waits.end_step(is_empty=is_empty)


def has_all(held: Sequence[Piece], pieces: Sequence[Piece]) -> bool:
    """Whether what is held goes as far as what was found."""
    if held and pieces and held[-1].stop >= pieces[-1].stop:
        return True
    return [piece.chunk for piece in held] == [piece.chunk for piece in pieces]


def still_coming(
    held: Sequence[Piece], pieces: Sequence[Piece], start: int, *, walks: bool
) -> list[Piece]:
    """The pieces that were found and do not back what is held, as they are waited for.

    Where there are sections, nothing is won before all has come: so only the last of them ends
    where the hit does, and the others where what is held does.

    Args:
        start: what is before is in HBM.
        walks: what is held is another window, and no part of what was found.
    """
    num_held = 0 if walks else sum(piece.group == 0 for piece in held)
    spine = [piece for piece in pieces if piece.group == 0][num_held:]
    sections = [piece for piece in pieces if piece.group]
    if not sections and not walks:
        return spine
    ready_stop = held[-1].stop if held else start
    waiting = [replace(piece, stop=ready_stop) for piece in (*spine, *sections)]
    return [*waiting[:-1], pieces[-1]]


def count_wanted(stats: StepStats, state: RequestState, pieces: Sequence[Piece]) -> None:
    """The request is first offered a place: where is what it wants then?"""
    if state.counted.wanted:
        return
    state.counted.wanted = True
    spine = [piece for piece in pieces if piece.group == 0]
    wanted = Counter[str]()
    for piece in spine:
        is_here = piece.chunk.dram.state is State.READY
        tier = DRAM if is_here else next(iter(piece.chunk.behind), NVME)
        wanted[tier] += piece.stop - piece.start
    for tier, tokens in wanted.items():
        stats.add("wanted_tokens", tier, tokens)
