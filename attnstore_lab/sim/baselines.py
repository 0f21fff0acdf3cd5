# SPDX-License-Identifier: Apache-2.0
"""Published policies, to compare with: no server can use them.

Each is the algorithm of its paper over chunks of one size, which knows neither requests nor
conversations. pools.py uses a request's chunks last one first, so that its beginning
stays longest. Where a paper has sketches of counts, here are counts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from random import Random
from typing import Protocol


class Baseline(Protocol):
    """A cache of chunks."""

    def __contains__(self, chunk: int) -> bool: ...
    def use(self, chunk: int) -> None:
        """The chunk was asked for, and may be kept from now on. Holds the capacity at most."""


class SecondUse:
    """LRU that takes a chunk at its second use, within as many others as a ghost list holds."""

    GHOSTS = 4
    """Length of the ghost list, in capacities."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._stored: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._stored

    def use(self, chunk: int) -> None:
        stored, ghosts = self._stored, self._ghosts
        if chunk in stored:
            stored.move_to_end(chunk)
        elif chunk in ghosts:
            del ghosts[chunk]
            if len(stored) >= self._capacity:
                self._forget(stored.popitem(last=False)[0])
            stored[chunk] = None
        else:
            self._forget(chunk)

    def _forget(self, chunk: int) -> None:
        self._ghosts[chunk] = None
        if len(self._ghosts) > self.GHOSTS * self._capacity:
            self._ghosts.popitem(last=False)


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue that filters, a main one, and ghosts."""

    SMALL = 0.1
    FREQUENCY_MAX = 3

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_size = max(1, int(self.SMALL * capacity))
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._frequency: dict[int, int] = {}  # of what is stored

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._frequency

    def use(self, chunk: int) -> None:
        if chunk in self._frequency:
            self._frequency[chunk] = min(self._frequency[chunk] + 1, self.FREQUENCY_MAX)
            return
        while len(self._frequency) >= self._capacity:
            if len(self._small) >= self._small_size or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        queue = self._main if chunk in self._ghosts else self._small
        self._ghosts.pop(chunk, None)
        queue.append(chunk)
        self._frequency[chunk] = 0

    def _evict_small(self) -> None:
        chunk = self._small.popleft()
        if self._frequency[chunk] > 1:
            self._frequency[chunk] = 0
            self._main.append(chunk)
            return
        del self._frequency[chunk]
        self._ghosts[chunk] = None
        if len(self._ghosts) > self._capacity - self._small_size:
            self._ghosts.popitem(last=False)

    def _evict_main(self) -> None:
        chunk = self._main.popleft()
        if self._frequency[chunk]:
            self._frequency[chunk] -= 1
            self._main.append(chunk)
        else:
            del self._frequency[chunk]


class Arc:
    """ARC (Megiddo and Modha, FAST 2003): used once and used more, shared out by their ghosts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.for_once = 0.0  # the target size of `once`: p of the paper
        self._once: OrderedDict[int, None] = OrderedDict()  # T1
        self.more: OrderedDict[int, None] = OrderedDict()  # T2
        self._ghosts_once: OrderedDict[int, None] = OrderedDict()  # B1
        self._ghosts_more: OrderedDict[int, None] = OrderedDict()  # B2

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._once or chunk in self.more

    def use(self, chunk: int) -> None:
        once, more = self._ghosts_once, self._ghosts_more
        if chunk in self:
            self._once.pop(chunk, None)
            self.more.pop(chunk, None)
        elif chunk in once:
            step = max(1.0, len(more) / len(once))
            self.for_once = min(self.for_once + step, self._capacity)
            self._replace(is_of_more=False)
            del once[chunk]
        elif chunk in more:
            step = max(1.0, len(once) / len(more))
            self.for_once = max(self.for_once - step, 0.0)
            self._replace(is_of_more=True)
            del more[chunk]
        else:
            self._make_room()
            self._once[chunk] = None
            return
        self.more[chunk] = None

    def _make_room(self) -> None:
        if len(self._once) + len(self._ghosts_once) == self._capacity:
            if len(self._once) == self._capacity:
                self._once.popitem(last=False)
                return
            self._ghosts_once.popitem(last=False)
            self._replace(is_of_more=False)
            return
        ghosts = len(self._ghosts_once) + len(self._ghosts_more)
        total = len(self._once) + len(self.more) + ghosts
        if total >= self._capacity:
            if total >= 2 * self._capacity:
                self._ghosts_more.popitem(last=False)
            self._replace(is_of_more=False)

    def _replace(self, *, is_of_more: bool) -> None:
        if len(self._once) + len(self.more) < self._capacity:
            return
        size = len(self._once)
        if size and (size > self.for_once or (is_of_more and size == int(self.for_once))):
            self._ghosts_once[self._once.popitem(last=False)[0]] = None
        else:
            self._ghosts_more[self.more.popitem(last=False)[0]] = None


