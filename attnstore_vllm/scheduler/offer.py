# SPDX-License-Identifier: Apache-2.0
"""Offers: the stored KV that a request gets when vLLM asks, and the part that vLLM takes.

vLLM asks as often as it has a place for the request and no blocks. Held chunks are let go when it
plans a step without having taken them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS, Offered, RequestState
from attnstore_vllm.scheduler.stats import (
    StepStats,
    count_offer,
    count_recomputation,
    count_taken,
    count_wanted,
)
from attnstore_vllm.scheduler.truncation import Truncation
from attnstore_vllm.scheduler.vllm_types import KVCacheManager
from attnstore_vllm.scheduler.waiting import Costs, Waits
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer import moves
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import plan_load


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
    ) -> None:
        self.kv_cache_manager: KVCacheManager | None = None
        """vLLM's, when it is known."""
        self._store = store
        self._geometry = geometry
        self._rank_token_bytes = geometry.rank_bytes // geometry.chunk_tokens
        self._costs = costs
        self._waits = waits
        self._plans = plans
        self._truncation = truncation
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
        held = self._store.hold_ready(pieces, state.sequence, stop)
        ready_stop = held[-1].stop if held else local
        cause = "lost"
        if len(held) < len(pieces):
            late = self._costs.why_not_wait(state, ready_stop, pieces[len(held) :])
            if late is None:
                self._store.release(piece.chunk for piece in held)
                self._waits.add(state, pieces)
                return None, False
            cause = late
        self._costs.end_wait(state, stats)
        self._waits.answered(state)
        num_tokens = ready_stop - local
        if held and not self._costs.copy_pays(local, ready_stop):
            cause, num_tokens = "slower", 0
        # A rest that is too short to be loaded is computed in any case.
        if state.counted.stored_stop - local - num_tokens >= MIN_LOAD_TOKENS:
            count_recomputation(stats, state, cause)
        state.computing.first = local
        count_offer(stats, state, self._store.tiers(held if num_tokens else ()))
        if num_tokens < MIN_LOAD_TOKENS:
            self._store.release(piece.chunk for piece in held)
            return 0, False
        self._truncation.offer(state, held, self.kv_cache_manager)
        # Moved KV is complete before the forward pass: it fills blocks token by token.
        layers_before = (
            0
            if state.moved is not None
            else self._costs.layers_before(
                num_tokens * self._rank_token_bytes,
                self._plans.loading_blocks() * self._geometry.block_tokens * self._rank_token_bytes,
                ready_stop,
                request.num_tokens,
            )
        )
        state.offered = Offered(held, local, layers_before)
        self._open.append(state)
        return num_tokens, layers_before > 0

    def take(
        self, state: RequestState, block_ids: Sequence[int], num_tokens: int, stats: StepStats
    ) -> bool:
        """vLLM takes so many tokens of the offer, for these blocks: their load is planned.

        Returns whether it is carried out before the request's first step.
        """
        offered, state.offered = state.offered, None
        assert offered is not None, "vLLM takes what was not offered"
        start, stop = offered.start, offered.start + num_tokens
        used = [piece for piece in offered.pieces if piece.start < stop]
        assert used and used[-1].stop >= stop, "vLLM takes more than was offered"
        copies, moved = plan_copies(used, block_ids, start, stop, self._geometry)
        self._store.release(piece.chunk for piece in offered.pieces[len(used) :])
        count_taken(stats, state, self._store.tiers(used), moves.num_tokens(moved))
        if not offered.layers_before:
            self._costs.load_tokens += num_tokens
        self._plans.load(
            state.request.request_id,
            [piece.chunk for piece in used],
            copies,
            moved,
            is_partial=stop % self._geometry.block_tokens != 0,
            layers_before=offered.layers_before,
        )
        state.waiting.deadline, state.computing.first = None, stop
        if state.request.lora_request is not None:
            size = self._geometry.block_tokens
            state.computing.unchecked = tuple(block_ids[start // size : -(-stop // size)])
        if start == 0:  # whole chunks of it are stored, since that is where they come from
            whole = stop // self._geometry.chunk_tokens
            state.computing.chunks_seen = max(state.computing.chunks_seen, whole)
        self._truncation.taken(state, used, stop)
        self._truncation.found(state, (p.chunk.name for p in used if p.first is None))
        return offered.layers_before > 0

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


def plan_copies(
    used: Sequence[Piece], block_ids: Sequence[int], start: int, stop: int, geometry: Geometry
) -> tuple[Any, Any]:
    """The copies of what is loaded in its place, and the moves of what is not.

    Args:
        used: held chunks for the tokens [start, stop).
        block_ids: of the request, from its first block on.
    """
    sizes = {"block_tokens": geometry.block_tokens, "chunk_tokens": geometry.chunk_tokens}
    placed = [piece for piece in used if piece.first is None]
    copies = (
        plan_load(
            [(piece.chunk.dram.slot, piece.start, piece.stop) for piece in placed],
            block_ids,
            start,
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
        **sizes,
    )
    return copies, moved
