# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for their KV to come up from NVMe, in the step that is being planned."""

from __future__ import annotations

import time
from collections.abc import Sequence

from attnstore_vllm.connector.costs import Costs
from attnstore_vllm.connector.requests import RequestState
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.store.store import Store

WAITS_MAX = 4
"""For so many requests a step works out anew that they should wait; for others, whose KV is not
even on its way, what was last said holds: vLLM goes through all of its queue, step after step, as
long as it has a place."""
WAIT_HOLDS_S = 0.05
"""For so long it holds in any case, so that all have their turn."""
EMPTY_STEP_WAIT_S = 0.002
"""How long a step that computes nothing waits for a read to end: bounded, and short enough
that a request that arrives meanwhile does not notice."""


class Waits:
    """All methods run on the scheduler's thread."""

    def __init__(self, store: Store, costs: Costs) -> None:
        self._store = store
        self._costs = costs
        self._for: list[Sequence[Piece]] = []
        self._num_worked_out = 0

    def goes_on(self, state: RequestState) -> bool:
        """Whether the request waits on without another look. Cost: some microseconds."""
        now = time.monotonic()
        is_due = now - state.asked_at > WAIT_HOLDS_S and self._num_worked_out < WAITS_MAX
        if is_due or not self._store.is_hungry(state.request.request_id):
            return False
        if now >= self._costs.deadline(state, now):
            return False
        if state.waiting_since is None:
            state.waiting_since = now
        self._note(state.coming)
        return True

    def add(self, state: RequestState, pieces: Sequence[Piece]) -> None:
        """It was worked out that the request should wait for these."""
        state.asked_at, state.coming = time.monotonic(), pieces
        self._note(pieces)
        self._num_worked_out += 1

    def _note(self, pieces: Sequence[Piece]) -> None:
        if len(self._for) < WAITS_MAX:
            self._for.append(pieces)

    def end_step(self, *, is_empty: bool) -> None:
        """The step is planned. If it computes nothing, wait a little for something to come."""
        if self._for and is_empty:
            self._store.wait_for_any(self._for, EMPTY_STEP_WAIT_S)
        self._for.clear()
        self._num_worked_out = 0
