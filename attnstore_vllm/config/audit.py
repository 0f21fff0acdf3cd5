# SPDX-License-Identifier: Apache-2.0
"""`audit`: settings of the live audit.

audit: {rate: 1/10000, tokens: 1000, stop_after: 3, keep: 256MiB}
audit: 1/10000, which is short for {rate: 1/10000}, and the default

This rate costs less than 0.2 % of computing while up to 0.95 of prompt tokens are hits.

Where the audit cannot be, a start that asks for it is refused. One that has it by default goes on
without, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from attnstore_vllm.config.values import SIZE_MIN, check_keys, parse_integer, parse_off_or_size
from attnstore_vllm.errors import ConfigError

_RATE = re.compile(r"1\s?/\s?([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Which hits are computed to be compared, and what follows of one that is wrong."""

    rate: float = 0.0001
    """The share of hits."""
    tokens_per_s: float = 1000.0
    """`tokens`, of all engines together."""
    stop_after: int = 3
    keep_bytes: int | None = 256 << 20
    """None: nothing is kept."""
    by_default: bool = field(default=False, compare=False)
    """The settings say nothing of it."""

    @classmethod
    def parse(cls, given: object) -> AuditConfig | None:
        """None: off. Raises ConfigError."""
        if given is False or given == "off" or (given == 0 and not isinstance(given, bool)):
            return None
        if not isinstance(given, Mapping):
            return cls(rate=_rate("audit", given, "off, {rate: 1/10000}, or a share of hits"))
        check_keys("audit.", given, {"rate", "tokens", "stop_after", "keep"}, set())
        keep = given.get("keep", "256MiB")
        return cls(
            rate=_rate("audit.rate", given.get("rate", "1/10000"), "a share of hits"),
            tokens_per_s=float(
                parse_integer("audit.tokens", given.get("tokens", 1000), 1, 1_000_000)
            ),
            stop_after=parse_integer("audit.stop_after", given.get("stop_after", 3), 1, 1000),
            keep_bytes=parse_off_or_size("audit.keep", keep, SIZE_MIN, "MiB"),
        )

    def share(self, engines: int) -> AuditConfig:
        """One engine's part."""
        keep = self.keep_bytes and max(1, self.keep_bytes // engines)
        return replace(self, tokens_per_s=self.tokens_per_s / engines, keep_bytes=keep)


BY_DEFAULT = AuditConfig(by_default=True)


def _rate(key: str, value: object, expected: str) -> float:
    if isinstance(value, str) and (match := _RATE.fullmatch(value.strip())):
        return float(Fraction(1, int(match[1])))
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    raise ConfigError(f"{key} is {value!r}; it must be {expected}, as in 1/10000 or 0.0001")
