# SPDX-License-Identifier: Apache-2.0
"""Small stores for the tests: chunks of 16 tokens, payloads of two pages, so that they tear.

The payload of a chunk is made from its key and a version, so any two differ everywhere.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import SequenceKeys, chunk_key, root_key, tenant_hash
from attnstore_vllm.io.choose import DeviceKind, open_device
from attnstore_vllm.io.device import Device
from attnstore_vllm.policy.eviction.departures import Departures, departures
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES, Root, SegmentHeader, header_bytes
from attnstore_vllm.tiers.nvme.slab import (
    Slab,
    new_generation,
    num_segments_for,
    open_slab,
    segment_bytes_for,
)
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.types import NVME

CHUNK_TOKENS = 16
GRAIN = 4
"""Hits end at multiples of it (index/prefix.py): as much less than usual as the chunks are."""
PAYLOAD_BYTES = 2 * PAGE_BYTES
RECORD_BYTES = header_bytes(CHUNK_TOKENS) + PAYLOAD_BYTES
NAMESPACE = bytes(range(32))
DEADLINE_S = 10.0


SHAPE = SegmentHeader(-1, CHUNK_TOKENS, PAYLOAD_BYTES, NAMESPACE, b"", 1_700_000_000, "a test")
SEGMENT_AT = PAGE_BYTES
"""Of the one segment that the slabs of these helpers have."""


def slab_bytes(num_records: int) -> int:
    """The size of a device with one segment of so many records."""
    return 2 * PAGE_BYTES + num_records * RECORD_BYTES


def capacity_for(num_records: int, record_bytes: int = RECORD_BYTES) -> int:
    """The least capacity, to a page, with which a new file has room for so many records."""
    capacity = num_records * record_bytes
    while True:
        segment_bytes = segment_bytes_for(capacity, record_bytes)
        per_segment = (segment_bytes - PAGE_BYTES) // record_bytes
        if num_segments_for(capacity, segment_bytes) * per_segment >= num_records:
            return capacity
        capacity += PAGE_BYTES


def open_pool(num_slots: int, slot_bytes: int = PAYLOAD_BYTES) -> SharedPool:
    """A pool of this process alone. All members have mapped it, so its name is gone."""
    name = f"attnstore-test-{secrets.token_hex(8)}"
    worker = SharedPool(name, num_slots, slot_bytes, num_ranks=1, member=0)
    pool = SharedPool(name, num_slots, slot_bytes, num_ranks=1, member=1)
    worker.close()
    return pool


def mapped_bytes(address: int) -> int:
    """Bytes in this process's page table of the mapping with that address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, stop = (int(end, 16) for end in words[0].split("-"))
            inside = first <= address < stop
        elif inside and words[0] == "Rss:":
            return int(words[1]) << 10
    return 0


def new_slab(num_records: int) -> Slab:
    """A slab without a file; format_device() puts its root and segment onto a device."""
    slab = Slab(Path("memory"), PAGE_BYTES + num_records * RECORD_BYTES, SHAPE)
    slab.own[0] = replace(SHAPE, number=0, generation=new_generation())
    slab.fresh.append(0)
    return slab


def format_image(image: bytearray, slab: Slab) -> None:
    image[:PAGE_BYTES] = Root(slab.segment_bytes).encode()
    image[SEGMENT_AT : SEGMENT_AT + PAGE_BYTES] = slab.own[0].encode()


def format_device(device: MemoryDevice, slab: Slab) -> None:
    format_image(device.image, slab)


def found_slab(image: bytes | bytearray, shape: SegmentHeader = SHAPE) -> Slab:
    """The slab that the next start finds on a device with these bytes."""
    root = Root.decode(bytes(image[:PAGE_BYTES]), "memory, root")
    raw = bytes(image[SEGMENT_AT : SEGMENT_AT + PAGE_BYTES])
    slab = Slab(Path("memory"), root.segment_bytes, shape)
    slab.own[0] = SegmentHeader.decode(raw, 0, "memory, segment 0")
    return slab


def sequence_of(
    token_ids: Sequence[int], salt: str | None = None, chunk_tokens: int = CHUNK_TOKENS
) -> SequenceKeys:
    return SequenceKeys(root_key(NAMESPACE, salt, b""), token_ids, chunk_tokens)


