# SPDX-License-Identifier: Apache-2.0
"""Documents anywhere in a prompt: their KV is loaded, and what lies between them is computed by
workers in passes of our own (connector/own_pass.py).

    vLLM gives blocks up to the end of the last document, and waits
        step 1: documents are loaded    step 2 ...: gaps are computed    last: received

A step's passes have what its own tokens leave of vLLM's budget: others wait for them no longer than
for a chunked prefill of as many tokens. Which tokens is decided here, so that all ranks compute the
same in the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.vllm_types import Tables
from attnstore_vllm.transfer.plan import PassPlan, TokenRun


@dataclass(slots=True)
class _Gaps:
    state: RequestState
    plan_id: int
    """Of the load of its documents."""
    left: deque[range]
    """Tokens that no pass has had."""
    block_ids: tuple[tuple[int, ...], ...]
    has_ended: bool = False
    """The request was aborted: nothing more is written to its blocks."""


class Documents:
    """All methods run on the scheduler's thread.

    Args:
        step_tokens, step_rows: that a pass may have; of vLLM's own step as many are taken away.
        layers: that are loaded before a request is received.
    """

    def __init__(self, plans: OpenPlans, step_tokens: int, step_rows: int, layers: int) -> None:
        self._plans = plans
        self._step_tokens, self._step_rows = step_tokens, step_rows
        self._layers = layers
        self._open: dict[str, _Gaps] = {}
        """In the order in which they came; the first has the passes."""

    @property
    def is_open(self) -> bool:
        """Whether any request waits for passes."""
        return bool(self._open)

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._open

    def begin(
        self, state: RequestState, plan_id: int, gaps: Sequence[range], tables: Tables
    ) -> None:
        """vLLM has taken the offer, and the load of the documents is planned."""
        block_ids = tuple(tuple(blocks) for blocks in tables)
        self._open[state.request.request_id] = _Gaps(state, plan_id, deque(gaps), block_ids)

    def ended(self, request_id: str) -> None:
        """The request has ended: vLLM keeps its blocks until it is received."""
        if (found := self._open.get(request_id)) is not None:
            found.has_ended = True

    def plan(self, num_scheduled: int) -> list[PassPlan]:
        """The passes of a step whose own forward pass has so many tokens."""
        tokens, rows = self._step_tokens - num_scheduled, self._step_rows
        passes: list[PassPlan] = []
        for request_id, found in list(self._open.items()):
            if self._plans.is_open(found.plan_id):
                continue
            runs: list[TokenRun] = []
            while found.left and not found.has_ended and tokens > 0 and rows > 0:
                gap = found.left.popleft()
                now, later = gap[:tokens], gap[tokens:]
                if later:
                    found.left.appendleft(later)
                ids = found.state.request.all_token_ids[now.start : now.stop]
                runs.append(TokenRun(now.start, tuple(ids)))
                tokens, rows = tokens - len(now), rows - 1
            if runs:
                passes.append(PassPlan(request_id, tuple(runs), found.block_ids))
            if not found.left or found.has_ended:
                del self._open[request_id]
                self._plans.load(request_id, [], (), num_partial=0, layers_before=self._layers)
        return passes
