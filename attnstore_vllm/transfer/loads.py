# SPDX-License-Identifier: Apache-2.0
"""When a worker's loads are begun, waited for and over. docs/overlap.md has the ordering argument.

A load is *for this step*, and the forward pass waits for it layer by layer, or it is *ahead*: the
request waits in vLLM's own waiting state until enough layers are there that the others will come
in time (the paper's read buffer), is then told as received, and from then on every forward pass
waits for the layers that are missing, since any request may share its blocks by then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from attnstore_vllm.errors import CopyError
from attnstore_vllm.transfer.engine import CopyEngine, Event, Pages
from attnstore_vllm.transfer.moves import tables_by_group
from attnstore_vllm.transfer.plan import LoadPlan, pages

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Load:
    """Plans that are begun together, over together."""

    plans: list[LoadPlan]
    layers: list[Event] = field(default_factory=list)
    """One a layer, in the order in which they come."""
    first: Event | None = None
    """Of the partly filled blocks: all layers of them come before everything else."""
    gates: bool = False
    """The model may read its blocks: no layer is computed before it is there."""
    has_ended: bool = False
    """Of a load ahead: its request is gone, and so will be its blocks once it was received."""
    is_told: bool = False
    """Of a load ahead: it was reported as received, or as failed."""

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
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._finished: list[int] = []
        self._host_wait_s = 0.0

    def begin_step(self, ended: Collection[int], *, whole: bool) -> None:
        """Before the forward pass and before anything is written to blocks that changed hands.

        Args:
            ended: plans whose requests are gone or preempted.
            whole: the forward pass may be a graph that calls no hook.
        """
        self._poll(early=False)  # this forward pass would wait for what nobody reads in it
        for load in self._open:
            if any(plan.plan_id in ended for plan in load.plans):
                load.has_ended = True
                if load.is_told:  # its blocks may be others' already
                    self._engine.model_waits(load.layers[-1])
            if whole and load.gates:
                self._engine.model_waits(load.layers[-1])

    def begin(self, plans: Sequence[LoadPlan], *, whole: bool) -> None:
        """Begin to fill blocks from slots."""
        began = time.perf_counter()
        now = [plan for plan in plans if not plan.layers_before]
        # Moved KV fills single tokens of blocks that others of them, and new ones, are written to.
        whole = whole or any(plan.moves for plan in now)
        if now:
            load = _Load(now, gates=True)
            self._open.append(load)
            self._submit(load, together=whole or not self._engine.overlaps)
            if whole:
                self._engine.model_waits(load.layers[-1])
        for plan in plans:
            if plan.layers_before:
                load = _Load([plan])
                self._open.append(load)
                self._submit(load, together=not self._engine.overlaps)
        if plans and not self._engine.overlaps:
            self._host_wait_s += time.perf_counter() - began

    def wait_layer(self, layer: int) -> None:
        """The model reads this layer next."""
        for load in self._open:
            if load.gates:
                self._engine.model_waits(load.layers[layer])

    def end_step(self) -> None:
        """After the forward pass: whatever it did not wait for comes before what is next."""
        for load in self._open:
            if load.gates and not load.plans[0].layers_before:
                self._engine.model_waits(load.layers[-1])
        self._poll(early=True)

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ahead are received, and failed, since the last call: each once."""
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def take_finished(self) -> list[int]:
        """Plans whose slots are not read any more, each once."""
        finished, self._finished = self._finished, []
        return finished

    def take_waited_s(self) -> float:
        """Seconds for which the model has waited for loads since the last call."""
        waited, self._host_wait_s = self._host_wait_s, 0.0
        return waited + self._engine.waited_s()

    def close(self) -> None:
        """Complete what is in flight."""
        for load in self._open:
            try:
                self._engine.wait(load.layers[-1])
            except CopyError as error:
                logger.error("a load failed while the worker stopped: %s", error)
        self._open.clear()

    def _submit(self, load: _Load, *, together: bool) -> None:
        table = pages(copy for plan in load.plans for copy in plan.copies)
        if together:
            moved = tables_by_group(run for plan in load.plans for run in plan.moves)
            begun = [self._engine.load(table, self._all)] if len(table) else []
            # Behind the copies: they fill whole blocks.
            begun += [self._engine.move(some, group=group) for group, some in moved.items()]
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
            load.first = self._engine.load(partial, self._all)
        if len(rest):
            load.layers = [self._engine.load(rest, range(i, i + 1)) for i in self._all]
        else:
            assert load.first is not None
            load.layers = [load.first] * len(self._all)
        if load.first is not None and load.gates:
            self._engine.model_waits(load.first)

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
        if is_over or (early and not load.has_ended and load.is_there(plan.layers_before)):
            load.is_told = load.gates = True
            self._received.add(plan.request_id)

    def _fail(self, load: _Load, error: CopyError) -> None:
        """Nobody has read the blocks of a load ahead that was not told: vLLM computes them. Of any
        other the forward pass may have, so the engine has to stop."""
        if load.gates or not load.plans[0].layers_before:
            raise error
        # What was begun behind the failed piece may still write.
        for event in (load.first or load.layers[0], *load.layers):
            try:
                self._engine.wait(event)
            except CopyError:
                continue
        (plan,) = load.plans
        load.is_told = True
        self._failed.add(plan.request_id)
        logger.error("the load of request %s failed and is computed: %s", plan.request_id, error)


def _split(table: Pages, plans: Sequence[LoadPlan]) -> tuple[Pages, Pages]:
    """The pages that must be there in all layers first, and the others."""
    is_first = np.zeros(len(table), np.bool_)
    end = 0
    for plan in plans:
        end += plan.num_blocks
        is_first[end - plan.num_partial : end] = True
    return table[is_first], table[~is_first]
