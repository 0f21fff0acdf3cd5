# SPDX-License-Identifier: Apache-2.0
"""Values of settings: sizes, times, shares, directories and YAML itself, each checked once.

Every ConfigError names the key, the value that was found, and what would be right.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Container, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import yaml

from attnstore_vllm.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
    # As Kubernetes writes them, in its own case: `m` is a thousandth there.
    _UNITS[f"{_letter.upper()}i"], _UNITS[_letter.upper()] = 1024**_power, 1000**_power

LEAST = "  dram: 64GiB\n  nvme: {path: /mnt/nvme/attnstore, capacity: 2TiB}"
"""Settings that are enough for a start."""
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)\s*")


class _Strict(yaml.SafeLoader):
    """A key that is given twice is an error: of two values one would be ignored in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                continue  # no setting has such a name; YAML's own reader says so
            if name.tag != "tag:yaml.org,2002:merge" and name.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name.value} is given twice; expected once", name.start_mark
                )
            seen.add(name.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Raises: yaml.YAMLError, also of a key that is given twice."""
    return yaml.load(text, _Strict)


SIZE_MIN = 1 << 20
"""The smallest size of memory and files: less is a forgotten unit, and would be found out at the
first chunk, after the model has loaded."""


def parse_size(key: str, value: object, least: int = 1, unit: str = "GiB") -> int:
    """Bytes of "64GiB", "64Gi", "1.5 TB" or a plain integer.

    Args:
        least: that makes sense, in bytes.
        unit: that who writes less probably means.
    Raises: ConfigError naming `key`.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and (match := _SIZE.fullmatch(text)):
        number, given = match.groups()
        unit_bytes = _UNITS.get(given) or _UNITS.get(given.lower(), 0)
        num_bytes = (
            int(number) * unit_bytes if number.isdecimal() else int(float(number) * unit_bytes)
        )
        if num_bytes >= least:
            return num_bytes
        if num_bytes > 0:
            raise ConfigError(
                f"{key} is {value}: {num_bytes} bytes, and less than {format_size(least)} makes no "
                f"sense; did you mean {number}{unit}?"
            )
    raise ConfigError(
        f"{key} is {value!r}, which is no size; write a number and a unit, as in 64GiB or 2TiB"
    )


_NO_UNIT = re.compile(r"[0-9]+(?:\.[0-9]*)?")
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?([smhd])")
DURATION_MIN_S, DURATION_MAX_S = 1, 366 * 86_400
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds_of(value: object) -> float | None:
    """Seconds of 90, "90s", "10m", "1h" or "2d"; None if that is no duration from 1 s to a year.

    Requests may give numbers, which are seconds; settings may not.
    """
    if isinstance(value, str) and len(value) < 32 and (match := _DURATION.fullmatch(value)):
        value = float(match[1]) * _SECONDS[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if DURATION_MIN_S <= value <= DURATION_MAX_S else None


def parse_duration(key: str, value: object) -> float:
    """Seconds of a time with its unit: a number alone may be meant as minutes, or as days."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and _NO_UNIT.fullmatch(value)):
        raise ConfigError(
            f"{key} is {value!r}, which has no unit; write a time from 1 s to a year with one, as "
            "in 90s, 30m, 12h or 7d"
        )
    seconds = seconds_of(value)
    if seconds is None:
        raise ConfigError(
            f"{key} is {value!r}, which is no time from 1 s to a year; write one as in 90s, 30m, "
            "12h or 7d"
        )
    return seconds


def format_size(num_bytes: int) -> str:
    """The size as a person would write it, e.g. 1.5GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.4g}{unit}"
        size /= 1024
    return f"{size:.4g}PiB"


def check_keys(
    where: str,
    given: Mapping[str, Any],
    known: set[str],
    required: set[str],
    old: Container[str] = (),
) -> None:
    """Raise ConfigError for the first unknown key (with the nearest known one), missing key, or key
    without a value: YAML reads `secret_file:` as None, which asks for no default.

    Args: old: names that are taken too, and that no message offers.
    """
    for key in given:
        if key not in known and key not in old:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{where}{key} is not a setting of AttnStore; {hint}")
        if given[key] is None:
            raise ConfigError(
                f"{where}{key} is None: it stands there without a value; write one, or take the "
                "key out"
            )
    for key in sorted(required):
        if key not in given:
            raise ConfigError(
                f"{where}{key} is missing; AttnStore needs dram and nvme, as in\n{LEAST}"
            )


def parse_switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value


def parse_integer(key: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{key} is {value!r}; it must be an integer from {low} to {high}")
    return value


def parse_off_or_size(key: str, value: object, least: int, unit: str) -> int | None:
    """Bytes, or None where the value is `off` (YAML reads that as False)."""
    return None if value is False or value == "off" else parse_size(key, value, least, unit)


def parse_directory(key: str, raw: object) -> Path:
    if not isinstance(raw, str) or not raw or "\0" in raw:
        raise ConfigError(f"{key} is {raw!r}; it must be an absolute directory")
    path = Path(raw)
    if not path.is_absolute():
        home = os.path.expanduser(raw) if raw.isprintable() else "~"
        hint = "" if home.startswith("~") else f", as in {Path.cwd() / home}"
        raise ConfigError(f"{key} is {raw!r}, which is relative; write an absolute path{hint}")
    return path


def parse_directories(key: str, raw: object) -> tuple[Path, ...]:
    """One directory, or a list of them that lie beside each other."""
    if not isinstance(raw, list):
        return (parse_directory(key, raw),)
    if not raw:
        raise ConfigError(f"{key} is []; it must be an absolute directory, or a list of them")
    paths = tuple(parse_directory(key, each) for each in raw)
    for one, other in permutations(paths, 2):
        if one == other or one in other.parents:
            how = "twice" if one == other else f"and {str(other)!r} inside it"
            raise ConfigError(
                f"{key} names {str(one)!r} {how}; name one directory of each disk, and none twice"
            )
    return paths


def parse_share(key: str, value: object, most: float, most_of: str = "") -> float:
    """Args: most_of: the setting that `most` comes from."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most:
        return float(value)
    limit = most_of and f" (no more than {most_of})"
    raise ConfigError(f"{key} is {value!r}; it must be a share above 0, {most:g} at most{limit}")
