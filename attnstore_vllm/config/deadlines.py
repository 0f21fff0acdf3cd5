# SPDX-License-Identifier: Apache-2.0
"""Settings that say how long to wait: times with a unit, as in 500ms or 2s.

Files from before have them in milliseconds, under names that end in _ms. Those are read as they
were; old_names() says what to write now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from attnstore_vllm.config.values import parse_integer
from attnstore_vllm.errors import ConfigError

_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?(ms|s|m|h)")
_NO_UNIT = re.compile(r"-?[0-9]+(?:\.[0-9]*)?")
_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


@dataclass(frozen=True, slots=True)
class Deadline:
    """One such setting, and its bounds in milliseconds."""

    key: str
    """With its section, as in nvme.io_deadline."""
    low_ms: int
    high_ms: int

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def old_key(self) -> str:
        return f"{self.key}_ms"

    @property
    def old_name(self) -> str:
        return f"{self.name}_ms"

    def parse(self, given: Mapping[str, Any], default_ms: int) -> int:
        """Milliseconds, by either name.

        Args: given: the settings of its section.
        Raises: ConfigError, also if both names are given.
        """
        if self.old_name not in given:
            return self._parse(given[self.name]) if self.name in given else default_ms
        old = given[self.old_name]
        if self.name in given:
            raise ConfigError(
                f"{self.key} is {given[self.name]!r} and {self.old_key} is {old!r}: two names of "
                f"one setting; expected one. Take {self.old_key} out, which is the old name"
            )
        try:
            return parse_integer(self.old_key, old, self.low_ms, self.high_ms)
        except ConfigError as error:
            example = format_ms(max(self.low_ms, 500))
            raise ConfigError(
                f"{error}. Its name is {self.key} now, with a unit, as in {example}"
            ) from error

    def hint(self, given: Mapping[str, Any]) -> str | None:
        """The line to write in place of the old name; None where that is not given, or wrong."""
        if self.old_name not in given:
            return None
        try:
            ms = self.parse(given, 0)
        except ConfigError:
            return None
        return f"{self.old_key} is called {self.key} now: write `{self.name}: {format_ms(ms)}`"

    def _parse(self, value: object) -> int:
        bounds = f"a time from {format_ms(self.low_ms)} to {format_ms(self.high_ms)}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or (isinstance(value, str) and _NO_UNIT.fullmatch(value)):
            raise ConfigError(
                f"{self.key} is {value!r}, which has no unit; write {bounds} with one, as in "
                "500ms or 2s"
            )
        if isinstance(value, str) and (match := _TIME.fullmatch(value)):
            ms = Fraction(match[1]) * _MS[match[2]]
            if ms.denominator == 1 and self.low_ms <= ms <= self.high_ms:
                return int(ms)
        raise ConfigError(
            f"{self.key} is {value!r}; it must be {bounds}, in whole milliseconds, as in 500ms or "
            "2s"
        )


LOAD_DEADLINE = Deadline("load_deadline", 0, 60_000)
IO_DEADLINE = Deadline("nvme.io_deadline", 100, 600_000)
SHARED_DEADLINE = Deadline("shared.deadline", 10, 10_000)
DEADLINES = (IO_DEADLINE, LOAD_DEADLINE, SHARED_DEADLINE)


def format_ms(ms: int) -> str:
    """The time as a person would write it, and as it is read back: 500ms, 1s, 10m."""
    unit = "s" if ms % 1000 == 0 else "ms"
    if ms > 60_000 and ms % 60_000 == 0:
        unit = "m"
    return f"{ms // _MS[unit]}{unit}"


def old_names(given: object) -> Iterator[tuple[str, str]]:
    """(key, what to write in its place) of each old name whose value is right."""
    for deadline in DEADLINES:
        within = given
        if deadline.section:
            within = given.get(deadline.section) if isinstance(given, Mapping) else None
        hint = deadline.hint(within) if isinstance(within, Mapping) else None
        if hint is not None:
            yield deadline.old_key, hint
