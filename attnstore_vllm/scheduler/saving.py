# SPDX-License-Identifier: Apache-2.0
"""Which KV of a request is saved: whole chunks as steps complete them, the rest when it ends."""

from __future__ import annotations

from collections.abc import Sequence

from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import chunk_key
from attnstore_vllm.index.stops import kept_end
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.truncation import Truncation
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import plan_save

MIN_TAIL_TOKENS = 16
"""A shorter tail costs a slot and saves next to nothing."""


class Saving:
    """Asks the store for slots, and plans their saves. All on the scheduler's thread."""

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        plans: OpenPlans,
        truncation: Truncation,
    ) -> None:
        self._store = store
        self._geometry = geometry
        self._plans = plans
        self._truncation = truncation

    def save_chunks(self, state: RequestState, computed: int, block_ids: Sequence[int]) -> None:
        """Whole chunks up to `computed` tokens that were not offered to the store yet."""
        computed = min(computed, state.usable_tokens())
        if not state.may_save:
            return
        size = self._geometry.chunk_tokens
        if computed // size <= state.computing.chunks_seen:
            return
        sequence = state.sequence
        for number in range(state.computing.chunks_seen, computed // size):
            self._save(state, sequence.name(number, state.tenant), number, block_ids)
        state.computing.chunks_seen = computed // size

    def save_rest(self, state: RequestState, block_ids: Sequence[int]) -> None:
        """Save the rest of a request that has ended, the tail included."""
        request = state.request
        if not state.may_save:
            return
        # What is in flight counts as computed for vLLM, and is not.
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        computed = min(computed, request.num_tokens, len(block_ids) * self._geometry.block_tokens)
        # Else another connector may be loading it.
        computed = min(computed, state.computing.scheduled_stop)
        computed = min(computed, state.usable_tokens())
        if computed > 0 and state.may_save:
            self.save_chunks(state, computed, block_ids)
            self._save_tail(state, kept_end(computed, request.num_prompt_tokens), block_ids)

    def _save_tail(self, state: RequestState, stop: int, block_ids: Sequence[int]) -> None:
        size = self._geometry.chunk_tokens
        number, start = stop // size, stop // size * size
        if stop - start < MIN_TAIL_TOKENS:
            return
        sequence = state.sequence
        parent, extra = sequence.parent(number), sequence.extra(number)
        tokens = sequence.tokens(start, stop)
        key = chunk_key(parent, extra, tokens)
        name = ChunkName(key, parent, extra, state.tenant, start, stop - start, tokens)
        self._save(state, name, number, block_ids)

    def _save(
        self, state: RequestState, name: ChunkName, number: int, block_ids: Sequence[int]
    ) -> None:
        chunk = self._store.begin_save(
            name,
            state.run(number),
            state.pin_s(name.position),
            again=name.position >= state.computing.first,
        )
        self._truncation.saved(state, name)
        if chunk is None:
            return
        copies = plan_save(
            chunk.dram.slot,
            block_ids,
            name.position,
            name.num_tokens,
            block_tokens=self._geometry.block_tokens,
        )
        self._plans.save(
            state.request.request_id, chunk, copies, state.request.lora_request, state.adapter
        )
