# SPDX-License-Identifier: Apache-2.0
"""`quotas`: what tenants may hold of DRAM and of NVMe, and put into the shared tier.

quotas:
  gold: {salt_file: /run/secrets/gold_salt, dram: 0.25, nvme: 500GiB, shared: 2TiB}
  plain: {dram: 16GiB}

A tenant is the requests of one cache_salt, or those without one. A salt is a secret: the settings
name a file that has it, and everything else the name that the operator gave the tenant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnstore_vllm.config.secret_files import read_secret_file
from attnstore_vllm.config.values import SIZE_MIN, check_keys, parse_share, parse_size
from attnstore_vllm.errors import ConfigError

TENANTS_MAX = 64
"""Each has series on /metrics, and an order of departure."""
SALT_BYTES_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}")
TIERS = ("dram", "nvme", "shared")
_EXAMPLE = "{gold: {salt_file: /run/secrets/gold_salt, dram: 0.25}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The quotas of one tenant. None: it has none of that tier."""

    name: str
    salt_file: Path | None
    """None: the tenant is the requests without a salt."""
    dram: float | int | None = None
    nvme: float | int | None = None
    """A share of the tier, or bytes."""
    shared: int | None = None
    """Bytes. How much the shared tier has, no server knows."""

    def share(self, ranks: int) -> Quota:
        """One engine's part."""
        parts: dict[str, Any] = {}
        for tier in TIERS:
            if isinstance(size := getattr(self, tier), int):
                parts[tier] = size // ranks
        return replace(self, **parts)

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


def slots_of(quota: float | int, num_slots: int, slot_bytes: int) -> int:
    """Slots, of so many; one at least.

    Args:
        quota: a share of them, or bytes.
    """
    of_all = quota * num_slots if isinstance(quota, float) else quota // slot_bytes
    return max(1, int(of_all))


def parse_quotas(given: object, *, has_shared: bool = True) -> tuple[Quota, ...]:
    """Raises ConfigError.

    Args:
        has_shared: there is a shared tier.
    """
    if given is False or given == "off":
        return ()
    if not isinstance(given, Mapping) or not 0 < len(given) <= TENANTS_MAX:
        # What was given is not shown: who misreads the page may have written salts for names.
        raise ConfigError(
            f"quotas must be off, or a mapping of 1 to {TENANTS_MAX} tenants, as in {_EXAMPLE}"
        )
    quotas = tuple(_quota(number, *item) for number, item in enumerate(given.items(), start=1))
    for quota in quotas:
        if quota.shared is not None and not has_shared:
            raise ConfigError(
                f"quotas.{quota.name}.shared is given, and there is no shared tier; take it out, "
                "or set shared"
            )
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
    check_keys(f"{key}.", given, {"salt_file", *TIERS}, set())
    if not given.keys() & set(TIERS):
        raise ConfigError(f"{key} has no quota; write dram, nvme or shared, as in {_EXAMPLE}")
    file = given.get("salt_file")
    if file is not None and not (isinstance(file, str) and Path(file).is_absolute()):
        raise ConfigError(f"{key}.salt_file must be the absolute path of a file that has the salt")
    shared = given.get("shared")
    if isinstance(shared, float) or shared == 1:
        raise ConfigError(
            f"{key}.shared is {shared}, and a share of what no server knows; write a size, as in "
            "500GiB"
        )
    sizes = {tier: _size(f"{key}.{tier}", given[tier]) for tier in TIERS if tier in given}
    return Quota(name=name, salt_file=None if file is None else Path(file), **sizes)


def _size(key: str, value: object) -> Any:
    """A share, which is a float, or bytes. Raises ConfigError."""
    if isinstance(value, float) or value == 1:
        return parse_share(key, value, 1.0)
    return parse_size(key, value, SIZE_MIN, "GiB")
