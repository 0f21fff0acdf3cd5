# SPDX-License-Identifier: Apache-2.0
"""Sessions that clients name: how they come back, and what one has left leaves first, once a
request says it is over.

How many say so in one step is for clients to say. So a step ends as many runs as one request may,
and what is beyond waits in line for later steps.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.sessions import ENDED_MAX, RUNS_MAX, SESSIONS_MAX, SessionTable
from attnstore_vllm.policy.visits import Run, Terms
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.store.store import Store
from attnstore_vllm.types import Event

ENDING = 2
"""Tokens of an answer's end: the last one alone ends all answers of many models."""
LINE_MAX = RUNS_MAX * SESSIONS_MAX
"""Runs that wait to be ended: as many as sessions have. One beyond them leaves as any other."""


class Sessions:
    """See the module. On the scheduler's thread."""

    def __init__(self) -> None:
        self.table = SessionTable()
        self._line: deque[Run] = deque()
        self._left = ENDED_MAX  # in this step
        self.put_off = Counter[str]()
        """Runs that wait for a later step to be ended, and that are not ended."""

    def terms(self, state: RequestState) -> Terms:
        """Those of a request that comes, with what its session has left. Cost: a look-up."""
        session, terms = state.hints.session, state.terms
        if session is None:
            return terms
        named = state.tenant, session
        return replace(
            terms, session=self.table.numbers(*named), last_turn=self.table.last_turn(*named)
        )

    def finished(self, store: Store, state: RequestState) -> None:
        """A request has ended: tell the store, also of what its session has left if that is over.

        Cost: a look-up; O(ENDED_MAX) if the session is over, of which a step has as much in all.
        """
        run, request, hints = state.run_of(store), state.request, state.hints
        ended: list[Run] = []
        if hints.session is not None:
            if hints.terms.priority is Priority.ENDED:
                ended = self.table.end(state.tenant, hints.session)
            elif state.visit is not None or state.computing.scheduled_stop:  # else it left nothing
                self.table.note(state.tenant, hints.session, run, hints.parent)
        said = request.num_tokens - request.num_prompt_tokens
        ending = tuple(request.all_token_ids[-ENDING:]) if said >= ENDING else None
        store.answered(run, said, ending)
        if ended:
            self._end(store, ended)

    def end_step(self, store: Store) -> None:
        """A step is planned: the next one's budget begins, with what is in line."""
        self._left = ENDED_MAX
        if self._line:
            self._go_on(store)

    def _end(self, store: Store, ended: list[Run]) -> None:
        taken = ended[: LINE_MAX - len(self._line)]
        self._line.extend(taken)
        self._go_on(store)
        self.put_off[Event.END_LATER] += min(len(taken), len(self._line))
        self.put_off[Event.END_DROPPED] += len(ended) - len(taken)

    def _go_on(self, store: Store) -> None:
        if self._left > 0:
            self._left -= store.end(self._line, self._left)
