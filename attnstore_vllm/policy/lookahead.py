# SPDX-License-Identifier: Apache-2.0
"""The waiting queue, and what it says of where KV should be. Pure.

    front                                                              back
    [ preempted ... ][ waiting since longest ............ since shortest ]
      \\_ their chunks are fetched first       theirs are given up first _/

Requests stand in the order in which vLLM will run them. Each wants chunks. What a request wants is
fetched from NVMe nearest first, into room that nothing nearer wants: so DRAM holds what the first
so many requests want, as many as fit by their real sizes (the look-ahead window; CachedAttention,
section 3.3.1 has its mean, C_mem / S_kv). What is wanted is not evicted while there is anything
that is not. Then reads take what is wanted by the farthest request first (section 3.3.2). Saves
take only what waits behind a better priority.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from attnstore_vllm.policy.lazy_heap import LazyHeap

C = TypeVar("C", bound=Hashable)
"""A chunk, or what stands for one."""

SHARED_MIN = 16
"""A chunk that so many waiting requests want counts as wanted by a near one."""
LOOK_MAX = 64
"""Chunks that cannot go that are looked at for one that can."""

QueuePlace = tuple[float, float, str]
"""Requests run in ascending order of this. The last is the request's id."""
_Rank = tuple[float, float, int, int]
"""The order of the nearest request that wants a chunk, backwards; its depth there; a number. The
farthest is the lowest."""
FARTHEST = 2.0**63
"""The priority beyond which there is none."""
LAST: QueuePlace = (math.inf, 0.0, "")
"""The order of a chunk that no request waits for."""


@dataclass(slots=True)
class _Waiting(Generic[C]):
    order: QueuePlace
    wants: tuple[C, ...] = ()


