# SPDX-License-Identifier: Apache-2.0
"""One pool of slots under each policy: what is in it after each request.

The policies that a server can use are the real ones (policy/); those of baselines.py are there to
compare with; `belady` knows the future and is the bound for whole chunks, `infinite` forgets
nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from attnstore_lab.sim.baselines import BASELINES, Baseline
from attnstore_lab.sim.trace import Trace, TraceRequest
from attnstore_vllm.policy.eviction.departures import departures
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import answer, unknown_run, visit_of


class PolicyPool(Protocol):
    """Holds at most as many chunks as it was made for, once store() has returned."""

    def __contains__(self, chunk: int) -> bool: ...
    def store(self, request: TraceRequest, chunks: Sequence[int], num_found: int) -> None:
        """A request was served: all its chunks are stored, as far as there is room.

        Args:
            chunks: of the request.
            num_found: of them, the leading ones that were in the pool.
        """
        ...


def _always(_: object) -> bool:
    return True


class InOrder:
    """lru and fifo. Of one request the last chunk is the one that goes first."""

    def __init__(self, policy: str, num_slots: int, trace: Trace) -> None:
        self._num_slots = num_slots
        self._order = departures(policy, trace.num_chunks, ReturnEstimator())

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._order

    def store(self, request: TraceRequest, chunks: Sequence[int], num_found: int) -> None:
        order, run = self._order, unknown_run(request.arrival_s)
        order.use([chunk for chunk in chunks if chunk in order], run)
        for chunk in chunks:
            if chunk not in order:
                order.add(chunk, run)
        while len(order) > self._num_slots:
            victim = order.victim(request.arrival_s, _always)
            assert victim is not None
            order.remove(victim)


class ByReturnPool:
    """attnstore."""

    def __init__(self, num_slots: int, trace: Trace) -> None:
        self._num_slots = num_slots
        self._chunk_tokens = trace.chunk_tokens
        self._estimator = ReturnEstimator()
        self._order = departures("attnstore", trace.num_chunks, self._estimator)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._order

    def store(self, request: TraceRequest, chunks: Sequence[int], num_found: int) -> None:
        order, now = self._order, request.arrival_s
        last_runs = [order.run_of(chunk) for chunk in chunks[:num_found]]
        whole = chunks[: request.num_tokens // self._chunk_tokens]
        visit = visit_of(self._estimator, last_runs, whole, request.num_tokens, now)
        answer(visit.own, request.answer_tokens, self._estimator, now)
        if self._estimator.is_due:
            self._estimator.refit(now)
        for part, run in (  # no request asks for a ttl here, so its shared chunks are of one run
            (chunks[: visit.num_shared], visit.shared),
            (chunks[visit.num_shared :], visit.own),
        ):
            order.use([chunk for chunk in part if chunk in order], run)
            for chunk in part:
                if chunk not in order:
                    order.add(chunk, run)
        while len(order) > self._num_slots:
            victim = order.victim(now, _always)
            assert victim is not None
            order.remove(victim)


class Published:
    """A policy that knows chunks alone. Of one request the last chunk counts as used first."""

    def __init__(self, baseline: Callable[[int], Baseline], num_slots: int, trace: Trace) -> None:
        self._baseline = baseline(num_slots)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._baseline

    def store(self, request: TraceRequest, chunks: Sequence[int], num_found: int) -> None:
        for chunk in reversed(chunks):
            self._baseline.use(chunk)


class Belady:
    """Evicts what is used again last, and of one request the last chunk first."""

    def __init__(self, num_slots: int, trace: Trace) -> None:
        self._num_slots = num_slots
        self._uses: list[list[int]] = [[] for _ in range(trace.num_chunks)]
        for number in range(len(trace.requests) - 1, -1, -1):
            for chunk in trace.requests[number].chunks.tolist():
                self._uses[chunk].append(number)  # the next one last
        self._never = len(trace.requests)
        self._next: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._next

    def store(self, request: TraceRequest, chunks: Sequence[int], num_found: int) -> None:
        for place, chunk in enumerate(chunks):
            uses = self._uses[chunk]
            uses.pop()
            when = -(uses[-1] if uses else self._never), -place
            self._next[chunk] = when
            heapq.heappush(self._heap, (*when, chunk))
        while len(self._next) > self._num_slots:
            use, depth, chunk = heapq.heappop(self._heap)
            if self._next.get(chunk) == (use, depth):
                del self._next[chunk]


class Infinite:
    def __init__(self) -> None:
        self._chunks: set[int] = set()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def store(self, request: TraceRequest, chunks: Sequence[int], num_found: int) -> None:
        self._chunks.update(chunks)


POLICIES: dict[str, Callable[[int, Trace], PolicyPool]] = {
    "attnstore": ByReturnPool,
    "lru": partial(InOrder, "lru"),
    "fifo": partial(InOrder, "fifo"),
    **{name: partial(Published, baseline) for name, baseline in BASELINES.items()},
    "belady": Belady,
    "infinite": lambda _, __: Infinite(),
}
