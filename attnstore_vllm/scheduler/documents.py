# SPDX-License-Identifier: Apache-2.0
"""Documents anywhere in a prompt: their KV is loaded, and what lies between them is computed by
workers in passes of our own (connector/document_passes.py).

    vLLM gives blocks up to the end of the last document, and waits
        step 1: documents are loaded    step 2 ...: gaps are computed    last: received

A step's passes have what its own tokens leave of vLLM's budget, and are few: others wait for them
no longer than for a chunked prefill of as many tokens. Which tokens is decided here, so that all
ranks compute the same in the same step. Where tokens are chosen by their K, how many is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from attnstore_vllm.config.settings import RecomputeBy, TruncationConfig
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.scheduler.costs import Chosen
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.vllm_types import Tables
from attnstore_vllm.transfer.plan import CHOSEN_TOGETHER, PassPlan, Selection, TokenRun
from attnstore_vllm.types import Cause, Clock

COMPARED_LAYERS = 2
"""Layers that are computed of all tokens, to choose some. K of the first does not differ."""
DEEP_LAYERS = 20
"""With so many it pays to choose: the compared layers are a tenth of the model at most."""
PASSES_MAX = 2
"""Passes in one step. Each reads the model's weights once, as a step does, though it computes
little."""
FULL_STEPS_MAX = 4
"""Steps in a row that leave no room for passes. Then there is one in spite of it, as there would be
for a prompt that vLLM computes in parts."""

PASSES_DEADLINE_S = 30.0
"""How long the passes of a request may take, from their first step on; then it is computed."""


def settled(config: TruncationConfig, layers: int) -> TruncationConfig:
    """With what recompute_by means for a model of so many layers: first, or deviation."""
    least = {"auto": DEEP_LAYERS, "first": math.inf, "deviation": COMPARED_LAYERS + 1}
    by: RecomputeBy = "deviation" if layers >= least[config.recompute_by] else "first"
    return replace(config, recompute_by=by)


@dataclass(slots=True)
class _Gaps:
    state: RequestState
    plan_id: int
    """That of its documents' load."""
    block_ids: tuple[tuple[int, ...], ...]
    left: deque[range]
    """Tokens that no pass has had."""
    compared: deque[range] = field(default_factory=deque)
    """Tokens that are to be compared first."""
    gaps: tuple[range, ...] = ()
    num_chosen: int = 0
    """See Selection; `left` counts tokens in the order of their positions then."""
    deadline: float | None = None
    """When the request is computed, if its passes are not over; None: its load is not over."""
    has_ended: bool = False
    """The request was aborted: nothing more is written to its blocks."""


@dataclass(slots=True)
class _Room:
    """A step's room for passes: tokens, rows of each, and how many there may be."""

    tokens: int
    rows: int
    passes: int = PASSES_MAX