class WTinyLfu:
    """W-TinyLFU (Einziger et al., TOS 2017): a small LRU window before a segmented LRU that takes
    what was asked for more often than what would go. Counts are halved now and then."""

    WINDOW = 0.01
    PROTECTED = 0.8
    SAMPLE = 10
    """Counts are halved after so many times the capacity; no count goes beyond COUNT_MAX."""
    COUNT_MAX = 15

    def __init__(self, capacity: int) -> None:
        self._window_size = max(1, int(self.WINDOW * capacity))
        self._main_size = capacity - self._window_size
        self._protected_size = int(self.PROTECTED * self._main_size)
        self._sample = self.SAMPLE * capacity
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self.counts: Counter[int] = Counter()
        self._counted = 0

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._window or chunk in self._probation or chunk in self._protected

    def use(self, chunk: int) -> None:
        self._count(chunk)
        if chunk in self._probation:
            del self._probation[chunk]
            self._protected[chunk] = None
            if len(self._protected) > self._protected_size:
                self._probation[self._protected.popitem(last=False)[0]] = None
        elif chunk in self._protected:
            self._protected.move_to_end(chunk)
        else:
            self._window[chunk] = None
            self._window.move_to_end(chunk)
            if len(self._window) > self._window_size:
                self._admit(self._window.popitem(last=False)[0])

    def _count(self, chunk: int) -> None:
        self.counts[chunk] = min(self.counts[chunk] + 1, self.COUNT_MAX)
        self._counted += 1
        if self._counted >= self._sample:
            self._counted //= 2
            self.counts = Counter({c: n // 2 for c, n in self.counts.items() if n > 1})

    def _admit(self, chunk: int) -> None:
        if len(self._probation) + len(self._protected) >= self._main_size:
            segment = self._probation or self._protected
            if not segment or self.counts[chunk] <= self.counts[next(iter(segment))]:
                return
            segment.popitem(last=False)
        self._probation[chunk] = None


class LeCaR:
    """LeCaR (Vietri et al., HotStorage 2018): evicts by LRU or by LFU, by which of the two has
    given up less that was asked for again. Chance is seeded."""

    LEARNING_RATE = 0.45
    DISCOUNT = 0.005  # to the power of 1 / capacity

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._random = Random(1)
        self._by_age: OrderedDict[int, None] = OrderedDict()
        self._frequency: dict[int, int] = {}  # of what is stored
        self._by_frequency: dict[int, OrderedDict[int, None]] = {}
        self.weights = [0.5, 0.5]  # of LRU and LFU
        self._ghosts: tuple[OrderedDict[int, tuple[int, int]], ...] = OrderedDict(), OrderedDict()
        self._now = 0

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._by_age

    def use(self, chunk: int) -> None:
        self._now += 1
        frequency = 1
        if chunk in self._by_age:
            frequency = self._leave(chunk) + 1
        else:
            for expert, ghosts in enumerate(self._ghosts):
                if chunk in ghosts:
                    frequency, since = ghosts.pop(chunk)
                    frequency += 1
                    self._blame(expert, self._now - since)
            if len(self._by_age) >= self._capacity:
                self._evict()
        self._by_age[chunk] = None
        self._frequency[chunk] = frequency
        self._by_frequency.setdefault(frequency, OrderedDict())[chunk] = None

    def _blame(self, expert: int, age: int) -> None:
        regret = self.DISCOUNT ** (age / self._capacity)
        self.weights[1 - expert] *= 2.718281828 ** (self.LEARNING_RATE * regret)
        whole = sum(self.weights)
        self.weights = [weight / whole for weight in self.weights]

    def _evict(self) -> None:
        expert = 0 if self._random.random() < self.weights[0] else 1
        oldest = self._by_age if expert == 0 else self._by_frequency[min(self._by_frequency)]
        chunk = next(iter(oldest))
        ghosts = self._ghosts[expert]
        ghosts[chunk] = self._leave(chunk), self._now
        if len(ghosts) > self._capacity:
            ghosts.popitem(last=False)

    def _leave(self, chunk: int) -> int:
        del self._by_age[chunk]
        frequency = self._frequency.pop(chunk)
        peers = self._by_frequency[frequency]
        del peers[chunk]
        if not peers:
            del self._by_frequency[frequency]
        return frequency


BASELINES: dict[str, Callable[[int], Baseline]] = {
    "s3fifo": S3Fifo,
    "arc": Arc,
    "w-tinylfu": WTinyLfu,
    "lecar": LeCaR,
    "second-use": SecondUse,
}
