# SPDX-License-Identifier: Apache-2.0
"""The waiting queue, and what it says of where KV should be. Pure.

    front                                                              back
    [ preempted ... ][ waiting since longest ............ since shortest ]
      \\_ their chunks are fetched first       theirs are given up first _/

Requests stand in the order in which vLLM will run them. Each wants chunks. What a request wants is
fetched from NVMe nearest first, into room that nothing nearer wants: so DRAM holds what the first
so many requests want, as many as fit by their real sizes (the look-ahead window; CachedAttention,
section 3.3.1 has its mean, C_mem / S_kv). What is wanted is not evicted while there is anything
that is not; then what is wanted by the farthest request goes first (section 3.3.2).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

SHARED_MIN = 16
"""What so many waiting requests want is taken for wanted by a near one."""

Order = tuple[float, float, str]
"""Requests run in ascending order of this. The last is the request's id."""
LAST: Order = (math.inf, 0.0, "")
"""Of what no request waits for."""


@dataclass(slots=True)
class _Waiting:
    order: Order
    wants: tuple[Hashable, ...] = ()
    missing: set[Hashable] = field(default_factory=set)
    """Of these, what is not in DRAM and not on its way there."""


class LookAhead:
    """See the module. Cost of each call: O(log requests + chunks of one request), unless said."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._queue: list[Order] = []
        self._hungry: list[Order] = []
        """Of those in the queue, those with something missing."""
        self._wanted_by: dict[Hashable, list[str]] = {}
        self._last = self._first = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[str]:
        """Ids of the requests, in the order in which they will run."""
        return (order[2] for order in self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    # ---- the queue ---------------------------------------------------------------------

    def append(self, request_id: str) -> None:
        """A request has come; the queue is first come, first served."""
        self._last += 1
        self._enter((self._last, 0.0, request_id))

    def prepend(self, request_ids: Sequence[str]) -> None:
        """Requests were preempted, the one that is to run first named first."""
        for request_id in reversed(request_ids):
            self._first -= 1
            self._enter((self._first, 0.0, request_id))

    def insert(self, request_id: str, priority: int, arrival_s: float) -> None:
        """A request has come or was preempted; the queue is ordered by priority, then arrival."""
        self._enter((float(priority), arrival_s, request_id))

    def remove(self, request_id: str) -> None:
        """It runs, or was aborted. A request that does not wait is passed over."""
        if request_id not in self._waiting:
            return
        self.want(request_id, (), ())
        order = self._waiting.pop(request_id).order
        del self._queue[bisect_left(self._queue, order)]

    def _enter(self, order: Order) -> None:
        assert order[2] not in self._waiting
        self._waiting[order[2]] = _Waiting(order)
        insort(self._queue, order)

    # ---- what it wants -----------------------------------------------------------------

    def want(
        self, request_id: str, chunks: Iterable[Hashable], missing: Iterable[Hashable]
    ) -> None:
        """What a waiting request wants, in place of what it wanted before.

        Args:
            missing: of these, those that have to be fetched.
        """
        waiting = self._waiting[request_id]
        wants = tuple(dict.fromkeys(chunks))
        for chunk in waiting.wants:
            self._unwant(chunk, request_id)
        for chunk in wants:
            self._wanted_by.setdefault(chunk, []).append(request_id)
        waiting.wants = wants
        self._set_missing(waiting, set(missing))

    def _unwant(self, chunk: Hashable, request_id: str) -> None:
        wanted_by = self._wanted_by[chunk]
        wanted_by.remove(request_id)
        if not wanted_by:
            del self._wanted_by[chunk]

    def _set_missing(self, waiting: _Waiting, missing: set[Hashable]) -> None:
        if missing and not waiting.missing:
            insort(self._hungry, waiting.order)
        elif waiting.missing and not missing:
            del self._hungry[bisect_left(self._hungry, waiting.order)]
        waiting.missing = missing

    def is_wanted(self, chunk: Hashable) -> bool:
        return chunk in self._wanted_by

    def has_come(self, chunk: Hashable) -> None:
        """The chunk is in DRAM or on its way, or there is nothing left to fetch."""
        for request_id in self._wanted_by.get(chunk, ()):
            waiting = self._waiting[request_id]
            if chunk in waiting.missing:
                self._set_missing(waiting, waiting.missing - {chunk})

    def has_gone(self, chunk: Hashable) -> None:
        """The chunk has left DRAM, and can be fetched again."""
        for request_id in self._wanted_by.get(chunk, ()):
            waiting = self._waiting[request_id]
            self._set_missing(waiting, waiting.missing | {chunk})

    def next_to_fetch(self) -> tuple[Hashable, Order] | None:
        """The chunk that is to be fetched next, and for whom; None if nothing is missing.

        The nearest request's, in the order of the prompt.
        """
        if not self._hungry:
            return None
        waiting = self._waiting[self._hungry[0][2]]
        chunk = next(chunk for chunk in waiting.wants if chunk in waiting.missing)
        return chunk, waiting.order

    def farthest(self, beyond: Order | None, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        """The chunk to give up for a request: one that only requests beyond it want, of the
        farthest; or None.

        Args:
            beyond: of the request that needs the room; None: any may be given up.
        Cost: the requests from the back up to the first with such a chunk, and its chunks.
        """
        for order in reversed(self._queue):
            if beyond is not None and order <= beyond:
                return None
            waiting = self._waiting[order[2]]
            if len(waiting.missing) == len(waiting.wants):
                continue
            for chunk in reversed(waiting.wants):
                if chunk not in waiting.missing and can_go(chunk) and self._is_last(chunk, order):
                    return chunk
        return None

    def _is_last(self, chunk: Hashable, order: Order) -> bool:
        """Whether no request before this one wants the chunk."""
        wanted_by = self._wanted_by[chunk]
        return len(wanted_by) < SHARED_MIN and all(
            self._waiting[request_id].order >= order for request_id in wanted_by
        )

    def stop_fetching(self) -> None:
        """Nothing is missing any more, until requests want something again."""
        for order in self._hungry:
            self._waiting[order[2]].missing = set()
        self._hungry.clear()
