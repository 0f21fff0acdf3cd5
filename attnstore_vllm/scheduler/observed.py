# SPDX-License-Identifier: Apache-2.0
"""A scheduler side that is watched: what each request did at the store, told when it has ended.

Only a server that wants spans or a trace has one. Others have the plain Scheduler, and pay nothing.
Watchers run on a thread of their own, behind a queue with a limit: none can hold up a step.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.scheduler.report import report_of
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.scheduler.vllm_types import Request, Tables

logger = logging.getLogger(__name__)

Facts = dict[str, str | int | float | bool]
PHASES_MAX = 16
"""The most of one request: one that is preempted again and again has more, which are not told."""
UNTOLD_MAX = 256
"""Requests that wait to be told; beyond, one that ends is not told."""
CLOSE_DEADLINE_S = 3.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's way: `lookup`, `wait` or `load`. Times are of the wall clock."""

    name: str
    start_ns: int
    end_ns: int
    facts: Facts


@dataclass(slots=True)
class Watched:
    """One request, from its arrival to its end."""

    state: RequestState
    start_ns: int
    end_ns: int = 0
    phases: list[Phase] = field(default_factory=list)
    waits_since: int | None = None
    forecast_s: float | None = None
    """The forecast of the wait, as it was first said."""
    loads: tuple[int, Facts] | None = None
    """When its load was planned; it is not over."""
    is_answered: bool = False
    """vLLM had an answer to what it finds."""

    def add(self, name: str, start_ns: int, facts: Facts) -> None:
        """A phase ends now."""
        if len(self.phases) < PHASES_MAX:
            self.phases.append(Phase(name, start_ns, time.time_ns(), facts))

    def facts(self) -> Facts:
        """The facts of the whole request."""
        told = {key: value for key, value in report_of(self.state).items() if value is not None}
        decision = "compute" if self.is_answered else "none"
        has_loaded = any(phase.name == "load" for phase in self.phases)
        return {**told, "decision": "load" if has_loaded else decision}


class Watcher(Protocol):
    """Told of requests that have ended. On the watchers' thread; what it raises ends it alone."""

    def begin(self, scheduler: Scheduler) -> None: ...
    def ended(self, seen: Watched) -> None: ...
    def close(self) -> None: ...


