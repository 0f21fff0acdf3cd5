# SPDX-License-Identifier: Apache-2.0
"""A simulated server's HBM in which blocks may be held for a session that is away."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.hbm import Hbm
from attnstore_lab.sim.jobs import Job


class HoldingHbm(Hbm):
    """As Hbm, for models with one group. A block takes room once, as in vLLM: a request's hit is
    in use by it and not in the cache beside it.

    `_taken` are bytes in use; `_cached` are chunks that are in use by none.
    """

    def __init__(self, machine: Machine, size: int) -> None:
        assert machine.shape is None, "several groups are not simulated here"
        super().__init__(machine, size)
        self._users: Counter[int] = Counter()
        """By chunk: running requests that have hit it, and holds."""
        self._hits: dict[str, list[int]] = {}
        self._held: dict[int, list[int]] = {}
        self._holds: Counter[int] = Counter()
        """By chunk: sessions that it is held for."""

    def _found(self, job: Job) -> list[int]:
        def is_there(number: int) -> bool:
            return number in self._cached or number in self._users

        return list(takewhile(is_there, job.request.chunks.tolist()))

    def cached_tokens(self, job: Job) -> int:
        found = self._found(job)
        for number in reversed(found):
            if number in self._cached:
                self._cached.move_to_end(number)
        return min(len(found), (job.num_tokens - 1) // self._size) * self._size

    def take(self, job: Job) -> bool:
        found = self._found(job)[: (job.num_tokens - 1) // self._size]
        own = self._machine.held_bytes(job.num_in_all) - len(found) * self._cached_bytes
        idle = [number for number in found if number not in self._users]
        wanted = own + len(idle) * self._cached_bytes
        if self._taken and self._taken + wanted > self._machine.hbm:
            return False
        self._taken += wanted
        self._running[job.request_id] = job
        self._hits[job.request_id] = found
        self._use(found)
        self.let_go(job.request.session)
        room = max(0, self._machine.hbm - self._taken) // self._cached_bytes
        while len(self._cached) > room:
            self._cached.popitem(last=False)
        return True

    @property
    def tokens_in_use(self) -> int:
        return self._taken * self._size // self._cached_bytes

    @property
    def held_tokens(self) -> int:
        """Each chunk counted once."""
        return self._size * len(self._holds)

    def held_with(self, job: Job) -> int:
        """held_tokens with those of a request that runs."""
        return self.held_tokens + self._size * sum(n not in self._holds for n in self._whole(job))

    def give_back(self, job: Job) -> None:
        """The request has ended. Its whole blocks stay until others need the room."""
        whole = self._end(job)
        if self._machine.prefix_cache:
            for number in reversed(whole):
                if number not in self._users:
                    self._cached[number] = None
                    self._cached.move_to_end(number)

    def hold(self, job: Job) -> None:
        """The request has ended. Its whole blocks stay for its session until let_go()."""
        assert job.request.session not in self._held
        whole = self._end(job)
        self._taken += self._cached_bytes * sum(number not in self._users for number in whole)
        self._use(whole)
        self._held[job.request.session] = whole
        self._holds.update(whole)

    def let_go(self, session: int) -> None:
        """What is held for the session is as if its request had just ended. If nothing is held,
        nothing happens."""
        held = self._held.pop(session, [])
        self._unuse(held)
        for number in held:
            self._holds[number] -= 1
            if not self._holds[number]:
                del self._holds[number]

    def _end(self, job: Job) -> list[int]:
        """Take the request's blocks out of use. Returns its whole chunks."""
        del self._running[job.request_id]
        hits = self._hits.pop(job.request_id)
        own = self._machine.held_bytes(job.num_in_all) - len(hits) * self._cached_bytes
        self._taken -= own
        self._unuse(hits)
        return self._whole(job)

    def _use(self, chunks: list[int]) -> None:
        for number in chunks:
            self._cached.pop(number, None)
            self._users[number] += 1

    def _unuse(self, chunks: list[int]) -> None:
        for number in reversed(chunks):
            self._users[number] -= 1
            if not self._users[number]:
                del self._users[number]
                self._taken -= self._cached_bytes
                self._cached[number] = None

    def _whole(self, job: Job) -> list[int]:
        """Chunks of a request that will be full when it ends."""
        return list(job.request.chunks[: job.request.known_tokens // self._size].tolist())
