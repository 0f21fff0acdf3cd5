# SPDX-License-Identifier: Apache-2.0
"""Offers: the stored KV that a request gets when vLLM asks, or that it waits for.

It is long since what a request is offered, and what it takes of that, are one thing.

vLLM asks as often as it has a place for the request and no blocks. Costs decides whether a request
waits for its KV, loads it or computes it: by how long vLLM's steps take and by what the store says
of its disk (policy/cost.py). Waits keeps the requests that wait from being looked at more often
than a step can afford. Held chunks are let go when vLLM plans a step without having taken them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.prefix import Piece, gaps_of, pieces_before
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.scheduler.audits import Audits, is_on_trial
from attnstore_vllm.scheduler.costs import Costs
from attnstore_vllm.scheduler.documents import Documents
from attnstore_vllm.scheduler.figures import GroupCounts, StepStats
from attnstore_vllm.scheduler.open_plans import OpenPlans, plan_groups, plan_states
from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS, Offered, RequestState
from attnstore_vllm.scheduler.stages import Stages
from attnstore_vllm.scheduler.truncation import Truncation, documents_of
from attnstore_vllm.scheduler.untaken import Untaken
from attnstore_vllm.scheduler.vllm_types import Tables
from attnstore_vllm.scheduler.waits import Waits
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import last_blocks_last
from attnstore_vllm.types import DRAM, NVME, Cause

LINGERS_MAX = 8
"""Looks at a request that is alone in a step, at most."""


class Offers:
    """See the module. All methods run on the scheduler's thread.

    Args:
        audits: hits that are computed all the same; None: there are none.
        stages: of loads that are longer than DRAM; None: there are none.
        cuts_hits: vLLM may take less than it is offered.
    """

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        costs: Costs,
        waits: Waits,
        plans: OpenPlans,
        truncation: Truncation,
        counts: GroupCounts,
        audits: Audits | None = None,
        stages: Stages | None = None,
        documents: Documents | None = None,
        *,
        cuts_hits: bool = False,
    ) -> None:
        self._audits = audits
        self._stages, self._documents = stages, documents
        self._cuts_hits = cuts_hits
        self._needs = {need.group: need for need in store.needs}
        self.untaken = Untaken(store, geometry.block_tokens)
        self._store = store
        self._geometry = geometry
        self._rank_token_bytes = geometry.rank_bytes // geometry.chunk_tokens
        self._costs = costs
        self._waits = waits
        self._plans = plans
        self._truncation = truncation
        self._counts = counts
        self._open: list[RequestState] = []
        """Requests with an offer in this schedule()."""

    def ask(
        self,
        state: RequestState,
        local: int,
        stats: StepStats,
        found: list[Piece] | None = None,
    ) -> tuple[int | None, bool]:
        """How many tokens the request is offered behind those that are in HBM, None: ask again;
        and whether they are loaded before its first step.

        Args:
            local: tokens that are in HBM already.
            found: what its first look-up has found just now, of all its tokens.
        """
        state.withdrawn = None
        last = state.untaken
        if last is not None and last.rest and not (self._stages and self._stages.is_free(state)):
            state.untaken = None  # another load is in parts by now
        held = self.untaken.again(state, local)
        if last is not None and held is not None:
            return self._offer(state, held, last.rest, local)
        answer: tuple[int | None, bool] = (None, False)
        if self._waits.goes_on(state):
            if state.waiting.coming:  # else it has not had a look yet
                count_wanted(stats, state, state.waiting.coming)
        else:
            answer = self._look(state, local, stats, None if local else found)
        for _ in range(LINGERS_MAX):
            if answer[0] is not None or not self._waits.lingers(state):
                break
            answer = self._look(state, local, stats)
        return answer

    def _look(
        self, state: RequestState, local: int, stats: StepStats, pieces: list[Piece] | None = None
    ) -> tuple[int | None, bool]:
        request, lookup = state.request, state.lookup
        if lookup.asked:
            if self._waits.awaits(state):
                return None, False  # before the answer a look finds what the last one has found
            pieces = None  # a tier may have answered since
        # One token is left to compute at least: vLLM needs its logits.
        left = self._costs.leaves((request.num_tokens - local) * self._rank_token_bytes)
        stop = max(local, min(request.num_tokens - left, state.usable_tokens()))
        pieces = self._find(state, local, stop) if pieces is None else pieces
        if lookup.asked and self._waits.awaits(state):
            return None, False
        state.expect(pieces)
        count_wanted(stats, state, pieces)
        found_stop = pieces[-1].stop if pieces else local
        pieces, rest = self._stages.split(state, pieces) if self._stages else (pieces, [])
        held = self._store.hold_ready(pieces, lookup.keys, stop, local)
        ready_stop = held[-1].stop if held else local
        cause = Cause.LOST
        if pieces and found_stop > [*pieces, *rest][-1].stop:
            cause = Cause.SLOWER if rest else Cause.DRAM_TOO_SMALL
        if not has_all(held, pieces):
            rest = []
            coming = still_coming(held, pieces, local, walks=self._store.strategy.walks)
            late = self._costs.why_not_wait(state, ready_stop, coming)
            if late is None:
                self._store.release(piece.chunk for piece in held)
                self._waits.add(state, pieces)
                return None, False
            cause = late
        self._costs.end_wait(state, stats)
        self._waits.answered(state)
        ready_stop = rest[-1].stop if rest else ready_stop
        num_tokens = ready_stop - local
        why_none = self._why_none(state, held, rest, local, ready_stop)
        if why_none is not None:
            cause, num_tokens = why_none, 0
        state.computing.first = local
        if not state.counted.offered:
            offered = [*held, *rest] if num_tokens >= MIN_LOAD_TOKENS else []
            self._first_answer(state, local, pieces, offered, stats)
            # A rest that is too short to be loaded is computed in any case.
            if state.counted.stored_stop - local - num_tokens >= MIN_LOAD_TOKENS:
                stats.add("recomputations", cause, 1)
                state.counted.why_computed = cause
            else:
                why = state.counted.why_short = self._why_short(state, found_stop)
                if why is Cause.DRAM_TOO_SMALL:
                    stats.add("recomputations", why, 1)
        if num_tokens < MIN_LOAD_TOKENS:
            self._store.release(piece.chunk for piece in held)
            held, rest = [], []
        self.untaken.note(state, local, held, rest)
        return self._offer(state, held, rest, local)

    def _why_none(
        self,
        state: RequestState,
        held: Sequence[Piece],
        rest: Sequence[Piece],
        local: int,
        stop: int,
    ) -> Cause | None:
        """Why what is there of tokens [local, stop) is offered as none; None: it is offered."""
        if held and has_gaps(held):
            assert self._documents is not None
            num_tokens = sum(piece.stop - piece.start for piece in held)
            num_bytes = num_tokens * self._rank_token_bytes
            chosen = self._documents.chosen(num_tokens)
            if not self._costs.passes_pay(held, local, num_bytes, chosen):
                return Cause.SLOWER
        elif held:
            ahead_s = self._ahead_s(state, held) if self._costs.ahead_layers else None
            if not self._costs.copy_pays(local, stop, ahead_s):
                return Cause.SLOWER
        if self._audits is None or stop - local < MIN_LOAD_TOKENS:
            return None
        if not self._audits.takes(state, held, rest, stop - local):
            return None
        state.counted.audited = max(state.counted.audited, len(state.audited))
        return Cause.AUDIT

    def _find(self, state: RequestState, local: int, stop: int) -> list[Piece]:
        num_expired = self._store.residency.num_expired
        name, visit = state.request.request_id, state.visit
        pieces = self._store.find(
            state.lookup, local, stop, MIN_LOAD_TOKENS, request_id=name, visit=visit
        )
        state.note_expired(self._store.residency.num_expired - num_expired, pieces, local)
        return pieces

    def _first_answer(
        self,
        state: RequestState,
        local: int,
        pieces: Sequence[Piece],
        offered: Sequence[Piece],
        stats: StepStats,
    ) -> None:
        """Count what is said once of a request.

        Args:
            pieces: that it waits for no longer.
        """
        counted, num_tokens = state.counted, state.request.num_tokens
        counted.offered, counted.why_computed = True, None
        state.has_in_hbm(local)
        self._store.answered_with(state.request.request_id, pieces)
        for group in state.lookup.short_of:
            self._counts.add("shortened_hits", group, 1)
        sources = self._store.tiers(offered, local)
        for source, number in {
            "hbm": local,
            **sources,
            "computed": num_tokens - local - sources.total(),
        }.items():
            stats.add("prompt_tokens", source, number)

    def _why_short(self, state: RequestState, at: int) -> Cause:
        """Why nothing is found behind the prompt's first `at` tokens. Asked once of a request."""
        counted, size, ahead = state.counted, self._geometry.chunk_tokens, self._store.ahead
        stop, usable = state.request.num_tokens - 1, state.usable_tokens()
        num_found = -(-(at - counted.in_hbm) // size)
        if usable - at < MIN_LOAD_TOKENS <= stop - at:
            return state.why_unusable()
        if state.lookup.short_of:
            return Cause.GROUP_LACKS
        at = at if not ahead else -(-(at + ahead) // size) * size  # else what is before is there
        stop = min(stop, usable)
        if stop - at < MIN_LOAD_TOKENS:
            return Cause.NOT_STORED
        why = self._store.thread.reader.why_short(state.sequence, at, stop, MIN_LOAD_TOKENS)
        if why is Cause.DRAM_TOO_SMALL and self._needs:
            return Cause.GROUP_LACKS
        if why is Cause.DRAM_TOO_SMALL and num_found < self._store.num_slots:
            why = Cause.NOT_STORED  # it came since the look-up
        if why not in (Cause.NOT_STORED, Cause.RECOVERING):
            return why
        if counted.expired_at is not None:
            return Cause.EXPIRED
        return Cause.NOT_ANSWERED if counted.is_unanswered else why

    def _offer(
        self, state: RequestState, held: list[Piece], rest: list[Piece], local: int
    ) -> tuple[int | None, bool]:
        """The answer to vLLM: it may take what is held, and `rest` in parts."""
        if not held:
            return 0, False
        keys = state.lookup.keys  # before it may be of another lineage
        if state.finds_moved:
            spine = [piece for piece in held if piece.group == 0]
            self._truncation.offer(state, spine, self.untaken.kv_cache_manager)
        layers_before = self._layers_before(state, held)
        if self._stages and rest:
            layers_before, self._stages.offered = self._geometry.most_layers, state
        state.offered = Offered(held, local, layers_before, keys, rest)
        self._open.append(state)
        return [*held, *rest][-1].stop - local, layers_before > 0

    def _layers_before(self, state: RequestState, held: Sequence[Piece]) -> int:
        """How many layers are loaded before the request's first step."""
        if has_gaps(held):  # passes are to fill the gaps
            return self._geometry.most_layers
        if state.moved is not None:  # it fills blocks token by token, before the forward pass
            return 0
        # For a load in a step that computes, vLLM takes no word that it has failed (_fail()).
        if self._needs and self._cuts_hits:
            return self._geometry.most_layers
        # vLLM copies states before it begins a step's loads. And for a load in a request's first
        # step vLLM 0.32 counts one block of each recurrent group too few, and may stop for it.
        if any(need.reach is Reach.STATE for need in self._needs.values()):
            return self._geometry.most_layers
        if not self._costs.ahead_layers:
            return 0
        return self._costs.layers_before(
            *self._load_bytes(held), held[-1].stop, state.request.num_tokens
        )

    def _ahead_s(self, state: RequestState, held: Sequence[Piece]) -> float | None:
        """How long a request would wait for a load ahead of its step; None: it is for its step."""
        if state.finds_moved:
            return None
        layers = self._layers_before(state, held)
        return self._costs.ahead_s(sum(self._load_bytes(held)), layers, self._geometry.most_layers)

    def _load_bytes(self, held: Sequence[Piece]) -> tuple[int, int]:
        """A rank's, of a load and of those that may be before it."""
        num_tokens = held[-1].stop - held[0].start
        queued = self._plans.loading_blocks() * self._geometry.block_tokens
        return num_tokens * self._rank_token_bytes, queued * self._rank_token_bytes

    def take(self, state: RequestState, tables: Tables, num_tokens: int, stats: StepStats) -> bool:
        """vLLM takes so many tokens of the offer, for these blocks: their load is planned.

        It may take fewer than it was offered, or take them in a later step. It skips just as many
        in every layer: so what does not back that very length is a load that has failed. Which
        versions do so, and when: connector/facts.py: may_cut_hits().

        Returns whether it is carried out before the request's first step.
        Raises: UnsupportedError, for a length that nothing backs, in a step that computes: no
            version that is known takes one.
        """
        offered = self.part_taken(state, num_tokens)
        if not offered.pieces:
            return self._fail(state, offered, num_tokens, stats)
        start, stop = offered.start, offered.start + num_tokens
        sections = [piece for piece in offered.pieces if piece.group]
        spine = offered.pieces[: len(offered.pieces) - len(sections)]
        rest = [piece for piece in offered.rest if piece.start < stop]
        now = rest[0].start if rest else stop  # the others are loaded in parts
        used = pieces_before(spine, now)
        gaps = gaps_of(used, start, now) if has_gaps(used) else []
        documents, has_passes = documents_of(used), bool(gaps)
        if documents and self._documents is not None:  # of these some tokens may be chosen
            has_passes |= self._documents.chosen(sum(map(len, documents))) is not None
        if not gaps and not (used and [*used, *rest][-1].stop >= stop):  # it ends before the first
            self._store.release(piece.chunk for piece in offered.pieces)
            return self._fail(state, replace(offered, pieces=[], rest=[]), num_tokens, stats)
        states = [piece for piece in sections if self._needs[piece.group].reach is Reach.STATE]
        sections = [piece for piece in sections if piece not in states]
        planned = plan_groups([*used, *sections], tables, now, self._geometry)
        copies, num_partial = last_blocks_last(
            [
                (copies, now % self._geometry.groups[group].block_tokens != 0 and not moved)
                for group, (copies, moved) in planned.items()
            ]
        )
        moved = [run for _, runs in planned.values() for run in runs]
        if len(spine) > len(used):
            self._store.release(piece.chunk for piece in spine[len(used) :])
        if self._needs:
            self._count_loaded((*used, *sections, *states), stop)
        loaded = (*used, *rest, *sections, *states)
        self._pin(state, loaded)
        sources = self._costs.count_loaded(stats, used, start, now)
        state.counted.sources = dict(sources + self._store.tiers(rest, now))
        if moved:  # tokens count once, not once a group
            stats.add("moved_tokens", DRAM, sum(run.num_tokens for run in planned[0][1]))
        if not offered.layers_before:
            self._costs.times.load_tokens += num_tokens
        plan_id = self._plans.load(
            state.request.request_id,
            [piece.chunk for piece in (*used, *sections, *states)],
            (*plan_states(states, tables, self._geometry), *copies) if states else copies,
            tuple(moved),
            num_partial=num_partial,
            layers_before=offered.layers_before,
            has_more=bool(rest or has_passes),
        )
        if has_passes:
            assert self._documents is not None
            first = min(run.start for run in (*gaps, *documents))
            self._documents.begin(state, plan_id, gaps, tables, range(first, now))
        if self._stages and offered.rest:
            self._stages.offered = None
            if rest:
                self._stages.begin(state, plan_id, rest, tables[0], stop)
        self._go_on(state, (*used, *sections, *states), start, stop, tables)
        if state.finds_moved:
            self._truncation.taken(state, used, stop)
        return offered.layers_before > 0

    def _pin(self, state: RequestState, loaded: Sequence[Piece]) -> None:
        """A request loads these, and may have asked for its prompt to be pinned."""
        pin_s = state.hints.terms.pin_s
        if pin_s is not None:
            self._store.pin(loaded, state.lookup, state.request.num_prompt_tokens, pin_s)

    def _go_on(
        self, state: RequestState, taken: Sequence[Piece], start: int, stop: int, tables: Tables
    ) -> None:
        """The request goes on behind these pieces."""
        state.waiting.deadline, state.computing.first = None, stop
        state.untaken = None
        state.forget_matches()
        if state.request.lora_request is not None:
            size = self._geometry.block_tokens
            state.computing.unchecked = tuple(tables[0][start // size : -(-stop // size)])
        if start == 0:  # whole chunks of it are stored, since that is where they come from
            whole = stop // self._geometry.chunk_tokens
            state.computing.go_on_from(max(state.computing.chunks_seen, whole))
        # Sections of moved KV are another prompt's: to go on here says nothing of them.
        state.computing.sections = tuple(
            (piece.chunk, self._needs[piece.group])
            for piece in taken
            if piece.first is None and piece.group in self._needs
        )

    def part_taken(self, state: RequestState, num_tokens: int) -> Offered:
        """The offer, as far as vLLM takes it; without pieces if none back just that."""
        held, offered = state.offered, state.offered or state.withdrawn
        state.offered = state.withdrawn = None
        if offered is None:  # was never offered. It counts what a load brings later as computed now
            done = state.request.num_computed_tokens
            layers_before = self._geometry.most_layers if done else 0
            return Offered([], max(0, done - num_tokens), layers_before, state.lookup.keys)
        stop = offered.start + num_tokens
        if held is not None:
            # Of one group with all tokens a shorter part is backed by what backs the whole.
            if stop == held.stop or (stop < held.stop and not self._needs):
                return held
            if self._stages and held.rest:
                self._stages.offered = None
        elif state.adapter is None or state.lookup.keys is not offered.keys:
            return offered  # it is of another adapter, or another session, by now
        pieces = self._store.hold_exactly(offered.pieces, offered.keys, offered.start, stop)
        self._store.release(piece.chunk for piece in offered.pieces)
        if is_on_trial(self._store, state, pieces):
            self._store.release(piece.chunk for piece in pieces)
            pieces = []
        return replace(offered, pieces=pieces, rest=[])

    def _fail(
        self, state: RequestState, offered: Offered, num_tokens: int, stats: StepStats
    ) -> bool:
        """Nothing backs what vLLM takes: it is told so by the workers, as of a copy that has
        failed, and computes the request."""
        name = state.request.request_id
        if not offered.layers_before:
            raise UnsupportedError(
                f"vLLM has taken {num_tokens} stored tokens of request {name} from token "
                f"{offered.start} on, which is not what it was offered, and not all layers have "
                "KV for just so many. It computes in the same step, and would give a wrong "
                "answer: so the engine stops. Please report it, with vLLM's version and model"
            )
        self._plans.load(
            name, [], (), num_partial=0, layers_before=offered.layers_before, has_failed=True
        )
        stats.add("recomputations", Cause.LOST, 1)
        state.load_failed, state.counted.sources = Cause.LOST, {}
        state.waiting.deadline, state.computing.first = None, offered.start + num_tokens
        state.untaken = None
        state.forget_matches()
        return True

    def _count_loaded(self, pieces: Iterable[Piece], stop: int) -> None:
        for piece in pieces:
            size = self._geometry.groups[piece.group].block_tokens
            num_blocks = -(-min(piece.stop, stop) // size) - piece.start // size
            self._counts.add_blocks("group_loaded_bytes", piece.group, num_blocks)

    def withdraw(self, state: RequestState) -> None:
        """The offer is not taken, or asked for anew."""
        assert state.offered is not None
        self._store.release(piece.chunk for piece in state.offered.pieces)
        if self._stages and state.offered.rest:
            self._stages.offered = None
        state.withdrawn, state.offered = replace(state.offered, pieces=[], rest=[]), None
        self._truncation.withdraw(state)

    def end_schedule(self, stats: StepStats, *, is_empty: bool) -> None:
        """A step is planned: what vLLM has not taken by now it does not take. A load in parts goes
        on.

        Args:
            is_empty: it computes nothing.
        """
        for state in self._open:
            if state.offered is not None:
                self.withdraw(state)
        self._open.clear()
        if self._stages and (waited_for := self._stages.go_on(stats)):
            self._waits.note(waited_for)
        self._waits.end_step(is_empty=is_empty)


def has_gaps(pieces: Iterable[Piece]) -> bool:
    """Whether some are documents, with gaps before them."""
    return any(piece.gap for piece in pieces)


def has_all(held: Sequence[Piece], pieces: Sequence[Piece]) -> bool:
    """Whether what is held goes as far as what was found."""
    if held and pieces and held[-1].stop >= pieces[-1].stop:
        return True
    return [piece.chunk for piece in held] == [piece.chunk for piece in pieces]


def still_coming(
    held: Sequence[Piece], pieces: Sequence[Piece], start: int, *, walks: bool
) -> list[Piece]:
    """The pieces that were found and do not back what is held, as they are waited for.

    Where there are sections, nothing is won before all has come: so only the last of them ends
    where the hit does, and the others where what is held does.

    Args:
        start: what is before is in HBM.
        walks: what is held is another window, and no part of what was found.
    """
    num_held = 0 if walks else sum(piece.group == 0 for piece in held)
    spine = [piece for piece in pieces if piece.group == 0][num_held:]
    sections = [piece for piece in pieces if piece.group]
    if not sections and not walks:
        return spine
    ready_stop = held[-1].stop if held else start
    waiting = [replace(piece, stop=ready_stop) for piece in (*spine, *sections)]
    return [*waiting[:-1], pieces[-1]]


def count_wanted(stats: StepStats, state: RequestState, pieces: Sequence[Piece]) -> None:
    """The request is first offered a place: where is what it wants then?"""
    if state.counted.wanted:
        return
    state.counted.wanted = True
    spine = [piece for piece in pieces if piece.group == 0]
    wanted = Counter[str]()
    for piece in spine:
        is_here = piece.chunk.dram.state is State.READY
        tier = DRAM if is_here else next(iter(piece.chunk.behind), NVME)
        wanted[tier] += piece.stop - piece.start
    for tier, tokens in wanted.items():
        stats.add("wanted_tokens", tier, tokens)
