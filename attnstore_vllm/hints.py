# SPDX-License-Identifier: Apache-2.0
"""Hints that a request gives about its KV: {"kv_transfer_params": {"attnstore": {...}}} in its
body.

    store: false            nothing that it computes is saved; what is stored may be loaded
    priority: low|normal|high
    ttl: 600, "10m", "1h"   after so long without use its KV is not found any more
    truncation: true        its prompt may be served with stored KV that is moved to other positions
    approximate: true       its prompt may be served with KV that a codec has changed
    report: true            the response says where its prompt's KV came from
    ended: true             the conversation is over: its KV leaves before all other KV
    session: "an id"        the conversation that it is of: `ended` holds for all that it has left
    parent: "an id"         the session that has begun this one, and ends it with itself
    tool: "a name"          the last tool: the one whose result the prompt brings
    agent: "a name"         the kind of agent that asks
    audit: true             its hit is computed, to be compared with what is stored
    pin: true               its prompt's KV is not evicted until that time is over, within a share

Hints come from any client: each that makes no sense is ignored and counted, and none fails a
request. What else is in kv_transfer_params is for other connectors, and is not changed;
hint_sources.py reads what other standards say there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.values import seconds_of
from attnstore_vllm.index.keys import encode_tokens
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.told import Told
from attnstore_vllm.policy.visits import NO_TERMS, Terms
from attnstore_vllm.types import TOKEN_BYTES

SECTION: Final = "attnstore"
KEYS: Final = (
    "store", "priority", "ttl", "truncation", "approximate", "report", "ended", "audit", "pin",
    "session", "parent", "tool", "agent",
)  # fmt: skip
ID_MAX = 256
"""Characters of a session's id."""
NAMES: Final = {"session": ID_MAX, "parent": ID_MAX, "tool": 64, "agent": 64}
"""Hints that are names, and characters that each has at most."""
PRIORITIES = {"low": Priority.LOW, "normal": Priority.NORMAL, "high": Priority.HIGH}


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of one request."""

    store: bool = True
    terms: Terms = NO_TERMS
    truncation: bool | None = None
    """None: it does not say."""
    approximate: bool | None = None
    """None: it does not say."""
    report: bool = False
    audit: bool = False
    applied: int = 0
    ignored: int = 0
    session: str | None = None
    """A name that the client has chosen: it means nothing but among requests of its salt."""
    parent: str | None = None
    tool: str | None = None
    agent: str | None = None
    """When the next turn comes is learned by these (policy/told.py)."""

    def terms_of(self, tenant: bytes) -> Terms:
        """The terms of a request of this tenant."""
        if self.session is None and self.tool is None and self.agent is None:
            return self.terms
        return replace(self.terms, told=Told(tenant, self.agent, self.tool))

    def with_ignored(self, more: int) -> Hints:
        return replace(self, ignored=self.ignored + more) if more else self


NO_HINTS = Hints()


def is_name(key: str, value: object) -> bool:
    """Whether this makes sense as the hint of one of NAMES."""
    return isinstance(value, str) and 0 < len(value) <= NAMES[key]


def makes_sense(key: str, value: object) -> bool:
    """Whether a hint may have this value, of any server's."""
    if key == "priority":
        return isinstance(value, str) and value in PRIORITIES
    if key == "ttl":
        return seconds_of(value) is not None
    if key in NAMES:
        return is_name(key, value)
    return isinstance(value, bool)


class HintReader:
    """Reads hints by the server's settings.

    Args:
        ttl_s: of the whole server, which a hint may shorten; None: none.
        longest_pin_s: None where nothing may be pinned.
        may_truncate: requests may ask for moved KV.
        may_approximate: requests may ask for KV that a codec has changed: there is some.
        may_audit: requests may ask to be compared: there is an audit.
        salted_only: requests without a cache_salt share nothing.
    """

    def __init__(
        self,
        ttl_s: float | None = None,
        longest_pin_s: float | None = None,
        *,
        may_truncate: bool = True,
        may_approximate: bool = False,
        may_audit: bool = False,
        salted_only: bool = False,
    ) -> None:
        self.salted_only = salted_only
        self._may_be_true = {
            "pin": longest_pin_s is not None,
            "truncation": may_truncate,
            "approximate": may_approximate,
            "audit": may_audit,
        }
        self.ttl_s = ttl_s
        self._longest_pin_s = longest_pin_s

    @classmethod
    def from_settings(cls, config: StoreConfig) -> HintReader:
        pinning = config.pinning
        return cls(
            config.ttl_s,
            pinning.longest_s if pinning is not None else None,
            may_truncate=config.truncation is not None,
            may_approximate=config.nvme.changed_by is not None,
            may_audit=config.audit is not None,
            salted_only=config.shared_by == "salted",
        )

    def read(self, params: object) -> Hints:
        """The hints in Request.kv_transfer_params, of any type. Cost: constant."""
        if not isinstance(params, dict) or SECTION not in params:
            return NO_HINTS
        given = params[SECTION]
        if not isinstance(given, dict):
            return Hints(ignored=1)
        said: dict[str, Any] = {
            key: given[key]
            for key in KEYS
            if makes_sense(key, given.get(key))
            and not (given[key] is True and not self._may_be_true.get(key, True))
        }
        ended, ttl_s = said.get("ended", False), seconds_of(said.get("ttl"))
        level = Priority.ENDED if ended else PRIORITIES[said.get("priority", "normal")]
        times = [t for t in (self._longest_pin_s, self.ttl_s, ttl_s) if t is not None]
        pin_s = min(times) if said.get("pin") and not ended else None
        return Hints(
            store=said.get("store", True),
            terms=Terms(level, ttl_s, pin_s),
            truncation=said.get("truncation"),
            approximate=said.get("approximate"),
            report=said.get("report", False),
            audit=said.get("audit", False),
            applied=len(said),
            ignored=len(given) - len(said),
            **{key: said[key] for key in NAMES if key in said},
        )


@dataclass(frozen=True, slots=True)
class PrefetchOrder:
    """The order that POST /attnstore/prefetch sends to the scheduler side, in a request's place.

    The token ids travel as bytes, which no JSON body can hold: so no client can give such an order
    but the route, where the operator has turned it on.
    """

    token_ids: list[int]
    cache_salt: str | None

    def as_params(self) -> dict[str, object]:
        """As kv_transfer_params."""
        order = {"prefetch": encode_tokens(self.token_ids), "cache_salt": self.cache_salt}
        return {SECTION: order}


def prefetch_order(params: object) -> PrefetchOrder | None:
    """The order that a request stands for, or None: it is an ordinary request."""
    given = params.get(SECTION) if isinstance(params, dict) else None
    encoded = given.get("prefetch") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(encoded, bytes):
        return None
    assert len(encoded) % TOKEN_BYTES == 0
    salt = given.get("cache_salt")
    token_ids = np.frombuffer(encoded, ">u4").tolist()
    return PrefetchOrder(token_ids, salt if isinstance(salt, str) else None)
