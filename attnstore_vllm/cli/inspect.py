# SPDX-License-Identifier: Apache-2.0
"""`attnstore inspect DIR`: what is stored, by namespace. Reads headers; safe beside a server."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnstore_vllm.cli.node_file import opened_node
from attnstore_vllm.cli.slab_file import RecordState, opened, stored_files
from attnstore_vllm.cli.stored_groups import UNKNOWN, GroupFigures, StoredName, by_group
from attnstore_vllm.config.values import format_size
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.io.codec import NONE
from attnstore_vllm.plain_text import printable, quantity
from attnstore_vllm.tiers.nvme.aside import kept, stops
from attnstore_vllm.tiers.nvme.format import SegmentHeader
from attnstore_vllm.transfer.geometry import Group, groups_in
from attnstore_vllm.types import Key

LENGTHS = (1024, 4096, 16384, 65536)


@dataclass(slots=True)
class Namespace:
    """All segments of one namespace in one file."""

    segment: SegmentHeader
    file: Path
    segments: int = 0
    chunks: int = 0
    tails: int = 0
    tokens: int = 0
    bad_headers: int = 0
    tenants: set[bytes] = field(default_factory=set)
    written: list[int] = field(default_factory=list)
    parents: set[Key] = field(default_factory=set)
    ends: dict[Key, int] = field(default_factory=dict)
    names: list[StoredName] = field(default_factory=list)
    """Names of records where a model has several KV cache groups: all of them together tell each
    one's group."""
    groups: list[GroupFigures] = field(default_factory=list)
    """Then, the spine first; empty of a model with one."""

    told: tuple[Group, ...] = field(init=False)
    """The groups that the label tells; empty where it tells of one."""

    def __post_init__(self) -> None:
        self.told = groups_in(self.segment.label)

    def sequences(self) -> list[int]:
        """Tokens of every stored sequence: of each chunk that none continues."""
        return [stop for key, stop in self.ends.items() if key not in self.parents]


def inspect(directory: Path) -> list[Namespace]:
    """Newest namespace first. Raises: ConfigError, OSError."""
    found: dict[tuple[Path, bytes], Namespace] = {}
    for path in stored_files(directory)[0]:
        with opened(path) as slab:
            for _, segment in slab.segments():
                if not isinstance(segment, SegmentHeader):
                    continue
                namespace = found.setdefault((path, segment.namespace), Namespace(segment, path))
                namespace.segments += 1
                for record in slab.records(segment, payloads=False):
                    if record.state is RecordState.BAD:
                        namespace.bad_headers += 1
                    elif record.header is not None:
                        _add(namespace, record.header)
    for namespace in found.values():
        if namespace.told:
            _tell_groups(namespace)
    return sorted(found.values(), key=lambda n: n.segment.last_used, reverse=True)


def _tell_groups(namespace: Namespace) -> None:
    """Sections hold no tokens or sequences of their own: those are the spine's."""
    segment = namespace.segment
    namespace.groups, spine = by_group(namespace.names, namespace.told, segment.chunk_tokens)
    namespace.names = []
    namespace.tokens = sum(record.num_tokens for record in spine)
    namespace.parents = {record.parent for record in spine}
    namespace.ends = {record.key: record.stop for record in spine}


def _add(namespace: Namespace, header: Any) -> None:
    name = header.name
    if namespace.told:
        namespace.names.append(
            StoredName(name.key, name.parent, name.num_tokens, name.position + name.num_tokens)
        )
    namespace.chunks += 1
    namespace.tails += name.num_tokens < namespace.segment.chunk_tokens
    namespace.tokens += name.num_tokens
    namespace.tenants.add(name.tenant)
    namespace.written.append(header.written_at)
    namespace.parents.add(name.parent)
    namespace.ends[name.key] = name.position + name.num_tokens


def as_json(namespaces: list[Namespace]) -> list[dict[str, Any]]:
    now = int(time.time())
    return [
        {
            "file": str(n.file),
            "namespace": n.segment.namespace.hex(),
            "label": n.segment.label,
            "last_used": n.segment.last_used,
            "segments": n.segments,
            "chunk_tokens": n.segment.chunk_tokens,
            "codec": n.segment.encoding.codec if n.segment.encoding is not None else NONE,
            "chunks": n.chunks,
            "tails": n.tails,
            "tokens": n.tokens,
            "bytes": n.chunks * n.segment.record_bytes,
            "bad_headers": n.bad_headers,
            "tenants": len(n.tenants),
            "age_s": {"oldest": now - min(n.written), "newest": now - max(n.written)}
            if n.written
            else None,
            "sequences": _by_length(n.sequences()),
            **({"groups": [_group_json(n, group) for group in n.groups]} if n.groups else {}),
        }
        for n in namespaces
    ]


