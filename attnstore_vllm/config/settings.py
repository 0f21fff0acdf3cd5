# SPDX-License-Identifier: Apache-2.0
"""Settings. Read once, here, at start; everything else takes a typed object.

It is long since each part of the settings has its type and its parser here.

    # attnstore.yaml: everything has a default but these two
    dram: 64GiB
    nvme: {path: /mnt/nvme/attnstore, capacity: 2TiB}

Every ConfigError names the key, the value that was found, and what would be right.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import yaml

from attnstore_vllm.config import shared
from attnstore_vllm.config.shared import SharedConfig
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.io.codec import CODEC_NAMES, CODECS, NONE

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
_SCRUB_MIN = 64 << 10


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
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DURATION_MIN_S, DURATION_MAX_S = 1, 366 * 86_400


def seconds_of(value: object) -> float | None:
    """Seconds of 90, "90s", "10m", "1h" or "2d"; None if that is no duration from 1 s to a year.

    Requests may give numbers, which are seconds; settings may not.
    """
    if isinstance(value, str) and len(value) < 32 and (match := _DURATION.fullmatch(value)):
        value = float(match[1]) * _SECONDS[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if DURATION_MIN_S <= value <= DURATION_MAX_S else None


def _duration(key: str, value: object) -> float:
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
                f"{where}{key} is missing; AttnStore needs dram and nvme, as in\n{LEAST}"
            )


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value


def _integer(key: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{key} is {value!r}; it must be an integer from {low} to {high}")
    return value


def _off_or_size(key: str, value: object, least: int, unit: str) -> int | None:
    """Bytes, or None where the value is `off` (YAML reads that as False)."""
    return None if value is False or value == "off" else parse_size(key, value, least, unit)


def _directory(key: str, raw: object) -> Path:
    if not isinstance(raw, str) or not raw or "\0" in raw:
        raise ConfigError(f"{key} is {raw!r}; it must be an absolute directory")
    path = Path(raw)
    if not path.is_absolute():
        home = os.path.expanduser(raw) if raw.isprintable() else "~"
        hint = "" if home.startswith("~") else f", as in {Path.cwd() / home}"
        raise ConfigError(f"{key} is {raw!r}, which is relative; write an absolute path{hint}")
    return path


def _directories(key: str, raw: object) -> tuple[Path, ...]:
    """One directory, or a list of them that lie beside each other."""
    if not isinstance(raw, list):
        return (_directory(key, raw),)
    if not raw:
        raise ConfigError(f"{key} is []; it must be an absolute directory, or a list of them")
    paths = tuple(_directory(key, each) for each in raw)
    for one, other in permutations(paths, 2):
        if one == other or one in other.parents:
            how = "twice" if one == other else f"and {str(other)!r} inside it"
            raise ConfigError(
                f"{key} names {str(one)!r} {how}; name one directory of each disk, and none twice"
            )
    return paths


def _check_number(paths: tuple[Path, ...], engines: int) -> None:
    if len(paths) > engines:
        raise ConfigError(
            f"nvme.path names {len(paths)} directories, but data_parallel_size is {engines}: each "
            f"engine has one file; expected {engines} at most. Give an engine one path, for "
            "instance of a RAID 0 of both disks, or start more engines"
        )


IO_KINDS = ("auto", "uring", "aiofiles")
EVICTIONS = ("attnstore", "lru", "fifo")
Sharing = Literal["everyone", "salted"]
"""Who shares KV: all requests without a cache_salt with each other, and those of one salt; or the
latter alone."""


def _sharing(key: str, value: object) -> Sharing:
    for known in ("everyone", "salted"):
        if value == known:
            return known
    raise ConfigError(f"{key} is {value!r}; it must be everyone or salted")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeConfig:
    """The slab file's directory (created with mode 0700 if only its last part is missing)."""

    path: Path
    """One engine's own; of the whole server's settings the first that they name."""
    capacity_bytes: int
    more_paths: tuple[Path, ...] = ()
    """The others of a list, over which data-parallel engines are spread."""
    whole: NvmeConfig | None = None
    """The settings that this is one engine's part of."""
    io: Literal["auto", "uring", "aiofiles"] = "auto"
    io_deadline_ms: int = 5000
    """A request that takes longer puts the tier out of use for a while."""
    daily_writes_bytes: int | None = None
    """The most that is written a day, to spare the disk; None: no limit."""
    scrub_bytes_per_s: int | None = 8 << 20
    """The speed at which cold records are read again, to find rot early; None: never."""
    codec: str = NONE
    """The codec that KV on the disk is encoded with."""
    is_for_all: bool = False
    """`approximate: all`: with a codec that changes KV, every request may get such that does not
    say otherwise; else only those that ask for it."""

    @property
    def changes_kv(self) -> bool:
        """Whether the codec gives other KV than it got."""
        return self.codec != NONE and not CODECS[self.codec].is_exact

    @property
    def paths(self) -> tuple[Path, ...]:
        """All that the settings name, in their order."""
        return (self.path, *self.more_paths)

    @property
    def named_path(self) -> Path:
        """The one of them that this engine's directory is, or lies in."""
        return self.path if self.whole is None else self.path.parent

    @property
    def group_path(self) -> Path:
        """The one that all engines know: what they have in common lies there."""
        return (self.whole or self).path

    @classmethod
    def parse(cls, given: object) -> NvmeConfig:
        if not isinstance(given, Mapping):
            raise ConfigError(f"nvme is {given!r}; it must be {{path: ..., capacity: ...}}")
        known = {"path", "capacity", "io", "io_deadline_ms", "daily_writes", "scrub", "codec"}
        known.add("approximate")
        check_keys("nvme.", given, known, {"path", "capacity"})
        path, *more = _directories("nvme.path", given["path"])
        io = given.get("io", "auto")
        if io not in IO_KINDS:
            raise ConfigError(f"nvme.io is {io!r}; it must be one of {', '.join(IO_KINDS)}")
        codec = given.get("codec", NONE)
        if codec not in CODEC_NAMES:
            raise ConfigError(
                f"nvme.codec is {codec!r}; it must be one of {', '.join(CODEC_NAMES)}"
            )
        who = given.get("approximate", "asked")
        if who not in ("asked", "all"):
            raise ConfigError(f"nvme.approximate is {who!r}; it must be asked or all")
        if who == "all" and (codec == NONE or CODECS[codec].is_exact):
            raise ConfigError(
                f"nvme.approximate is all, but nvme.codec: {codec} changes no KV; leave it out"
            )
        deadline = given.get("io_deadline_ms", 5000)
        writes, scrub = given.get("daily_writes", False), given.get("scrub", "8MiB")
        return cls(
            path=path,
            more_paths=tuple(more),
            capacity_bytes=parse_size("nvme.capacity", given["capacity"], SIZE_MIN),
            io=io,
            io_deadline_ms=_integer("nvme.io_deadline_ms", deadline, 100, 600_000),
            daily_writes_bytes=_off_or_size("nvme.daily_writes", writes, SIZE_MIN, "GiB"),
            scrub_bytes_per_s=_off_or_size("nvme.scrub", scrub, _SCRUB_MIN, "MiB"),
            codec=codec,
            is_for_all=who == "all",
        )

    def engine_path(self, rank: int, ranks: int) -> Path:
        """The directory of an engine, by its rank alone: it finds its file again after a restart.

        Engines of one path follow each other, as the GPUs of a NUMA node do.
        """
        return self.paths[rank * len(self.paths) // ranks] / f"dp{rank}"

    def share(self, rank: int, ranks: int) -> NvmeConfig:
        """One engine's part: a directory of its own, an equal share of the rest."""

        def part(num_bytes: int | None) -> int | None:
            return None if num_bytes is None else max(1, num_bytes // ranks)

        return replace(
            self,
            path=self.engine_path(rank, ranks),
            more_paths=(),
            whole=self,
            capacity_bytes=self.capacity_bytes // ranks,
            daily_writes_bytes=part(self.daily_writes_bytes),
            scrub_bytes_per_s=part(self.scrub_bytes_per_s),
        )


def _share(key: str, value: object, most: float, most_of: str = "") -> float:
    """Args: most_of: the setting that `most` comes from."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most:
        return float(value)
    limit = most_of and f" (no more than {most_of})"
    raise ConfigError(f"{key} is {value!r}; it must be a share above 0, {most:g} at most{limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningConfig:
    """Limits on what requests may pin (`pin: true`): shares of each tier's slots, and for how
    long."""

    share: float = 0.1
    tenant_share: float = 0.02
    longest_s: float = 3600.0

    @classmethod
    def parse(cls, given: object) -> PinningConfig | None:
        if given is False or given == "off":
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"pinning is {given!r}; it must be off or "
                "{share: 0.1, tenant_share: 0.02, longest: 1h}"
            )
        check_keys("pinning.", given, {"share", "tenant_share", "longest"}, set())
        share = _share("pinning.share", given.get("share", 0.1), 0.5)
        one = _share(
            "pinning.tenant_share",
            given.get("tenant_share", share / 5),
            share,
            "pinning.share, by default 0.1",
        )
        longest = _duration("pinning.longest", given.get("longest", "1h"))
        return cls(share=share, tenant_share=one, longest_s=longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationConfig:
    """Whether stored KV may be moved to other positions, for prompts that were cut."""

    enabled: bool = False
    """For every request that does not say otherwise; else only for those that ask for it."""
    min_tokens: int = 64
    """Fewer in a row are computed."""
    sinks: int = 0
    """First tokens of a prompt that are never moved ones."""
    shared_by: Sharing = "salted"
    """`share`: who can be served with whose KV, moved. It begins and ends at any token, so that
    who shares it can read the prompts of the others token by token."""

    @classmethod
    def parse(cls, given: object) -> TruncationConfig | None:
        if given is False or given == "off":
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(f"truncation is {given!r}; it must be off or {{enabled: true}}")
        check_keys("truncation.", given, {"enabled", "min_tokens", "sinks", "share"}, set())
        return cls(
            enabled=_switch("truncation.enabled", given.get("enabled", False)),
            min_tokens=_integer("truncation.min_tokens", given.get("min_tokens", 64), 32, 65_536),
            sinks=_integer("truncation.sinks", given.get("sinks", 0), 0, 65_536),
            shared_by=_sharing("truncation.share", given.get("share", "salted")),
        )


def _shared(given: object, nvme: NvmeConfig) -> SharedConfig | None:
    if given is False or given == "off":
        return None
    if nvme.changes_kv:
        raise ConfigError(
            f"nvme.codec is {nvme.codec}, which changes KV, and shared is set. What comes from "
            "others does not say whether it may be changed; set shared: off, or codec: lossless"
        )
    if not isinstance(given, Mapping) or ("redis" in given) == ("mooncake" in given):
        # Not as it was given: there may be a password in it.
        raise ConfigError(
            "shared must be off, {redis: redis://host:6379/0} or {mooncake: {master: host:port}}"
        )
    kind = "redis" if "redis" in given else "mooncake"
    check_keys("shared.", given, shared.KEYS, set())
    for key in sorted(shared.REDIS_KEYS & given.keys()) if kind == "mooncake" else ():
        raise ConfigError(f"shared.{key} is for Redis: Mooncake has neither passwords nor TLS")
    is_redis = kind == "redis"
    bandwidth, writes = given.get("bandwidth", False), given.get("daily_writes", False)
    options = shared.redis_options(given) if is_redis else shared.mooncake_options(given[kind])
    return SharedConfig(
        kind=kind,
        options=tuple(sorted(options.items())),
        password_file=shared.file_of("password_file", given),
        secret_file=shared.file_of("secret_file", given),
        deadline_ms=_integer("shared.deadline_ms", given.get("deadline_ms", 500), 10, 10_000),
        bandwidth_bytes=_off_or_size("shared.bandwidth", bandwidth, SIZE_MIN, "MiB"),
        daily_writes_bytes=_off_or_size("shared.daily_writes", writes, SIZE_MIN, "GiB"),
        prefix=shared.prefix_of(given.get("prefix", "as1/")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Where a trace of requests is written: hashes and lengths, never tokens."""

    path: Path
    """A directory (created with mode 0700 if only its last part is missing)."""
    sample: float = 1.0
    """The share of conversations that are in it."""
    size_bytes: int = 256 << 20
    """The trace ends there."""

    @classmethod
    def parse(cls, given: object) -> TraceConfig | None:
        if given is False or given == "off":
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(f"trace is {given!r}; it must be off or {{path: /var/log/attnstore}}")
        known = {"path", "sample", "size"}
        check_keys("trace.", given, known, set())
        return cls(
            path=_directory("trace.path", given.get("path")),
            sample=_share("trace.sample", given.get("sample", 1), 1),
            size_bytes=parse_size("trace.size", given.get("size", "256MiB"), SIZE_MIN, "MiB"),
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
    step_budget: int = 1 << 17
    """Prompt tokens that are looked up in one step of the engine; what is beyond waits for a later
    one."""
    eviction: Literal["attnstore", "lru", "fifo"] = "attnstore"
    """Who leaves a full tier, of what nobody waits for: what is least likely to return soon; the
    others are there to compare with."""
    look_ahead: bool = True
    """Bring up from NVMe what waiting requests want; off only to compare with."""
    compute_if_sooner: bool = True
    """Compute what is stored where that is measured to be sooner than loading it."""
    write_buffer_bytes: int | None = None
    """HBM of each GPU that KV waits in on its way to DRAM; None: room for two steps' tokens. Of no
    account where the model runs on the CPU."""
    states_every: int | None = None
    """Tokens of a prompt between the states that recurrent layers keep while there is room; None:
    where vLLM's steps end, if that is measured to pay; 0: none are kept."""
    ttl_s: float | None = None
    """After so long without use KV is not found any more; None: it stays while there is room."""
    pinning: PinningConfig | None = None
    """Limits on what requests may pin; None: nothing."""
    shared_by: Sharing = "everyone"
    """`share`. With "salted" requests without a cache_salt neither find nor leave KV."""
    truncation: TruncationConfig | None = TruncationConfig()
    """KV of prompts that were cut; None: no request may ask for it."""
    shared: SharedConfig | None = None
    """A tier behind NVMe that several servers share; None: there is none."""
    trace: TraceConfig | None = None
    """A trace of requests for `attnstore simulate` and `plan`; None: none is written."""
    io_depth: int = 8
    """Requests in flight on the device; half of them may be writes."""
    peers: bool = True
    """Data-parallel engines of one host read each other's DRAM and NVMe."""
    data_parallel_size: int = 1
    """Engines that share the two sizes. `vllm serve -dp N` fills it in."""

    @classmethod
    def parse(cls, given: object) -> StoreConfig:
        """Build from the YAML or vLLM's kv_connector_extra_config. Raises ConfigError."""
        if not isinstance(given, Mapping):
            found = "empty" if given is None else repr(given)
            raise ConfigError(
                f"the settings of AttnStore are {found}; they must be a mapping, as in\n{LEAST}"
            )
        typed = {"dram_bytes", "ttl_s", "write_buffer_bytes", "shared_by"}
        named = {"dram", "ttl", "write_buffer", "share"}
        known = ({f.name for f in fields(cls)} - typed) | named
        check_keys("", given, known, {"dram", "nvme"})
        optional = {
            key: _integer(key, given[key], low, high)
            for key, low, high in (
                ("chunk_tokens", 16, 4096),
                ("load_deadline_ms", 0, 60_000),
                ("step_budget", 1024, 1 << 30),
                ("io_depth", 2, 1024),
                ("data_parallel_size", 1, 4096),
            )
            if key in given
        }
        eviction = given.get("eviction", "attnstore")
        if eviction not in EVICTIONS:
            raise ConfigError(f"eviction is {eviction!r}; it must be one of {', '.join(EVICTIONS)}")
        look_ahead, compute_if_sooner = (
            _switch(key, given.get(key, True)) for key in ("look_ahead", "compute_if_sooner")
        )
        peers = given.get("peers", "auto")
        if peers not in ("auto", "off", False):
            raise ConfigError(f"peers is {peers!r}; it must be auto or off")
        every = given.get("states_every", "auto")
        if every != "auto":
            is_off = every is False or every == "off"
            every = 0 if is_off else _integer("states_every", every, 16, 1 << 20)
        ttl = given.get("ttl", False)
        ttl_s = None if ttl is False or ttl == "off" else _duration("ttl", ttl)
        if ttl_s is not None and eviction != "attnstore":
            raise ConfigError(
                f"ttl is {ttl!r} and eviction {eviction!r}; only eviction: attnstore knows when "
                "each chunk was used last"
            )
        dram = parse_size("dram", given["dram"], SIZE_MIN)
        nvme = NvmeConfig.parse(given["nvme"])
        if "data_parallel_size" in optional:  # else vLLM's command line may fill it in
            _check_number(nvme.paths, optional["data_parallel_size"])
        pinning = PinningConfig.parse(given.get("pinning", False))
        truncation = TruncationConfig.parse(given.get("truncation", {}))
        tier = _shared(given.get("shared", False), nvme)
        buffer = given.get("write_buffer", "auto")
        buffer_bytes = (
            None if buffer == "auto" else parse_size("write_buffer", buffer, SIZE_MIN, "MiB")
        )
        return cls(
            dram_bytes=dram,
            nvme=nvme,
            eviction=eviction,
            look_ahead=look_ahead,
            compute_if_sooner=compute_if_sooner,
            peers=peers == "auto",
            states_every=None if every == "auto" else every,
            ttl_s=ttl_s,
            pinning=pinning,
            write_buffer_bytes=buffer_bytes,
            truncation=truncation,
            shared=tier,
            trace=TraceConfig.parse(given.get("trace", False)),
            shared_by=_sharing("share", given.get("share", "everyone")),
            **optional,
        )

    def siblings(self) -> list[Path]:
        """The directories of the other engines that share the sizes, if they are to be asked; of
        one engine's part."""
        whole, size = self.nvme.whole, self.data_parallel_size
        # What comes from others does not say whether a codec may change it.
        if not self.peers or self.nvme.changes_kv or whole is None:
            return []
        dirs = (whole.engine_path(rank, size) for rank in range(size))
        return [directory for directory in dirs if directory != self.nvme.path]

    def share(self, dp_rank: int | None) -> StoreConfig:
        """The part of one data-parallel engine: `path/dp<rank>` and an equal share of both sizes.

        Args:
            dp_rank: None where the server is a single engine.
        Raises: ConfigError.
        """
        _check_number(self.nvme.paths, self.data_parallel_size)
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
            shared=self.shared and self.shared.share(self.data_parallel_size),
            trace=self.trace
            and replace(
                self.trace,
                path=Path(f"{self.trace.path}-dp{dp_rank}"),
                size_bytes=self.trace.size_bytes // self.data_parallel_size,
            ),
        )
