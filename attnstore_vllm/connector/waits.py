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
"""Requests whose KV is not even on its way that are looked at in a step; for the others, what was
last said holds: vLLM goes through all of its queue, step after step, as long as it has a place."""
ROUND_S = 0.05
"""In a round each is looked at once. So long, at least, lies between the beginnings of two."""
EMPTY_STEP_WAIT_S = 0.002
"""How long a step that computes nothing waits for a read to end: bounded, and short enough
that a request that arrives meanwhile does not notice."""


class Waits:
    """All methods run on the scheduler's thread."""

    def __init__(self, store: Store, costs: Costs) -> None:
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
        if state.is_answered or not self._store.is_hungry(state.request.request_id):
            return False
        if state.look < self._round:
            if self._num_looks < WAITS_MAX:
                self._num_looks += 1
                self._looking = True
                state.look = self._round
                return False
            self._is_behind = True
        now = time.monotonic()
        if now >= self._costs.deadline(state, now):
            return False
        if state.waiting_since is None:
            state.waiting_since = now
        self._note(state.coming)
        return True

    def answered(self, state: RequestState) -> None:
        """It was worked out that the request waits no longer. Its look is another's: how many
        have an answer in a step is limited by what vLLM can start."""
        self._num_looks -= self._looking
        self._looking = False
        state.is_answered, state.coming = True, ()

    def add(self, state: RequestState, pieces: Sequence[Piece]) -> None:
        """It was worked out that the request should wait for these."""
        state.is_answered, state.coming = False, pieces
        self._note(pieces)

    def _note(self, pieces: Sequence[Piece]) -> None:
        if len(self._for) < WAITS_MAX:
            self._for.append(pieces)

    def end_step(self, *, is_empty: bool) -> None:
        """The step is planned. If it computes nothing, wait a little for something to come."""
        if self._for and is_empty:
            self._store.wait_for_any(self._for, EMPTY_STEP_WAIT_S)
        self._for.clear()
        now = time.monotonic()
        if self._num_looks and self._round_at is None:
            self._round_at = now
        if not self._is_behind and self._round_at and now - self._round_at >= ROUND_S:
            self._round, self._round_at = self._round + 1, None
        self._num_looks, self._is_behind = 0, False
