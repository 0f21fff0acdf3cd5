# SPDX-License-Identifier: Apache-2.0
"""When a worker's saves are gathered, drained and over. docs/overlap.md has the ordering argument.

With a write buffer (the paper's, in HBM) a save is *queued* until there are rows for it, *gathered*
into them in the model's order, so that its blocks are free from then on, and *leaving* for its slot
on the engine's own stream. Without one it goes from its blocks to its slot at once.

What finished requests leave behind is moved before the forward pass, so that vLLM can give their
blocks away in the very step that is told of it; what the step computes is moved with it or after.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from attnstore_vllm.errors import CopyError
from attnstore_vllm.transfer.engine import CopyEngine, Event, Pages, Rows
from attnstore_vllm.transfer.plan import TransferPlan, pages

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Batch:
    """Saves that are gathered and drained together."""

    plans: list[TransferPlan]
    pages: Pages
    rows: Rows
    next_layer: int = 0
    """Those before it are gathered."""
    events: list[Event] = field(default_factory=list)
    """Of the drains that are not over, in their order."""
    has_failed: bool = False


class Saves:
    """All methods run on the worker's thread. A step calls begin_step, layer_computed for each
    layer if its hooks run, and end_step.

    Args:
        queue_blocks: how many blocks may wait for rows; a save beyond that is given up.
    """

    def __init__(self, engine: CopyEngine, num_layers: int, queue_blocks: int) -> None:
        self._engine = engine
        self._all = range(num_layers)
        self._queue_blocks = queue_blocks
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
        self._give_up([plan for plan in self._queued if plan.request_id in preempted])
        self._poll()
        self._enqueue(before)
        self._move_queued()
        assert not before or not self._queued, "blocks were given away before there were rows"
        self._enqueue(after)
        if by_layer and self._engine.num_rows:
            self._this_step = self._take_batch()

    def layer_computed(self, layer: int) -> None:
        """The forward pass has written this layer of all blocks of this step's saves."""
        batch = self._this_step
        if batch is not None and layer == batch.next_layer:
            self._move(batch, range(layer, layer + 1))

    def end_step(self, finished: Sequence[str]) -> None:
        """After the forward pass.

        Args:
            finished: requests that have ended, whose blocks vLLM keeps until take_freed().
        """
        batch, self._this_step = self._this_step, None
        if batch is not None and batch.next_layer < len(self._all):
            self._move(batch, self._all[batch.next_layer :])
        self._poll()
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
            self._move(batch, self._all)

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
            self._engine.wait(self._engine.save(table, self._all))
            self._finished += [plan.plan_id for plan in plans]

    def _poll(self) -> None:
        """Rows are free when all that was begun with them is over, whether it failed or not."""
        still: list[_Batch] = []
        for batch in self._leaving:
            while batch.events:
                try:
                    if not batch.events[0].done():
                        break
                except CopyError as error:
                    if not batch.has_failed:  # of a batch once, not a layer
                        logger.error("saves are dropped, since a copy failed: %s", error)
                    batch.has_failed = True
                del batch.events[0]
            if batch.events:
                still.append(batch)
                continue
            ids = [plan.plan_id for plan in batch.plans]
            if batch.has_failed:
                self._given_up += ids
            else:
                self._finished += ids
            # In their order: rows that follow each other leave in one copy.
            self._free_rows = sorted(self._free_rows + batch.rows.tolist())
        self._leaving = still

    def _give_up(self, plans: Sequence[TransferPlan]) -> None:
        for plan in plans:
            self._queued.remove(plan)
            self._queued_blocks -= plan.num_blocks
            self._given_up.append(plan.plan_id)
