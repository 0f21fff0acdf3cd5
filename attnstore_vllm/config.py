# SPDX-License-Identifier: Apache-2.0
"""Settings. Read once, here, at start; everything else takes a typed object.

    # attnstore.yaml: everything has a default but these two
    dram: 64GiB
    nvme: {path: /mnt/nvme/attnstore, capacity: 2TiB}

Every ConfigError names the key, the value that was found, and what would be right.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from attnstore_vllm.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_size(key: str, value: object) -> int:
    """Bytes of "64GiB", "1.5 TB" or a plain integer. Raises ConfigError naming `key`."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, unit = match.groups()
        num_bytes = int(float(number) * _UNITS.get(unit.lower(), 0))
        if num_bytes > 0:
            return num_bytes
    raise ConfigError(
        f"{key} is {value!r}, which is no size; write a number and a unit, as in 64GiB or 2TiB"
    )


def format_size(num_bytes: int) -> str:
    """The size as a person would write it, e.g. 1.5GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g}{unit}"
        size /= 1024
    return f"{size:.4g}TiB"


def check_keys(where: str, given: Mapping[str, Any], known: set[str], required: set[str]) -> None:
    """Raise ConfigError for the first unknown key (with the nearest known one) or missing key."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{where}{key} is not a setting of AttnStore; {hint}")
    for key in sorted(required):
        if key not in given:
            raise ConfigError(
                f"{where}{key} is missing; AttnStore needs dram and nvme, as in\n"
                "  dram: 64GiB\n  nvme: {path: /mnt/nvme/attnstore, capacity: 2TiB}"
            )


def _integer(key: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{key} is {value!r}; it must be an integer from {low} to {high}")
    return value


def _off_or_size(key: str, value: object) -> int | None:
    """Bytes, or None where the value is `off` (YAML reads that as False)."""
    return None if value is False or value == "off" else parse_size(key, value)


IO_KINDS = ("auto", "uring", "aiofiles")
EVICTIONS = ("attnstore", "lru", "fifo")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeConfig:
    """The slab file's directory (created with mode 0700 if only its last part is missing)."""

    path: Path
    capacity_bytes: int
    io: Literal["auto", "uring", "aiofiles"] = "auto"
    io_deadline_ms: int = 5000
    """A request that takes longer puts the tier out of use for a while."""
    daily_writes_bytes: int | None = None
    """The most that is written a day, to spare the disk; None: no limit."""
    scrub_bytes_per_s: int | None = 8 << 20
    """What cold records are read again with, to find rot early; None: never."""

    @classmethod
    def parse(cls, given: object) -> NvmeConfig:
        if not isinstance(given, Mapping):
            raise ConfigError(f"nvme is {given!r}; it must be {{path: ..., capacity: ...}}")
        known = {"path", "capacity", "io", "io_deadline_ms", "daily_writes", "scrub"}
        check_keys("nvme.", given, known, {"path", "capacity"})
        raw = given["path"]
        if not isinstance(raw, str) or not raw:
            raise ConfigError(f"nvme.path is {raw!r}; it must be an absolute directory")
        path = Path(raw)
        if not path.is_absolute():
            raise ConfigError(
                f"nvme.path is {raw!r}, which is relative; write an absolute path, "
                f"as in {Path.cwd() / raw}"
            )
        io = given.get("io", "auto")
        if io not in IO_KINDS:
            raise ConfigError(f"nvme.io is {io!r}; it must be one of {', '.join(IO_KINDS)}")
        deadline = given.get("io_deadline_ms", 5000)
        writes, scrub = given.get("daily_writes", False), given.get("scrub", "8MiB")
        return cls(
            path=path,
            capacity_bytes=parse_size("nvme.capacity", given["capacity"]),
            io=io,
            io_deadline_ms=_integer("nvme.io_deadline_ms", deadline, 100, 600_000),
            daily_writes_bytes=_off_or_size("nvme.daily_writes", writes),
            scrub_bytes_per_s=_off_or_size("nvme.scrub", scrub),
        )

    def share(self, rank: int, ranks: int) -> NvmeConfig:
        """One engine's part: a directory of its own, an equal share of the rest."""

        def part(num_bytes: int | None) -> int | None:
            return None if num_bytes is None else max(1, num_bytes // ranks)

        return replace(
            self,
            path=self.path / f"dp{rank}",
            capacity_bytes=self.capacity_bytes // ranks,
            daily_writes_bytes=part(self.daily_writes_bytes),
            scrub_bytes_per_s=part(self.scrub_bytes_per_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """All settings. Sizes are in bytes and are those of the whole server, all ranks together."""

    dram_bytes: int
    nvme: NvmeConfig
    chunk_tokens: int = 256
    """Tokens a chunk has; rounded up to whole blocks of vLLM."""
    load_deadline_ms: int = 1000
    """How long a request waits for its chunks to come up from NVMe before it computes them."""
    eviction: Literal["attnstore", "lru", "fifo"] = "attnstore"
    """Who leaves a full tier, of what nobody waits for: what is least likely to return soon; the
    others are there to compare with."""
    look_ahead: bool = True
    """Bring up from NVMe what waiting requests want; off only to compare with."""
    io_depth: int = 8
    """Requests in flight on the device; half of them may be writes."""
    data_parallel_size: int = 1
    """Engines that share the two sizes. `vllm serve -dp N` fills it in."""

    @classmethod
    def parse(cls, given: object) -> StoreConfig:
        """Build from the YAML or vLLM's kv_connector_extra_config. Raises ConfigError."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"the settings of AttnStore are {given!r}; they must be a mapping")
        known = ({f.name for f in fields(cls)} - {"dram_bytes"}) | {"dram"}
        check_keys("", given, known, {"dram", "nvme"})
        optional = {
            key: _integer(key, given[key], low, high)
            for key, low, high in (
                ("chunk_tokens", 16, 4096),
                ("load_deadline_ms", 0, 60_000),
                ("io_depth", 2, 1024),
                ("data_parallel_size", 1, 4096),
            )
            if key in given
        }
        eviction = given.get("eviction", "attnstore")
        if eviction not in EVICTIONS:
            raise ConfigError(f"eviction is {eviction!r}; it must be one of {', '.join(EVICTIONS)}")
        look_ahead = given.get("look_ahead", True)
        if not isinstance(look_ahead, bool):
            raise ConfigError(f"look_ahead is {look_ahead!r}; it must be true or false")
        dram = parse_size("dram", given["dram"])
        nvme = NvmeConfig.parse(given["nvme"])
        return cls(dram_bytes=dram, nvme=nvme, eviction=eviction, look_ahead=look_ahead, **optional)

    def share(self, dp_rank: int | None) -> StoreConfig:
        """The part of one data-parallel engine: `path/dp<rank>` and an equal share of both sizes.

        Args:
            dp_rank: None where the server is a single engine.
        """
        if dp_rank is None:
            return self
        if not 0 <= dp_rank < self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_size is {self.data_parallel_size}, but this engine has data-"
                f"parallel rank {dp_rank}; set data_parallel_size to the number of engines"
            )
        return replace(
            self,
            dram_bytes=self.dram_bytes // self.data_parallel_size,
            nvme=self.nvme.share(dp_rank, self.data_parallel_size),
        )
