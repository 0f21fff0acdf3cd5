# SPDX-License-Identifier: Apache-2.0
"""A simulated server's HBM: room for requests that run, and vLLM's own prefix cache in the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import overload

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.jobs import Job


@dataclass(frozen=True, slots=True)
class BlockPool:
    """As much of vLLM's as the scheduler side reads."""

    hash_block_size: int
    cached_block_hash_to_block: OrderedDict[int, None]
    get_num_free_blocks: Callable[[], int]


class Blocks(Sequence[int]):
    """A request's blocks of one group: those before `first` are vLLM's null block, 0."""

    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        places = range(self._count)[index]
        if isinstance(places, int):
            return places + 1 if places >= self._first else 0
        return [place + 1 if place >= self._first else 0 for place in places]


class Hbm:
    """Stands for vLLM's KVCacheManager.

    Room for prompt and answer is taken at once, so no request is preempted. Blocks have no bytes:
    each request's are numbered from 1. Where there are several groups the prefix cache backs what
    ends where a request has ended: elsewhere vLLM keeps neither windows nor states.

    Args:
        size: tokens of a chunk of the trace, which is what the prefix cache keeps.
    """

    def __init__(self, machine: Machine, size: int) -> None:
        self._machine = machine
        self._size = size
        self._groups = machine.geometry.groups
        self._needs = [] if machine.shape is None else machine.shape.needs()
        self._grain = max(group.block_tokens for group in self._groups)
        self._cached_bytes = machine.spine_bytes(size)
        self._taken = 0
        self._running: dict[str, Job] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """By number of the chunk, the one unused for longest first."""
        self._ends: set[int] = set()
        """The last whole chunks of requests that have ended."""
        self.block_pool = BlockPool(size, self._cached, self._num_free)

    def _num_free(self) -> int:
        """Blocks that are free, as if all were of the spine."""
        block_bytes = self._machine.spine_bytes(self._groups[0].block_tokens)
        return max(0, self._machine.hbm - self._taken) // block_bytes

    def cached_tokens(self, job: Job) -> int:
        """Tokens of a waiting request that the prefix cache has. One is left to compute."""
        found = list(takewhile(self._cached.__contains__, job.request.chunks.tolist()))
        for number in reversed(found):
            self._cached.move_to_end(number)
        count = min(len(found), (job.num_tokens - 1) // self._size)
        while self._needs and count and found[count - 1] not in self._ends:
            count -= 1
        return count * self._size // self._grain * self._grain

    def take(self, job: Job) -> bool:
        """Room for a request, if there is. One that is alone always has it."""
        wanted = self._machine.held_bytes(job.num_in_all)
        if self._running and self._taken + wanted > self._machine.hbm:
            return False
        self._taken += wanted
        self._running[job.request_id] = job
        room = max(0, self._machine.hbm - self._taken) // self._cached_bytes
        while len(self._cached) > room:
            self._ends.discard(self._cached.popitem(last=False)[0])
        return True

    def give_back(self, job: Job) -> None:
        """The request has ended. Its whole blocks stay until others need the room."""
        self._taken -= self._machine.held_bytes(job.num_in_all)
        del self._running[job.request_id]
        if self._machine.prefix_cache:
            whole = job.request.chunks[: job.request.known_tokens // self._size].tolist()
            for number in reversed(whole):
                self._cached[number] = None
                self._cached.move_to_end(number)
            self._ends.update(whole[-1:])

    def get_block_ids(self, request_id: str) -> tuple[Sequence[int], ...]:
        job = self._running[request_id]
        return self.tables(job, job.num_computed_tokens)

    def tables(self, job: Job, computed: int) -> tuple[Sequence[int], ...]:
        """The request's blocks by group, once so many tokens are computed or loaded."""
        firsts = [0, *(need.first(computed) // need.block_tokens for need in self._needs)]
        return tuple(
            Blocks(first, -(-job.num_in_all // group.block_tokens))
            for first, group in zip(firsts, self._groups, strict=True)
        )
