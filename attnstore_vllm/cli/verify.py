# SPDX-License-Identifier: Apache-2.0
"""`attnstore verify DIR`: read every record of every namespace, and say what is wrong.

Safe beside a running server. A power loss may leave torn records: they are reported as bad
here, and are misses for a server.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnstore_vllm.cli.node_file import NodeFile, opened_node
from attnstore_vllm.cli.slab_file import RecordState, SlabFile, opened, stored_files
from attnstore_vllm.config.values import format_size

SHOWN_MAX = 20


@dataclass(slots=True)
class Verdict:
    good: int = 0
    free: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    read_bytes: int = 0

    def add_bad(self, cause: str, where: str) -> None:
        self.bad[cause] += 1
        if len(self.examples) < SHOWN_MAX:
            self.examples.append(f"{where}: {cause}")


def verify(directory: Path, *, quiet: bool = False) -> Verdict:
    """Read everything. Raises: ConfigError if there is nothing to read, OSError."""
    verdict = Verdict()
    slabs, nodes = stored_files(directory)
    for path in slabs:
        with opened(path) as slab:
            bar = tqdm(
                total=slab.num_segments * slab.segment_bytes,
                unit="B",
                unit_scale=True,
                desc=str(path),
                disable=quiet or not sys.stderr.isatty(),
            )
            with bar:
                for number, segment in slab.segments():
                    if isinstance(segment, str):
                        verdict.add_bad(f"segment {segment}", f"{path}, segment {number}")
                    else:
                        _verify_segment(slab, segment, verdict)
                    bar.update((number + 1) * slab.segment_bytes - bar.n)
    for path in nodes:
        with opened_node(path) as node:
            _verify_node(node, verdict)
    return verdict


def _verify_node(node: NodeFile, verdict: Verdict) -> None:
    """By their own checksums. Whether they are those of the first node's records, a read says."""
    verdict.free += node.num_places
    for record in node.records(payloads=True):
        verdict.free -= node.num_places > 0 and record.state is not RecordState.FREE
        if record.state is RecordState.GOOD:
            verdict.good += 1
            verdict.read_bytes += node.record_bytes
        elif record.state is RecordState.BAD:
            verdict.add_bad(record.cause, f"{node.path}, record at byte {record.offset}")


def _verify_segment(slab: SlabFile, segment: Any, verdict: Verdict) -> None:
    verdict.free += slab.num_records(segment)
    for record in slab.records(segment, payloads=True):
        verdict.free -= record.state is not RecordState.FREE
        if record.state is RecordState.GOOD:
            verdict.good += 1
            verdict.read_bytes += segment.record_bytes
        elif record.state is RecordState.BAD:
            where = f"{slab.path}, record {record.number} at byte {record.offset}"
            verdict.add_bad(record.cause, where)


def as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "good": verdict.good,
        "free": verdict.free,
        "bad": dict(verdict.bad),
        "read_bytes": verdict.read_bytes,
        "examples": verdict.examples,
    }


def show(verdict: Verdict) -> None:
    print(
        f"{verdict.good} records are good ({format_size(verdict.read_bytes)} read), "
        f"{verdict.free} places are free"
    )
    for cause, count in verdict.bad.most_common():
        print(f"BAD  {cause}: {count}")
    for example in verdict.examples:
        print(f"     {example}")
    if verdict.bad:
        print("A server drops a bad record when it meets it and computes its tokens again.")
