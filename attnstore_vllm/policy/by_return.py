# SPDX-License-Identifier: Apache-2.0
"""Evict what is least likely to return soon. Pure: time is given.

The chunks of a tier stand in groups: those that a run (policy/returns.py) was the last to use.
All chunks of a group return together or not at all, so they are worth the same; of the group that
is worth least the deepest chunk goes first, for without it the others are still a prefix.

Runs of one kind stand in the order of their age, and what they are worth rises with age up to
some point and falls from there: the one that is worth least stands at one end or the other. So a
decision looks at two groups of each kind, however many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from attnstore_vllm.policy.returns import Before, ReturnEstimator, kind_of

GROUPS_MAX = 8
"""Groups of one end of a kind that a decision looks at, if none of their chunks can go."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What one request used of one conversation."""

    number: int
    kind: int
    since: float
    is_shared: bool


@dataclass(slots=True, eq=False)
class _Group:
    run: Run
    chunks: list[Hashable] = field(default_factory=list)
    """By depth; those that have left the group are still in it, until they are met."""
    num_left: int = 0
    """Chunks that are still of the group."""


class ByReturn:
    """The order of departure in one tier. Ids are hashable; an id is added once."""

    def __init__(self, estimator: ReturnEstimator) -> None:
        self._estimator = estimator
        self._group_of: dict[Hashable, _Group] = {}
        self._kinds: dict[int, OrderedDict[Run, _Group]] = {}  # oldest first
        self._poorest: _Group | None = None

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, chunk: Hashable) -> bool:
        return chunk in self._group_of

    def run_of(self, chunk: Hashable) -> Run | None:
        group = self._group_of.get(chunk)
        return group.run if group is not None else None

    def use(self, chunk: Hashable, run: Run) -> None:
        """Add a chunk, or note that `run` uses it now. Of one run in the order of depth."""
        group = self._kinds.setdefault(run.kind, OrderedDict()).get(run)
        if group is None:
            group = self._kinds[run.kind][run] = _Group(run)
            self._poorest = None
        if chunk in self._group_of:
            self.remove(chunk)
        self._group_of[chunk] = group
        group.chunks.append(chunk)
        group.num_left += 1

    def remove(self, chunk: Hashable) -> None:
        group = self._group_of.pop(chunk)
        group.num_left -= 1
        if not group.num_left:
            del self._kinds[group.run.kind][group.run]
            if group is self._poorest:
                self._poorest = None

    def victim(self, now: float, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        """The chunk to evict, or None if none is found that can go. Nothing is changed.

        Cost: two groups a kind for the first chunk of a group, O(1) for those after it.
        """
        if self._poorest is not None:
            chunk = self._last(self._poorest, can_go)
            if chunk is not None:
                return chunk
        found, least = None, (0.0, False)
        for kind, groups in self._kinds.items():
            for ends in (groups.values(), reversed(groups.values())):
                for _, group in zip(range(GROUPS_MAX), ends, strict=False):
                    chunk = self._last(group, can_go)
                    if chunk is None:
                        continue
                    # Of one request, what others share is before what is its own, and stays.
                    worth = self._estimator.worth(kind, now - group.run.since), group.run.is_shared
                    if found is None or worth < least:
                        found, least, self._poorest = chunk, worth, group
                    break
        return found

    def _last(self, group: _Group, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        chunks, group_of = group.chunks, self._group_of
        while chunks and group_of.get(chunks[-1]) is not group:
            chunks.pop()
        return next((c for c in reversed(chunks) if group_of.get(c) is group and can_go(c)), None)


def runs_of_request(
    estimator: ReturnEstimator,
    last_runs: Sequence[Run | None],
    marks: Sequence[int],
    num_tokens: int,
    num_chunks: int,
    now: float,
) -> Iterator[tuple[int, Run]]:
    """What a request that comes now uses: (number of chunks, run), the shared part first.

    A chunk is shared if another run than the one that this request continues was the last to use
    it, and then for as long as it is stored.

    Args:
        last_runs: of the request's leading chunks that are stored, the run that used each last.
        marks: of its whole chunks.
        num_chunks: that it has in all, the partly filled last one included.
    """
    before = estimator.arrive(marks, now)
    num_shared = _num_shared(last_runs, before)
    known = max(before.depth if before is not None else 0, len(last_runs))
    turn = before.turn + 1 if before is not None else 1
    gap_s = now - before.since if before is not None else None
    is_fresh = 2 * (len(marks) - known) > len(marks)
    for start, stop in ((0, num_shared), (num_shared, num_chunks)):
        if start == stop:
            continue
        is_shared = start == 0 and num_shared > 0
        kind = kind_of(turn, gap_s, num_tokens, is_fresh=is_fresh, is_shared=is_shared)
        number = 0
        end = min(stop, len(marks))
        if end > start:
            follows = 0 if is_shared else turn
            number = estimator.open(marks[end - 1], kind, follows, stop - start, now)
        yield stop - start, Run(number, kind, now, is_shared)


def _num_shared(last_runs: Sequence[Run | None], before: Before | None) -> int:
    """Of the leading chunks, how many other conversations use too."""
    own = before.number if before is not None else 0
    for number, run in enumerate(last_runs):
        if run is None or not (run.is_shared or run.number != own):
            return number
    return len(last_runs)
