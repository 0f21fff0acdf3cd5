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
        if size > self._left < self._size:
            return False
        self._left -= size
        return True

    def begin_step(self) -> None:
        self._left = self._size
