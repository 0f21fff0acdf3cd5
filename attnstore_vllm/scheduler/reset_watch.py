# SPDX-License-Identifier: Apache-2.0
"""Resets of the prefix cache in HBM, as vLLM tells of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from attnstore_vllm.scheduler.messages import StepPlan, StepReport
from attnstore_vllm.scheduler.vllm_types import KVCacheManager
from attnstore_vllm.types import Seen

logger = logging.getLogger(__name__)


class ResetWatch:
    """Sees a reset of vLLM's own prefix cache, of which no hook tells, and asks why it came. All
    methods run on the scheduler's thread.

    Weights that are updated through collective_rpc or finish_weight_update reach no connector. What
    follows them is a plain reset_prefix_cache, since vLLM's own cache is wrong from then on too. So
    after one all requests wait for one step, in which the workers look whether the weights are what
    they were. The same at the start, since nothing need be reset before the first request; and,
    where vLLM has no prefix cache, when a request comes to a server that had none.

    Args:
        on_reset: called when vLLM's prefix cache has been emptied.
    """

    def __init__(self, on_reset: Callable[[], None] = lambda: None) -> None:
        self._on_reset = on_reset
        self._pool: Any = None
        self._blocks: object = None
        """vLLM's table of cached blocks: a reset puts another in its place."""
        self._in_doubt = True
        """From the start on: weights may come from elsewhere before the first request."""
        self._was_reset = False
        self.is_wanted = False
        """A request waits for the look."""
        self._asked: int | None = None
        """The step in which the workers look."""

    def bind(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._blocks = self._pool.cached_block_hash_to_block

    def must_wait(self) -> bool:
        """vLLM asks what a request finds: is it to ask again? Cost: 0.1 us without a reset."""
        if self._pool is None:
            return False
        blocks = self._pool.cached_block_hash_to_block
        if blocks is not self._blocks:
            self._blocks, self._in_doubt, self._asked = blocks, True, None
            self._was_reset = True
            self._on_reset()
        # Only a step in which requests are scheduled may look: until a pause is over, the
        # weights may still be about to change.
        self.is_wanted = self._in_doubt
        return self._in_doubt

    def doubt(self) -> None:
        """Weights may have been updated: the store was reset, or vLLM has no prefix cache that
        would be reset then. A look of before says nothing of it."""
        self._in_doubt, self._asked = True, None

    def add_to(self, plan: StepPlan) -> None:
        """Have the workers look in this step, if they have not been asked."""
        if self.is_wanted and self._asked is None:
            plan.looks_at_weights = True
            self._asked = plan.number
        self.is_wanted = False

    def is_late(self, report: StepReport) -> bool:
        """Whether a look of before the last reset says that the weights are the same."""
        return report.weights is Seen.SAME and report.number != self._asked

    def on_report(self, report: StepReport) -> bool:
        """Whether the weights are not what they were. Of a model whose weights cannot be seen:
        whether they may be others, since vLLM's cache was reset."""
        if self._asked is not None and report.number == self._asked:
            self._in_doubt, self._asked = False, None
        changed = report.weights is Seen.CHANGED or (
            report.weights is Seen.UNKNOWN and self._was_reset
        )
        if report.weights is not Seen.NOTHING:
            self._was_reset = False
        if changed:
            logger.warning(
                "AttnStore drops every tier: the weights in memory are not those of before"
            )
        return changed
