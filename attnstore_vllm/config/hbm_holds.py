# SPDX-License-Identifier: Apache-2.0
"""`holding`: settings of HBM that is held while a session is away.

holding: {share: 0.9, longest: 30s, defer: 60s}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnstore_vllm.config.values import check_keys, parse_duration, parse_share
from attnstore_vllm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingConfig:
    """How much of HBM may be held, and for how long (policy/holding.py)."""

    share: float = 0.9
    longest_s: float = 30.0
    defer_s: float = 60.0
    """0: no request waits at the door."""

    @classmethod
    def parse(cls, given: object) -> HoldingConfig | None:
        """None: off. Raises ConfigError."""
        if given is False or given == "off":
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"holding is {given!r}; it must be off or {{share: 0.9, longest: 30s, defer: 60s}}"
            )
        check_keys("holding.", given, {"share", "longest", "defer"}, set())
        defer = given.get("defer", "60s")
        is_off = defer is False or defer == "off"
        return cls(
            share=parse_share("holding.share", given.get("share", 0.9), 0.9),
            longest_s=parse_duration("holding.longest", given.get("longest", "30s")),
            defer_s=0.0 if is_off else parse_duration("holding.defer", defer),
        )