class Documents:
    """All methods run on the scheduler's thread.

    Args:
        engine: says what a pass may have; of vLLM's own step as many tokens are taken away.
        config: settled.
        layers: that are loaded before a request is received.
    """

    def __init__(
        self,
        plans: OpenPlans,
        engine: EngineFacts,
        config: TruncationConfig | None,
        layers: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self._plans = plans
        self._step_tokens, self._step_rows = engine.pass_tokens, engine.pass_rows
        config = config or TruncationConfig()
        self._chosen_share = config.recompute if config.recompute_by == "deviation" else 0.0
        self._layers = layers
        self._clock = clock
        self._open: dict[str, _Gaps] = {}
        """In the order in which they came; the first has the passes."""
        self._num_full = 0
        """Steps that left no room, one after the other."""

    @property
    def is_open(self) -> bool:
        """Whether any request waits for passes."""
        return bool(self._open)

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._open

    def chosen(self, num_moved: int) -> Chosen | None:
        """Which of so many tokens of documents are chosen to be computed anew; None: none are."""
        number = math.ceil(self._chosen_share * num_moved)
        return Chosen(number, COMPARED_LAYERS / self._layers) if number else None

    def begin(
        self,
        state: RequestState,
        plan_id: int,
        gaps: Sequence[range],
        tables: Tables,
        tokens: range,
    ) -> None:
        """vLLM has taken the offer, and the load of the documents is planned.

        Args:
            gaps: between documents.
            tokens: all of both.
        """
        block_ids = tuple(tuple(blocks) for blocks in tables)
        found = _Gaps(state, plan_id, block_ids, deque(gaps))
        in_gaps = sum(map(len, gaps))
        if (chosen := self.chosen(len(tokens) - in_gaps)) is not None:
            found.num_chosen = chosen.num_tokens
            found.gaps = tuple(gaps)
            found.compared = deque([tokens])
            found.left = deque([range(in_gaps + found.num_chosen)])
        state.own_pass_tokens = in_gaps + found.num_chosen
        self._open[state.request.request_id] = found

    def ended(self, request_id: str) -> None:
        """The request has ended: vLLM keeps its blocks until it is received."""
        if (found := self._open.get(request_id)) is not None:
            found.has_ended = True

    def plan(self, num_scheduled: int, stats: StepStats) -> list[PassPlan]:
        """The passes of a step whose own forward pass has so many tokens."""
        loaded = [found for found in self._open.values() if not self._plans.is_open(found.plan_id)]
        if not loaded:
            return []
        room = self._room(num_scheduled)
        passes: list[PassPlan] = []
        now = self._clock()
        for found in loaded:
            found.deadline = found.deadline or now + PASSES_DEADLINE_S
            is_late = now >= found.deadline
            if not (found.has_ended or is_late):
                passes += self._passes(found, room)
            if not found.left or found.has_ended or is_late:
                self._received(found, stats, is_late=is_late and bool(found.left))
        return passes

    def _room(self, num_scheduled: int) -> _Room:
        tokens = self._step_tokens - num_scheduled
        self._num_full = 0 if tokens > 0 else self._num_full + 1
        if self._num_full > FULL_STEPS_MAX:
            self._num_full, tokens = 0, self._step_tokens
        return _Room(tokens, self._step_rows)

    def _passes(self, found: _Gaps, room: _Room) -> Iterator[PassPlan]:
        request_id, block_ids = found.state.request.request_id, found.block_ids
        if found.compared and room.tokens > 0 and room.passes > 0:
            room.passes -= 1
            most = room.tokens * self._layers // COMPARED_LAYERS
            ranges = _take(found.compared, most, room.rows)
            room.tokens -= -(-sum(map(len, ranges)) * COMPARED_LAYERS // self._layers)
            selection = Selection(found.gaps, found.num_chosen, range(0))
            yield PassPlan(request_id, _runs(found, ranges), block_ids, selection)
        if found.compared or room.tokens <= 0 or room.passes <= 0:
            return
        room.passes -= 1
        if not found.num_chosen:
            ranges = _take(found.left, room.tokens, room.rows)
            yield PassPlan(request_id, _runs(found, ranges), block_ids)
        else:
            ranges = _take(found.left, min(room.tokens, room.rows * CHOSEN_TOGETHER), 1)
            selection = Selection(found.gaps, found.num_chosen, ranges[0])
            yield PassPlan(request_id, (), block_ids, selection)
        room.tokens -= sum(map(len, ranges))

    def _received(self, found: _Gaps, stats: StepStats, *, is_late: bool) -> None:
        """With an empty last part vLLM hears that the request is loaded, or that it has failed."""
        request_id = found.state.request.request_id
        del self._open[request_id]
        if is_late and not found.has_ended:
            found.state.load_has_failed(Cause.DEADLINE)
            stats.add("recomputations", Cause.DEADLINE, 1)
        self._plans.load(
            request_id, [], (), num_partial=0, layers_before=self._layers, has_failed=is_late
        )


def _take(left: deque[range], tokens: int, rows: int) -> list[range]:
    """The first of these tokens, in so many runs at most; they are left no more."""
    taken: list[range] = []
    while left and tokens > 0 and len(taken) < rows:
        some = left.popleft()
        if later := some[tokens:]:
            left.appendleft(later)
        taken.append(some[:tokens])
        tokens -= len(taken[-1])
    return taken


def _runs(found: _Gaps, ranges: Sequence[range]) -> tuple[TokenRun, ...]:
    ids = found.state.request.all_token_ids
    return tuple(TokenRun(some.start, tuple(ids[some.start : some.stop])) for some in ranges)
