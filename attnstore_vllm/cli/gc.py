# SPDX-License-Identifier: Apache-2.0
"""`attnstore gc DIR`: delete by age, namespace, tenant or size. Says what would go; --yes does it.

What goes is what all given rules name. It is punched out of the file, with all that holds nothing,
such as KV of before a reset: that goes also where the rules name nothing that is there.
So does KV that an audit has kept aside, in files of its own; a size says nothing of these.
The bytes are gone, and the file system has the space until the next server start reserves it.
Looking is safe beside a running server; to delete, it must be stopped.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from attnstore_vllm.cli.slab_file import RecordState, SlabFile, opened, stored_files
from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.plain_text import quantity
from attnstore_vllm.preflight import lock_directory
from attnstore_vllm.tiers.nvme.aside import kept, remove
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES, SegmentHeader
from attnstore_vllm.tiers.nvme.slab import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_ASIDE = "(an audit's)"
"""In the place of a model's name, which a file that an audit has kept does not say."""
_SHOWN = 16
"""Characters of a name that a person is shown; as many as tell namespaces apart."""


def parse_age(text: str) -> float:
    """Seconds of "7d", "12h", "30m". Raises: ConfigError."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--older-than is {text!r}; write a number and a unit (s, m, h, d, w), as in 7d"
        )
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which records go: those for which all rules hold."""

    older_than_s: float | None = None
    namespace: str | None = None
    """The beginning of its hexadecimal name, as `attnstore inspect` shows it; of one only."""
    tenant: str | None = None
    """The cache_salt; the store has only a hash of it."""
    to_size: int | None = None
    """The oldest segments of them go, until the rest takes no more bytes. Segments go whole, and
    only if nothing else is in them."""


@dataclass(slots=True)
class Part:
    """One tenant's part of a namespace: how much there is, and how much goes."""

    namespace: bytes
    label: str
    tenant: bytes
    stored: int = 0
    records: int = 0
    bytes: int = 0

    @property
    def tenant_name(self) -> str:
        return "no cache_salt" if self.tenant == tenant_hash(None) else self.tenant.hex()[:_SHOWN]

    def as_json(self) -> dict[str, Any]:
        tenant = None if self.tenant == tenant_hash(None) else self.tenant.hex()
        return {
            "namespace": self.namespace.hex(),
            "label": self.label,
            "tenant_hash": tenant,
            "stored": self.stored,
            "records": self.records,
            "bytes": self.bytes,
        }


