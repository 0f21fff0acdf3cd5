# SPDX-License-Identifier: Apache-2.0
"""Offers: the stored KV that a request gets when vLLM asks, and the part that vLLM takes.

vLLM asks as often as it has a place for the request and no blocks. Held chunks are let go when it
plans a step without having taken them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.index.sections import Reach, cut
from attnstore_vllm.index.stops import GRAIN_TOKENS
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS, Offered, RequestState
from attnstore_vllm.scheduler.stats import (
    GroupCounts,
    StepStats,
    count_offer,
    count_recomputation,
    count_short,
    count_taken,
    count_wanted,
)
from attnstore_vllm.scheduler.truncation import Truncation
from attnstore_vllm.scheduler.vllm_types import KVCacheManager
from attnstore_vllm.scheduler.waiting import Costs, Waits
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer import moves
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import ChunkCopy, last_blocks_last, plan_load

Tables = Sequence[Sequence[int]]
"""The blocks of a request in each group, from its first token on; 0 for what is not there."""


class Offers:
    """See the module. All methods run on the scheduler's thread."""

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        costs: Costs,
        waits: Waits,
        plans: OpenPlans,
        truncation: Truncation,
        counts: GroupCounts,
        *,
        needs_next_token: bool = False,
    ) -> None:
        self._unproven_tokens = 2 * GRAIN_TOKENS - 1 if needs_next_token else 0
        """At most so many at the end of what matches are not offered (see _leave_unproven)."""
        self._needs = {need.group: need for need in store.needs}
        self.kv_cache_manager: KVCacheManager | None = None
        """vLLM's, when it is known."""
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

    def ask(self, state: RequestState, local: int, stats: StepStats) -> tuple[int | None, bool]:
        """How many tokens the request is offered behind those that are in HBM, None: ask again;
        and whether they are loaded before its first step.

        Args:
            local: tokens that are in HBM already.
        """
        if self._waits.goes_on(state):
            count_wanted(stats, state, state.waiting.coming)
            return None, False
        request = state.request
        # One token is left to compute: vLLM needs its logits.
        stop = max(local, min(request.num_tokens - 1, state.usable_tokens()))
        pieces = self._store.find(
            state.sequence,
            local,
            stop,
            MIN_LOAD_TOKENS,
            request_id=request.request_id,
            visit=state.visit,
        )
        state.expect(pieces)
        count_wanted(stats, state, pieces)
        held = self._store.hold_ready(pieces, state.sequence, stop, local)
        ready_stop = held[-1].stop if held else local
        cause = "lost"
        if not has_all(held, pieces):
            coming = still_coming(held, pieces, local, walks=self._store.walks)
            late = self._costs.why_not_wait(state, ready_stop, coming)
            if late is None:
                self._store.release(piece.chunk for piece in held)
                self._waits.add(state, pieces)
                return None, False
            cause = late
        self._costs.end_wait(state, stats)
        self._waits.answered(state)
        held = self._leave_unproven(held)
        ready_stop = held[-1].stop if held else local
        num_tokens = ready_stop - local
        if held and not self._costs.copy_pays(local, ready_stop):
            cause, num_tokens = "slower", 0
        # A rest that is too short to be loaded is computed in any case.
        if (
            state.counted.stored_stop - local - num_tokens
            >= MIN_LOAD_TOKENS + self._unproven_tokens
        ):
            count_recomputation(stats, state, cause)
        state.computing.first = local
        count_short(self._counts, state)
        count_offer(stats, state, self._store.tiers(held if num_tokens else (), local))
        if num_tokens < MIN_LOAD_TOKENS:
            self._store.release(piece.chunk for piece in held)
            return 0, False
        spine = [piece for piece in held if piece.group == 0]
        self._truncation.offer(state, spine, self.kv_cache_manager)
        layers_before = self._layers_before(state, held)
        state.offered = Offered(held, local, layers_before)
        self._open.append(state)
        return num_tokens, layers_before > 0

    def _layers_before(self, state: RequestState, held: Sequence[Piece]) -> int:
        """How many layers are loaded before the request's first step."""
        if state.moved is not None:  # it fills blocks token by token, before the forward pass
            return 0
        # vLLM copies states before it begins a step's loads. And for a load in a request's first
        # step vLLM 0.32 counts one block of each recurrent group too few, and may stop for it.
        if any(need.reach is Reach.STATE for need in self._needs.values()):
            return self._geometry.num_layers
        stop = held[-1].stop
        return self._costs.layers_before(
            (stop - held[0].start) * self._rank_token_bytes,
            self._plans.loading_blocks() * self._geometry.block_tokens * self._rank_token_bytes,
            stop,
            state.request.num_tokens,
        )

    def _leave_unproven(self, held: list[Piece]) -> list[Piece]:
        """Let go of what ends with the last token that matches, and keep what does not.

        Where KV of a token depends on the one after it, that of the last token is right only if the
        next one matches too. What is left ends where a hit may, one stop before.
        """
        if not held or not self._unproven_tokens:
            return held
        kept = cut(held, held[-1].stop - 1, GRAIN_TOKENS)
        self._store.release(piece.chunk for piece in held[len(kept) :])
        return kept

    def take(self, state: RequestState, tables: Tables, num_tokens: int, stats: StepStats) -> bool:
        """vLLM takes so many tokens of the offer, for these blocks: their load is planned.

        Returns whether it is carried out before the request's first step.
        """
        offered, state.offered = state.offered, None
        assert offered is not None, "vLLM takes what was not offered"
        start, stop = offered.start, offered.start + num_tokens
        sections = [piece for piece in offered.pieces if piece.group]
        spine = offered.pieces[: len(offered.pieces) - len(sections)]
        used = [piece for piece in spine if piece.start < stop]
        assert used and used[-1].stop >= stop, "vLLM takes more than was offered"
        assert not self._needs or used[-1].stop == stop, "sections back no shorter hit"
        states = [piece for piece in sections if self._needs[piece.group].reach is Reach.STATE]
        sections = [piece for piece in sections if piece not in states]
        planned = plan_groups([*used, *sections], tables, stop, self._geometry)
        copies, num_partial = last_blocks_last(
            [
                (copies, stop % self._geometry.groups[group].block_tokens != 0 and not moved)
                for group, (copies, moved) in planned.items()
            ]
        )
        moved = [run for _, runs in planned.values() for run in runs]
        self._store.release(piece.chunk for piece in spine[len(used) :])
        self._count_loaded((*used, *sections, *states), stop)
        num_moved = moves.num_tokens(planned[0][1])  # once, in whatever groups
        count_taken(stats, state, self._store.tiers(used, start), num_moved)
        if not offered.layers_before:
            self._costs.load_tokens += num_tokens
        self._plans.load(
            state.request.request_id,
            [piece.chunk for piece in (*used, *sections, *states)],
            (*plan_states(states, tables, self._geometry), *copies),
            tuple(moved),
            num_partial=num_partial,
            layers_before=offered.layers_before,
        )
        state.waiting.deadline, state.computing.first = None, stop
        if state.request.lora_request is not None:
            size = self._geometry.block_tokens
            state.computing.unchecked = tuple(tables[0][start // size : -(-stop // size)])
        if start == 0:  # whole chunks of it are stored, since that is where they come from
            whole = stop // self._geometry.chunk_tokens
            state.computing.chunks_seen = max(state.computing.chunks_seen, whole)
        # Sections of moved KV are another prompt's: to go on here says nothing of them.
        state.computing.sections = tuple(
            (piece.chunk, self._needs[piece.group])
            for piece in (*used, *sections, *states)
            if piece.first is None and piece.group in self._needs
        )
        self._truncation.taken(state, used, stop)
        self._truncation.found(state, (p.chunk.name for p in used if p.first is None))
        return offered.layers_before > 0

    def _count_loaded(self, pieces: Iterable[Piece], stop: int) -> None:
        for piece in pieces:
            size = self._geometry.groups[piece.group].block_tokens
            num_blocks = -(-min(piece.stop, stop) // size) - piece.start // size
            self._counts.add_blocks("group_loaded_bytes", piece.group, num_blocks)

    def withdraw(self, state: RequestState) -> None:
        """The offer is not taken, or asked for anew."""
        if state.offered is not None:
            self._store.release(piece.chunk for piece in state.offered.pieces)
            state.offered = None
            self._truncation.take_back(state)

    def end_schedule(self) -> None:
        """A step is planned: what vLLM has not taken by now it does not take."""
        for state in self._open:
            self.withdraw(state)
        self._open.clear()


def has_all(held: Sequence[Piece], pieces: Sequence[Piece]) -> bool:
    """Whether what is held goes as far as what was found."""
    is_same = [piece.chunk for piece in held] == [piece.chunk for piece in pieces]
    return is_same or bool(held and pieces and held[-1].stop >= pieces[-1].stop)


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


def plan_groups(
    pieces: Sequence[Piece], tables: Tables, stop: int, geometry: Geometry
) -> dict[int, tuple[tuple[ChunkCopy, ...], tuple[moves.MovedRun, ...]]]:
    """The copies and the moves of each group that has pieces.

    Args:
        pieces: held, group by group, each for the tokens before `stop` that it needs.
    """
    planned = {}
    for group, found in groupby(pieces, lambda piece: piece.group):
        some = list(found)
        block_tokens = geometry.groups[group].block_tokens
        first = some[0].start
        block_ids = tables[group][first // block_tokens : -(-stop // block_tokens)]
        needs_look = group > 0 or geometry.has_window_alone
        assert all(block_ids) or not needs_look, "vLLM gave no block for what is loaded"
        planned[group] = plan_copies(some, tables[group], first, stop, geometry, group)
    return planned


def plan_states(
    states: Sequence[Piece], tables: Tables, geometry: Geometry
) -> tuple[ChunkCopy, ...]:
    """The copies of states into the blocks that vLLM has for the token before each."""
    copies = []
    for piece in states:
        block_id = tables[piece.group][
            (piece.stop - 1) // geometry.groups[piece.group].block_tokens
        ]
        assert block_id, "vLLM gave no block for a state"
        copies.append(ChunkCopy(piece.chunk.dram.slot, 0, (block_id,)))
    return tuple(copies)


def plan_copies(
    used: Sequence[Piece],
    block_ids: Sequence[int],
    start: int,
    stop: int,
    geometry: Geometry,
    group: int = 0,
) -> tuple[tuple[ChunkCopy, ...], tuple[moves.MovedRun, ...]]:
    """The copies of what is loaded in its place, and the moves of what is not, of one group.

    Args:
        used: held chunks for the tokens [start, stop).
        block_ids: of the request, from its first block on.
    """
    block_tokens = geometry.groups[group].block_tokens
    sizes = {"block_tokens": block_tokens, "chunk_tokens": geometry.chunk_tokens}
    placed = [piece for piece in used if piece.first is None]
    copies = (
        plan_load(
            [(piece.chunk.dram.slot, piece.start, piece.stop) for piece in placed],
            block_ids,
            start // block_tokens * block_tokens,
            min(stop, placed[-1].stop),
            **sizes,
        )
        if placed
        else ()
    )
    moved = moves.plan_moves(
        [
            moves.StoredTokens(
                piece.chunk.dram.slot,
                piece.first,
                piece.start - piece.shift,
                piece.start,
                min(piece.stop, stop),
            )
            for piece in used
            if piece.first is not None
        ],
        block_ids,
        group=group,
        **sizes,
    )
    return copies, moved