def _group_json(namespace: Namespace, group: GroupFigures) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "reach_tokens": group.reach_tokens,
        "block_tokens": group.block_tokens,
        "records": group.records,
        "bytes": group.records * namespace.segment.record_bytes,
        "tokens": group.tokens if group.kind != Reach.STATE.value else 0,
        "with_holes": group.with_holes,
    }


def _by_length(lengths: list[int]) -> dict[str, int]:
    groups: dict[str, int] = {}
    low = 0
    for high in LENGTHS:
        groups[f"up to {high}"] = sum(low < length <= high for length in lengths)
        low = high
    groups[f"over {low}"] = sum(length > low for length in lengths)
    return groups


def inspect_nodes(directory: Path) -> list[dict[str, Any]]:
    """The figures of each file of a node that is not the first. Raises: ConfigError, OSError."""
    found = []
    for path in stored_files(directory)[1]:
        with opened_node(path) as node:
            records = Counter(record.state for record in node.records(payloads=False))
            number = records.total() - records[RecordState.FREE]
            found.append(
                {
                    "node_file": str(path),
                    "record_bytes": node.record_bytes,
                    "places": node.num_places,
                    "records": number,
                    "bytes": number * node.record_bytes,
                    "bad_headers": records[RecordState.BAD],
                }
            )
    return found


def show_nodes(nodes: list[dict[str, Any]]) -> None:
    for n in nodes:
        print(f"{n['node_file']}: of a node that is not the first")
        if not n["record_bytes"]:
            print("  it has no whole record, which would tell their size")
            continue
        print(
            f"  {quantity(n['records'], 'record')} in {quantity(n['places'], 'place')} of "
            f"{format_size(n['record_bytes'])}, {format_size(n['bytes'])}; what they belong to, "
            "the first node's directory says"
        )
        if n["bad_headers"]:
            damaged = quantity(n["bad_headers"], "damaged header")
            print(f"  {damaged}; `attnstore verify` says more")


def show(namespaces: list[Namespace]) -> None:
    for n in as_json(namespaces):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(n["last_used"]))
        print(f"{n['namespace'][:16]}  {n['label']}")
        codec = "" if n["codec"] == NONE else f", codec {n['codec']}"
        segments = quantity(n["segments"], "segment")
        print(f"  in {n['file']}, {segments}{codec}, last used {used}")
        print(
            f"  {quantity(n['chunks'], 'chunk')} ({quantity(n['tails'], 'tail')}), "
            f"{quantity(n['tokens'], 'token')}, {format_size(n['bytes'])}, "
            f"{quantity(n['tenants'], 'tenant')}"
        )
        if n["age_s"]:
            print(f"  written {_age(n['age_s']['oldest'])} to {_age(n['age_s']['newest'])} ago")
        sequences = ", ".join(f"{k}: {v}" for k, v in n["sequences"].items() if v)
        print(f"  sequences by tokens: {sequences or 'none'}")
        for group in n.get("groups", ()):
            print(f"  {_group_line(group)}")
        if n["bad_headers"]:
            damaged = quantity(n["bad_headers"], "damaged header")
            print(f"  {damaged}; `attnstore verify` says more")


def show_audits(directory: Path) -> None:
    """The files that audits of this directory's engines have left (tiers/nvme/aside.py). Raises:
    OSError."""
    for path in stored_files(directory)[0]:
        for mark in stops(path.parent):
            print(f"not served: {mark} is there. Remove it to serve that namespace again")
        for file, head in kept(path.parent):
            said = "it is not whole" if head is None else _kept_line(head)
            print(f"  {file}: {said}")


def _kept_line(head: dict[str, Any]) -> str:
    told = (head.get(name) for name in ("num_tokens", "position", "found"))
    return "{} tokens from token {} of a prompt; {}".format(*(printable(str(one)) for one in told))


def _group_line(group: dict[str, Any]) -> str:
    records, size = group["records"], format_size(group["bytes"])
    if group["kind"] == UNKNOWN:
        told = quantity(records, "record")
        return f"group not told: {told}, {size}; the spine beside them is not stored"
    if group["kind"] == Reach.STATE.value:
        return f"states: {records}, {size}"
    reach = f" of {group['reach_tokens']} tokens" if group["reach_tokens"] else ""
    holes = f", {group['with_holes']} of them without leading blocks" if group["with_holes"] else ""
    told = f"{quantity(records, 'record')}, {quantity(group['tokens'], 'token')}"
    return f"{group['kind']}{reach}: {told}, {size}{holes}"


def _age(seconds: int) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0, seconds)} s"