@dataclass(slots=True)
class Report:
    """The records that go, or are gone."""

    parts: list[Part]
    """All there is, also what stays."""
    is_done: bool
    freed_bytes: int = 0
    """That the file system has back."""
    audit_files: int = 0
    """Chunks that an audit has kept aside."""
    nodes: list[str] = field(default_factory=list)
    """Words on the files that nothing goes from."""

    @property
    def records(self) -> int:
        return sum(part.records for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        going = [part.as_json() for part in self.parts if part.records]
        return {
            "deleted": self.is_done,
            "records": self.records,
            "bytes": self.bytes,
            "freed_bytes": self.freed_bytes,
            "audit_files": self.audit_files,
            "parts": going,
        }


class _Stored(NamedTuple):
    """A good record; a file may have millions, so no more of it than is needed."""

    offset: int
    tenant: bytes
    written_at: int


@dataclass(slots=True)
class _Segment:
    header: SegmentHeader
    going: list[_Stored] = field(default_factory=list)
    staying: list[_Stored] = field(default_factory=list)

    @property
    def records(self) -> list[_Stored]:
        return [*self.going, *self.staying]

    @property
    def age(self) -> tuple[int, int]:
        """Less is older."""
        return self.header.last_used, max(record.written_at for record in self.records)

    def taken_bytes(self) -> int:
        kept = len(self.staying) * self.header.record_bytes
        return PAGE_BYTES + kept if kept else 0


def collect(directory: Path, rules: Rules, *, is_dry: bool) -> Report:
    """Find what goes, and delete it unless `is_dry`.

    Raises: ConfigError, also for a namespace or tenant that is not there, and where a running
        server owns the directory that is to be changed; OSError.
    """
    paths, nodes = stored_files(directory)
    if not paths:
        raise ConfigError(_of_a_node(nodes[0]))
    with ExitStack() as stack:
        if not is_dry:
            for path in paths:
                stack.callback(os.close, lock_directory(path.parent))
        slabs = [stack.enter_context(opened(path, writable=not is_dry)) for path in paths]
        found = [_read(slab) for slab in slabs]
        parts = _parts(segment for file in found for segment in file)
        aside = [head for path in paths for _, head in kept(path.parent)]
        for head in aside:
            if (whose := _whose(head)) is not None:
                parts.setdefault(whose, Part(whose[0], _ASIDE, whose[1]))
        try:
            rules = _known(rules, list(parts.values()))
        except ConfigError as error:
            raise ConfigError(f"{error}\n{_unheld(slabs, found, is_dry=is_dry)}") from None
        size = None if rules.to_size is None else rules.to_size // len(paths)
        for file in found:
            _choose(file, rules, size)
        for segment in (segment for file in found for segment in file):
            for record in segment.going:
                part = parts[segment.header.namespace, record.tenant]
                part.records += 1
                part.bytes += segment.header.record_bytes
        report = Report(list(parts.values()), not is_dry, nodes=[_of_a_node(n) for n in nodes])
        now = time.time()
        report.audit_files = sum(_goes(head, rules, now) for head in aside)
        if not is_dry:
            report.freed_bytes = _erase(slabs, found)
            for path in paths:
                report.freed_bytes += sum(remove(path.parent, lambda head: _goes(head, rules, now)))
    return report


def show(report: Report) -> None:
    for part in report.parts:
        if part.records:
            print(
                f"{part.namespace.hex()[:_SHOWN]} {part.label}, {part.tenant_name}: "
                f"{part.records} of {part.stored} records, {format_size(part.bytes)}"
            )
    what = f"{report.records} records ({format_size(report.bytes)})"
    if report.audit_files:
        what += f" and {quantity(report.audit_files, 'chunk')} that an audit has kept aside"
    if report.is_done:
        print(f"{what} are gone, {format_size(report.freed_bytes)} of the disk are free")
    else:
        print(f"{what} would go; nothing was changed. --yes deletes them")


def _of_a_node(path: Path) -> str:
    return (
        f"{path} is of a node that is not the first: its records say neither model, tenant nor "
        "age, so none is deleted. What the first node's directory has lost is never read here "
        "again. To delete the bytes too, stop the server and delete this file: its KV is computed "
        "again"
    )


# ---- what goes -----------------------------------------------------------------------------


def _read(slab: SlabFile) -> list[_Segment]:
    """All that is stored: segments and their good records, which stay as yet."""
    segments, tenants = [], dict[bytes, bytes]()
    for _, header in slab.segments():
        if isinstance(header, SegmentHeader):
            segments.append(_Segment(header))
            for record in slab.records(header, payloads=False):
                if record.state is RecordState.GOOD and record.header is not None:
                    tenant = record.header.name.tenant
                    segments[-1].staying.append(
                        _Stored(
                            record.offset,
                            tenants.setdefault(tenant, tenant),
                            record.header.written_at,
                        )
                    )
    return segments


def _parts(segments: Iterable[_Segment]) -> dict[tuple[bytes, bytes], Part]:
    """The stored part of each namespace and tenant."""
    parts: dict[tuple[bytes, bytes], Part] = {}
    for segment in segments:
        namespace, label = segment.header.namespace, segment.header.label
        for record in segment.records:
            key = (namespace, record.tenant)
            parts.setdefault(key, Part(namespace, label, record.tenant)).stored += 1
    return parts


def _known(rules: Rules, parts: Sequence[Part]) -> Rules:
    """The rules with the namespace's whole name. Raises: ConfigError if something is not there."""
    namespace = None
    if rules.namespace is not None:
        wanted = rules.namespace.lower()
        names = {part.namespace.hex() for part in parts}
        matching = [name for name in names if wanted and name.startswith(wanted)]
        if len(matching) != 1:
            raise ConfigError(
                f"--namespace {rules.namespace!r} is {'several' if matching else 'none'} of what "
                f"is stored here:\n{_listing(parts)}"
            )
        namespace = matching[0]
        parts = [part for part in parts if part.namespace.hex() == namespace]
    if rules.tenant is not None:
        if tenant_hash(rules.tenant) not in {part.tenant for part in parts}:
            raise ConfigError(
                "the tenant has nothing here. The store knows it by a hash of its cache_salt "
                f"({tenant_hash(rules.tenant).hex()[:_SHOWN]}); what is stored:\n{_listing(parts)}"
            )
    return Rules(rules.older_than_s, namespace, rules.tenant, rules.to_size)


def _listing(parts: Sequence[Part]) -> str:
    lines = [
        f"  {part.namespace.hex()[:_SHOWN]} {part.label}, {part.tenant_name}: {part.stored} records"
        for part in parts
    ]
    return "\n".join(lines) or "  nothing"


def _whose(head: dict[str, Any] | None) -> tuple[bytes, bytes] | None:
    """Namespace and tenant of what an audit has kept; None: it is not whole."""
    try:
        return (bytes.fromhex(head["namespace"]), bytes.fromhex(head["tenant"])) if head else None
    except (KeyError, TypeError, ValueError):
        return None


def _goes(head: dict[str, Any] | None, rules: Rules, now: float) -> bool:
    """Whether the rules name what an audit has kept. What is not whole goes by any of them."""
    whose = _whose(head)
    if rules.to_size is not None:
        return False
    if head is None or whose is None:
        return True
    at, limit = head.get("at"), rules.older_than_s
    is_new = limit is not None and isinstance(at, int) and now - limit <= at <= now
    is_of = rules.namespace in (None, whose[0].hex())
    return not is_new and is_of and (rules.tenant is None or tenant_hash(rules.tenant) == whose[1])


def _choose(segments: Sequence[_Segment], rules: Rules, to_size: int | None) -> None:
    """Move records from `staying` to `going`."""
    now = time.time()
    limit = None if rules.older_than_s is None else now - rules.older_than_s
    tenant = None if rules.tenant is None else tenant_hash(rules.tenant)
    for segment in segments:
        is_of = rules.namespace in (None, segment.header.namespace.hex())
        records, segment.going, segment.staying = segment.records, [], []
        for record in records:
            # A time that has not come says nothing of a record's age: it counts as old.
            is_old = limit is None or not limit <= record.written_at <= now
            goes = is_of and is_old
            goes = goes and tenant in (None, record.tenant)
            (segment.going if goes else segment.staying).append(record)
    if to_size is not None:
        _spare(segments, to_size)


def _spare(segments: Sequence[_Segment], to_size: int) -> None:
    """Let only the oldest of the segments that may go as a whole go, until it is enough."""
    whole = [segment for segment in segments if segment.going and not segment.staying]
    for segment in segments:
        segment.going, segment.staying = [], segment.records
    taken = sum(segment.taken_bytes() for segment in segments)
    for segment in sorted(whole, key=lambda segment: segment.age):
        if taken <= to_size:
            return
        taken -= segment.taken_bytes()
        segment.going, segment.staying = segment.staying, []


# ---- deleting ------------------------------------------------------------------------------


def _unheld(slabs: Sequence[SlabFile], found: Sequence[list[_Segment]], *, is_dry: bool) -> str:
    """Nothing is named, yet what has lost its name may have been of it: erase that. In words."""
    if is_dry:
        return "nothing was changed. What a reset has deleted may be on the disk: --yes erases it"
    freed = _erase(slabs, found)
    return (
        "what is stored stays. What nothing holds is erased, such as KV of before a reset: "
        f"{format_size(freed)} of the disk are free"
    )


def _erase(slabs: Sequence[SlabFile], found: Sequence[list[_Segment]]) -> int:
    """Leave what stays, on the disk itself. Returns the bytes that the file system has back."""
    freed = 0
    for slab, file in zip(slabs, found, strict=True):
        before = slab.allocated_bytes
        _punch_all_but(slab, file)
        os.fsync(slab.fd)
        freed += max(0, before - slab.allocated_bytes)
    return freed


def _punch_all_but(slab: SlabFile, segments: Sequence[_Segment]) -> None:
    """Leave the records that stay, and the headers of their segments; what lies between them is
    deleted, damaged, or was never written."""
    begins = PAGE_BYTES
    for segment in segments:
        if not segment.staying:
            continue
        size = segment.header.record_bytes
        kept = [(slab.segment_offset(segment.header.number), PAGE_BYTES)]
        kept += sorted((record.offset, size) for record in segment.staying)
        for offset, num_bytes in kept:
            _punch(slab, begins, offset)
            begins = offset + num_bytes
    _punch(slab, begins, slab.segment_offset(slab.num_segments))


def _punch(slab: SlabFile, begins: int, ends: int) -> None:
    ends = min(ends, os.fstat(slab.fd).st_size)
    if begins >= ends:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    if libc.fallocate(slab.fd, mode, ctypes.c_long(begins), ctypes.c_long(ends - begins)) == 0:
        return
    zeros = bytes(1 << 20)  # a file system without holes: overwrite
    while begins < ends:
        begins += os.pwrite(slab.fd, zeros[: ends - begins], begins)
