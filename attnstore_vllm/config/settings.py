# SPDX-License-Identifier: Apache-2.0
"""Settings. Read once, here, at start; everything else takes a typed object. What each is for is
in config/texts.py; a field says here only what its type adds.

It is long since each part of the settings has its type and its parser here.

    # attnstore.yaml: everything has a default but these two
    dram: 64GiB
    nvme: {path: /mnt/nvme/attnstore, capacity: 2TiB}

Every ConfigError names the key, the value that was found, and what would be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from attnstore_vllm.config.audit import BY_DEFAULT, AuditConfig
from attnstore_vllm.config.deadlines import IO_DEADLINE, LOAD_DEADLINE
from attnstore_vllm.config.hbm_holds import HoldingConfig
from attnstore_vllm.config.shared import SharedConfig
from attnstore_vllm.config.tenants import Quota, parse_quotas
from attnstore_vllm.config.values import (
    LEAST,
    SIZE_MIN,
    check_keys,
    parse_directories,
    parse_directory,
    parse_duration,
    parse_integer,
    parse_off_or_size,
    parse_share,
    parse_size,
    parse_switch,
)
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.io.codec import CODEC_NAMES, CODECS, NONE

_SCRUB_MIN = 64 << 10


def _check_number(paths: tuple[Path, ...], engines: int) -> None:
    if len(paths) > engines:
        raise ConfigError(
            f"nvme.path names {len(paths)} directories, but data_parallel_size is {engines}: each "
            f"engine has one file; expected {engines} at most. Give an engine one path, for "
            "instance of a RAID 0 of both disks, or start more engines"
        )


IO_KINDS = ("auto", "uring", "aiofiles")
EVICTIONS = ("attnstore", "lru", "fifo")
DRAM_CODECS = (NONE, "lossless")
Sharing = Literal["everyone", "salted"]
"""Who shares KV: all requests without a cache_salt with each other, and those of one salt; or the
latter alone."""
RecomputeBy = Literal["auto", "first", "deviation"]
"""Which tokens of documents are computed anew: each document's first ones, or those whose K differs
most from what is loaded. `auto`: by the model's depth (scheduler/documents.py)."""


def _sharing(key: str, value: object) -> Sharing:
    for known in ("everyone", "salted"):
        if value == known:
            return known
    raise ConfigError(f"{key} is {value!r}; it must be everyone or salted")


