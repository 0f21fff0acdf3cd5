# SPDX-License-Identifier: Apache-2.0
"""Which LoRA adapter stands behind an id, as the workers say.

vLLM tells the scheduler side nothing of adapters that are loaded, loaded again or thrown out. So a
plan asks, and the workers answer with its report (connector/live_lora.py):
- each step says what its requests' adapters are now. If one has changed, what was saved meanwhile
  is dropped, and nothing more of its requests is saved;
- before stored KV is offered, an answer of a step that was planned after the request had come is
  waited for. One that came after an adapter was replaced is never served KV of the old one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from blake3 import blake3

from attnstore_vllm.scheduler.vllm_types import LoRARequest

NO_ADAPTER = b""
DEADLINE_S = 2.0
"""A request that has not heard of its adapter by then is computed."""
KEPT_MAX = 10_000


@dataclass(slots=True)
class _Known:
    identity: bytes | None
    """None: the workers have not loaded it."""
    number: int
    """Of the last step whose report has said so."""


@dataclass(slots=True)
class Asked:
    """A request's question: answered by the report of plan `number` or a later one."""

    number: int
    until: float


class Adapters:
    """All methods run on the scheduler's thread.

    Args:
        num_ranks: the identity is made of all ranks' answers.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_ranks = num_ranks
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._wanted: set[int] = set()
        self._planned = 0

    def identity(self, lora: LoRARequest | None) -> bytes | None:
        """What is known of it, if anything; a later answer may be another."""
        if lora is None:
            return NO_ADAPTER
        known = self._known.get(lora.lora_int_id)
        return None if known is None else known.identity

    def ask(self) -> Asked:
        """A question of a request that has come, or has lost its blocks."""
        return Asked(self._planned + 1, self._clock() + DEADLINE_S)

    def answer(self, lora: LoRARequest, asked: Asked) -> tuple[bytes | None, bool]:
        """What the adapter is, None if the workers have not loaded it or have not said; and
        whether the request is to wait for what they say."""
        known = self._known.get(lora.lora_int_id)
        if known is not None and known.number >= asked.number:
            return known.identity, False
        self._wanted.add(lora.lora_int_id)
        return None, self._clock() < asked.until

    def plan(self, number: int, scheduled: Iterable[LoRARequest | None]) -> tuple[int, ...]:
        """The ids that plan `number` asks of: those wanted and those of its requests."""
        self._planned = number
        ids = {lora.lora_int_id for lora in scheduled if lora is not None} | self._wanted
        self._wanted.clear()
        return tuple(sorted(ids))

    def on_report(self, number: int, told: Mapping[int, Mapping[int, bytes | None]]) -> set[int]:
        """Take what the ranks say after step `number`. Returns the ids that are another adapter,
        or none any more.

        Args:
            told: by id, by rank.
        """
        changed = set()
        for lora_id, by_rank in told.items():
            digests = [by_rank.get(rank) for rank in range(self._num_ranks)]
            parts = [digest for digest in digests if digest is not None]
            identity = None
            if len(parts) == self._num_ranks:
                identity = blake3(b"".join(parts)).digest()
            before = self._known.pop(lora_id, None)
            self._known[lora_id] = _Known(identity, number)
            if before is not None and before.identity not in (None, identity):
                changed.add(lora_id)
        while len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)
        return changed
