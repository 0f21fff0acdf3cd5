# SPDX-License-Identifier: Apache-2.0
"""The bound of each KV cache group that is compared by distance, over restarts. Of the store's
thread alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from attnstore_vllm.policy.kv_compare import STATE_BOUND
from attnstore_vllm.policy.learned_bound import PAIRS, LearnedBound, as_json, bounds_from
from attnstore_vllm.tiers.nvme.aside import Aside
from attnstore_vllm.types import Key


class AuditedBounds:
    """Bounds that grow with what is seen. An earlier process of the same namespace has begun them.

    Nothing is learned of a model with states: they agree to the bit until a prompt's steps end
    elsewhere, and so does all that is computed from them.

    Args:
        namespace: of all that is compared.
        most: the bound of each KV cache group until it is learned.
    """

    def __init__(self, aside: Aside, namespace: bytes, most: Sequence[float]) -> None:
        self._aside = aside
        self._namespace = namespace
        self._bounds: list[LearnedBound] = bounds_from(aside.learned(namespace), len(most))
        self._most, self._learns = most, STATE_BOUND not in most
        self._seen = [set[Key]() for _ in most]
        """Chunks that this process has compared, by group, PAIRS at most."""

    def of(self, group: int) -> float:
        return self._bounds[group].value if self._learns else self._most[group]

    def note(self, group: int, hit: int, key: Key, distance: float) -> None:
        """A pair of which this process has computed both agreed. A few of all calls write a file:
        each changes a bound, and there are ten of them."""
        if not self._learns:
            return
        before, seen = self.of(group), self._seen[group]
        is_new = key not in seen
        if len(seen) < PAIRS:
            seen.add(key)
        self._bounds[group] = self._bounds[group].and_one(distance, hit, key, is_new=is_new)
        if self.of(group) != before:
            with suppress(OSError):  # as on a full disk: the next start learns it anew
                self._aside.learn(self._namespace, as_json(self._bounds))
