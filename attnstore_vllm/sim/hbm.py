# SPDX-License-Identifier: Apache-2.0
"""A simulated server's HBM: room for requests that run, and vLLM's own prefix cache in the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from attnstore_vllm.sim.hardware import Machine
from attnstore_vllm.sim.jobs import Job


@dataclass(frozen=True, slots=True)
class BlockPool:
    """As much of vLLM's as the scheduler side reads."""

    hash_block_size: int
    cached_block_hash_to_block: OrderedDict[int, None]


class Hbm:
    """Stands for vLLM's KVCacheManager, with blocks as large as chunks.

    Room for prompt and answer is taken at once, so nobody is preempted. Blocks have no bytes:
    each request's are numbered from 0.
    """

    def __init__(self, machine: Machine) -> None:
        self._size = machine.chunk_tokens
        self._num_tokens = machine.hbm // machine.kv_bytes_per_token
        self._has_cache = machine.prefix_cache
        self._taken = 0
        self._blocks: dict[str, range] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """By number of the chunk, the one unused for longest first."""
        self.block_pool = BlockPool(self._size, self._cached)

    def cached_tokens(self, job: Job) -> int:
        """Tokens of a waiting request that the prefix cache has. One is left to compute."""
        found = list(takewhile(self._cached.__contains__, job.request.chunks.tolist()))
        for number in reversed(found):
            self._cached.move_to_end(number)
        return min(len(found), (job.num_tokens - 1) // self._size) * self._size

    def take(self, job: Job) -> bool:
        """Room for a request, if there is. One that is alone always has it."""
        if self._blocks and self._taken + job.num_in_all > self._num_tokens:
            return False
        self._taken += job.num_in_all
        self._blocks[job.request_id] = range(-(-job.num_in_all // self._size))
        room = max(0, self._num_tokens - self._taken) // self._size
        while len(self._cached) > room:
            self._cached.popitem(last=False)
        return True

    def give_back(self, job: Job) -> None:
        """The request has ended. Its whole blocks stay until others need the room."""
        self._taken -= job.num_in_all
        del self._blocks[job.request_id]
        if self._has_cache:
            whole = job.request.known_tokens // self._size
            for number in reversed(job.request.chunks[:whole].tolist()):
                self._cached[number] = None
                self._cached.move_to_end(number)

    def get_block_ids(self, request_id: str) -> tuple[Sequence[int], ...]:
        return (self._blocks[request_id],)