def lookup_of(
    token_ids: Sequence[int], salt: str | None = None, *, may_ask: bool = False
) -> Lookup:
    """The look-ups of a request with these tokens."""
    return Lookup(sequence_of(token_ids, salt), tenant=tenant_hash(salt), may_ask=may_ask)


def tokens_of(conversation: int, num_tokens: int) -> list[int]:
    """Token ids that no other conversation shares."""
    return list(range(conversation * 10_000 + 1, conversation * 10_000 + 1 + num_tokens))


def name_of(sequence: SequenceKeys, number: int, salt: str | None = None) -> ChunkName:
    """Chunk number `number` of the sequence: a tail where the tokens end within it."""
    start = number * sequence.chunk_tokens
    stop = min(start + sequence.chunk_tokens, len(sequence.token_ids))
    parent, extra = sequence.parent(number), sequence.extra(number)
    tokens = sequence.tokens(start, stop)
    key = chunk_key(parent, extra, tokens)
    return ChunkName(key, parent, extra, tenant_hash(salt), start, stop - start, tokens)


def names_of(sequence: SequenceKeys) -> list[ChunkName]:
    count = -(-len(sequence.token_ids) // sequence.chunk_tokens)
    return [name_of(sequence, number) for number in range(count)]


def payload_of(name: ChunkName, version: int = 0, num_bytes: int = PAYLOAD_BYTES) -> bytes:
    return blake3(name.key + version.to_bytes(8, "little")).digest(length=num_bytes)


def lru(num_slots: int) -> Departures:
    """The order of departure in which nothing is learned."""
    return departures("lru", num_slots, ReturnEstimator())


def wait_until(condition: Callable[[], bool], store: Store) -> None:
    """Wait for what the store's own thread does."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the store did not get there"
        store.wait_for_any((), 0.005)  # no run to wait for: returns after the time, or earlier


@dataclass(slots=True)
class Rig:
    """A store over a device, with what its callers do: fill slots, and read them."""

    device: Device
    slab: Slab
    dram_slots: int = 8
    depth: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of open_store()."""
    pool: SharedPool = field(init=False)
    store: Store = field(init=False)
    is_open: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self.pool = open_pool(self.dram_slots)
        options = {"grain": GRAIN, "io_depth": self.depth, **self.options}
        self.store = open_store(self.pool, self.slab, self.device, **options)

    def hears(self) -> None:
        """Of what an audit has removed, as the scheduler's side does before it saves anything."""
        assert self.store.audit is not None
        self.store.audit.take_removed()

    def put(self, name: ChunkName, payload: bytes | None = None) -> Chunk | None:
        """Save as the workers do. None where the store wants no bytes."""
        chunk = self.store.begin_save(name)
        if chunk is not None:
            self.pool.slot(chunk.dram.slot)[:] = payload_of(name) if payload is None else payload
            self.store.finish_saves([chunk])
        return chunk

    def put_all(self, sequence: SequenceKeys) -> None:
        for name in names_of(sequence):
            assert self.put(name) is not None

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.store)

    def until_idle(self) -> None:
        self.until(self.store.is_idle)

    def read(self, sequence: SequenceKeys, *, wait: bool = True) -> list[tuple[ChunkName, bytes]]:
        """What a request for all tokens loads: names and bytes of the leading READY chunks."""
        stop = len(sequence.token_ids)
        pieces = self.store.find(Lookup(sequence), 0, stop)
        if wait:
            self.until(lambda: not any(_on_its_way(p.chunk) for p in pieces))
        held = self.store.hold_ready(self.store.find(Lookup(sequence), 0, stop), sequence, stop)
        found = [(p.chunk.name, bytes(self.pool.slot(p.chunk.dram.slot))) for p in held]
        self.store.loaded(p.chunk for p in held)
        return found

    def check_read(self, sequence: SequenceKeys) -> int:
        """Read, compare with what put_all() put, and return how many chunks there were."""
        found = self.read(sequence)
        for name, payload in found:
            assert payload == payload_of(name)
        return len(found)

    def chunk(self, name: ChunkName) -> Chunk:
        chunk = self.store.residency.index.get(name.key)
        assert chunk is not None
        return chunk

    def close(self) -> None:
        if self.is_open:
            self.store.close()
        self.is_open = False


