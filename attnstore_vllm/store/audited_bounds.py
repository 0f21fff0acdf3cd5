# SPDX-License-Identifier: Apache-2.0
"""The bound of each KV cache group that is compared by distance, over restarts. Of the store's
thread alone."""

from __future__ import annotations

from contextlib import suppress

from attnstore_vllm.policy.learned_bound import LearnedBound, as_json, bounds_from
from attnstore_vllm.tiers.nvme.aside import Aside


class AuditedBounds:
    """Bounds that grow with what is seen. An earlier process of the same namespace has begun them.

    Args:
        namespace: of all that is compared.
    """

    def __init__(self, aside: Aside, namespace: bytes, num_groups: int) -> None:
        self._aside = aside
        self._namespace = namespace
        self._bounds: list[LearnedBound] = bounds_from(aside.learned(namespace), num_groups)

    def of(self, group: int) -> float:
        return self._bounds[group].value

    def note(self, group: int, distance: float) -> None:
        """A pair of which this process has computed both agreed. A few of all calls write a file:
        each changes a bound, and there are ten of them."""
        before = self._bounds[group]
        after = self._bounds[group] = before.and_one(distance)
        if after.value != before.value:
            with suppress(OSError):  # as on a full disk: the next start learns it anew
                self._aside.learn(self._namespace, as_json(self._bounds))
