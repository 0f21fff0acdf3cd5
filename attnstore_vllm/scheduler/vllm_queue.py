# SPDX-License-Identifier: Apache-2.0
"""vLLM's waiting queue, as the connector's public hooks tell of it.

A request enters at the back when it comes and at the front when it is preempted (or in the order of
priorities); one that vLLM skips stays in its place. It leaves when it is scheduled or has ended.
"""

from __future__ import annotations

from collections.abc import Mapping

from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS, RequestState
from attnstore_vllm.scheduler.vllm_types import Request, SchedulerOutput
from attnstore_vllm.store.store import Store


class VllmQueue:
    """Keeps store.queue() like vLLM's. All methods run on the scheduler's thread."""

    def __init__(self, store: Store, *, by_priority: bool) -> None:
        self._store = store
        self._by_priority = by_priority
        self._running: dict[str, Request] = {}
        """In the order in which they were scheduled, which is the order of vLLM's own list."""
        self._waiting: dict[str, Request] = {}
        self._placed: set[str] = set()

    def on_new_request(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        self._enter([request], preempted=False)

    def on_step(self, output: SchedulerOutput, states: Mapping[str, RequestState]) -> None:
        """A step was planned. What was preempted since the last one waits again."""
        preempted = output.preempted_req_ids or ()
        back = [request for name, request in self._running.items() if name in preempted]
        for request in back:
            del self._running[request.request_id]
            self._waiting[request.request_id] = request
        if back:
            self._enter(back, preempted=True)
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
        if self._running.pop(request_id, None) is None:
            self._waiting.pop(request_id, None)
            self._store.leave_queue([request_id])

    def _enter(self, requests: list[Request], *, preempted: bool) -> None:
        with self._store.queue() as queue:
            if self._by_priority:
                for request in requests:
                    queue.insert(request.request_id, request.priority, request.arrival_time)
            elif preempted:
                queue.prepend([request.request_id for request in requests])
            else:
                queue.append(requests[0].request_id)

    def _look_up(self, request: Request, states: Mapping[str, RequestState]) -> None:
        """Look up what a preempted request will want again."""
        state = states.get(request.request_id)
        if state is None or state.computing.is_outdated or state.adapter is None:
            return
        if request.request_id in self._waiting:
            self._store.find(
                state.sequence,
                0,
                request.num_tokens - 1,
                MIN_LOAD_TOKENS,
                request_id=request.request_id,
                visit=state.visit,
            )
