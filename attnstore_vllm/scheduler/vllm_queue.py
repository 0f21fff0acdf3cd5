# SPDX-License-Identifier: Apache-2.0
"""vLLM's waiting queue, as its hooks and objects tell of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from attnstore_vllm.policy.step_budget import StepBudget
from attnstore_vllm.scheduler.lookups import STEP_TOKENS, Lookups, look_tokens
from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS, RequestState
from attnstore_vllm.scheduler.vllm_types import Request, SchedulerOutput
from attnstore_vllm.store.store import Store
from attnstore_vllm.types import Event


class VllmQueue:
    """Keeps store.queue() like vLLM's. All methods run on the scheduler's thread.

    A request enters at the back when it comes and at the front when it is preempted (or in the
    order of priorities); one that vLLM skips stays in its place. It leaves when it is scheduled or
    has ended.

    Args:
        lookups: whose budget the look-ups of preempted requests are part of.
    """

    def __init__(self, store: Store, lookups: Lookups, *, by_priority: bool) -> None:
        self._store = store
        self._lookups = lookups
        self._leaving = StepBudget(STEP_TOKENS)
        """To leave costs a look at each chunk that is wanted; many may be aborted at once."""
        self._gone = OrderedDict[str, int]()
        """Those that have ended and are still in store.queue(), and what it takes to leave it."""
        self._by_priority = by_priority
        self._running: dict[str, Request] = {}
        """In the order in which they were scheduled, which is the order of vLLM's own list."""
        self._waiting: dict[str, Request] = {}
        self._placed: set[str] = set()

    def on_new_request(self, request: Request) -> None:
        if self._gone.pop(request.request_id, 0):
            self._store.leave_queue([request.request_id])  # another of this name
        self._waiting[request.request_id] = request
        with self._store.queue() as queue:
            if self._by_priority:
                queue.insert(request.request_id, request.priority, request.arrival_time)
            else:
                queue.append(request.request_id)

    def is_alone(self, request_id: str) -> bool:
        """Whether no other request runs or waits."""
        return not self._running and self._waiting.keys() == {request_id}

    def on_step(self, output: SchedulerOutput, states: Mapping[str, RequestState]) -> None:
        """A step was planned. What was preempted since the last one waits again."""
        while self._gone and self._leaving.take(next(iter(self._gone.values()))):
            self._store.leave_queue([self._gone.popitem(last=False)[0]])
        self._leaving.begin_step()
        preempted = output.preempted_req_ids or ()
        back = [request for name, request in self._running.items() if name in preempted]
        for request in back:
            del self._running[request.request_id]
            self._waiting[request.request_id] = request
        if back:
            self._enter_again(back)
        # A streaming session's next input is scheduled as a new request, behind all that run.
        begun = {new.req_id for new in output.scheduled_new_reqs}
        new = [
            name
            for name in output.num_scheduled_tokens
            if name in begun or name not in self._running
        ]
        if new or self._placed:
            self._store.leave_queue([*new, *self._placed])
            for name in new:
                begins = self._running.pop(name, None) or self._waiting.pop(name, None)
                if begins is not None:
                    self._running[name] = begins
        for request in back:
            if request.request_id not in self._placed:
                self._look_up(request, states)
        self._placed.clear()

    def on_placed(self, request_id: str) -> None:
        """vLLM has given it blocks, and schedules it when its load is received.

        Before on_step(), which may be the one that tells of its preemption: after a reset.
        """
        self._placed.add(request_id)

    def on_finished(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            return
        request = self._waiting.pop(request_id, None)
        tokens = look_tokens(request.num_tokens if request is not None else 0)
        if not self._gone and self._leaving.take(tokens):
            self._store.leave_queue([request_id])
        else:
            self._gone[request_id] = tokens
            self._lookups.put_off[Event.LEAVE_LATER] += 1

    def _enter_again(self, requests: list[Request]) -> None:
        """These were preempted."""
        with self._store.queue() as queue:
            if not self._by_priority:
                queue.prepend([request.request_id for request in requests])
                return
            for request in requests:
                queue.insert(request.request_id, request.priority, request.arrival_time)

    def _look_up(self, request: Request, states: Mapping[str, RequestState]) -> None:
        """Look up what a preempted request will want again."""
        state = states.get(request.request_id)
        if state is None or state.computing.is_outdated or state.adapter is None:
            return
        if request.request_id not in self._waiting:
            return
        if not self._lookups.budget.take(look_tokens(request.num_tokens)):
            self._lookups.put_off[Event.LOOKUP_LATER] += 1  # until vLLM asks for it
        else:
            self._store.find(
                state.lookup,
                0,
                request.num_tokens - 1,
                MIN_LOAD_TOKENS,
                request_id=request.request_id,
                visit=state.visit,
            )
