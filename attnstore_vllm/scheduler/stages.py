# SPDX-License-Identifier: Apache-2.0
"""Loads in parts: of stored KV that is longer than DRAM.

    vLLM gives blocks for all of it, and waits
        part 1 is in DRAM -> HBM, let go     part 2 comes up meanwhile -> HBM ...     received

Each part is held while workers copy it, as any load is, and the next is planned when all ranks have
said that it is over. vLLM hears that the request is received with the last part. Where a chunk does
not come (it was evicted, it is damaged or on trial, the disk is late), the blocks from it on are
told to be missing with the last part, and vLLM computes them.

One load at a time is in parts: two would wait for each other's room. The chunks that it is to load
next, half of DRAM at most, are wanted before all that the queue wants: DRAM takes nothing for other
requests before them, and NVMe keeps them as it keeps what a request waits for.

Only for requests of which KV of all tokens in their places is loaded: not for models with windows
or states, nor with drafts, adapters, sessions, moved KV, a second connector, or a
vLLM that fails a request whose load has failed (kv_load_failure_policy).
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.scheduler.audits import is_on_trial
from attnstore_vllm.scheduler.costs import Costs
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.open_plans import OpenPlans, plan_copies
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import ChunkCopy, last_blocks_last
from attnstore_vllm.types import Cause, Clock

FIRST = 2
"""A load in parts begins when one slot in so many has what it begins with ..."""
PARTS = 16
"""... and goes on with parts of one slot in so many: little enough to be there in time."""


@dataclass(slots=True)
class _Parts:
    state: RequestState
    plan_id: int
    """The plan of the part that was planned last."""
    rest: list[Piece]
    """Pieces that no part has had."""
    block_ids: Sequence[int]
    """The request's, from its first block on."""
    stop: int
    """Tokens that vLLM has taken."""
    since: float | None = None
    """When the next part was begun to be waited for; None: one is being copied."""
    has_ended: bool = False
    """The request was aborted: nothing more is written to its blocks."""


