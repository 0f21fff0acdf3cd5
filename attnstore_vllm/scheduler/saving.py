# SPDX-License-Identifier: Apache-2.0
"""Which KV of a request is saved: whole chunks as steps complete them, the rest when it ends.

Of a chunk the spine is saved, and a section of each other group (index/sections.py). Sections are
worth most where hits may end: at the end of the prompt and of the answer, and where the prompt
parts from what was stored. Those that lie before are *passed*: they stay in DRAM as long as there
is room, for whoever branches off there, and are not written behind it. When a conversation has
gone on, the sections of its end before are dropped, unless others use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import SequenceKeys, chunk_key
from attnstore_vllm.index.sections import Need
from attnstore_vllm.index.stops import kept_end
from attnstore_vllm.policy.runs import Run
from attnstore_vllm.scheduler.offer import Tables
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.truncation import Truncation
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import hole_of, plan_save

MIN_TAIL_TOKENS = 16
"""A shorter tail costs a slot and saves next to nothing."""
PASSED_PRIORITY = -2
"""Passed sections leave DRAM before all else, also before what hints call low."""


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
        self._needs = store.needs

    def save_chunks(
        self, state: RequestState, computed: int, tables: Tables, *, has_ended: bool = False
    ) -> None:
        """Whole chunks up to `computed` tokens that were not offered to the store yet.

        Args:
            has_ended: vLLM keeps the request's blocks until they are saved.
        """
        computed = min(computed, state.usable_tokens())
        if not state.may_save:
            return
        size = self._geometry.chunk_tokens
        if computed // size <= state.computing.chunks_seen:
            return
        sequence = state.sequence
        for number in range(state.computing.chunks_seen, computed // size):
            name = sequence.name(number, state.tenant)
            self._save(state, name, number, tables[0])
            if self._needs:
                self._save_sections(state, name, number, tables, computed, has_ended=has_ended)
        state.computing.chunks_seen = computed // size

    def save_rest(self, state: RequestState, tables: Tables) -> None:
        """Save the rest of a request that has ended, the tail included."""
        request = state.request
        if not state.may_save:
            return
        # What is in flight counts as computed for vLLM, and is not.
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        computed = min(computed, request.num_tokens, len(tables[0]) * self._geometry.block_tokens)
        # Else another connector may be loading it.
        computed = min(computed, state.computing.scheduled_stop)
        computed = min(computed, state.usable_tokens())
        if computed > 0 and state.may_save:
            self.save_chunks(state, computed, tables, has_ended=True)
            end = kept_end(computed, request.num_prompt_tokens)
            self._save_tail(state, end, tables)
            self._drop_passed(state, end)

    def _save_tail(self, state: RequestState, stop: int, tables: Tables) -> None:
        size = self._geometry.chunk_tokens
        number, start = stop // size, stop // size * size
        if stop - start < MIN_TAIL_TOKENS:
            return
        name = name_up_to(state.sequence, number, state.tenant, stop)
        self._save(state, name, number, tables[0])
        if self._needs:
            self._save_sections(state, name, number, tables, stop, has_ended=True)

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

    # ---- sections ----------------------------------------------------------------------

    def _save_sections(
        self,
        state: RequestState,
        spine: ChunkName,
        number: int,
        tables: Tables,
        computed: int,
        *,
        has_ended: bool,
    ) -> None:
        """Those of one chunk, of which the spine is `spine`."""
        stop = spine.position + spine.num_tokens
        for need in self._needs:
            block_ids = tables[need.group]
            sizes = {"block_tokens": need.block_tokens}
            hole = hole_of(block_ids, spine.position, spine.num_tokens, **sizes)
            if hole is None:
                continue
            keys = state.sequence.section(need.group, hole)
            name = name_up_to(keys, number, state.tenant, stop)
            is_passed = self._is_passed(state, need, stop, computed)
            run = state.run(number)
            chunk = self._store.begin_save(
                name,
                _passed(run) if is_passed and run is not None else run,
                None if is_passed else state.pin_s(name.position),
                again=name.position >= state.computing.first and not is_passed,
                stays=is_passed,
            )
            if chunk is None:
                continue
            if not is_passed:
                state.computing.sections = (*state.computing.sections, (chunk, need))
            copies = plan_save(
                chunk.dram.slot, block_ids, name.position, name.num_tokens, hole=hole, **sizes
            )
            self._plans.save(
                state.request.request_id,
                chunk,
                copies,
                state.request.lora_request,
                state.adapter,
                is_fleeting=not has_ended,
            )

    def _is_passed(self, state: RequestState, need: Need, stop: int, computed: int) -> bool:
        """Whether a section that ends at `stop` backs no hit that is likely to come."""
        num_prompt_tokens = state.request.num_prompt_tokens
        ends = [num_prompt_tokens - 1, state.sequence.spine_stop]
        if computed >= num_prompt_tokens:
            ends.append(computed)
        size = self._geometry.chunk_tokens
        first = (stop - 1) // size * size
        return not any(need.first(end) < stop and end > first for end in ends)

    def _drop_passed(self, state: RequestState, end: int) -> None:
        """The conversation has gone on to `end`: most sections that it had before back no hit that
        is likely to come, unless others use them too (a shared run)."""
        prompt_end = state.request.num_prompt_tokens - 1
        self._store.drop_passed(
            chunk
            for chunk, need in state.computing.sections
            if not any(
                need.first(stop) < chunk.name.position + self._geometry.chunk_tokens
                for stop in (end, prompt_end)
            )
        )


def name_up_to(sequence: SequenceKeys, number: int, tenant: bytes, stop: int) -> ChunkName:
    """The name of chunk `number`, or of its leading tokens up to `stop`."""
    size = sequence.chunk_tokens
    start = number * size
    if stop == start + size:
        return sequence.name(number, tenant)
    parent, extra = sequence.parent(number), sequence.extra(number)
    tokens = sequence.tokens(start, stop)
    key = chunk_key(parent, extra, tokens)
    return ChunkName(key, parent, extra, tenant, start, stop - start, tokens)


def _passed(run: Run) -> Run:
    """The same run, of what leaves before the rest of it."""
    return replace(run, priority=PASSED_PRIORITY)