class LookAhead(Generic[C]):
    """See the module. Cost of each call: O(chunks of one request * log(all that is wanted))."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting[C]] = {}
        self._queue: list[QueuePlace] = []
        self.wanted_by: dict[C, dict[str, int]] = {}
        """By which requests, and how deep in their prompts."""
        self._nearest: dict[C, _Rank] = {}
        """By the nearest request that wants the chunk; none for chunks that SHARED_MIN want."""
        self._absent: set[C] = set()
        """Wanted, to be fetched, and not on its way."""
        self._missing: list[QueuePlace] = []
        """Requests that may want something absent; in order, and tidied late."""
        self._all = LazyHeap[C](self._nearest.get)
        self._present = LazyHeap[C](
            lambda chunk: self._nearest.get(chunk) if chunk not in self._absent else None
        )
        self._count = itertools.count()
        self._last = self._first = 0.0
        self._is_by_priority = False

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[str]:
        """Ids of the requests, in the order in which they will run."""
        return (order[2] for order in self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def first(self) -> QueuePlace | None:
        """The place of the request that runs next."""
        return self._queue[0] if self._queue else None

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

    def insert(self, request_id: str, priority: float, arrival_s: float) -> None:
        """A request has come or was preempted; the queue is ordered by priority, then arrival. A
        client's priority may be any number: one that no float has counts as the farthest."""
        self._is_by_priority = True
        if priority != -math.inf:  # ours, before all
            priority = max(-FARTHEST, min(FARTHEST, priority))
        self._enter((float(priority), arrival_s, request_id))

    def remove(self, request_id: str) -> list[C]:
        """It runs, or was aborted. Returns what no request wants any more."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return []
        unwanted = self._unwant(request_id, waiting.wants)
        del self._waiting[request_id]
        _discard(self._missing, waiting.order)
        _discard(self._queue, waiting.order)
        if not self.wanted_by:  # so that what it leaves need not be tidied
            self._all.clear()
            self._present.clear()
        return unwanted

    def _enter(self, order: QueuePlace) -> None:
        assert order[2] not in self._waiting
        self._waiting[order[2]] = _Waiting(order)
        insort(self._queue, order)

    # ---- what it wants -----------------------------------------------------------------

    def want(
        self, request_id: str, chunks: Iterable[C], absent: Iterable[C]
    ) -> tuple[list[C], list[C]]:
        """Note what a waiting request wants, in place of what it wanted before.

        Args:
            absent: of these, those that have to be fetched.
        Returns: what no request wanted before, and what none wants any more.
        """
        waiting = self._waiting[request_id]
        wants, absent = tuple(dict.fromkeys(chunks)), set(absent)
        if wants == waiting.wants and self._absent.intersection(wants) == absent:
            if absent:
                _add(self._missing, waiting.order)
            return [], []  # asked again, as vLLM does step after step
        before, waiting.wants = waiting.wants, wants
        new: dict[C, int] = {}
        others: list[C] = []
        for depth, chunk in enumerate(wants):
            wanted_by = self.wanted_by.get(chunk)
            if wanted_by is None:
                self.wanted_by[chunk] = {request_id: depth}
                new[chunk] = depth
            else:
                wanted_by[request_id] = depth
                others.append(chunk)
        kept = set(wants)
        unwanted = self._unwant(request_id, [chunk for chunk in before if chunk not in kept])
        come = self._absent.intersection(wants) - absent
        self._absent.difference_update(come)
        self._absent.update(absent)
        self._rank_new(new, waiting.order)
        for chunk in others:
            self._rank(chunk)
        self._put_present(come)
        has_missing = not self._absent.isdisjoint(wants)
        (_add if has_missing else _discard)(self._missing, waiting.order)
        return list(new), unwanted

    def _rank_new(self, depths: Mapping[C, int], order: QueuePlace) -> None:
        """These, by depth, are wanted by this request alone. All of a prompt may be."""
        priority, since, _ = order
        ranks = {c: (-priority, -since, -d, next(self._count)) for c, d in depths.items()}
        self._nearest.update(ranks)
        self._all.push_all([(rank, chunk) for chunk, rank in ranks.items()])
        absent = self._absent
        present = [(rank, chunk) for chunk, rank in ranks.items() if chunk not in absent]
        self._present.push_all(present)

    def _rank(self, chunk: C) -> None:
        """Who wants the chunk may have changed, and whether it is here."""
        wanted_by = self.wanted_by.get(chunk, {})
        if not 0 < len(wanted_by) < SHARED_MIN:
            self._nearest.pop(chunk, None)
            return
        if len(wanted_by) == 1:  # most are wanted by one alone
            ((request_id, depth),) = wanted_by.items()
            order = self._waiting[request_id].order
        else:
            order, depth = min((self._waiting[r].order, depth) for r, depth in wanted_by.items())
        before = self._nearest.get(chunk)
        if before is not None and before[:3] == (-order[0], -order[1], -depth):
            return
        rank = (-order[0], -order[1], -depth, next(self._count))
        self._nearest[chunk] = rank
        if before is None or rank < before:  # else it has risen, which the heaps find
            self._all.push(rank, chunk)
            if chunk not in self._absent:
                self._present.push(rank, chunk)

    def _put_present(self, chunks: Iterable[C]) -> None:
        """These are absent no longer."""
        for chunk in chunks:
            rank = self._nearest.get(chunk)
            if rank is not None:
                self._present.push(rank, chunk)

    def lost(self, chunk: C) -> list[C]:
        """The chunk is in no tier any more: who wants it wants nothing from it on.

        Returns what no request wants any more.
        """
        unwanted: list[C] = []
        for request_id, at in list(self.wanted_by.get(chunk, {}).items()):
            waiting = self._waiting[request_id]
            gone, waiting.wants = waiting.wants[at:], waiting.wants[:at]
            unwanted += self._unwant(request_id, gone)
            if _has(self._missing, waiting.order) and self._absent.isdisjoint(waiting.wants):
                _discard(self._missing, waiting.order)
        return unwanted

    def _unwant(self, request_id: str, chunks: Iterable[C]) -> list[C]:
        """Returns those that no request wants any more."""
        unwanted = []
        for chunk in chunks:
            wanted_by = self.wanted_by[chunk]
            if len(wanted_by) > 1:
                del wanted_by[request_id]
                self._rank(chunk)
            else:
                assert request_id in wanted_by
                del self.wanted_by[chunk]
                self._nearest.pop(chunk, None)
                unwanted.append(chunk)
        self._absent.difference_update(unwanted)
        return unwanted

    def wants_of(self, request_id: str) -> Sequence[C]:
        """Chunks that the waiting request wants."""
        waiting = self._waiting.get(request_id)
        return waiting.wants if waiting is not None else ()

    def has_come(self, chunk: C) -> None:
        """The chunk is in DRAM or on its way, or there is nothing left to fetch."""
        if chunk in self._absent:
            self._absent.remove(chunk)
            self._put_present((chunk,))

    def has_gone(self, chunk: C) -> None:
        """The chunk has left DRAM, and can be fetched again."""
        wanted_by = self.wanted_by.get(chunk)
        if wanted_by:
            self._absent.add(chunk)
            for request_id in wanted_by:
                _add(self._missing, self._waiting[request_id].order)

    def stop_fetching(self) -> None:
        """Nothing is fetched until requests want something again."""
        absent = list(self._absent)
        self._absent.clear()  # what is not here now counts as present: it is not fetched
        self._put_present(absent)
        self._missing.clear()

    def next_to_fetch(self) -> tuple[C, QueuePlace] | None:
        """The chunk that is to be fetched next, and for whom; None if nothing is absent.

        The nearest request's, in the order of the prompt.
        """
        while self._missing:
            order = self._missing[0]
            for chunk in self._waiting[order[2]].wants:
                if chunk in self._absent:
                    return chunk, order
            del self._missing[0]
        return None

    def give_up(self, request_id: str) -> None:
        """Fetch nothing for this request, before it asks again."""
        _discard(self._missing, self._waiting[request_id].order)

    def has_missing(self, request_id: str) -> bool:
        """Whether it waits for something that is not even on its way."""
        waiting = self._waiting.get(request_id)
        if waiting is None or not _has(self._missing, waiting.order):
            return False
        return any(chunk in self._absent for chunk in waiting.wants)

    def num_before(self, request_id: str) -> int:
        """Requests that run before this one."""
        return bisect_left(self._queue, self._waiting[request_id].order)

    def num_absent_before(self, request_id: str) -> int:
        """Absent chunks that nearer requests want, of the nearest few.

        A request that does not wait comes after all.
        """
        waiting = self._waiting.get(request_id)
        beyond = waiting.order if waiting is not None else LAST
        found: set[C] = set()
        looks = 0
        for order in self._missing:
            if order >= beyond or looks >= 4 * LOOK_MAX:
                break
            wants = self._waiting[order[2]].wants
            looks += len(wants)
            found.update(chunk for chunk in wants if chunk in self._absent)
        return len(found)

    def farthest(self, beyond: QueuePlace | None, can_go: Callable[[C], bool]) -> C | None:
        """The chunk in DRAM to give up for a request: one that only requests beyond it want, of the
        farthest, the deepest; or None.

        Args:
            beyond: of the request that needs the room; None: any may be given up.
        """
        before = (-beyond[0], -beyond[1]) if beyond is not None else None
        return self._present.find(can_go, LOOK_MAX, before)

    def outranked(self, can_go: Callable[[C], bool]) -> C | None:
        """The same, of requests with a worse priority than the next one has, or None. Clients name
        priorities: such a request may wait for ever, and what it wants must not stay as long."""
        if not (self._is_by_priority and self._queue):
            return None
        return self._present.find(can_go, LOOK_MAX, (-self._queue[0][0], -math.inf))

    def farthest_of_all(self, can_go: Callable[[C], bool]) -> C | None:
        """The chunk to give up for good, wherever it is."""
        return self._all.find(can_go, LOOK_MAX)


def _has(orders: list[QueuePlace], order: QueuePlace) -> bool:
    place = bisect_left(orders, order)
    return place < len(orders) and orders[place] == order


def _add(orders: list[QueuePlace], order: QueuePlace) -> None:
    if not _has(orders, order):
        insort(orders, order)


def _discard(orders: list[QueuePlace], order: QueuePlace) -> None:
    if _has(orders, order):
        del orders[bisect_left(orders, order)]
