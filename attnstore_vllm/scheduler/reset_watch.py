# SPDX-License-Identifier: Apache-2.0
"""Resets of the prefix cache in HBM, as vLLM tells of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from attnstore_vllm.scheduler.messages import StepPlan, StepReport
from attnstore_vllm.scheduler.vllm_types import KVCacheManager
from attnstore_vllm.types import Seen


class LookResult(Enum):
    """The result of a look at the weights."""

    NOTHING_NEW = "they are what they were, or no worker has looked"
    OTHERS = "others; all that is stored was computed by the weights that name it"
    IN_DOUBT = "others, or it cannot be told; what came since the last look may be of either"


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
        self._hbm_is_new = True
        """vLLM's prefix cache has nothing of before the last look."""
        self.hbm_is_mixed = False
        """It has KV of weights that are others by now, since its reset has failed or there was
        none; or KV that an audit has found to be wrong."""
        self.is_wanted = False
        """A request waits for the look."""
        self._asked: int | None = None
        """The step in which the workers look."""
        self._was_new_when_asked = False
        """_hbm_is_new then: what steps behind it compute is of the weights that it sees."""
        self._num_asked = self._num_named = 0
        """Store.num_named before the look that was asked for last, and before the last that has
        come. The weights of the latter are known."""

    def bind(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._blocks = self._pool.cached_block_hash_to_block

    def must_wait(self) -> bool:
        """vLLM asks what a request finds: is it to ask again? Cost: 0.1 us without a reset."""
        if self._pool is None:
            return False
        self._notice()
        # Only a step in which requests are scheduled may look: until a pause is over, the
        # weights may still be about to change.
        self.is_wanted = self._in_doubt
        return self._in_doubt

    def _notice(self) -> None:
        blocks = self._pool.cached_block_hash_to_block
        if blocks is not self._blocks:
            self._blocks, self._in_doubt, self._asked = blocks, True, None
            self._was_reset = self._hbm_is_new = True
            self.hbm_is_mixed = False
            self._on_reset()

    def doubt(self, *, was_reset: bool = False, is_empty: bool = False) -> None:
        """Weights may have been updated: the store was reset, vLLM pauses, or it has no prefix
        cache that would be reset then. A look of before says nothing of it.

        Args:
            was_reset, is_empty: no request has blocks, nor finds any: by a reset, or without one.
        """
        self._in_doubt, self._asked = True, None
        self._was_reset |= was_reset
        if was_reset or is_empty:
            self._hbm_is_new, self.hbm_is_mixed = True, False

    def add_to(self, plan: StepPlan, num_scheduled: int, num_named: int) -> None:
        """Have the workers look when this step ends, if a request waits for it and they have not
        been asked. What another step computes is in vLLM's cache when they do: of a request that
        is not served, or of one that did not wait.

        Args:
            num_scheduled: tokens that the step computes.
            num_named: see Store.
        """
        if num_scheduled and self._pool is not None:
            self._notice()
        if self.is_wanted and self._asked is None:
            plan.looks_at_weights = True
            self._asked, self._num_asked = plan.number, num_named
            self._was_new_when_asked = self._hbm_is_new
        self.is_wanted = False
        self._hbm_is_new &= not num_scheduled or plan.looks_at_weights

    def is_late(self, report: StepReport) -> bool:
        """Whether a look of before the last reset says that the weights are the same."""
        return report.weights is Seen.SAME and report.number != self._asked

    def on_report(self, report: StepReport, num_named: int) -> LookResult:
        """The result of the look that a report tells of. A model whose weights cannot be seen may
        have others since vLLM's cache was reset.

        Args:
            num_named: see Store.
        """
        is_awaited = self._asked is not None and report.number == self._asked
        if is_awaited:
            self._in_doubt, self._asked = False, None
        was_reset = self._was_reset
        hbm_is_new = self._was_new_when_asked if is_awaited else self._hbm_is_new
        if report.weights is Seen.NOTHING:
            return LookResult.NOTHING_NEW
        self._was_reset = False
        self._hbm_is_new &= not is_awaited
        if report.weights is Seen.SAME or (report.weights is Seen.UNKNOWN and not was_reset):
            if is_awaited:
                self._num_named = self._num_asked
            return LookResult.NOTHING_NEW
        self.hbm_is_mixed |= not hbm_is_new
        all_named, self._num_named = num_named == self._num_named, num_named
        is_seen = report.weights is Seen.CHANGED
        return LookResult.OTHERS if is_seen and all_named else LookResult.IN_DOUBT
