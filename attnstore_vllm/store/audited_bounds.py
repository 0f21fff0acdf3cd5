# SPDX-License-Identifier: Apache-2.0
"""The bound of each KV cache group that is compared by distance, over restarts. Of the store's
thread alone."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

from attnstore_vllm.policy.kv_compare import STATE_BOUND
from attnstore_vllm.policy.learned_bound import HIT_BITS, LearnedBound, as_json, bounds_from
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
        self._process = secrets.token_bytes(16)
        """Hits are numbered anew in each."""

    def of(self, group: int) -> float:
        return self._bounds[group].value if self._learns else self._most[group]

    def note(self, group: int, hit: int, key: Key, distance: float) -> None:
        """A pair of which this process has computed both agreed. A few of all calls write a file:
        each changes a bound, and there are ten of them."""
        if not self._learns:
            return
        before = self.of(group)
        self._bounds[group] = self._bounds[group].and_one(distance, self._name(hit), key)
        if self.of(group) != before:
            with suppress(OSError):  # as on a full disk: the next start learns it anew
                self._aside.learn(self._namespace, as_json(self._bounds))

    def _name(self, hit: int) -> int:
        """The name of a hit: none of another process has it."""
        number = hit.to_bytes(8, "little")
        digest = blake2b(number, key=self._process, digest_size=HIT_BITS // 8).digest()
        return int.from_bytes(digest, "little")
