# SPDX-License-Identifier: Apache-2.0
"""Conversations in a store over a file with encoded records, and its restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.store.format import SegmentHeader
from attnstore_vllm.store.slab import open_slab
from tests.helpers import Rig, capacity_for, names_of, sequence_of, tokens_of

Start = Callable[..., Rig]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Of three chunks each, told by their numbers; a chunk's name says what its bytes are."""

    payload: Callable[[ChunkName], bytes]

    def put_all(self, rig: Rig, number: int) -> None:
        for name in names_of(sequence_of(tokens_of(number, 40))):
            assert rig.put(name, self.payload(name)) is not None
        rig.until_idle()

    def check_read(self, rig: Rig, number: int) -> int:
        found = rig.read(sequence_of(tokens_of(number, 40)))
        for name, payload in found:
            assert payload == self.payload(name)
        return len(found)


@contextmanager
def starting(
    path: Path, usual: SegmentHeader, num_records: int, dram_slots: int
) -> Iterator[Start]:
    """start(shape=usual, **options of the store) starts it on the file; an earlier one there is
    closed first."""
    rigs: list[Rig] = []

    def start(shape: SegmentHeader = usual, **options: Any) -> Rig:
        for rig in rigs:
            rig.close()
        slab = open_slab(path, capacity_for(num_records), shape)
        device, _ = open_device(path, 4, "auto")
        rigs.append(Rig(device, slab, dram_slots, options=options))
        rigs[-1].until_idle()
        return rigs[-1]

    yield start
    for rig in rigs:
        if rig.is_open:
            rig.until_idle()
            rig.store.residency.check_integrity()
        rig.close()
