# SPDX-License-Identifier: Apache-2.0
"""The histories of test_ttl.py in several engines at once: siblings, and a shared tier.

It is long since engines, what is between them and the oracle's rules of copies are one world.

Goal: an engine finds KV of others only as long as the documents permit, and after its reset none
that was computed before it, by any engine and from any tier, restarts in between.
Method: two engines of one host, which read each other through real sockets, and a server that
shares nothing with them but a network store (a dictionary behind the real shared tier). They serve
the same texts. The clock stands until a step is over, so all that is asked for is answered in time.
Each engine has an oracle of its own. A copy is a use of it, if its source may have given it:

- a sibling, while it may be found there, and has no request's own ttl;
- the network store, if an engine has written it there, for which it must have no ttl at all.

Engines are reset in rounds, as is told to (docs/deploying.md): all of them, in any order, and
others go on meanwhile. The bytes of a chunk say how often its engine had been reset.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.tiers.peers.make_peers import peers_of
from attnstore_vllm.tiers.peers.peers_io import PeersIo
from attnstore_vllm.tiers.shared.backend import MISSING, Backend
from attnstore_vllm.tiers.shared.child import Lane, locks
from attnstore_vllm.tiers.shared.lanes import NOTHING, LaneOp, Lanes, parse_numbers
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.shared_io import SharedIo
from attnstore_vllm.tiers.shared.start import MakeShared
from attnstore_vllm.tiers.tier_io import MakeTier, Stored
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.types import PEERS, SHARED, Key
from tests.helpers import CHUNK_TOKENS, GRAIN, NAMESPACE, Rig, lookup_of, open_pool, payload_of
from tests.property.test_ttl import WEIGHTS, Clock, Kept, Request
from tests.property.test_ttl_groups import PinnedHistory

SETTINGS = {"redis": {"url": "redis://nowhere:1"}}
SIBLINGS = 2
ENGINES = 3
STEPS = 60
SETTLE_S = 10.0
CONNECT_S = 0.6
SLOTS = 16
TTLS_S: list[list[float | None]] = [[None], [None, None, 60.0], [None, 20.0, 60.0, 200.0]]
WITH_OTHERS = {**WEIGHTS, "arrive": 8, "look_again": 8, "restart": 0.3}


class Values(Backend):
    """A network store: values by name."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def exist(self, names: Sequence[str]) -> list[bool]:
        return [name in self.values for name in names]

    def get(self, names: Sequence[str], places: Sequence[memoryview]) -> list[int]:
        return [self._get(name, place) for name, place in zip(names, places, strict=True)]

    def _get(self, name: str, place: memoryview) -> int:
        value = self.values.get(name)
        if value is None:
            return MISSING
        place[:] = value
        return len(value)

    def put(
        self, names: Sequence[str], values: Sequence[memoryview], *, overwrite: bool
    ) -> list[int]:
        for name, value in zip(names, values, strict=True):
            self.write(name, bytes(value), overwrite=overwrite)
        return [0] * len(names)

    def delete(self, names: Sequence[str]) -> list[int]:
        for name in names:
            self.values.pop(name, None)
        return [0] * len(names)

    def read(self, name: str, at_most: int) -> bytes | None:
        return self.values.get(name)

    def write(self, name: str, value: bytes, *, overwrite: bool) -> None:
        if overwrite or name not in self.values:
            self.values[name] = value

    def count(self, prefix: str) -> tuple[int, int] | None:
        return None

    def remove(self, prefix: str) -> int:
        return 0