class Watchers:
    """The thread that tells watchers of requests."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = list(watchers)
        self._untold: queue.Queue[Watched | None] = queue.Queue(UNTOLD_MAX)
        self._has_said = False
        self._ends_at = math.inf
        self._thread = threading.Thread(target=self._run, name="attnstore-watchers", daemon=True)
        self._thread.start()

    def tell(self, seen: Watched | None) -> None:
        """Waits for nothing."""
        try:
            self._untold.put_nowait(seen)
        except queue.Full:
            if not self._has_said:
                self._has_said = True
                logger.warning("spans and traces lack requests: they end faster than they are told")

    def close(self) -> None:
        """Tell what is left, for CLOSE_DEADLINE_S at most."""
        self._ends_at = time.monotonic() + CLOSE_DEADLINE_S / 2
        self.tell(None)  # a full queue does not take it, and has its end by the clock
        self._thread.join(CLOSE_DEADLINE_S)

    def _run(self) -> None:
        while (seen := self._untold.get()) is not None:
            self._tell(seen)
            if time.monotonic() > self._ends_at:
                break
        for watcher in self._watchers:
            watcher.close()

    def _tell(self, seen: Watched) -> None:
        for watcher in list(self._watchers):
            try:
                watcher.ended(seen)
            except Exception:
                logger.warning("%s stops: it failed", type(watcher).__name__, exc_info=True)
                self._watchers.remove(watcher)


class ObservedScheduler(Scheduler):
    """See the module.

    Args:
        watchers: that are told of each request that the store serves.
    """

    def __init__(self, watchers: Sequence[Watcher], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for watcher in watchers:
            watcher.begin(self)
        self._watchers = Watchers(watchers)
        self._seen: dict[str, Watched] = {}
        """Those that are in `requests`."""
        self._loading: dict[str, Watched] = {}

    def on_new_request(self, request: Request) -> None:
        start_ns = time.time_ns()
        super().on_new_request(request)
        state = self.requests.get(request.request_id)
        if state is not None:
            seen = self._seen[request.request_id] = Watched(state, start_ns)
            if state.visit is not None:
                self._looked_up(seen, start_ns)

    def _look_up(self, state: RequestState) -> None:
        start_ns = time.time_ns()
        super()._look_up(state)
        seen = self._seen.get(state.request.request_id)
        if seen is not None:  # else it has just come
            self._looked_up(seen, start_ns)

    def _looked_up(self, seen: Watched, start_ns: int) -> None:
        state = seen.state
        tiers = self.store.tiers(state.waiting.coming, 0)
        facts: Facts = {f"{tier}_tokens": tokens for tier, tokens in tiers.items()}
        facts |= {"prompt_tokens": state.request.num_prompt_tokens}
        seen.add("lookup", start_ns, facts | {"stored_tokens": state.counted.stored_stop})

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        seen = self._seen.get(request.request_id)
        if seen is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        state, start_ns = seen.state, time.time_ns()
        found, is_ahead = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is None:
            seen.waits_since = seen.waits_since or start_ns
            if seen.forecast_s is None and state.waiting.forecast is not None:
                seen.forecast_s = state.waiting.forecast[1]
        else:
            seen.is_answered = True
            _end_wait(seen)
        return found, is_ahead

    def update_state_after_alloc(
        self, request: Request, block_ids: Tables, num_external_tokens: int
    ) -> None:
        seen, before = self._seen.get(request.request_id), self.plans.loading_blocks()
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        if seen is None or not num_external_tokens:
            return
        geometry, state = self.geometry, seen.state
        blocks, stop = self.plans.loading_blocks() - before, state.computing.first
        facts: Facts = {f"{tier}_tokens": n for tier, n in state.counted.sources.items()}
        facts |= {
            "tokens": num_external_tokens,
            "bytes": (blocks + self.stages.blocks_left(request.request_id))
            * geometry.all_block_bytes,
            "computing_forecast_s": self.costs.saved_s(stop - num_external_tokens, stop),
        }
        seen.loads = time.time_ns(), facts
        self._loading[request.request_id] = seen

    def on_report(self, report: StepReport) -> None:
        super().on_report(report)
        over = [name for name in self._loading if not self._is_loading(name)]
        for request_id in over:
            _end_load(self._loading.pop(request_id))

    def _is_loading(self, request_id: str) -> bool:
        return (
            self.plans.is_loading(request_id)
            or self.stages.is_loading(request_id)
            or self.documents.is_loading(request_id)
        )

    def on_failed_requests(self, request_ids: Collection[str]) -> None:
        super().on_failed_requests(request_ids)
        for request_id in self._loading.keys() & request_ids:
            _end_load(self._loading.pop(request_id))

    def request_finished(
        self, request: Request, block_ids: Tables
    ) -> tuple[bool, dict[str, Any] | None]:
        found = super().request_finished(request, block_ids)
        seen = self._seen.pop(request.request_id, None)
        if seen is not None:
            self._loading.pop(request.request_id, None)
            _end_wait(seen)
            _end_load(seen)
            seen.end_ns = time.time_ns()
            self._watchers.tell(seen)
        return found

    def close(self) -> None:
        super().close()
        self._watchers.close()


def _end_wait(seen: Watched) -> None:
    since, seen.waits_since = seen.waits_since, None
    if since is not None:
        facts: Facts = {} if seen.forecast_s is None else {"forecast_s": seen.forecast_s}
        why = seen.state.counted.why_computed
        seen.add("wait", since, facts | ({} if why is None else {"why_computed": why}))
    seen.forecast_s = None


def _end_load(seen: Watched) -> None:
    loads, seen.loads = seen.loads, None
    if loads is not None:
        seen.add("load", loads[0], loads[1] | {"failed": seen.state.load_failed is not None})
