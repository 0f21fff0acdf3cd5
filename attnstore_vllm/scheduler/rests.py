# SPDX-License-Identifier: Apache-2.0
"""The rests of finished requests: what found no room in DRAM while they ran.

A prompt that is larger than DRAM is saved as fast as the tiers behind take it, from its first chunk
on. When its request ends, vLLM gives its blocks away, and keeps what is in them for its own prefix
cache until it needs the room. As long as it does so the rest is saved from there. Nothing is held:
no request waits for room, and a reset of vLLM's cache ends it.

A block is known by the object that names it in vLLM's cache, and not by what the name says: vLLM
makes another object whenever it names a block anew, and takes the name away before it writes to
one. So the same object in the same block means the same KV. It is looked at after vLLM has
planned a step, and read before that step begins.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.saving import Saving
from attnstore_vllm.scheduler.vllm_types import KVCacheManager, Tables
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.types import Clock

RESTS_MAX = 64
"""Finished requests of which a rest is saved. The oldest is given up for a new one."""
CHUNKS_MAX = 16
"""Chunks that one step saves of rests."""
STALL_S = 1.0
"""Rests are given up when there has been no room for so long: the engine steps for them ..."""
REST_S = 30.0
"""... and one that takes so long in all."""


@dataclass(slots=True, eq=False)
class _Rest:
    state: RequestState
    stop: int
    """Tokens of it that have KV."""
    block_ids: Sequence[int]
    """Blocks of the spine."""
    names: Sequence[object]
    """The objects that name these blocks; None where vLLM has none."""
    since: float


class Rests:
    """All methods run on the scheduler's thread."""

    def __init__(
        self,
        geometry: Geometry,
        plans: OpenPlans,
        saving: Saving,
        clock: Clock = time.monotonic,
    ) -> None:
        self._geometry = geometry
        self._plans = plans
        self._saving = saving
        self._clock = clock
        self._rests: deque[_Rest] = deque()
        self._openings = (-1, 0.0)
        """How many DRAM has had, and since when."""
        self.manager: KVCacheManager | None = None
        """vLLM's. Set when it is known; before that no rest is saved."""

    def __len__(self) -> int:
        return len(self._rests)

    def note(self, state: RequestState, stop: int, tables: Tables) -> None:
        """A request ends of which there is KV up to token `stop`. Cost: a look at each block, where
        something of it found no room."""
        if state.computing.no_room_at is None:
            return
        block_ids = list(tables[0][: stop // self._geometry.block_tokens])
        names = self._names(block_ids)
        first = state.computing.chunks_seen * self._blocks_a_chunk
        request = state.request
        is_other = request.resumable or request.lora_request or state.moved is not None
        if is_other or None in names[first : first + self._blocks_a_chunk]:
            self._saving.give_up(state, stop)
            return
        now = self._clock()
        if len(self._rests) >= RESTS_MAX:
            self._end(self._rests[0])
        state.computing.has_ended = True
        self._rests.append(_Rest(state, stop, block_ids, names, now))

    @property
    def _blocks_a_chunk(self) -> int:
        return self._geometry.chunk_tokens // self._geometry.block_tokens

    def _names(self, block_ids: Sequence[int]) -> list[object]:
        if self.manager is None or not self._plans.has_rows(0):
            return [None] * len(block_ids)
        blocks = getattr(self.manager.block_pool, "blocks", None)
        if blocks is None:
            return [None] * len(block_ids)
        return [blocks[block_id].block_hash for block_id in block_ids]

    def go_on(self) -> None:
        """A step is planned: save of the rests what there is room for."""
        left, now, openings = CHUNKS_MAX, self._clock(), self._saving.num_openings
        if openings != self._openings[0]:
            self._openings = openings, now
        if now - self._openings[1] > STALL_S or not self._saving.may_come_free:
            self.clear()
        for rest in list(self._rests):
            left -= self._go_on(rest, left)
            if left <= 0:
                break

    def _go_on(self, rest: _Rest, most: int) -> int:
        """Returns how many chunks are saved."""
        state, now = rest.state, self._clock()
        computing, num_chunks = state.computing, rest.stop // self._geometry.chunk_tokens
        if now - rest.since > REST_S or not state.may_save:
            self._end(rest)
            return 0
        if not self._saving.may_find_room(state):
            return 0
        number = self._saving.first_missing(state)
        there = self._chunks_there(rest, number)
        stop = min(there, number + self._with_rows(min(most, there - number)))
        request_id = state.request.request_id
        before = self._plans.num_new(request_id)
        self._saving.save_spine(state, number, stop, rest.block_ids)
        if computing.chunks_seen == there < num_chunks:
            self._end(rest)  # vLLM has given the next one's blocks away
        elif computing.chunks_seen == num_chunks:
            self._rests.remove(rest)
            self._save_tail(rest)
        self._plans.comes_first(request_id, before)
        return computing.chunks_seen - number

    def _with_rows(self, most: int) -> int:
        """So many chunks, or fewer if there are not the rows for them."""
        while most and not self._plans.has_rows(most * self._blocks_a_chunk):
            most -= 1
        return most

    def _chunks_there(self, rest: _Rest, number: int) -> int:
        """The first chunk, from this one on, of which vLLM has given a block away."""
        size = self._blocks_a_chunk
        stop = min(len(rest.names) // size, number + CHUNKS_MAX + 1)
        while number < stop and self._is_there(rest, number * size, (number + 1) * size):
            number += 1
        return number

    def _is_there(self, rest: _Rest, first: int, stop: int) -> bool:
        names = self._names(rest.block_ids[first:stop])
        return all(
            name is not None and name is before
            for name, before in zip(names, rest.names[first:stop], strict=True)
        )

    def _save_tail(self, rest: _Rest) -> None:
        size = self._blocks_a_chunk
        first = len(rest.names) // size * size
        if first < len(rest.names) and self._is_there(rest, first, len(rest.names)):
            if self._plans.has_rows(len(rest.names) - first):
                self._saving.save_whole_blocks(rest.state, rest.stop, rest.block_ids)

    def _end(self, rest: _Rest) -> None:
        self._rests.remove(rest)
        self._saving.give_up(rest.state, rest.stop)

    def clear(self) -> None:
        """Save nothing more of what is in vLLM's blocks."""
        while self._rests:
            self._end(self._rests[0])
