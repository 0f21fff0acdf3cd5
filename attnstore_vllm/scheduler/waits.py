# SPDX-License-Identifier: Apache-2.0
"""Waits: requests that wait for their KV, so that none is looked at more often than a step can
afford."""

from __future__ import annotations

import time
from collections.abc import Sequence

from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.scheduler.costs import Costs
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.vllm_queue import VllmQueue
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.remote import RemoteLookup
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.types import Clock

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


class Waits:
    """Requests that wait for their KV, in the step that is being planned.

    Args:
        queue: vLLM's; None: it is not known.
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
        self._asked: list[RemoteLookup] = []
        self._round = 1
        self._round_at: float | None = None
        self._num_looks = 0
        self._is_behind = False
        """Some request has not had a look in this round."""
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
        lookup = state.lookup
        if not awaits_remote(lookup):
            state.counted.is_unanswered |= any(not ask.is_over for ask in lookup.asked)
            lookup.asked = ()  # nor will it: what comes late finds its place alone
            return False
        if state.waiting.since is None:
            state.waiting.since = self._clock()
        self._num_looks -= self._looking
        self._looking = False
        if len(self._asked) < WAITS_MAX:
            self._asked.append(state.lookup)
        return True

    def note(self, pieces: Sequence[Piece]) -> None:
        """These are waited for: a step that computes nothing waits till one of them may come."""
        if len(self._for) < WAITS_MAX:
            self._for.append(pieces)

    def lingers(self, state: RequestState) -> bool:
        """Wait a little for what the request waits for, if no other runs or waits: until vLLM
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
