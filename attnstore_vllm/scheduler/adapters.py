# SPDX-License-Identifier: Apache-2.0
"""Which LoRA adapter stands behind an id, as the workers say.

vLLM tells the scheduler side nothing of adapters that are loaded, loaded again or thrown out. So a
plan asks, and the workers answer with its report (identity/live_lora.py):
- each step says what its requests' adapters are now. A save under another identity is dropped, and
  nothing more of such a request is saved;
- before stored KV is offered, an answer of a step that was planned after the request had come is
  waited for. One that came after an adapter was replaced is never offered KV of the old one;
- the step in which a request first computes behind stored KV compares: an adapter that was replaced
  in between makes the load a failed one, and vLLM computes the request.

vLLM's own caches go by an adapter's name. So they may hold what two adapters of one name have left;
a request that finds something there under such a name leaves nothing in the store.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from attnstore_vllm.scheduler.vllm_types import LoRARequest, Request
from attnstore_vllm.types import Clock

S = TypeVar("S")
NO_ADAPTER = b""
DEADLINE_S = 2.0
"""A request that has not heard of its adapter by then is computed."""
KEPT_MAX = 10_000
PLANS_MAX = 64
"""Steps whose reports may still come: more than vLLM has in flight."""


@dataclass(slots=True)
class _Known:
    identity: bytes | None
    """None: the workers have not loaded it."""
    digests: tuple[bytes | None, ...]
    """By rank."""
    number: int
    """Number of the last step whose report has said so."""


@dataclass(slots=True)
class Asked:
    """A request's question: answered by the report of plan `number` or a later one."""

    number: int
    until: float


class _Names:
    """Identities that stood behind an adapter's name while something of it may be in a cache of
    vLLM's."""

    def __init__(self) -> None:
        self._had: OrderedDict[str, bytes] = OrderedDict()
        self._mixed: set[str] = set()
        self._forgot = False

    def saw(self, name: str, identity: bytes) -> bool:
        """Returns whether the name has two from now on."""
        before = self._had.pop(name, identity)
        self._had[name] = identity
        if len(self._had) > KEPT_MAX:
            self._had.popitem(last=False)
            self._forgot = True
        is_news = before != identity and name not in self._mixed
        if is_news:
            self._mixed.add(name)
        return is_news

    def are_mixed(self, name: str) -> bool:
        return name in self._mixed or (self._forgot and name not in self._had)


class Adapters:
    """All methods run on the scheduler's thread.

    Args:
        num_ranks: the identity is made of all ranks' answers.
    """

    def __init__(self, num_ranks: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._num_ranks = num_ranks
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._wanted: set[int] = set()
        self._planned = 0
        self._requests: dict[str, Request] = {}
        """All with an adapter, also those that the store does not serve."""
        self._names_of: OrderedDict[int, dict[int, str]] = OrderedDict()
        """By plan: names of the ids that it runs."""
        self._in_hbm = _Names()
        self._in_encoder_cache = _Names()

    # ---- requests ----------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """A request with an adapter has come."""
        self._requests[request.request_id] = request

    def of(self, states: Mapping[str, S]) -> list[S]:
        """Those of these requests that have an adapter. Cost: that of those."""
        return [states[name] for name in self._requests if name in states]

    def leave(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def identity(self, lora: LoRARequest | None) -> bytes | None:
        """Its digest, if that is known; a later answer may be another."""
        if lora is None:
            return NO_ADAPTER
        known = self._known.get(lora.lora_int_id)
        return None if known is None else known.identity

    def ask(self) -> Asked:
        """A question of a request that has come, or has lost its blocks."""
        return Asked(self._planned + 1, self._clock() + DEADLINE_S)

    def answer(self, lora: LoRARequest, asked: Asked) -> tuple[bytes | None, bool]:
        """The adapter's digest, None if the workers have not loaded it or have not said; and
        whether the request is to wait for what they say."""
        known = self._known.get(lora.lora_int_id)
        if known is not None and known.number >= asked.number:
            return known.identity, False
        self._wanted.add(lora.lora_int_id)
        return None, self._clock() < asked.until

    def digests(self, lora: LoRARequest) -> tuple[bytes | None, ...]:
        """By rank, what the last answer was made of."""
        known = self._known.get(lora.lora_int_id)
        return () if known is None else known.digests

    def may_be_mixed(self, request: Request, local: int) -> bool:
        """Whether what vLLM has of the request under its adapter's name may be another's.

        Args:
            local: tokens that vLLM's prefix cache has of it.
        """
        lora = request.lora_request
        if lora is None:
            return False
        in_hbm = local > 0 and self._in_hbm.are_mixed(lora.lora_name)
        return in_hbm or (
            bool(request.mm_features) and self._in_encoder_cache.are_mixed(lora.lora_name)
        )

    def hbm_is_empty(self) -> None:
        """vLLM has reset its prefix cache: nothing of before is found there."""
        self._in_hbm = _Names()

    # ---- steps -------------------------------------------------------------------------

    def plan(self, number: int, scheduled: Iterable[str]) -> tuple[int, ...]:
        """The ids that plan `number` asks of: those wanted and those of its requests."""
        self._planned = number
        requests = [self._requests[name] for name in scheduled if name in self._requests]
        found = [r.lora_request for r in requests if r.lora_request is not None]
        ids = {lora.lora_int_id for lora in found} | self._wanted
        self._wanted.clear()
        if found:
            self._names_of[number] = {lora.lora_int_id: lora.lora_name for lora in found}
        while len(self._names_of) > PLANS_MAX:
            self._names_of.popitem(last=False)
        return tuple(sorted(ids))

    def on_report(self, number: int, told: Mapping[int, Mapping[int, bytes | None]]) -> set[str]:
        """Take what the ranks say after step `number`. Returns names that have stood for two
        adapters from now on.

        Args:
            told: by id, by rank.
        """
        names, mixed = self._names_of.pop(number, {}), set[str]()
        for lora_id, by_rank in told.items():
            digests = tuple(by_rank.get(rank) for rank in range(self._num_ranks))
            parts = [digest for digest in digests if digest is not None]
            identity = None
            if len(parts) == self._num_ranks:
                identity = blake3(b"".join(parts)).digest()
            self._known.pop(lora_id, None)
            self._known[lora_id] = _Known(identity, digests, number)
            name = names.get(lora_id)
            if name is not None and identity is not None:
                self._in_encoder_cache.saw(name, identity)
                if self._in_hbm.saw(name, identity):
                    mixed.add(name)
        while len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)
        return mixed