def _on_its_way(chunk: Chunk) -> bool:
    if chunk.dropped or chunk.dram.state is State.READY:
        return False
    return chunk.dram.state is State.READING or chunk.at(NVME).state is State.READY


def memory_rig(
    num_records: int = 16, dram_slots: int = 8, *, hold: bool = False, **options: Any
) -> Rig:
    """A rig over memory. With `hold` the device does nothing before step() or release()."""
    device = MemoryDevice(slab_bytes(num_records), hold=hold)
    slab = new_slab(num_records)
    format_device(device, slab)
    return Rig(device, slab, dram_slots, options=options)


Start = Callable[..., Rig]


@contextmanager
def starting(
    path: Path,
    usual: SegmentHeader,
    records: int,
    dram_slots: int,
    io: DeviceKind = "auto",
) -> Iterator[Start]:
    """start(shape=usual, num_records=records, **options of the store) starts it on the file; an
    earlier one there is closed first."""
    rigs: list[Rig] = []

    def start(shape: SegmentHeader = usual, num_records: int = records, **options: Any) -> Rig:
        for rig in rigs:
            rig.close()
        slab = open_slab(path, capacity_for(num_records), shape)
        device, _ = open_device(path, 4, io)
        rigs.append(Rig(device, slab, dram_slots, options=options))
        rigs[-1].until_idle()  # recovery is over
        return rigs[-1]

    yield start
    for rig in rigs:
        if rig.is_open:
            rig.until_idle()
            rig.store.check_integrity()
        rig.close()


Rigs = Callable[..., tuple[Rig, MemoryDevice]]
"""The fixture open_rig of tests/unit/conftest.py."""


def held_device(image: bytes | bytearray) -> MemoryDevice:
    """The medium of an earlier store, before anything has been read from it."""
    device = MemoryDevice(len(image), hold=True)
    device.image[:] = image
    return device


def conversation(number: int, num_tokens: int = 40) -> list[int]:
    return tokens_of(number, num_tokens)


def push_out_of_dram(rig: Rig, device: MemoryDevice, count: int) -> None:
    for number in range(count):
        rig.put(name_of(sequence_of(conversation(700 + number, 16)), 0))
        device.settle()


def nvme_only(rig: Rig, device: MemoryDevice) -> list[int]:
    """A conversation of 3 chunks that is on NVMe and not in DRAM."""
    tokens = conversation(1)
    rig.put_all(sequence_of(tokens))
    device.settle()
    push_out_of_dram(rig, device, rig.dram_slots)
    for name in names_of(sequence_of(tokens)):
        chunk = rig.chunk(name)
        assert (chunk.dram.state, chunk.at(NVME).state) == (State.ABSENT, State.READY)
    return tokens


def as_of_before(store: Store) -> None:
    """Take all that NVMe has for what recovery has found there."""
    nvme = store.residency.nvme
    nvme.is_found[:] = b"\1" * nvme.num_slots


STRANGER = 65534


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let a file be another user's; returns whose. Who is not root becomes another user instead, as
    far as Python is asked."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        return STRANGER
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    return user


_IN_A_NAMESPACE = """
import ctypes, os, sys
from pathlib import Path
if ctypes.CDLL(None).unshare(0x10000000):
    sys.exit(99)
print(flush=True)
sys.stdin.readline()
{imports}
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
"""


def nobody_in_a_namespace(imports: str, code: str, uid: int, *arguments: Path) -> list[str]:
    """Lines that code prints as user `uid`, who has there the number of all that the user namespace
    does not know. Skips the test where there are none. For root.

    Args:
        imports: of the code. They are read before it is that user, who may not, and in the
            namespace already: a process with threads gets none.
    """
    whole = _IN_A_NAMESPACE.format(imports=imports) + code
    command = [sys.executable, "-c", whole, *map(str, arguments)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        assert child.stdin is not None and child.stdout is not None
        if not child.stdout.readline():
            pytest.skip("no user namespaces here")
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{child.pid}/{kind}").write_text(f"65534 {uid} 1")
        said, _ = child.communicate("\n", timeout=60)
    return said.splitlines()


def num_dirty(residency: Residency) -> int:
    """Chunks that wait for being written, of all tiers."""
    return sum(len(tier.waiting) for tier in residency.behind)
