# SPDX-License-Identifier: Apache-2.0
"""The store and the scheduler side of a simulated server: their own code, without bytes and in
virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from attnstore_lab.sim.disk import SimulatedDisk
from attnstore_lab.sim.hardware import Machine
from attnstore_vllm.config.settings import NvmeConfig, StoreConfig
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.visits import NO_TERMS, Terms, Visit
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.context import Harness
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES, SegmentHeader
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.tiers.remote import RemoteLookup
from attnstore_vllm.tiers.tier_io import MakeTier

EVICTION: dict[str, Literal["lru", "fifo"]] = {"lru": "lru", "lru-ahead": "lru", "fifo": "fifo"}
"""By policy; else attnstore."""
NO_DEADLINE_MS = 10**12
NO_LIMIT = 1 << 60
"""The budget of a step: many simulated steps are one round of the server's loop."""
NAMESPACE = b"simulated".ljust(32)


class NoPool:
    """store.context.Pool without bytes."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = PAGE_BYTES
        self._page = memoryview(bytearray(PAGE_BYTES))

    def slot(self, slot: int) -> memoryview:
        return self._page

    def close(self) -> None:
        """Nothing is held."""


class SimulatedStore(Store):
    """A store that counts the tokens which are saved, and never waits in real time."""

    saved_tokens = 0
    before_arrival: Callable[[SequenceKeys, int], object] = staticmethod(lambda keys, stop: None)
    """Told of each request's prompt before it is looked up, and how much of it may be found."""

    def arrive(
        self,
        request_id: str,
        lookup: Lookup,
        num_tokens: int,
        min_tokens: int = 1,
        terms: Terms = NO_TERMS,
    ) -> tuple[list[Piece], Visit]:
        self.before_arrival(lookup.keys, num_tokens - 1)
        return super().arrive(request_id, lookup, num_tokens, min_tokens, terms)

    def _begun(
        self, name: ChunkName, chunk: Chunk | None, pin_s: float | None, *, yields: bool
    ) -> None:
        super()._begun(name, chunk, pin_s, yields=yields)
        if chunk is not None:
            self.saved_tokens += name.num_tokens

    def wait_for_room(self, num_openings: int, timeout_s: float) -> None:
        """The server's loop lets time pass."""

    def wait_for_any(
        self,
        waiting: Sequence[Sequence[Piece]],
        timeout_s: float,
        asked: Sequence[RemoteLookup] = (),
    ) -> bool:
        """The server's loop lets time pass."""
        return False


class _FixedNames:
    """See scheduler.Names."""

    namespace: bytes | None = NAMESPACE

    def be_live(self, live: Mapping[int, bytes | None]) -> None:
        raise AssertionError("no weights change here")

    def close(self) -> None:
        """Nothing is held."""


def open_scheduler(
    machine: Machine,
    policy: str,
    num_tokens: int,
    disk: SimulatedDisk,
    clock: Callable[[], float],
    more_tiers: Sequence[MakeTier] = (),
) -> tuple[Scheduler, SimulatedStore]:
    """As connector/build.py does, for one of server.POLICIES.

    Args:
        num_tokens: different ones in the trace.
    """
    geometry = machine.geometry
    num_records = -(-num_tokens // machine.chunk_tokens) * len(geometry.groups)
    at_most = 2 * num_records + 64  # slots; more are never used
    dram = max(1, machine.dram // machine.chunk_bytes)
    nvme = max(1, machine.nvme // machine.nvme_chunk_bytes)
    if policy == "infinite":
        dram = nvme = at_most
    shape = SegmentHeader(
        0, machine.chunk_tokens, PAGE_BYTES, NAMESPACE, b"simulated".ljust(16), 0, "simulated"
    )
    segment_bytes = PAGE_BYTES + min(nvme, at_most) * shape.record_bytes
    slab = Slab(Path("simulated"), segment_bytes, shape, own={0: shape}, fresh=[0])
    config = StoreConfig(
        dram_bytes=machine.dram,
        nvme=NvmeConfig(
            path=slab.path,
            capacity_bytes=machine.nvme,
            io_deadline_ms=NO_DEADLINE_MS,
            scrub_bytes_per_s=None,
        ),
        load_deadline_ms=round(1000 * machine.load_deadline_s),
        step_budget=NO_LIMIT,
        eviction=EVICTION.get(policy, "attnstore"),
        look_ahead=policy not in ("lru", "fifo"),
        states_every=machine.states_every,
        truncation=None,
        audit=None,  # there are no bytes to compare
        io_depth=machine.io_depth,
    )
    engine = EngineFacts(
        needs=tuple(machine.shape.needs()) if machine.shape is not None else (),
        hit_tokens=geometry.hit_tokens,
        step_tokens=machine.max_num_batched_tokens,
        has_prefix_cache=machine.prefix_cache,
    )
    harness = Harness(clock=clock, threaded=False)
    store = SimulatedStore(
        NoPool(dram), slab, disk, config, engine, more_tiers=more_tiers, harness=harness
    )
    if policy == "dram":
        store.residency.lose(store.residency.nvme)
    return Scheduler(store, geometry, _FixedNames(), config, engine, clock=clock), store
