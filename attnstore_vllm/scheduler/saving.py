# SPDX-License-Identifier: Apache-2.0
"""Which KV of a request is saved: whole chunks as steps complete them, the rest when it ends.

It is long since chunks, sections and states are saved by one rule.

Of a chunk the spine is saved, and a section of each other group (index/sections.py). A spine that
is a window is kept as sections are. These are worth most where hits may end: at the end of the
prompt and of the answer, and where the prompt parts from what was stored. Those that lie before are
of *low value*: they stay in DRAM as long as there is room, for requests that branch off there.
Those of a prompt that was new for the most part are also written behind it, while much room is left
there. When a conversation has gone on, the sections of its end before are dropped, unless others
use them; not before its new end has a state, where a group needs one.

A recurrent group has a state where a step ends, and nowhere else. One is kept at the end of the
answer, one at the end of the prompt's last block, and one where the prompt parts from stored ones:
vLLM is asked to end a step there. Passed ones are kept in between, as often as the settings say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.index.prefix import GRAIN_TOKENS, kept_end, whole_blocks
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.policy.step_budget import StepBudget
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.scheduler.costs import Costs
from attnstore_vllm.scheduler.figures import GroupCounts
from attnstore_vllm.scheduler.open_plans import OpenPlans, Planned
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.truncation import Truncation
from attnstore_vllm.scheduler.vllm_types import Tables
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import ChunkCopy, hole_of, plan_save
from attnstore_vllm.types import Cause, Event

MIN_TAIL_TOKENS = 16
"""A shorter tail costs a slot and saves next to nothing."""
SAVE_TOKENS = 512
"""To save a chunk costs about as much as to look up so many tokens. How many requests cross a
chunk's end in one step, or end in it, is for clients to say: so a step saves no more of them than
its budget has, or twice what it computes. What goes on is saved in a later step; of what ends the
rest is not saved."""


class Saving:
    """Asks the store for slots, and plans their saves. All on the scheduler's thread.

    Args:
        costs: say where a state in between pays.
        states_every: see StoreConfig.
        step_tokens: what a step computes of prompts, at most.
        step_budget: see lookups.py; a chunk that is saved takes SAVE_TOKENS of as much.
    """

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        plans: OpenPlans,
        truncation: Truncation,
        costs: Costs,
        states_every: int | None,
        step_tokens: int,
        step_budget: int,
    ) -> None:
        self.note_save: Callable[[RequestState, Chunk], None] | None = None
        """Told of each chunk that is being saved, where routers want to know."""
        self._store = store
        self._geometry = geometry
        self._plans = plans
        self._truncation = truncation
        self._needs, self._walks = store.needs, store.strategy.walks
        self._costs = costs
        self._states_every = states_every
        states = [need.block_tokens for need in self._needs if need.reach is Reach.STATE]
        self._state_tokens = max(states, default=0)
        """The length of a block that has a state."""
        self._num_states = len(states)
        self._is_state = {need.group: need.reach is Reach.STATE for need in self._needs}
        self._grain = geometry.hit_tokens or GRAIN_TOKENS
        """Hits end at multiples of it."""
        self.counts = GroupCounts(geometry)
        each = 1 + len(self._needs)
        per_step = max(
            step_budget // SAVE_TOKENS, each * 2 * -(-step_tokens // geometry.chunk_tokens)
        )
        self._running, self._ended = StepBudget(per_step), StepBudget(per_step)
        """Saves of requests that go on, and of those that end, in a step."""
        self._each = each
        self.put_off = Counter[str]()
        """Chunks that wait for a later step, and that are not saved, since others have taken them.
        """

    def end_step(self) -> None:
        """A step is planned."""
        self._running.begin_step()
        self._ended.begin_step()

    def begin(self, req: RequestState, start: int) -> None:
        """vLLM has its answer: the prompt is computed from `start` on."""
        if self._num_states and req.may_save:
            whole = req.lookup.parts_at // self._state_tokens * self._state_tokens
            computing = req.computing
            if not req.lookup.has_begun:  # else it was preempted, and has left its states
                computing.junctions = (getattr(req.request, "shared_prefix_boundary", 0), whole)
                # The first who parts knows of no prompt before it, but is asked to leave a state.
                computing.has_parted = max(computing.junctions) > start
            computing.state_stop = start
            self._set_step_end(req, start)

    def _set_step_end(self, req: RequestState, start: int) -> None:
        """Tell vLLM where the prompt's step that begins at `start` is to end, at the latest."""
        size = self._state_tokens
        # A kernel that leaves the state of there from inside of a step lets vLLM go past it.
        stops = (*req.computing.junctions, (req.request.num_prompt_tokens - 1) // size * size)
        if self._states_every:
            stops += (-(-(req.computing.state_stop + self._states_every) // size) * size,)
        if req.audited:  # a stored state is compared with the one that is there
            stops += tuple(piece.stop for piece in req.audited if self._is_state.get(piece.group))
        next_stop = min((stop for stop in stops if stop > start), default=0)
        req.request.shared_prefix_boundary = next_stop

    def save_chunks(self, req: RequestState, computed: int, tables: Tables) -> None:
        """Whole chunks up to `computed` tokens that were not offered to the store yet."""
        computed = min(computed, req.usable_tokens())
        if self._store.ahead > 1:
            # The last ones were made of guesses, and are made anew by the next step.
            known = max(req.request.num_tokens, computed + 1)
            computed = min(computed, known - self._store.ahead)
        if req.may_save:
            left = self._save_chunks(req, computed, tables, has_ended=False)
            self.put_off[Event.SAVE_LATER] += left

    def _save_chunks(
        self, req: RequestState, computed: int, tables: Tables, *, has_ended: bool
    ) -> int:
        """Returns how many are not saved in this step, for the budget.

        Args:
            has_ended: vLLM keeps the request's blocks until they are saved.
        """
        size, computing = self._geometry.chunk_tokens, req.computing
        budget = self._ended if has_ended else self._running
        whole, left = computed // size, 0
        if not self._walks and whole > computing.chunks_seen and self.may_find_room(req):
            first = self.first_missing(req)
            left = self.save_spine(req, first, whole, tables[0], budget)
        if self._needs:
            for number in range(computing.sections_seen, whole - left):
                if self._walks and not budget.take(self._each):
                    left = whole - number
                    break
                self._save_sections(req, (number + 1) * size, tables, computed, has_ended=has_ended)
                computing.sections_seen = number + 1
        if self._walks:
            computing.chunks_seen = computing.sections_seen
        return left

    def may_find_room(self, req: RequestState) -> bool:
        """Whether something has changed since the request found no room. Cost: constant."""
        return req.computing.no_room_at != self.num_openings

    def save_spine(
        self,
        req: RequestState,
        number: int,
        stop: int,
        block_ids: Sequence[int],
        budget: StepBudget | None = None,
    ) -> int:
        """Whole chunks from first_missing() up to number `stop`, until one finds no room: that one
        is asked for again once there may be room, and nothing behind it before. So all that is
        stored of a request is its beginning. Returns how many the budget has left for later."""
        computing = req.computing
        openings, computing.no_room_at = self._store.num_openings, None
        fits = stop if budget is None else min(stop, number + budget.fits(self._each))
        names = req.sequence.names(number, fits, req.tenant)
        computing.chunks_seen = number + self._save(req, names, number, block_ids)
        if computing.chunks_seen < fits:
            computing.no_room_at = openings
        if budget is not None:  # what found no room has taken its part too
            budget.spend((min(computing.chunks_seen + 1, fits) - number) * self._each)
        return 0 if computing.no_room_at is not None else stop - computing.chunks_seen

    @property
    def num_openings(self) -> int:
        """See Store."""
        return self._store.num_openings

    @property
    def may_come_free(self) -> bool:
        """Whether there may be room later."""
        return self._plans.any_open() or self._store.is_writing

    def first_missing(self, req: RequestState) -> int:
        """The chunk to go on with: the next one, or one that was saved and has been pushed out."""
        number, moved = req.computing.chunks_seen, req.moved
        first = 0 if moved is None else min(number, moved.stop // req.chunk_tokens)
        # Of one that may come with moved KV, what is before that is stored under another name.
        return first + self._store.num_stored(req.sequence.keys(first, number))

    def save_step_end(self, req: RequestState, num_scheduled: int, tables: Tables) -> None:
        """Sections that are there when the step ends that is being planned, and may not be later:
        the states of the prompt's steps, and what windows need at the prompt's end."""
        request = req.request
        req.lookup.begin()
        before = request.num_computed_tokens
        computed, prompt_end = before + num_scheduled, request.num_prompt_tokens
        # The first says of a session's last input whether it may be saved.
        if before >= prompt_end or computed > req.usable_tokens() or not req.may_save:
            return
        if self._num_states:
            self._save_states(req, before, computed, tables)
            self._set_step_end(req, computed)
        whole = whole_blocks(prompt_end, self._grain)
        for need in self._needs:
            if need.reach is Reach.STATE or computed < prompt_end or need.group == 0:
                continue  # a chunk of the spine's window is whole when it is full, or at the end
            elif whole % self._geometry.chunk_tokens >= MIN_TAIL_TOKENS:
                self._save_section(req, need, whole, tables, low_value=True, is_fleeting=True)

    def _save_states(self, req: RequestState, before: int, computed: int, tables: Tables) -> None:
        """Those after `computed` tokens, where a step of the prompt ends."""
        prompt_end, size = req.request.num_prompt_tokens, self._state_tokens
        is_near = req.lookup.parts_at - size < computed
        is_junction = is_near and before < computed <= req.lookup.parts_at
        is_last = computed < prompt_end <= computed + size
        is_kept = is_junction or is_last
        if computed % self._grain or not (is_kept or self._is_wanted(req, computed)):
            return
        req.computing.state_stop = computed
        saved = self._save_states_at(req, computed, tables, low_value=not is_kept)
        if is_last and not is_junction:
            req.computing.prompt_states = saved

    def _is_wanted(self, req: RequestState, computed: int) -> bool:
        """Whether a state is kept there as long as there is room."""
        last, every = req.computing.state_stop, self._states_every
        if computed == req.request.num_prompt_tokens:  # for a prompt that goes on from this one
            return True
        if every is None:
            return self._costs.state_pays(last, computed, self._num_states)
        return every > 0 and computed - last >= every

    def save_rest(self, req: RequestState, tables: Tables) -> int:
        """Save the rest of a request that has ended, the tail included.

        Returns up to which token there is something to save, whether there was room or not.
        """
        request = req.request
        if not req.may_save:
            return 0
        # A step in flight counts, since the save comes behind it: it has had all tokens whose ids
        # are known. Drafts are beyond num_tokens.
        computed = min(request.num_computed_tokens, request.num_tokens)
        computed = min(computed, len(tables[0]) * self._geometry.block_tokens)
        # Else another connector may be loading it.
        computed = min(computed, req.computing.scheduled_stop)
        computed = min(computed, req.usable_tokens())
        if computed > 0 and req.may_save:
            req.computing.no_room_at = None
            left = self._save_chunks(req, computed, tables, has_ended=True)
            if not self._ended.take(self._each):  # nor if some are left: a hole hides the rest
                self.put_off[Event.SAVE_DROPPED] += left + 1
                req.counted.why_not_stored = Cause.STEP_BUDGET
                return 0
            end = self._kept_end(computed, request.num_prompt_tokens)
            # A state has seen all that was computed, and a hit may end where a tail does.
            is_state_at_end = end == computed == request.num_computed_tokens
            is_state_at_end &= not 0 < end % self._geometry.chunk_tokens < MIN_TAIL_TOKENS
            states = [need for need in self._needs if need.reach is Reach.STATE]
            if is_state_at_end or all(self._has_state_in_tail(req, need, end) for need in states):
                self._save_tail(req, end, tables)
            if states and is_state_at_end:
                saved = self._save_states_at(req, end, tables, low_value=False)
                before_tokens = 0 if req.visit is None else req.visit.before_tokens
                went_on_from_prompt = 0 < req.computing.first <= before_tokens
                self._store.make_low_priority(
                    saved if went_on_from_prompt else req.computing.prompt_states
                )
            if self._needs and (is_state_at_end or not states):
                self._drop_low_value(req, end)
        return max(0, computed)

    def _kept_end(self, computed: int, num_prompt_tokens: int) -> int:
        if self._geometry.hit_tokens:
            return whole_blocks(computed, self._grain)
        return kept_end(computed, num_prompt_tokens)

    def save_whole_blocks(self, req: RequestState, stop: int, block_ids: Sequence[int]) -> None:
        """The tail of a request whose whole chunks are saved, up to its last whole block."""
        size, block = self._geometry.chunk_tokens, self._geometry.block_tokens
        stop = whole_blocks(stop // block * block, self._grain)
        if stop % size >= MIN_TAIL_TOKENS:
            number = stop // size
            name = req.sequence.name_up_to(number, req.tenant, stop)
            self._save(req, [name], number, block_ids)

    def give_up(self, req: RequestState, stop: int) -> None:
        """Save nothing more, though chunks up to token `stop` are missing; forget what was saved
        behind them."""
        size, seen = self._geometry.chunk_tokens, req.computing.chunks_seen
        self._store.give_up(max(0, stop // size - seen))
        saved = [chunk for chunk, _ in req.computing.sections]
        behind = [
            c for c in (*saved, *req.computing.prompt_states) if c.name.position >= seen * size
        ]
        if behind:
            self._store.drop_low_value(behind, pinned=True)

    def _has_state_in_tail(self, req: RequestState, need: Need, end: int) -> bool:
        """Whether its prompt has left a state there. A tail without one backs no hit, and would
        take the place of the conversation's last one, which may have a state at its end."""
        size = self._geometry.chunk_tokens
        last = (req.request.num_prompt_tokens - 1) // need.block_tokens * need.block_tokens
        return last > max(req.computing.first, end // size * size)

    def _save_tail(self, req: RequestState, stop: int, tables: Tables) -> None:
        size = self._geometry.chunk_tokens
        number, start = stop // size, stop // size * size
        if stop - start < MIN_TAIL_TOKENS or req.computing.no_room_at is not None:
            return
        if not self._walks:
            name = req.sequence.name_up_to(number, req.tenant, stop)
            self._save(req, [name], number, tables[0])
        if self._needs:
            self._save_sections(req, stop, tables, stop, has_ended=True)

    def _save(
        self, req: RequestState, names: Sequence[ChunkName], first: int, block_ids: Sequence[int]
    ) -> int:
        """Save chunks of the spine from number `first` on. Returns how many are being saved, or are
        stored already: for the one behind these there is no room now."""
        if self._store.is_distrusted:
            return len(names)
        runs = self._runs(req, first, len(names))
        begun = self._store.begin_saves(
            names,
            runs,
            again_from=req.computing.first,
            pin_s=req.hints.terms.pin_s,
            pin_stop=req.request.num_prompt_tokens,
            dram_only=req.dram_only,
            yields=req.computing.has_ended,
        )
        planned = []
        for name, chunk in zip(names, begun, strict=False):
            if req.finds_moved:
                self._truncation.saved(req, name)
            if chunk is None:
                continue
            if self.note_save is not None:
                self.note_save(req, chunk)
            copies = plan_save(
                chunk.dram.slot,
                block_ids,
                name.position,
                name.num_tokens,
                block_tokens=self._geometry.block_tokens,
            )
            planned.append((chunk, copies))
        self._plan(req, planned, group=0)
        return len(begun)

    # ---- sections ----------------------------------------------------------------------

    def _save_sections(
        self, req: RequestState, stop: int, tables: Tables, computed: int, *, has_ended: bool
    ) -> None:
        """Those of the chunk that ends at `stop`, or whose tail does."""
        for need in self._needs:
            if need.reach is Reach.STATE:
                continue
            low_value = self._is_low_value(req, need, stop, computed)
            chunk = self._save_section(
                req, need, stop, tables, low_value=low_value, is_fleeting=not has_ended
            )
            if chunk is not None and not low_value:
                req.computing.sections = (*req.computing.sections, (chunk, need))

    def _save_section(
        self,
        req: RequestState,
        need: Need,
        stop: int,
        tables: Tables,
        *,
        low_value: bool,
        is_fleeting: bool,
    ) -> Chunk | None:
        """The group's part of the chunk in which `stop` is, up to `stop`."""
        size, sizes = self._geometry.chunk_tokens, {"block_tokens": need.block_tokens}
        number = (stop - 1) // size
        position = number * size
        block_ids = tables[need.group]
        hole = hole_of(block_ids, position, stop - position, **sizes)
        if hole is not None and need.room:  # the slot has no more places
            hole = max(hole, -(-(stop - position) // need.block_tokens) - need.room)
        if hole is None or (hole and need.group == 0):  # the spine's chunks are whole
            return None
        name = req.sequence.section(need.group, hole).name_up_to(number, req.tenant, stop)
        chunk = self._begin(req, name, number, low_value=low_value)
        if chunk is not None:
            slot = chunk.dram.slot
            copies = plan_save(
                slot, block_ids, position, stop - position, hole=hole, places=need.room, **sizes
            )
            self._plan(req, [(chunk, copies)], group=need.group, is_fleeting=is_fleeting)
            self.counts.add("sections_passed", need.group, low_value)
        return chunk

    def _save_states_at(
        self, req: RequestState, stop: int, tables: Tables, *, low_value: bool
    ) -> tuple[Chunk, ...]:
        """Those of all recurrent groups after `stop` tokens. Returns those that are copied."""
        needs = [need for need in self._needs if need.reach is Reach.STATE]
        saved = [self._save_state(req, need, stop, tables, low_value=low_value) for need in needs]
        return tuple(chunk for chunk in saved if chunk is not None)

    def _save_state(
        self, req: RequestState, need: Need, stop: int, tables: Tables, *, low_value: bool
    ) -> Chunk | None:
        """The state after `stop` tokens, which is in the block of the last of them."""
        block_ids, index = tables[need.group], (stop - 1) // need.block_tokens
        if index >= len(block_ids) or not block_ids[index]:
            return None
        number = (stop - 1) // self._geometry.chunk_tokens
        name = req.sequence.section(need.group, 0).name_up_to(number, req.tenant, stop)
        chunk = self._begin(req, name, number, low_value=low_value, is_alone=True)
        if chunk is not None:
            copies = (ChunkCopy(chunk.dram.slot, 0, (block_ids[index],)),)
            self._plan(req, [(chunk, copies)], group=need.group, is_fleeting=True)
            self.counts.add("sections_passed", need.group, low_value)
        return chunk

    def _begin(
        self,
        req: RequestState,
        name: ChunkName,
        number: int,
        *,
        low_value: bool,
        is_alone: bool = False,
    ) -> Chunk | None:
        """Begin to save what a group has beside the spine."""
        if self._store.is_distrusted:
            return None
        if low_value and req.computing.no_room_at is not None:
            return None  # it is behind a chunk that is missing
        run = self._runs(req, number, 1)[0]
        if low_value:
            run = req.low_value_run(run)
        elif req.is_branch and name.position < req.lookup.parts_at < name.end and not self._walks:
            run = run.copy(is_shared=True)  # it does not go as the conversation's own
        is_of_prompt = name.position < req.request.num_prompt_tokens
        chunk = self._store.begin_save(
            name,
            run,
            req.hints.terms.pin_s if is_of_prompt and not low_value else None,
            again=name.position >= req.computing.first and not low_value,
            low_value=low_value,
            is_alone=is_alone,
            dram_only=req.dram_only,
            yields=req.computing.has_ended,
        )
        # Who parts from a prompt for the first time does so within a long text that was new.
        is_mostly_new = 2 * req.computing.first < req.request.num_prompt_tokens
        if chunk is not None and low_value and is_mostly_new:
            self._store.write_if_room(chunk)
        if chunk is not None and self.note_save is not None:
            self.note_save(req, chunk)
        return chunk

    def _runs(self, req: RequestState, first: int, count: int) -> list[Run]:
        """The runs of so many of its chunks, from number `first` on."""
        if req.ends_sooner:
            req.ends_sooner, lease = False, self._store.unseen_run(req.hints.terms).lease
            if req.visit is not None:
                req.visit = req.visit.until(lease)
            else:
                req.unseen = req.run_of(self._store).copy(lease=lease)
        if req.visit is not None:
            return req.visit.runs_of(first, first + count)
        return [req.run_of(self._store)] * count

    def _plan(
        self, req: RequestState, planned: Planned, *, group: int, is_fleeting: bool = False
    ) -> None:
        if self._needs:
            copied = chain.from_iterable(copies for _, copies in planned)
            num_blocks = sum(len(copy.block_ids) for copy in copied)
            self.counts.add_blocks("group_saved_bytes", group, num_blocks)
        request = req.request
        self._plans.save(
            request.request_id, planned, request.lora_request, req.adapter, is_fleeting=is_fleeting
        )

    def _is_low_value(self, req: RequestState, need: Need, stop: int, computed: int) -> bool:
        """Whether a section that ends at `stop` backs no hit that is likely to come."""
        num_prompt_tokens = req.request.num_prompt_tokens
        ends = [num_prompt_tokens - 1, req.lookup.parts_at]
        if computed >= num_prompt_tokens:
            ends.append(computed)
        size = self._geometry.chunk_tokens
        first = (stop - 1) // size * size
        return not any(need.first(end) < stop and end > first for end in ends)

    def _drop_low_value(self, req: RequestState, end: int) -> None:
        """The conversation has gone on to `end`: most sections that it had before back no hit that
        is likely to come, unless others use them too (a shared run). Whose prompt has parted from
        the one before it is another conversation, and the next one may part there as well."""
        before_tokens = 0 if req.visit is None else req.visit.before_tokens
        if req.computing.has_parted or 0 < req.lookup.parts_at <= before_tokens - self._grain:
            return
        prompt_end = req.request.num_prompt_tokens - 1
        for need in self._needs if req.computing.first else ():
            # What the prompt before needed at its end, and its answer not, no hit has brought here.
            is_state = need.reach is Reach.STATE
            needed = prompt_end // need.block_tokens * need.block_tokens
            if not is_state:
                needed = min(need.first(prompt_end), need.first(end)) + 1
            keys = req.sequence.section(need.group, 0)
            dropped = self._store.drop_before(keys, needed, low_value=is_state)
            self.counts.add("sections_dropped", need.group, dropped)
        for chunk, need in req.computing.sections:
            if need.reach is Reach.STATE or not any(
                need.first(stop) < chunk.name.position + self._geometry.chunk_tokens
                for stop in (end, prompt_end)
            ):
                dropped = self._store.drop_low_value([chunk])
                self.counts.add("sections_dropped", need.group, dropped)
