# SPDX-License-Identifier: Apache-2.0
"""How much of a kind of work is done in one step of the engine. Pure."""

from __future__ import annotations


class StepBudget:
    """So much work a step. The first work of a step is done however large it is, so that a step
    always gets on.

    Args:
        size: of a step's work, in any unit.
    """

    def __init__(self, size: int) -> None:
        assert size > 0
        self._size = self._left = size

    def take(self, size: int) -> bool:
        """Whether work of this size is done in this step."""
        is_done = self.fits(size) > 0
        self.spend(size * is_done)
        return is_done

    def fits(self, size: int) -> int:
        """How many works of this size are done in this step."""
        return max(self._left // size, self._left == self._size)

    def spend(self, size: int) -> None:
        """So much is done, of what fits."""
        self._left -= size

    def begin_step(self) -> None:
        self._left = self._size
