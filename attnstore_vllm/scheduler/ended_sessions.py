# SPDX-License-Identifier: Apache-2.0
"""Sessions that clients name: how they come back, and what one has left leaves first, once a
request says it is over."""

from __future__ import annotations

from dataclasses import replace

from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.sessions import SessionTable
from attnstore_vllm.policy.visits import Terms
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.store.store import Store

ENDING = 2
"""Tokens of an answer's end: the last one alone ends all answers of many models."""


class Sessions:
    """See the module. On the scheduler's thread."""

    def __init__(self) -> None:
        self.table = SessionTable()

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

        Cost: a look-up; O(ENDED_MAX) if the session is over.
        """
        run, request, hints = state.run_of(store), state.request, state.hints
        ended = []
        if hints.session is not None:
            if hints.terms.priority is Priority.ENDED:
                ended = self.table.end(state.tenant, hints.session)
            elif state.visit is not None or state.computing.scheduled_stop:  # else it left nothing
                self.table.note(state.tenant, hints.session, run, hints.parent)
        said = request.num_tokens - request.num_prompt_tokens
        ending = tuple(request.all_token_ids[-ENDING:]) if said >= ENDING else None
        store.answered(run, said, ended, ending)
