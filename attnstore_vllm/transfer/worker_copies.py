# SPDX-License-Identifier: Apache-2.0
"""When a worker's loads and saves are begun, waited for and over. docs/overlap.md has the ordering
argument.

It is long since the order of loads and saves is argued for both together.

A load is *for this step*, and the forward pass waits for it layer by layer, or it is *ahead*: the
request waits in vLLM's own waiting state until enough layers are there that the others will come
in time (the paper's read buffer), is then told as received, and from then on every forward pass
waits for the layers that are missing, since any request may share its blocks by then.

With a write buffer (the paper's, in HBM) a save is *queued* until there are rows for it, *gathered*
into them in the model's order, so that its blocks are free from then on, and *leaving* for its slot
on the engine's own stream. Without one it goes from its blocks to its slot at once. What finished
requests leave behind is moved before the forward pass, so that vLLM can give their blocks away in
the very step that is told of it; what the step computes is moved with it or after.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from attnstore_vllm.errors import CopyError, DoesNotFitError
from attnstore_vllm.transfer.engine import CopyEngine, Pages, Rows, StreamEvent
from attnstore_vllm.transfer.plan import LoadPlan, TransferPlan, pages, tables_by_group

logger = logging.getLogger(__name__)

LAYERS_BEFORE_PASS = 4
"""Layers of a step's loads that are given to the device before its forward pass is launched. Its
hooks give the others, each so many layers before it is read: a DMA call costs the host 0.5 us a
run, which would hold up the launch of a pass that takes longer than the copies."""
LAYERS_A_SAVE = 8
"""Layers that are gathered and drained together: fewer and larger calls than one for each layer,
while one group still leaves beside the gather, or the computing, of the next."""


@dataclass(slots=True, eq=False)
class _Load:
    """Plans that are begun together, over together."""

    plans: list[LoadPlan]
    layers: list[StreamEvent] = field(default_factory=list)
    """One a layer, in the order in which they come; all of them once the step is over."""
    rest: Pages | None = None
    """Copies of each layer that is still to be given, after `mark`."""
    mark: StreamEvent | None = None
    first: StreamEvent | None = None
    """The end of copies of partly filled blocks: all their layers come before everything else."""
    gates: bool = False
    """The model may read its blocks: no layer is computed before it is there."""
    has_ended: bool = False
    """In a load ahead: its request is gone, and so will be its blocks once it was received."""
    is_told: bool = False
    """In a load ahead: it was reported as received, or as failed."""

    def is_there(self, num_layers: int) -> bool:
        """Whether so many layers are, and the partly filled blocks. Raises CopyError."""
        if self.first is not None and not self.first.done():
            return False
        return all(event.done() for event in self.layers[:num_layers])


class Loads:
    """All methods run on the worker's thread. A step calls begin_step, then begin (vLLM calls it
    before the forward pass if a load is for this step, else after it), wait_layer for each layer
    unless a graph replays without hooks, and end_step."""

    def __init__(self, engine: CopyEngine, num_layers: int) -> None:
        self._engine = engine
        self._all = range(num_layers)
        self._open: list[_Load] = []
        self._mark: StreamEvent | None = None
        """The point that loads ahead of this step come after."""
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._missing: set[int] = set()
        self._broken: set[str] = set()
        """Requests of which a part has failed, and the last part has not come."""
        self._finished: list[int] = []
        self._host_wait_s = 0.0

    def begin_step(self, ended: Collection[int], *, whole: bool) -> None:
        """Before the forward pass and before anything is written to blocks that changed hands.

        Args:
            ended: plans whose requests are gone or preempted.
            whole: the forward pass may be a graph that calls no hook.
        """
        self._poll(early=False)  # this forward pass would wait for what is not read in it
        for load in self._open:
            if any(plan.plan_id in ended for plan in load.plans):
                load.has_ended = True
                if load.is_told:  # its blocks may be others' already
                    self._engine.model_waits(load.layers[-1])
            if whole and load.gates:
                self._engine.model_waits(load.layers[-1])

    def fail(self, request_id: str) -> None:
        """A pass of our own has not computed what lies between this request's documents."""
        self._broken.add(request_id)

    def has_failed(self, request_id: str) -> bool:
        """Whether a copy or a pass of this request has failed, of which vLLM has not heard."""
        return request_id in self._broken

    def mark(self) -> None:
        """Loads ahead of this step come after what the model has been given by now, and not after
        the forward pass: vLLM begins them when that was launched."""
        self._mark = self._engine.mark()

    def begin(self, plans: Sequence[LoadPlan], *, whole: bool) -> None:
        """Begin to fill blocks from slots."""
        began = time.perf_counter()
        mark, self._mark = self._mark, None
        now = [plan for plan in plans if not plan.layers_before]
        # Moved KV fills single tokens of blocks that others of them, and new ones, are written to.
        whole = whole or any(plan.moves for plan in now)
        if now:
            load = _Load(now, gates=True)
            self._open.append(load)
            self._submit(load, self._engine.mark(), together=whole or not self._engine.overlaps)
            if len(now) < len(plans):  # loads ahead come behind it
                self._give(load, len(self._all))
            if whole:
                self._engine.model_waits(load.layers[-1])
        for plan in plans:
            if plan.layers_before and not (
                plan.num_blocks or plan.moves
            ):  # no more comes, and all is over
                if plan.has_failed:
                    self._broken.add(plan.request_id)
                self._report(plan)
                self._finished.append(plan.plan_id)
            elif plan.layers_before:
                load = _Load([plan])
                self._open.append(load)
                mark = mark or self._engine.mark()
                together = bool(plan.moves) or not self._engine.overlaps
                self._submit(load, mark, together=together)
        if plans and not self._engine.overlaps:
            self._host_wait_s += time.perf_counter() - began

    def wait_layer(self, layer: int) -> None:
        """The model reads this layer next."""
        for load in self._open:
            if load.gates:
                self._give(load, layer + 1 + LAYERS_BEFORE_PASS)
                self._engine.model_waits(load.layers[layer])

    def end_step(self) -> None:
        """After the forward pass: what it did not wait for comes before what is next."""
        for load in self._open:
            self._give(load, len(self._all))
            if load.gates and not load.plans[0].layers_before:
                self._engine.model_waits(load.layers[-1])
        self._poll(early=True)

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ahead are received, and failed, since the last call: each once."""
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def take_missing(self) -> set[int]:
        """Blocks of requests that are received, which no part of their loads has filled. To be
        taken with take_received()."""
        missing, self._missing = self._missing, set()
        return missing

    def take_finished(self) -> list[int]:
        """Plans whose slots are not read any more, each once."""
        finished, self._finished = self._finished, []
        return finished

    def take_times(self) -> tuple[float, list[tuple[int, float]]]:
        """Since the last call: seconds for which the model has waited for loads; and what
        CopyEngine.measured() says."""
        waited, self._host_wait_s = self._host_wait_s, 0.0
        return waited + self._engine.waited_s(), self._engine.measured()

    def complete(self) -> None:
        """Return when all that was begun has written to its blocks. The next step tells of it."""
        for load in self._open:
            _wait_for_all(self._engine, [*filter(None, [load.first]), *load.layers])

    def close(self) -> None:
        """Complete what is in flight."""
        for load in self._open:
            self._give(load, len(self._all))
            try:
                self._engine.wait(load.layers[-1])
            except CopyError as error:
                logger.error("a load failed while the worker stopped: %s", error)
        self._open.clear()

    def _submit(self, load: _Load, mark: StreamEvent, *, together: bool) -> None:
        table = pages(copy for plan in load.plans for copy in plan.copies)
        if together:
            moves = [run for plan in load.plans for run in plan.moves]
            begun = [self._engine.load(table, self._all, mark)] if len(table) else []
            # Behind the copies: they fill whole blocks.
            for group, some in tables_by_group(moves).items() if moves else ():
                begun.append(self._engine.move(some, group=group))
            *before, last = begun
            for event in before:
                self._engine.model_waits(event)  # it may have failed where the last did not
            load.first = before[-1] if before else None
            load.layers = [last] * len(self._all)
            return
        # A block that receives new tokens is complete in all layers before the forward pass: vLLM
        # may write them before it waits for the layer.
        partial, rest = _split(table, load.plans)
        if len(partial):
            load.first = self._engine.load(partial, self._all, mark)
        if len(rest):
            load.rest, load.mark = rest, mark
            self._give(load, LAYERS_BEFORE_PASS if load.gates else len(self._all))
        else:
            assert load.first is not None
            load.layers = [load.first] * len(self._all)
        if load.first is not None and load.gates:
            self._engine.model_waits(load.first)

    def _give(self, load: _Load, end: int) -> None:
        """Begin its layers before this one."""
        if load.rest is None:
            return
        for layer in self._all[len(load.layers) : end]:
            load.layers.append(self._engine.load(load.rest, range(layer, layer + 1), load.mark))
        if len(load.layers) == len(self._all):
            load.rest = load.mark = None

    def _poll(self, *, early: bool) -> None:
        """Args: early: report also loads of which the rest will come in time."""
        still: list[_Load] = []
        for load in self._open:
            try:
                is_over = load.is_there(len(self._all))
                if load.plans[0].layers_before and not load.is_told:
                    self._tell(load, is_over=is_over, early=early)
            except CopyError as error:
                self._fail(load, error)
                is_over = True
            if is_over:
                self._finished += [plan.plan_id for plan in load.plans]
            else:
                still.append(load)
        self._open = still

    def _tell(self, load: _Load, *, is_over: bool, early: bool) -> None:
        """Report a load ahead as received, if it is time.

        One whose request is gone is reported when it is over: its blocks are free then.
        """
        (plan,) = load.plans
        if plan.has_more:
            return
        if is_over or (early and not load.has_ended and load.is_there(plan.layers_before)):
            load.is_told = load.gates = True
            self._report(plan)

    def _report(self, plan: LoadPlan) -> None:
        """With this plan its request is received; or failed, if a part before it has."""
        is_broken = plan.request_id in self._broken
        self._broken.discard(plan.request_id)
        (self._failed if is_broken else self._received).add(plan.request_id)
        self._missing.update(plan.missing)

    def _fail(self, load: _Load, error: CopyError) -> None:
        """None has read the blocks of a load ahead that was not told: vLLM computes them. Of any
        other the forward pass may have, so the engine has to stop."""
        if load.gates or not load.plans[0].layers_before:
            raise error
        # What was begun behind the failed piece may still write.
        _wait_for_all(self._engine, [load.first or load.layers[0], *load.layers])
        (plan,) = load.plans
        load.is_told = True
        self._broken.add(plan.request_id)
        if not plan.has_more:  # else with the last part: other ranks tell of it then too
            self._report(plan)
        logger.error("the load of request %s failed and is computed: %s", plan.request_id, error)


def _wait_for_all(engine: CopyEngine, events: Iterable[StreamEvent]) -> None:
    """Whether they fail or not: who asks for the event is told."""
    for event in events:
        with suppress(CopyError):
            engine.wait(event)


def _split(table: Pages, plans: Sequence[LoadPlan]) -> tuple[Pages, Pages]:
    """The pages that must be there in all layers first, and the others."""
    is_first = np.zeros(len(table), np.bool_)
    end = 0
    for plan in plans:
        end += plan.num_blocks
        is_first[end - plan.num_partial : end] = True
    return table[is_first], table[~is_first]


@dataclass(slots=True, eq=False)
class _Batch:
    """Saves that are gathered and drained together."""

    plans: list[TransferPlan]
    pages: Pages
    rows: Rows
    next_layer: int = 0
    """Those before it are gathered."""
    computed: int = 0
    """Those before it are computed."""
    events: list[StreamEvent] = field(default_factory=list)
    """Ends of the drains that are not over, in their order."""
    has_failed: bool = False
    left_out: set[int] = field(default_factory=set)
    """Slots whose pages did not fit in their cells."""


class Saves:
    """All methods run on the worker's thread. A step calls begin_step, layer_computed for each
    layer if its hooks run, and end_step.

    Args:
        queue_blocks: how many blocks may wait for rows; a save beyond that is given up.
        layers_a_save: how many layers are gathered and drained together; None: LAYERS_A_SAVE.
    """

    def __init__(
        self,
        engine: CopyEngine,
        num_layers: int,
        queue_blocks: int,
        layers_a_save: int | None = None,
    ) -> None:
        self._engine = engine
        self._all = range(num_layers)
        self._queue_blocks = queue_blocks
        self._layers_a_save = layers_a_save or LAYERS_A_SAVE
        self._queued: deque[TransferPlan] = deque()
        self._queued_blocks = 0
        self._this_step: _Batch | None = None
        self._leaving: list[_Batch] = []
        self._free_rows = list(range(engine.num_rows))
        self._keeping: set[str] = set()
        """Finished requests of which something is queued: vLLM keeps their blocks."""
        self._freed: set[str] = set()
        self._finished: list[int] = []
        self._given_up: list[int] = []
        self._has_warned = False

    def begin_step(
        self,
        before: Sequence[TransferPlan],
        after: Sequence[TransferPlan],
        preempted: Collection[str],
        *,
        by_layer: bool,
    ) -> None:
        """Before the forward pass, and before anything is written to blocks that changed hands.

        Args:
            before: of blocks that may have changed hands; the scheduler side has made sure that
                there are rows for them (scheduler/open_plans.py).
            after: of blocks that are computed when the step ends.
            preempted: requests whose blocks are others' from now on.
            by_layer: layer_computed() will be called for each layer, once.
        """
        if preempted:
            self._give_up([plan for plan in self._queued if plan.request_id in preempted])
        if self._leaving:
            self._poll()
        if before:
            self._enqueue(before)
        if self._queued:
            self._move_queued()
        assert not before or not self._queued, "blocks were given away before there were rows"
        if after:
            self._enqueue(after)
        if by_layer and self._engine.num_rows:
            self._this_step = self._take_batch()

    def layer_computed(self, layer: int) -> None:
        """The forward pass has written this layer of all blocks of this step's saves."""
        batch = self._this_step
        if batch is None or layer != batch.computed:
            return
        batch.computed += 1
        if batch.computed - batch.next_layer == self._layers_a_save or batch.computed == len(
            self._all
        ):
            self._move(batch, range(batch.next_layer, batch.computed))

    def end_step(self, finished: Sequence[str]) -> None:
        """After the forward pass.

        Args:
            finished: requests that have ended, whose blocks vLLM keeps until take_freed().
        """
        batch, self._this_step = self._this_step, None
        if batch is not None:
            self._move_rest(batch)
        if self._leaving:
            self._poll()
        if self._queued:
            self._move_queued()
            self._give_up([plan for plan in self._queued if plan.is_fleeting])
        while self._queued_blocks > self._queue_blocks:
            self._give_up([self._queued[-1]])
        self._keeping.update(finished)
        waiting = {plan.request_id for plan in self._queued}
        self._freed |= self._keeping - waiting
        self._keeping &= waiting

    def take_freed(self) -> set[str]:
        """Finished requests whose blocks nothing reads any more, each once."""
        freed, self._freed = self._freed, set()
        return freed

    def take_finished(self) -> tuple[list[int], list[int]]:
        """Plans that are over since the last call, each once: complete ones, and given up ones."""
        finished, self._finished = self._finished, []
        given_up, self._given_up = self._given_up, []
        return finished, given_up

    def complete(self) -> None:
        """Return when all that was begun has read its blocks. The next step tells of it."""
        assert self._this_step is None, "a forward pass runs"
        for batch in self._leaving:
            _wait_for_all(self._engine, batch.events)

    def close(self) -> None:
        """Complete what has left its blocks."""
        for event in [event for batch in self._leaving for event in batch.events]:
            try:
                self._engine.wait(event)
            except CopyError as error:
                logger.error("a save failed while the worker stopped: %s", error)
        self._leaving.clear()

    def _enqueue(self, plans: Sequence[TransferPlan]) -> None:
        self._queued.extend(plans)
        self._queued_blocks += sum(plan.num_blocks for plan in plans)

    def _take_batch(self) -> _Batch | None:
        """The next of the queue for which there are rows."""
        plans: list[TransferPlan] = []
        num_blocks = 0
        while self._queued and num_blocks + self._queued[0].num_blocks <= len(self._free_rows):
            plan = self._queued.popleft()
            num_blocks += plan.num_blocks
            plans.append(plan)
        if not plans:
            return None
        self._queued_blocks -= num_blocks
        rows = np.array(self._free_rows[-num_blocks:], np.int64)
        del self._free_rows[-num_blocks:]
        return _Batch(plans, pages(copy for plan in plans for copy in plan.copies), rows)

    def _move_queued(self) -> None:
        if self._engine.num_rows == 0:
            self._save_directly()
            return
        batch = self._take_batch()
        if batch is not None:
            self._move_rest(batch)

    def _move_rest(self, batch: _Batch) -> None:
        """All layers that are left, which are computed."""
        for first in range(batch.next_layer, len(self._all), self._layers_a_save):
            self._move(batch, self._all[first : first + self._layers_a_save])

    def _move(self, batch: _Batch, layers: range) -> None:
        """Gather these layers, and begin to drain them."""
        self._engine.gather(batch.pages, batch.rows, layers)
        batch.events.append(self._engine.drain(batch.pages, batch.rows, layers))
        batch.next_layer = layers.stop
        if batch.next_layer == len(self._all):
            self._leaving.append(batch)

    def _save_directly(self) -> None:
        plans, self._queued, self._queued_blocks = list(self._queued), deque(), 0
        if plans:
            table = pages(copy for plan in plans for copy in plan.copies)
            left_out: Collection[int] = ()
            try:
                self._engine.wait(self._engine.save(table, self._all))
            except DoesNotFitError as error:
                left_out = error.slots
                self._warn_of_misfits()
            for plan in plans:
                self._end(plan, left_out)

    def _end(
        self, plan: TransferPlan, left_out: Collection[int], *, has_failed: bool = False
    ) -> None:
        is_lost = has_failed or any(copy.slot in left_out for copy in plan.copies)
        (self._given_up if is_lost else self._finished).append(plan.plan_id)

    def _warn_of_misfits(self) -> None:
        """Once: a model whose KV does not fit at all would say it in each step."""
        if not self._has_warned:
            logger.warning(
                "dram.codec: KV of some chunks does not fit in the room that DRAM has for encoded "
                "KV; such chunks are not stored (event unsaved). Set codec: none if they are many"
            )
        self._has_warned = True

    def _poll(self) -> None:
        """Rows are free when all that was begun with them is over, whether it failed or not."""
        still: list[_Batch] = []
        for batch in self._leaving:
            while batch.events:
                try:
                    if not batch.events[0].done():
                        break
                except DoesNotFitError as error:
                    batch.left_out |= error.slots
                    self._warn_of_misfits()
                except CopyError as error:
                    if not batch.has_failed:  # of a batch once, not a layer
                        logger.error("saves are dropped, since a copy failed: %s", error)
                    batch.has_failed = True
                del batch.events[0]
            if batch.events:
                still.append(batch)
                continue
            for plan in batch.plans:
                self._end(plan, batch.left_out, has_failed=batch.has_failed)
            # In their order: rows that follow each other leave in one copy.
            self._free_rows = sorted(self._free_rows + batch.rows.tolist())
        self._leaving = still

    def _give_up(self, plans: Sequence[TransferPlan]) -> None:
        for plan in plans:
            self._queued.remove(plan)
            self._queued_blocks -= plan.num_blocks
            self._given_up.append(plan.plan_id)
