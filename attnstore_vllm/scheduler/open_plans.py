# SPDX-License-Identifier: Apache-2.0
"""The copies that a step is to make, and the plans that workers still work at.

It is long since plans of loads and of saves share their numbers and their reports.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.scheduler.adapters import Adapters
from attnstore_vllm.scheduler.messages import StepPlan, StepReport
from attnstore_vllm.scheduler.vllm_types import LoRARequest, Tables
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.nvme.spread_io import SpreadIo
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import (
    ChunkCopy,
    LoadPlan,
    MovedRun,
    StoredTokens,
    TransferPlan,
    plan_load,
    plan_moves,
)
from attnstore_vllm.types import Clock, Flow

Planned = Sequence[tuple[Chunk, tuple[ChunkCopy, ...]]]
"""Chunks that are saved, and what fills each."""

KEPT_S = 0.1
"""How long requests wait for blocks that saves still read before vLLM preempts a request."""


@dataclass(slots=True)
class _Open:
    """A plan that not all ranks have completed."""

    flow: Flow
    chunks: list[Chunk]
    num_blocks: int
    request_id: str
    ranks_left: int
    is_given_up: bool = False
    lora: LoRARequest | None = None
    adapter: bytes | None = None
    """In a save: the adapter that its KV is said to be computed with."""
    is_void: bool = False
    """In a save: its request has lost the blocks, and may have others by now."""
    missing: tuple[int, ...] = ()
    """In a load: see LoadPlan."""


class OpenPlans:
    """All methods run on the scheduler's thread.

    Args:
        num_ranks: a plan is complete when so many have said so.
        rows: blocks that each worker's write buffer has room for; None if saves are over when they
            are begun.
        gives_blocks_away: blocks whose saves are sure of their rows are free at once. Not where
            others write to blocks in an order of their own.
    """

    def __init__(
        self,
        store: Store,
        num_ranks: int,
        rows: int | None,
        *,
        gives_blocks_away: bool,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._store = store
        self._num_ranks = num_ranks
        self._rows = rows
        self._gives_blocks_away = gives_blocks_away
        self._ids = itertools.count(1)
        self._plan = StepPlan()
        self._open: dict[int, _Open] = {}
        self._loading: dict[str, int] = {}
        """Requests whose last load is open, and its plan."""
        self._new_saves: dict[str, list[TransferPlan]] = {}
        """By request, of the step that is being planned."""
        self._saving = Counter[str]()
        """Saves that may still read blocks of a request, by request."""
        self._saving_blocks = self._loading_blocks = 0
        self._kept: dict[str, int] = {}
        """Finished requests whose blocks vLLM keeps, and how many ranks have not freed them."""
        self._kept_since = 0.0
        first = store.thread.tiers[0]
        self.nodes = first if isinstance(first, SpreadIo) else None
        """NVMe of several nodes: its orders and results travel with plans and reports."""

    # ---- plans -------------------------------------------------------------------------

    def load(
        self,
        request_id: str,
        chunks: list[Chunk],
        copies: tuple[ChunkCopy, ...],
        moves: tuple[MovedRun, ...] = (),
        *,
        num_partial: int,
        layers_before: int,
        has_more: bool = False,
        missing: tuple[int, ...] = (),
        has_failed: bool = False,
    ) -> int:
        """The held `chunks` are loaded; released when all ranks have done so. Returns the plan's
        number.

        Args:
            has_more, missing, has_failed: see LoadPlan.
        """
        self.load_is_void(request_id)  # a former one, of blocks that it has lost
        plan = LoadPlan(
            next(self._ids),
            request_id,
            copies,
            num_partial,
            layers_before,
            moves,
            has_more=has_more,
            missing=missing,
            has_failed=has_failed,
        )
        self._plan.loads.append(plan)
        found = self._add(plan, Flow.LOAD, chunks)
        found.missing = missing
        self._loading_blocks += found.num_blocks
        self._loading[request_id] = plan.plan_id
        return plan.plan_id

    def save(
        self,
        request_id: str,
        planned: Planned,
        lora: LoRARequest | None = None,
        adapter: bytes | None = None,
        *,
        is_fleeting: bool = False,
    ) -> None:
        """The chunks, which the store has begun to save, are filled when this step ends: each by a
        plan of its own.

        Args:
            lora, adapter: of its request, and what the adapter is taken for.
            is_fleeting: see TransferPlan.
        """
        if not planned:
            return
        new = self._new_saves.setdefault(request_id, [])
        for chunk, copies in planned:
            plan = TransferPlan(next(self._ids), request_id, copies, is_fleeting=is_fleeting)
            new.append(plan)
            found = self._add(plan, Flow.SAVE, [chunk])
            found.lora, found.adapter = lora, adapter
            self._saving_blocks += found.num_blocks
        self._saving[request_id] += len(planned)

    def _add(self, plan: TransferPlan, flow: Flow, chunks: list[Chunk]) -> _Open:
        found = _Open(flow, chunks, plan.num_blocks, plan.request_id, self._num_ranks)
        self._open[plan.plan_id] = found
        return found

    def take_plan(self, number: int) -> StepPlan:
        """The plan for the workers in the step of this number."""
        plan, self._plan = self._plan, StepPlan()
        plan.number = number
        plan.saves += chain.from_iterable(self._new_saves.values())
        self._new_saves.clear()
        if self.nodes is not None:
            plan.orders = self.nodes.take_orders(number)
        return plan

    # ---- requests ----------------------------------------------------------------------

    def finished(self, request_id: str) -> bool:
        """A request has ended; what it leaves behind is planned. Returns whether vLLM is to keep
        its blocks until the workers have said that they are free."""
        self.load_is_void(request_id)
        if self.has_rows(0):
            self.comes_first(request_id)
            return False
        if request_id not in self._saving:
            return False
        self._plan.finished_saving.append(request_id)
        if not self._kept:
            self._kept_since = self._clock()
        self._kept[request_id] = self._num_ranks
        return True

    def has_rows(self, num_blocks: int) -> bool:
        """Whether saves of so many more blocks, which may be others' from this step on, are read
        before it begins."""
        # All that is open has its row when the next step begins, so nothing waits for one.
        has_rows = self._rows is None or self._saving_blocks + num_blocks <= self._rows
        return self._gives_blocks_away and has_rows

    def num_new(self, request_id: str) -> int:
        """Saves of the request in the step that is being planned."""
        return len(self._new_saves.get(request_id, ()))

    def comes_first(self, request_id: str, since: int = 0) -> None:
        """Read what is planned of this request before the step begins. Only with has_rows().

        Args:
            since: num_new() of before: not those saves, which may be of another of its name.
        """
        new = self._new_saves.get(request_id, [])
        self._plan.saves_before += new[since:]
        del new[since:]

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Their blocks are others' in the step that is being planned."""
        lost = set(request_ids)
        saving = [
            o
            for o in self._open.values()
            if o.request_id in lost and o.flow is Flow.SAVE and not o.is_void
        ]
        self._plan.preempted += {o.request_id for o in saving}
        for found in saving:
            self._ends_saving(found)
            found.is_void = True
        # After a reset vLLM resumes requests in the step that tells of their preemption.
        resumed = {plan.request_id for plan in self._plan.loads}
        for request_id in lost - resumed:
            self.load_is_void(request_id)

    def load_is_void(self, request_id: str) -> bool:
        """The blocks that the request's load fills may be others' from the next step on.

        Returns whether a load of it was open.
        """
        plan_id = self._loading.pop(request_id, None)
        if plan_id is not None:
            self._plan.ended_loads.append(plan_id)
        return plan_id is not None

    def _ends_saving(self, found: _Open) -> None:
        """It does not read its request's blocks any more."""
        if not found.is_void:
            self._saving[found.request_id] -= 1
            if not self._saving[found.request_id]:
                del self._saving[found.request_id]

    # ---- reports -----------------------------------------------------------------------

    def on_report(self, report: StepReport) -> int:
        """Ranks have completed plans. Returns how many saves were given up."""
        saved: list[Chunk] = []
        num_given_up = 0
        if self.nodes is not None:
            self.nodes.on_results(report.results, report.number)
        for plan_id, num_ranks in report.ranks.items():
            found = self._open[plan_id]
            found.ranks_left -= num_ranks
            found.is_given_up |= plan_id in report.given_up
            assert found.ranks_left >= 0
            if found.ranks_left:
                continue
            del self._open[plan_id]
            if found.flow is Flow.LOAD:
                self._loading_blocks -= found.num_blocks
                if self._loading.get(found.request_id) == plan_id:
                    del self._loading[found.request_id]
                self._store.loaded(found.chunks)
                continue
            self._ends_saving(found)
            self._saving_blocks -= found.num_blocks
            if found.is_given_up:
                num_given_up += 1
                self._store.drop(found.chunks)
            saved += found.chunks
        if saved:
            self._store.finish_saves(saved)
        for request_id, num_ranks in report.freed.items():
            self._kept[request_id] -= num_ranks
            if not self._kept[request_id]:
                del self._kept[request_id]
        return num_given_up

    def saving(self) -> list[Chunk]:
        """The chunks that are being saved."""
        return [c for o in self._open.values() if o.flow is Flow.SAVE for c in o.chunks]

    def saving_of_others(
        self, told: Collection[int], mixed: Collection[str], adapters: Adapters
    ) -> list[Chunk]:
        """The chunks that are being saved under an adapter that is another one.

        Args:
            told: ids of adapters of which a report has come.
            mixed: names that have stood for two.
        """
        return [
            chunk
            for o in self._open.values()
            if o.flow is Flow.SAVE and o.lora is not None
            if (o.lora.lora_int_id in told and adapters.identity(o.lora) != o.adapter)
            or o.lora.lora_name in mixed
            for chunk in o.chunks
        ]

    def keeps_blocks(self) -> bool:
        """Whether vLLM keeps blocks of finished requests that will soon come free by themselves.

        Not for ever: as long as this says so, vLLM preempts no request, and none may get on.
        """
        return bool(self._kept) and self._clock() < self._kept_since + KEPT_S

    def any_open(self) -> bool:
        """Whether workers still have to copy or report: the engine must go on stepping."""
        is_busy = self.nodes is not None and self.nodes.is_busy()
        return is_busy or bool(self._open) or bool(self._kept)

    def is_open(self, plan_id: int) -> bool:
        """Whether not all ranks have completed the plan."""
        return plan_id in self._open

    def are_missing(self, block_ids: Collection[int]) -> bool:
        """Whether all of these are missing in loads that are open: no wrong KV is in them."""
        missing = set(chain.from_iterable(o.missing for o in self._open.values()))
        return missing.issuperset(block_ids)

    def is_loading(self, request_id: str) -> bool:
        """Whether a load of the request is open, of blocks that it still has."""
        return request_id in self._loading

    def loading_blocks(self) -> int:
        """Blocks of the loads that are open, which may be over or not yet begun."""
        return self._loading_blocks


def plan_groups(
    pieces: Sequence[Piece], tables: Tables, stop: int, geometry: Geometry
) -> dict[int, tuple[tuple[ChunkCopy, ...], tuple[MovedRun, ...]]]:
    """The copies and the moves of each group that has pieces.

    Args:
        pieces: held, group by group, each for the tokens before `stop` that it needs.
    """
    planned = {}
    for group, found in groupby(pieces, attrgetter("group")):
        some = list(found)
        block_tokens = geometry.groups[group].block_tokens
        first = some[0].start
        if group > 0 or geometry.has_window_alone:
            block_ids = tables[group][first // block_tokens : -(-stop // block_tokens)]
            assert all(block_ids), "vLLM gave no block for what is loaded"
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
) -> tuple[tuple[ChunkCopy, ...], tuple[MovedRun, ...]]:
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
            places=geometry.room(group),
            **sizes,
        )
        if placed
        else ()
    )
    if len(placed) == len(used):
        return copies, ()
    moved = plan_moves(
        [
            StoredTokens(
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
