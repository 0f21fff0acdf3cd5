# SPDX-License-Identifier: Apache-2.0
"""Blocks of vLLM's pool that are held for sessions, where many may begin alike.

A block's name is of all tokens up to its end. So where two sessions have one name at one place, all
before it is alike, and one user of those blocks is enough for both: they are kept as a tree of
runs, each with one use of its blocks in the pool. A run is let go when no session ends in it and no
run is after it. So a hold behind a long prompt that is held already costs what comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class _Run:
    names: Sequence[object]
    blocks: list[Any]
    before: _Run | None = None
    after: dict[object, _Run] = field(default_factory=dict)
    """By their first names."""
    num_holds: int = 0
    """Sessions that end here."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the names of a session leave the tree."""

    run: _Run
    number: int
    """Blocks of the run that it has."""
    shared: int
    """And of all runs up to there."""


class HeldBlocks:
    """See the module. Runs on the scheduler's thread.

    Args:
        pool: vLLM's BlockPool. Blocks of one KV cache group, of full attention.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._root = _Run((), [])
        self._ends: dict[int, _Run] = {}
        """By session."""
        self.num_blocks = 0
        """Held, each counted once."""

    def __len__(self) -> int:
        """Sessions."""
        return len(self._ends)

    def __contains__(self, session: int) -> bool:
        return session in self._ends

    @property
    def sessions(self) -> list[int]:
        return [*self._ends]

    def num_with(self, names: Sequence[object], size: int) -> int:
        """Blocks that would be held with the first `size` of these. Cost: as hold() without new
        blocks."""
        return self.num_blocks + size - self._find(names, size).shared

    def hold(self, session: int, names: Sequence[object], blocks: Sequence[int], size: int) -> None:
        """Hold a session's blocks, up to the first one that no other request would find.

        Cost: O(new blocks), and O(log blocks) for each run that it shares.

        Args:
            names: vLLM's, from the first block on.
            blocks: their numbers; in use by a request.
            size: so many.
        """
        assert session not in self._ends
        place = self._find(names, size)
        run = self._cut(place.run, place.number)
        new: list[Any] = []
        for number in blocks[place.shared : size]:
            block = self._pool.blocks[number]
            if block.is_null or block.block_hash is None:
                break
            new.append(block)
        if new:
            self._pool.touch(new)
            self.num_blocks += len(new)
            first = names[place.shared]
            run.after[first] = _Run(names[place.shared : place.shared + len(new)], new, run)
            run = run.after[first]
        run.num_holds += 1
        self._ends[session] = run

    def release(self, session: int) -> bool:
        """Returns whether it was held. Cost: O(blocks that it alone has)."""
        run = self._ends.pop(session, None)
        if run is None:
            return False
        run.num_holds -= 1
        while run.before is not None and not run.num_holds and not run.after:
            self._pool.free_blocks(reversed(run.blocks))  # the end of it is to leave first
            self.num_blocks -= len(run.blocks)
            del run.before.after[run.names[0]]
            run = run.before
        return True

    def _find(self, names: Sequence[object], size: int) -> _Place:
        run, shared = self._root, 0
        while shared < size:
            after = run.after.get(names[shared])
            if after is None:
                break
            run, number = after, _alike(after.names, names, shared, size)
            shared += number
            if number < len(run.names):
                return _Place(run, number, shared)
        return _Place(run, len(run.names), shared)

    def _cut(self, run: _Run, number: int) -> _Run:
        """The run that ends so many blocks after the beginning of this one."""
        if number == len(run.names):
            return run
        assert run.before is not None and number
        first = _Run(run.names[:number], run.blocks[:number], run.before)
        run.before.after[run.names[0]] = first
        run.names, run.blocks, run.before = run.names[number:], run.blocks[number:], first
        first.after[run.names[0]] = run
        return first


def _alike(run: Sequence[object], names: Sequence[object], start: int, size: int) -> int:
    """How many of a run's names these have, which have its first one, from `start` on."""
    low, high = 1, min(len(run), size - start)
    if run[high - 1] == names[start + high - 1]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if run[middle - 1] == names[start + middle - 1]:
            low = middle
        else:
            high = middle
    return low