class Near:
    """The child process of a shared tier (helper.py) without a process: its lanes are called."""

    def __init__(self, lanes: Lanes, backend: Backend) -> None:
        self.lanes = lanes
        self.buffer = memoryview(bytearray(lanes.buffer_bytes))
        self.is_running = False
        self._backend = backend
        nothing: Any = None  # no socket
        self._made = [
            Lane(number, nothing, lanes, self.buffer, {"prefix": ""}, locks())
            for number in range(lanes.num_lanes)
        ]

    def start(self) -> None:
        self.is_running = True

    def close(self) -> None:
        self.is_running = False

    def numbers(
        self, lane: int, op: LaneOp, names: Sequence[bytes], deadline_s: float
    ) -> list[int]:
        return parse_numbers(self._do(lane, op, names), len(names))

    def read(self, name: bytes, deadline_s: float) -> bytes | None:
        answer = self._do(0, LaneOp.READ, [name])
        return None if answer[:1] == NOTHING else answer[1:]

    def write(self, name: bytes, value: bytes, deadline_s: float, *, overwrite: bool) -> None:
        self._do(0, LaneOp.OVERWRITE_SMALL if overwrite else LaneOp.WRITE, [name], value)

    def _do(self, lane: int, op: LaneOp, names: Sequence[bytes], value: bytes = b"") -> bytes:
        return self._made[lane].do(self._backend, op, list(names), value)


@dataclass(slots=True)
class EngineRig(Rig):
    """A rig whose tiers know its pool."""

    make: Callable[[SharedPool], Sequence[MakeTier]] = lambda pool: ()

    def __post_init__(self) -> None:
        self.pool = open_pool(self.dram_slots)
        options = {"grain": GRAIN, "io_depth": self.depth, **self.options}
        more_tiers = tuple(self.make(self.pool))
        self.store = open_store(self.pool, self.slab, self.device, **options, more_tiers=more_tiers)