class Stages:
    """All methods run on the scheduler's thread.

    Args:
        is_allowed: vLLM computes what a part does not bring; and no other connector has requests or
            blocks of its own.
        deadline_s: how long a part may take to come up.
        pays: how many of the pieces that were found are worth waiting for.
        count: counts a load of these pieces, from the first token to the second.
    """

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        plans: OpenPlans,
        deadline_s: float,
        pays: Callable[[RequestState, Sequence[Piece]], int],
        count: Callable[[StepStats, Sequence[Piece], int, int], object],
        *,
        is_allowed: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        is_plain = len(geometry.groups) == 1 and not (store.needs or store.ahead)
        store.loads_in_parts = is_plain and is_allowed
        self._store = store
        self._geometry = geometry
        self._plans = plans
        self._deadline_s = deadline_s
        self._pays, self._count = pays, count
        self._clock = clock
        self._name = f"load in parts {secrets.token_hex(16)}"
        """Stands in the queue of what is wanted. No client can guess it."""
        self._part = max(1, store.num_slots // PARTS)
        # All that is wanted of it must find room beside the part that is being copied.
        self._window = max(1, store.num_slots - store.num_slots // FIRST)
        self.current: _Parts | None = None
        self.offered: RequestState | None = None
        """A request that is offered such a load."""

    @property
    def is_open(self) -> bool:
        """Whether a load has parts that are not planned yet."""
        return self.current is not None

    def is_loading(self, request_id: str) -> bool:
        """Whether parts of this request's load are not planned yet."""
        return self.current is not None and self.current.state.request.request_id == request_id

    def blocks_left(self, request_id: str) -> int:
        """Blocks of this request that no planned part fills."""
        if self.current is None or not self.is_loading(request_id):
            return 0
        return -(-(self.current.stop - self.current.rest[0].start) // self._geometry.block_tokens)

    @property
    def names(self) -> list[str]:
        """Names in the queue of what is wanted that are no requests. For tests."""
        return [self._name] if self._name in self._store.residency.look_ahead else []

    def is_free(self, state: RequestState) -> bool:
        """Whether this request may have its KV in parts now."""
        is_plain = not (state.finds_moved or state.request.resumable or state.request.lora_request)
        is_first = self.current is None and self.offered in (None, state)
        return self._store.loads_in_parts and is_first and is_plain and not state.is_at_once

    def split(self, state: RequestState, pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
        """The pieces to be in DRAM before a load begins, and those that come in parts. Cost: a
        look at each piece, where there are more than DRAM has room for."""
        most = self._store.num_slots
        if len(pieces) <= most:
            return pieces, []
        number = 0
        if self.is_free(state):
            # What was found of the last one's tokens may be wrong, and vLLM is told a number now.
            number = min(self._pays(state, pieces), len(pieces) - (not pieces[-1].exact))
        first = max(1, most // FIRST) if number > most else most
        return pieces[:first], pieces[first:number]

    def begin(
        self,
        state: RequestState,
        plan_id: int,
        rest: list[Piece],
        block_ids: Sequence[int],
        stop: int,
    ) -> None:
        """vLLM has taken what was offered, up to token `stop`, and the first part is planned."""
        assert self.current is None, "two loads in parts would wait for each other's room"
        self.current = _Parts(state, plan_id, rest, block_ids, stop)
        self._want(self.current)

    def ended(self, request_id: str) -> None:
        """The request has ended. If its load has parts left, vLLM keeps its blocks till we say so:
        with a last part that is empty, once what is being copied is."""
        if self.current is not None and self.is_loading(request_id):
            self.current.has_ended = True

    def go_on(self, stats: StepStats) -> Sequence[Piece]:
        """A step is planned. Returns what is waited for. Cost: a look at the pieces of a part; at
        all that are left, once a part."""
        load = self.current
        if load is None or self._plans.is_open(load.plan_id):
            return ()
        if load.has_ended:
            self._plan(load, [], (), stats)
            return ()
        now = self._clock()
        if load.since is None:
            load.since = now
            self._want(load)
        part = load.rest[: self._part]
        held = self._held(load.state, part, load.stop)
        if len(held) < len(part):
            is_late = now >= load.since + self._deadline_s
            if not is_late and self._comes(load.state, part[len(held)]):
                self._store.release(piece.chunk for piece in held)
                return part
            self._give_up(load, len(held), Cause.DEADLINE if is_late else Cause.LOST, stats)
            return ()
        del load.rest[: len(part)]
        self._plan(load, held, (), stats)
        return ()

    def _want(self, load: _Parts) -> None:
        near = load.rest[: self._window]
        self._store.want_part(self._name, [p.chunk for p in near if not p.chunk.dropped])

    def _held(self, state: RequestState, part: Sequence[Piece], stop: int) -> list[Piece]:
        """Hold the leading pieces that are READY, up to the first that is on trial: its bytes have
        come up since the hit was let pass."""
        held = self._store.hold_ready(part, state.sequence, stop)
        believed = takewhile(lambda piece: not is_on_trial(self._store, state, [piece]), held)
        number = len(list(believed))
        self._store.release(piece.chunk for piece in held[number:])
        return held[:number]

    def _comes(self, state: RequestState, piece: Piece) -> bool:
        """Whether it is on its way, or will be, and may be loaded then."""
        chunk = piece.chunk
        is_queued = self._store.has_missing(self._name)  # first: it may be taken from the queue now
        may_come = not chunk.dropped and (is_queued or chunk.dram.state is not State.ABSENT)
        return may_come and not is_on_trial(self._store, state, [piece])

    def _give_up(self, load: _Parts, num_held: int, cause: Cause, stats: StepStats) -> None:
        """Only so many of the next pieces have come: vLLM computes what is behind them."""
        held, lost = load.rest[:num_held], load.rest[num_held:]
        start, state = lost[0].start, load.state
        load.rest = []
        stats.add("recomputations", cause, 1)
        size = self._geometry.block_tokens
        state.counted.why_computed = cause
        not_loaded = self._store.tiers(lost, start)
        state.counted.sources = dict(Counter(state.counted.sources) - not_loaded)
        computing = state.computing
        computing.first = start
        computing.go_on_from(min(computing.chunks_seen, start // state.chunk_tokens))
        missing = tuple(load.block_ids[start // size : -(-load.stop // size)])
        self._plan(load, held, missing, stats)

    def _plan(
        self, load: _Parts, held: Sequence[Piece], missing: tuple[int, ...], stats: StepStats
    ) -> None:
        """Load these next; with what is missing, or with nothing left, the request is received."""
        size, has_more = self._geometry.block_tokens, bool(load.rest) and not load.has_ended
        copies: tuple[ChunkCopy, ...] = ()
        num_partial = 0
        if held:
            start, stop = held[0].start, min(load.stop, held[-1].stop)
            made, _ = plan_copies(held, load.block_ids, start, stop, self._geometry)
            copies, num_partial = last_blocks_last([(made, stop % size != 0)])
            self._count(stats, held, start, stop)
        load.since = None
        load.plan_id = self._plans.load(
            load.state.request.request_id,
            [piece.chunk for piece in held],
            copies,
            num_partial=num_partial,
            layers_before=self._geometry.most_layers,
            has_more=has_more,
            missing=missing,
        )
        if not has_more:
            self.current = None
            self._store.want_part(self._name, ())


def stages_of(
    store: Store,
    geometry: Geometry,
    plans: OpenPlans,
    costs: Costs,
    is_allowed: bool,
    clock: Clock,
) -> Stages:
    pays, count = costs.num_that_pay, costs.count_loaded
    deadline_s = costs.load_deadline_s
    return Stages(
        store, geometry, plans, deadline_s, pays, count, is_allowed=is_allowed, clock=clock
    )