def _recompute_by(value: object) -> RecomputeBy:
    for known in ("auto", "first", "deviation"):
        if value == known:
            return known
    raise ConfigError(f"truncation.recompute_by is {value!r}; it must be auto, first or deviation")


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
    daily_writes_bytes: int | None = None
    """None: no limit."""
    scrub_bytes_per_s: int | None = 8 << 20
    """None: never."""
    codec: str = NONE
    is_for_all: bool = False
    """`approximate: all`."""

    @property
    def changed_by(self) -> str | None:
        """Name and version of the codec if it gives other KV than it got; else None."""
        codec = CODECS.get(self.codec)
        return None if codec is None or codec.is_exact else codec.label

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
        known = {"path", "capacity", "io", "io_deadline", "daily_writes", "scrub", "codec"}
        known.add("approximate")
        check_keys("nvme.", given, known, {"path", "capacity"}, {IO_DEADLINE.old_name})
        path, *more = parse_directories("nvme.path", given["path"])
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
        writes, scrub = given.get("daily_writes", False), given.get("scrub", "8MiB")
        return cls(
            path=path,
            more_paths=tuple(more),
            capacity_bytes=parse_size("nvme.capacity", given["capacity"], SIZE_MIN),
            io=io,
            io_deadline_ms=IO_DEADLINE.parse(given, 5000),
            daily_writes_bytes=parse_off_or_size("nvme.daily_writes", writes, SIZE_MIN, "GiB"),
            scrub_bytes_per_s=parse_off_or_size("nvme.scrub", scrub, _SCRUB_MIN, "MiB"),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningConfig:
    """Limits on what requests may pin (`pin: true`): shares of each tier's slots, and for how
    long."""

    share: float = 0.1
    tenant_share: float = 0.02
    longest_s: float = 3600.0

    @property
    def shares(self) -> tuple[float, float]:
        """The share that can be pinned in all, and that of one tenant."""
        return self.share, self.tenant_share

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
        share = parse_share("pinning.share", given.get("share", 0.1), 0.5)
        one = parse_share(
            "pinning.tenant_share",
            given.get("tenant_share", share / 5),
            share,
            "pinning.share, by default 0.1",
        )
        longest = parse_duration("pinning.longest", given.get("longest", "1h"))
        return cls(share=share, tenant_share=one, longest_s=longest)


def _recompute(value: object) -> float:
    is_off = value in (False, "off")
    return 0.0 if is_off else parse_share("truncation.recompute", value, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationConfig:
    """Whether stored KV may be moved to other positions, for prompts that were cut."""

    enabled: bool = False
    min_tokens: int = 64
    sinks: int = 0
    shared_by: Sharing = "salted"
    """`share`. Moved KV begins and ends at any token (index/prefix.py)."""
    documents: bool = False
    """KV of a prompt's parts is found anywhere, with gaps."""
    recompute: float = 0.15
    """The share of documents that is computed anew."""
    recompute_by: RecomputeBy = "auto"
    """Which of their tokens."""
    recompute_last: int = 0
    """The last so many moved tokens before a prompt's new part are computed."""

    @classmethod
    def parse(cls, given: object) -> TruncationConfig | None:
        if given is False or given == "off":
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(f"truncation is {given!r}; it must be off or {{enabled: true}}")
        known = {"enabled", "min_tokens", "sinks", "share", "documents"}
        known |= {"recompute", "recompute_by", "recompute_last"}
        check_keys("truncation.", given, known, set())
        return cls(
            enabled=parse_switch("truncation.enabled", given.get("enabled", False)),
            min_tokens=parse_integer(
                "truncation.min_tokens", given.get("min_tokens", 64), 32, 65_536
            ),
            sinks=parse_integer("truncation.sinks", given.get("sinks", 0), 0, 65_536),
            shared_by=_sharing("truncation.share", given.get("share", "salted")),
            documents=parse_switch("truncation.documents", given.get("documents", False)),
            recompute=_recompute(given.get("recompute", 0.15)),
            recompute_by=_recompute_by(given.get("recompute_by", "auto")),
            recompute_last=parse_integer(
                "truncation.recompute_last", given.get("recompute_last", 0), 0, 65_536
            ),
        )


def _shared(given: object, nvme: NvmeConfig) -> SharedConfig | None:
    if given is False or given == "off":
        return None
    if nvme.changed_by is not None:
        raise ConfigError(
            f"nvme.codec is {nvme.codec}, which changes KV, and shared is set. What comes from "
            "others does not say whether it may be changed; set shared: off, or codec: lossless"
        )
    return SharedConfig.parse(given)


def _dram(given: object) -> tuple[int, str]:
    """Its bytes and its codec."""
    if not isinstance(given, Mapping):
        return parse_size("dram", given, SIZE_MIN), NONE
    check_keys("dram.", given, {"size", "codec"}, {"size"})
    codec = given.get("codec", NONE)
    if codec not in DRAM_CODECS:
        raise ConfigError(f"dram.codec is {codec!r}; it must be one of {', '.join(DRAM_CODECS)}")
    return parse_size("dram.size", given["size"], SIZE_MIN), codec


def _audit_beside(dram: str, nvme: NvmeConfig, given: Mapping[str, object]) -> AuditConfig | None:
    """`audit`. Raises ConfigError, also for what does not go with KV that DRAM keeps encoded."""
    audit = AuditConfig.parse(given["audit"]) if "audit" in given else BY_DEFAULT
    if dram == NONE:
        return audit
    if nvme.codec != NONE:
        raise ConfigError(
            f"dram.codec is {dram} and nvme.codec {nvme.codec}; NVMe keeps the bytes that DRAM "
            "has, so leave one of the two out"
        )
    if audit is not None and not audit.by_default:
        raise ConfigError(
            f"dram.codec is {dram} and audit is set, which compares KV that is not encoded; leave "
            "one of the two out"
        )
    return None


def _states_every(given: object) -> int | None:
    """StoreConfig.states_every."""
    if given == "auto":
        return None
    if given is False or given == "off":
        return 0
    return parse_integer("states_every", given, 16, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Where a trace of requests is written: hashes and lengths, never tokens."""

    path: Path
    """A directory (created with mode 0700 if only its last part is missing)."""
    sample: float = 1.0
    size_bytes: int = 256 << 20

    @classmethod
    def parse(cls, given: object) -> TraceConfig | None:
        if given is False or given == "off":
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(f"trace is {given!r}; it must be off or {{path: /var/log/attnstore}}")
        known = {"path", "sample", "size"}
        check_keys("trace.", given, known, set())
        return cls(
            path=parse_directory("trace.path", given.get("path")),
            sample=parse_share("trace.sample", given.get("sample", 1), 1),
            size_bytes=parse_size("trace.size", given.get("size", "256MiB"), SIZE_MIN, "MiB"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """All settings. Sizes are in bytes and are those of the whole server, all ranks together."""

    dram_bytes: int
    nvme: NvmeConfig
    dram_codec: str = NONE
    """How DRAM keeps KV; all behind it keep the same bytes."""
    chunk_tokens: int = 256
    load_deadline_ms: int = 1000
    step_budget: int = 1 << 17
    eviction: Literal["attnstore", "lru", "fifo"] = "attnstore"
    look_ahead: bool = True
    compute_if_sooner: bool = True
    write_buffer_bytes: int | None = None
    """None: `auto`."""
    states_every: int | None = None
    """None: `auto`; 0: none are kept."""
    ttl_s: float | None = None
    """None: KV stays while there is room."""
    pinning: PinningConfig | None = None
    """None: nothing may be pinned."""
    holding: HoldingConfig | None = None
    """None: no HBM is held."""
    quotas: tuple[Quota, ...] = ()
    """One for each tenant that has one."""
    shared_by: Sharing = "everyone"
    """`share`."""
    truncation: TruncationConfig | None = TruncationConfig()
    """None: no request may ask for it."""
    shared: SharedConfig | None = None
    trace: TraceConfig | None = None
    audit: AuditConfig | None = BY_DEFAULT
    """None: no hit is computed to be compared."""
    io_depth: int = 8
    peers: bool = True
    data_parallel_size: int = 1

    @classmethod
    def parse(cls, given: object) -> StoreConfig:
        """Build from the YAML or vLLM's kv_connector_extra_config. Raises ConfigError."""
        if not isinstance(given, Mapping):
            found = "empty" if given is None else repr(given)
            raise ConfigError(
                f"the settings of AttnStore are {found}; they must be a mapping, as in\n{LEAST}"
            )
        typed = {"dram_bytes", "dram_codec", "load_deadline_ms", "ttl_s", "write_buffer_bytes"}
        named = {"dram", LOAD_DEADLINE.name, "ttl", "write_buffer", "share"}
        known = ({f.name for f in fields(cls)} - typed - {"shared_by"}) | named
        check_keys("", given, known, {"dram", "nvme"}, {LOAD_DEADLINE.old_name})
        optional = {
            key: parse_integer(key, given[key], low, high)
            for key, low, high in (
                ("chunk_tokens", 16, 4096),
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
            parse_switch(key, given.get(key, True)) for key in ("look_ahead", "compute_if_sooner")
        )
        peers = given.get("peers", "auto")
        if peers not in ("auto", "off", False):
            raise ConfigError(f"peers is {peers!r}; it must be auto or off")
        ttl = given.get("ttl", False)
        ttl_s = None if ttl is False or ttl == "off" else parse_duration("ttl", ttl)
        if ttl_s is not None and eviction != "attnstore":
            raise ConfigError(
                f"ttl is {ttl!r} and eviction {eviction!r}; only eviction: attnstore knows when "
                "each chunk was used last"
            )
        dram_bytes, dram_codec = _dram(given["dram"])
        nvme = NvmeConfig.parse(given["nvme"])
        audit = _audit_beside(dram_codec, nvme, given)
        if "data_parallel_size" in optional:  # else vLLM's command line may fill it in
            _check_number(nvme.paths, optional["data_parallel_size"])
        truncation = TruncationConfig.parse(given.get("truncation", {}))
        tier = _shared(given.get("shared", False), nvme)
        buffer = given.get("write_buffer", "auto")
        buffer_bytes = (
            None if buffer == "auto" else parse_size("write_buffer", buffer, SIZE_MIN, "MiB")
        )
        return cls(
            dram_bytes=dram_bytes,
            dram_codec=dram_codec,
            nvme=nvme,
            load_deadline_ms=LOAD_DEADLINE.parse(given, 1000),
            eviction=eviction,
            look_ahead=look_ahead,
            compute_if_sooner=compute_if_sooner,
            peers=peers == "auto",
            states_every=_states_every(given.get("states_every", "auto")),
            ttl_s=ttl_s,
            pinning=PinningConfig.parse(given.get("pinning", False)),
            holding=HoldingConfig.parse(given.get("holding", False)),
            quotas=parse_quotas(given.get("quotas", False), has_shared=tier is not None),
            write_buffer_bytes=buffer_bytes,
            truncation=truncation,
            shared=tier,
            trace=TraceConfig.parse(given.get("trace", False)),
            audit=audit,
            shared_by=_sharing("share", given.get("share", "everyone")),
            **optional,
        )

    def siblings(self) -> list[Path]:
        """The directories of the other engines that share the sizes, if they are to be asked; of
        one engine's part."""
        whole, size = self.nvme.whole, self.data_parallel_size
        # What comes from others does not say whether a codec may change it.
        if not self.peers or self.nvme.changed_by or whole is None:
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
            quotas=tuple(quota.share(self.data_parallel_size) for quota in self.quotas),
            shared=self.shared and self.shared.share(self.data_parallel_size),
            audit=self.audit and self.audit.share(self.data_parallel_size),
            trace=self.trace
            and replace(
                self.trace,
                path=Path(f"{self.trace.path}-dp{dp_rank}"),
                size_bytes=self.trace.size_bytes // self.data_parallel_size,
            ),
        )
