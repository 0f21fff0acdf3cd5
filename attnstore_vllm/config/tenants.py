# SPDX-License-Identifier: Apache-2.0
"""`quotas`: what tenants may hold of DRAM.

quotas: {gold: {salt_file: /run/secrets/gold_salt, dram: 0.25}, plain: {dram: 16GiB}}

A tenant is the requests of one cache_salt, or those without one. A salt is a secret: the settings
name a file that has it, and everything else the name that the operator gave the tenant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from attnstore_vllm.config.secret_files import read_secret_file
from attnstore_vllm.config.values import SIZE_MIN, check_keys, parse_share, parse_size
from attnstore_vllm.errors import ConfigError

TENANTS_MAX = 64
"""Each has series on /metrics, and an order of departure."""
SALT_BYTES_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_EXAMPLE = "{gold: {salt_file: /run/secrets/gold_salt, dram: 0.25}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The quota of one tenant."""

    name: str
    salt_file: Path | None
    """None: the tenant is the requests without a salt."""
    dram: float | int
    """A share of DRAM, or bytes."""

    def dram_slots(self, num_slots: int, slot_bytes: int) -> int:
        """Slots, of so many; one at least."""
        is_share = isinstance(self.dram, float)
        return max(1, int(self.dram * num_slots) if is_share else int(self.dram // slot_bytes))

    def share(self, ranks: int) -> Quota:
        """One engine's part."""
        return self if isinstance(self.dram, float) else replace(self, dram=self.dram // ranks)

    def salt(self) -> str | None:
        """Read the salt. Raises ConfigError, in which the salt is not."""
        if self.salt_file is None:
            return None
        return read_salt(self.salt_file, f"quotas.{self.name}.salt_file")


def read_salt(path: Path, key: str) -> str:
    """The text of a file that its owner alone may read, but white space at its ends. Raises
    ConfigError, in which the salt is not.

    Args:
        key: the setting or option that names the file.
    """
    what = f"{key} is {str(path)!r}, which"
    try:
        salt = read_secret_file(path, what, "salt", SALT_BYTES_MAX).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} is not UTF-8; write the salt as requests send it") from None
    if not 0 < len(salt.encode()) <= SALT_BYTES_MAX:
        raise ConfigError(
            f"{what} has no salt of 1 to {SALT_BYTES_MAX} bytes; write the salt as requests send it"
        )
    return salt


def parse_quotas(given: object) -> tuple[Quota, ...]:
    """Raises ConfigError."""
    if given is False or given == "off":
        return ()
    if not isinstance(given, Mapping) or not 0 < len(given) <= TENANTS_MAX:
        # What was given is not shown: who misreads the page may have written salts for names.
        raise ConfigError(
            f"quotas must be off, or a mapping of 1 to {TENANTS_MAX} tenants, as in {_EXAMPLE}"
        )
    quotas = tuple(_quota(number, *item) for number, item in enumerate(given.items(), start=1))
    files = [quota.salt_file for quota in quotas]
    if len(set(files)) < len(files):
        raise ConfigError(
            "quotas has two tenants with the same salt_file, or two without one; a salt has one "
            "quota, so take one of them out"
        )
    return quotas


def _quota(number: int, name: object, given: object) -> Quota:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"the name of tenant {number} in quotas must be 1 to 32 letters, digits, _, . or -"
        )
    key = f"quotas.{name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key} must be a mapping, as in {_EXAMPLE}")
    check_keys(f"{key}.", given, {"salt_file", "dram"}, {"dram"})
    file = given.get("salt_file")
    if file is not None and not (isinstance(file, str) and Path(file).is_absolute()):
        raise ConfigError(f"{key}.salt_file must be the absolute path of a file that has the salt")
    dram = given["dram"]
    if isinstance(dram, float) or dram == 1:
        size: float | int = parse_share(f"{key}.dram", dram, 1.0)
    else:
        size = parse_size(f"{key}.dram", dram, SIZE_MIN, "GiB")
    return Quota(name=name, salt_file=None if file is None else Path(file), dram=size)
