# SPDX-License-Identifier: Apache-2.0
"""Index, policy and store over a disk in simulated time, driven from one seed.

Conversations grow, are read again, aborted, forgotten; the disk is slow, fails, hangs, fills up;
the process is killed, the power goes. Whatever happens:
- bytes that are held for a request are those that were saved under that name;
- the residency's invariants hold, and capacity is never exceeded;
- when the disk is well again, everything comes to rest, and nothing stays held.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.tiers.tier_io import MakeTier
from attnstore_vllm.transfer.pool import SharedPool
from tests.helpers import (
    format_image,
    found_slab,
    lookup_of,
    names_of,
    new_slab,
    open_pool,
    payload_of,
    sequence_of,
    slab_bytes,
)
from tests.simulation.disk import SimulatedDisk, Weather

IO_DEADLINE_S = 5.0
STEP_S = 0.002
REST_TURNS_MAX = 200_000

WEATHERS = (
    Weather(),
    Weather(latency_s=0.02),
    Weather(error=0.2),
    Weather(flipped_bit=0.2),
    Weather(lost_write=0.1, misplaced_write=0.1),
    Weather(hang=0.02),
    Weather(full=True),
    Weather(latency_s=0.01, error=0.05, flipped_bit=0.05, lost_write=0.05, misplaced_write=0.05,
            hang=0.01),
)  # fmt: skip


@dataclass(slots=True)
class World:
    """One run. `counts` says what happened, so that a caller can see that it was not nothing."""

    seed: int
    dram_slots: int = 6
    records: int = 12
    more_tiers: tuple[MakeTier, ...] = ()
    random: Random = field(init=False)
    disk: SimulatedDisk = field(init=False)
    pool: SharedPool = field(init=False)
    store: Store = field(init=False)
    counts: Counter[str] = field(init=False, default_factory=Counter)
    conversations: list[list[int]] = field(init=False, default_factory=list)
    held: list[Chunk] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.dram_slots = self.random.choice((3, 6, 12))
        self.records = self.random.choice((4, 12, 40))
        self.disk = SimulatedDisk(bytearray(slab_bytes(self.records)), self.random)
        slab = new_slab(self.records)
        format_image(self.disk.image, slab)
        self._open(slab)

    def _open(self, slab: Slab) -> None:
        self.pool = open_pool(self.dram_slots)
        self.store = open_store(
            self.pool,
            slab,
            self.disk,
            io_depth=4,
            io_deadline_ms=round(1000 * IO_DEADLINE_S),
            scrub_bytes_per_s=1 << 20,
            clock=lambda: self.disk.now,
            threaded=False,
            more_tiers=self.more_tiers,
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.come_to_rest()
        self.close()
        self.counts.update(self.disk.faults)

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.02:
            self.disk.weather = self.random.choice(WEATHERS)
        elif choice < 0.025:
            self.restart()
        elif choice < 0.03:
            self.reset()
        elif choice < 0.35:
            self.grow()
        elif choice < 0.65:
            self.look_up()
        elif choice < 0.75:
            self.let_go()
        self.disk.now += self.random.choice((0.0, STEP_S, 10 * STEP_S, 1.0))
        self.store.tick()
        if self.random.random() < 0.05:
            self.store.check_integrity()

    # ---- what requests do --------------------------------------------------------------

    def grow(self) -> None:
        """A conversation begins or goes on, and its chunks are saved."""
        if not self.conversations or self.random.random() < 0.3:
            shared = self.random.choice(self.conversations or [[]])
            tokens = shared[: self.random.randrange(len(shared) + 1)]
        else:
            tokens = self.conversations.pop(self.random.randrange(len(self.conversations)))
        tokens = tokens + [
            self.random.randrange(50_000) for _ in range(self.random.randrange(1, 50))
        ]
        self.conversations.append(tokens)
        if len(self.conversations) > 12:
            self.conversations.pop(0)
        for name in names_of(sequence_of(tokens)):
            chunk = self.store.begin_save(name)
            if chunk is not None:
                self.pool.slot(chunk.dram.slot)[:] = payload_of(name)
                self.store.finish_saves([chunk])
                self.counts["saved"] += 1

    def look_up(self) -> None:
        """A request looks for its history; what is ready is held and must be right."""
        if not self.conversations:
            return
        tokens = list(self.random.choice(self.conversations))
        if self.random.random() < 0.3:  # another branch of it
            tokens[self.random.randrange(len(tokens)) :] = [self.random.randrange(50_000)] * 9
        lookup = lookup_of(tokens, may_ask=True)
        sequence = lookup.keys
        pieces = self.store.find(lookup, 0, len(tokens))
        for piece in self.store.hold_ready(pieces, sequence, len(tokens)):
            chunk = piece.chunk
            name = chunk.name
            position = name.position
            assert self.pool.slot(chunk.dram.slot)[:] == payload_of(name), (
                f"seed {self.seed}: wrong bytes"
            )
            own = sequence.tokens(position, piece.stop)
            assert name.tokens[: len(own)] == own, f"seed {self.seed}: KV of other tokens"
            self.counts[f"from {chunk.came_from or 'dram'}"] += 1
            self.held.append(chunk)

    def let_go(self) -> None:
        for chunk in self.held:
            assert self.pool.slot(chunk.dram.slot)[:] == payload_of(chunk.name), (
                f"seed {self.seed}: bytes changed while they were held"
            )
        self.store.loaded(self.held)
        self.held = []

    # ---- what happens to it ------------------------------------------------------------

    def restart(self) -> None:
        """Killed, or the power goes; the next start finds what is on the medium."""
        self.held = []
        image = self.disk.lose_power() if self.random.random() < 0.5 else self.disk.kill()
        if self.random.random() < 0.2:
            at = self.random.randrange(8192, len(image))
            image[at] ^= 1 << self.random.randrange(8)
        self.counts.update(self.disk.faults)
        now = self.disk.now
        self.pool.close()
        self.disk = SimulatedDisk(image, self.random)
        self.disk.now = now
        try:
            slab = found_slab(image)
        except CorruptRecordError:
            slab = new_slab(self.records)
            format_image(self.disk.image, slab)
        self._open(slab)
        self.counts["restarts"] += 1

    def reset(self) -> None:
        """New weights: nothing of before may come back, now or after a restart."""
        self.let_go()
        self.store.thread.reset()
        self.conversations = []
        self.counts["resets"] += 1

    def come_to_rest(self) -> None:
        self.let_go()
        self.disk.weather = Weather()
        for _ in range(REST_TURNS_MAX):
            if self.store.is_idle():
                break
            self.disk.now += 0.05
            self.store.tick()
        assert self.store.is_idle(), f"seed {self.seed}: does not come to rest"
        self.store.check_integrity()
        for chunk in self.store.residency.index:
            assert chunk.dram.uses == 0, f"seed {self.seed}: held for good"

    def close(self) -> None:
        self.pool.close()