class Engine(PinnedHistory):
    """One engine of a world."""

    weights: Mapping[str, float] = WITH_OTHERS
    num_texts = 2

    def __init__(self, world: World, number: int, seed: int) -> None:
        self.world, self.number = world, number
        self.round = 0
        """How often it was reset."""
        self.lookups: list[Lookup] = []
        """The last ones, which may have asked."""
        super().__init__(seed, world.eviction, world.clock)
        self.num_tokens = 1_000_000 * (number + 1)
        self.ttls_s = self.rng.choice(TTLS_S)
        self.texts, self.names, self.log = world.texts, world.names, world.log

    # ---- its parts -----------------------------------------------------------------------

    def server_ttl(self) -> float | None:
        return self.world.ttls_s[self.number]

    @property
    def directory(self) -> Path:
        return self.world.directory / str(self.number)

    def open_rig(self, slab: Slab) -> Rig:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        rig = EngineRig(self.device, slab, SLOTS, options=self.options(), make=self.make_tiers)
        self.peers: PeersIo | None = None
        self.lookups = []
        for io in rig.store.thread.tiers:
            if isinstance(io, PeersIo):
                self.peers = io
            if isinstance(io, SharedIo):
                self.shared = io
        near: Any = Near(self.shared.helper.lanes, self.world.network)
        self.shared.helper = near
        self._begin_store = self.shared.begin_store
        vars(self.shared)["begin_store"] = self.write
        assert rig.store.remote is not None
        rig.store.remote.weights_seen(True)
        return rig

    def make_tiers(self, pool: SharedPool) -> Sequence[MakeTier]:
        paths = [self.world.directory / str(number) for number in range(SIBLINGS)]
        others = [path for path in paths if path != self.directory]
        shared = MakeShared(
            SETTINGS,
            namespace=NAMESPACE,
            where="a test's store",
            chunk_tokens=CHUNK_TOKENS,
            deadline_s=1.0,
            directory=self.directory,
            keys=SharedKeys.of(None),
        )
        if self.number >= SIBLINGS:
            return [shared]
        group = self.world.directory
        return [*peers_of(self.directory, group, others, NAMESPACE, CHUNK_TOKENS, pool), shared]

    def close_rig(self) -> None:
        for io in self.rig.store.thread.tiers:
            io.cancel()
        for io in self.rig.store.thread.tiers:
            io.close(1.0)
        self.rig.pool.close()

    def lookup_of(self, tokens: Sequence[int]) -> Lookup:
        self.lookups = [*self.lookups[-20:], lookup_of(tokens, may_ask=True)]
        return self.lookups[-1]

    # ---- what it does --------------------------------------------------------------------

    def say(self, what: str) -> None:
        super().say(f"engine {self.number}: {what}")

    def do_arrive(self) -> None:
        super().do_arrive()
        self.world.settle()

    def do_prefetch(self) -> None:
        super().do_prefetch()
        self.world.settle()

    def do_look_again(self) -> None:
        super().do_look_again()
        self.world.settle()
        if self.oracle.waiting:
            self.serve(self.rng.choice(self.oracle.waiting))

    def serve(self, request: Request) -> None:
        """Its bytes are of a computation that this engine may use."""
        store, stop = self.rig.store, request.num_prompt - 1
        pieces = store.find(request.lookup, 0, stop, request_id=request.id, visit=request.visit)
        self.check_found(pieces)
        begun = self.begun([*request.lookup.keys.token_ids], pieces)
        tails = [*self.tails(request.tokens, stop)]
        self.oracle.look(request, pieces, tails, self.clock.now, begun)
        held = store.hold_ready(pieces, request.lookup.keys, stop)
        for piece in held:
            found = bytes(self.rig.pool.slot(piece.chunk.dram.slot))
            versions = [n for n in range(9) if found == payload_of(piece.chunk.name, n)]
            assert versions == [self.round], f"of round {versions}, and not {self.round}"
            self.world.counts[piece.chunk.came_from or "dram"] += 1
        store.loaded([piece.chunk for piece in held])

    def save_chunk(
        self,
        request: Request,
        name: ChunkName,
        run: Run,
        *,
        group: int = 0,
        is_alone: bool = False,
        yields: bool,
    ) -> Chunk | None:
        chunk = super().save_chunk(
            request, name, run, group=group, is_alone=is_alone, yields=yields
        )
        if chunk is not None:
            self.rig.pool.slot(chunk.dram.slot)[:] = payload_of(name, self.round)
        return chunk

    def write(self, chunk: Chunk, payload: memoryview, done: Stored) -> None:
        """The store's thread writes this to the network."""
        kept = self.oracle.kept[chunk.name.key]
        assert kept.ttl_s == math.inf, "it is KV with a ttl"
        assert self.rig.store.residency.run_of(chunk).lease is None, "it ends at a time"
        self.world.written.add((chunk.name.key, self.round))
        self.world.counts["written"] += 1
        self._begin_store(chunk, payload, done)

    def do_reset(self) -> None:
        """With the next one that all engines get."""
        if self.round > min(engine.round for engine in self.world.engines):
            return
        self.say(f"reset {self.round + 1}")
        with self.rig.store.queue() as queue:
            for request in self.oracle.waiting:
                assert request.id in queue
        self.rig.store.leave_queue([request.id for request in self.oracle.waiting])
        self.running, self.rests, self.oracle.waiting = [], [], []
        resets = self.rig.store.thread.reset()
        self.round += 1
        self.oracle.kept.clear()
        assert self.rig.store.remote is not None
        self.world.settle(lambda: all(reset.is_over for reset in resets))
        assert all(reset.succeeded for reset in resets)
        self.rig.store.remote.weights_seen(True)
        self.do_finish_saves()
        self.world.settle()

    # ---- what must hold ------------------------------------------------------------------

    def check_found(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.note_copy(piece.chunk)
        super().check_found(pieces)

    def check(self) -> None:
        for chunk in list(self.rig.store.residency.index):
            self.note_copy(chunk)
        super().check()

    def note_copy(self, chunk: Chunk) -> None:
        """It may be new here: then it has come just now."""
        key, now, residency = chunk.name.key, self.clock.now, self.rig.store.residency
        is_others = {PEERS, SHARED} & {*chunk.behind, chunk.origin, chunk.came_from}
        lease, kept = residency.run_of(chunk).lease, self.oracle.kept.get(key)
        ends = math.inf if lease is None else lease.expires
        is_told = kept is not None and ends <= kept.ends
        if not is_others or is_told or not self.may_have_come(key):
            return
        ttl_s = math.inf if self.server_ttl_s is None else self.server_ttl_s
        self.oracle.kept[key] = Kept(now + ttl_s, ttl_s, None)
        self.world.counts["came"] += 1

    def may_have_come(self, key: Key) -> bool:
        if (key, self.round) in self.world.written:
            return True
        engines = self.world.engines[:SIBLINGS]
        if self not in engines:
            return False
        return any(e.round == self.round and e.may_tell(key) for e in engines if e is not self)

    def may_tell(self, key: Key) -> bool:
        """Whether its sibling may be told of the chunk."""
        if not self.oracle.is_alive(key, self.clock.now):
            return False
        return self.oracle.kept[key].ttl_s >= (self.server_ttl_s or math.inf)


class World:
    """Engines, and what is between them."""

    def __init__(self, seed: int, eviction: str, directory: Path) -> None:
        self.rng = rng = Random(seed)
        self.clock = Clock()
        self.eviction, self.directory = eviction, directory
        here, there = rng.choice([(None, None), (None, None), (None, 60.0), (60.0, 60.0)])
        self.ttls_s = [here] * SIBLINGS + [there]
        self.network = Values()
        self.written: set[tuple[Key, int]] = set()
        """Chunks in it, and in which round."""
        self.counts: dict[str, int] = dict.fromkeys(
            ["written", "came", "dram", PEERS, SHARED, "nvme"], 0
        )
        self.texts: list[list[int]] = []
        self.names: dict[Key, list[int]] = {}
        self.log: list[str] = []
        self.engines: list[Engine] = []
        for number in range(ENGINES):
            self.engines.append(Engine(self, number, seed * ENGINES + number))
        self.texts.append(self.engines[0].more(80))
        self.connect()

    def connect(self) -> None:
        def is_ready() -> bool:
            self.clock.now += CONNECT_S
            peers = [engine.peers for engine in self.engines if engine.peers is not None]
            return all(sibling.is_ready for io in peers for sibling in io.siblings)

        self.settle(is_ready)

    def settle(self, condition: Callable[[], bool] = lambda: True) -> None:
        """Until all that was asked for has come, and what may be written is."""
        ends_at = time.monotonic() + SETTLE_S
        calm = 0
        while calm < 2:
            for engine in self.engines:
                engine.rig.store.tick()
            is_calm = not any(map(is_busy, self.engines)) and condition()
            calm = calm + 1 if is_calm else 0
            if not is_calm:
                for engine in self.engines:
                    if engine.peers is not None:
                        engine.peers.submit()  # its thread may wait for the clock
                time.sleep(0.0005)
            assert time.monotonic() < ends_at, "it did not come to rest"

    def play(self, num_steps: int = STEPS) -> None:
        try:
            for _ in range(num_steps):
                engine = self.rng.choice(self.engines)
                if self.rng.random() < 0.05:
                    engine.do_reset()
                else:
                    engine.step()
                if not is_linked(self.engines):
                    self.connect()
                self.settle()
                for each in self.engines:
                    each.check()
        except AssertionError as error:
            raise AssertionError("\n".join([*self.log[-60:], str(error)])) from error
        finally:
            for engine in self.engines:
                engine.close()


def is_busy(engine: Engine) -> bool:
    store = engine.rig.store
    with engine.shared.context.progress:
        if any(io.num_loading or io.num_storing for io in store.thread.tiers):
            return True
    generation = engine.shared.generation
    is_out = generation.is_in_doubt or generation.why_out is not None
    if generation.usable is None and not is_out:
        return True
    return not all(ask.is_over for lookup in engine.lookups for ask in lookup.asked)


def is_linked(engines: Sequence[Engine]) -> bool:
    return all(
        sibling.is_ready
        for engine in engines
        if engine.peers is not None
        for sibling in engine.peers.siblings
    )


SEEDS = [range(15), pytest.param(range(15, 400), marks=pytest.mark.long)]
EVICTIONS = ["attnstore", "lru", "fifo"]


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_nothing_outlives_its_ttl_or_a_reset_at_others(seeds: range, tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    for seed in seeds:
        eviction = EVICTIONS[seed % len(EVICTIONS)]
        directory = tmp_path / str(seed)
        directory.mkdir(mode=0o700)
        world = World(seed, eviction, directory)
        try:
            world.play()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {eviction}\n{error}") from error
        for what, count in world.counts.items():
            counts[what] = counts.get(what, 0) + count
    assert all(counts[what] for what in ("written", "came", "dram", PEERS)), counts
