# SPDX-License-Identifier: Apache-2.0
"""The whole store against a dict, with power loss, damage and late completions at any point.

Goal: what a request is given under a key are the bytes that were put under that key, or nothing;
bytes of before a reset are nothing for ever; no slot in use is given away; capacity holds.
Method: hypothesis drives saves, loads, aborts, resets, crashes and single steps of the device.
`now` holds what each key must read as in this process; `on_disk` what it may read as after the
next start. After each rule the store's own thread has done all it can, so runs are repeatable.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from attnstore_vllm.index.chunk import Chunk, ChunkName, Nvme
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.store.format import PAGE_BYTES
from attnstore_vllm.testing.devices import PowerLossDevice
from attnstore_vllm.types import TOKEN_BYTES, Key
from tests.helpers import (
    CHUNK_TOKENS,
    RECORD_BYTES,
    Rig,
    found_slab,
    name_of,
    new_slab,
    payload_of,
    sequence_of,
    slab_bytes,
    tokens_of,
)

DRAM_SLOTS = 4
TOKENS = 3 * CHUNK_TOKENS
# Conversations that share their first 24 tokens, so that they part within the second chunk.
SEQUENCES = [
    tokens_of(1, TOKENS),
    tokens_of(1, 24) + tokens_of(2, TOKENS - 24),
    tokens_of(1, 24) + tokens_of(3, TOKENS - 24),
    tokens_of(4, TOKENS),
]
sequences = st.sampled_from(SEQUENCES)
ends = st.integers(1, TOKENS)
capacities = st.integers(3, 7)  # records


def prefix_name(tokens: list[int], end: int) -> ChunkName:
    """The chunk, or tail, that ends at token `end`."""
    return name_of(sequence_of(tokens[:end]), (end - 1) // CHUNK_TOKENS)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now: dict[Key, bytes] = {}
        self.on_disk: defaultdict[Key, set[bytes]] = defaultdict(set)
        self.is_volatile = False  # a reset came: nothing of this process survives its end
        self.is_damaged = False
        self.held: list[tuple[Chunk, bytes]] = []
        self.saving: list[tuple[Chunk, bytes]] = []
        self.num_puts = 0

    @initialize(seed=st.integers(0, 2**32), hold=st.booleans(), num_records=capacities)
    def start(self, seed: int, hold: bool, num_records: int) -> None:
        self.device = PowerLossDevice(slab_bytes(num_records), Random(seed), hold=hold)
        slab = new_slab(num_records)
        self.device.image[:PAGE_BYTES] = self.device.durable[:PAGE_BYTES] = slab.superblock.encode()
        self.rig = Rig(self.device, slab, DRAM_SLOTS)

    # ---- saving ------------------------------------------------------------------------

    @rule(tokens=sequences, end=ends)
    def begin_save(self, tokens: list[int], end: int) -> None:
        name = prefix_name(tokens, end)
        chunk = self.rig.store.begin_save(name)
        if chunk is not None:
            self.num_puts += 1
            payload = payload_of(name, self.num_puts)
            self.rig.pool.slot(chunk.dram_slot)[:] = payload
            self.saving.append((chunk, payload))

    @precondition(lambda self: self.saving)
    @rule(which=st.integers(0))
    def finish_save(self, which: int) -> None:
        chunk, payload = self.saving.pop(which % len(self.saving))
        if not chunk.dropped:
            self.now[chunk.name.key] = payload
            if not self.is_volatile:
                self.on_disk[chunk.name.key].add(payload)
        self.rig.store.finish_saves([chunk])

    @rule(tokens=sequences, end=ends)
    def put(self, tokens: list[int], end: int) -> None:
        before = len(self.saving)
        self.begin_save(tokens, end)
        if len(self.saving) > before:
            self.finish_save(before)

    @rule(conversation=st.integers(10, 99), count=st.integers(1, DRAM_SLOTS + 1))
    def pressure(self, conversation: int, count: int) -> None:
        for i in range(count):
            self.put(tokens_of(100 * conversation + i, CHUNK_TOKENS), CHUNK_TOKENS)
            self.device.settle()

    # ---- loading -----------------------------------------------------------------------

    def find(self, tokens: list[int], start: int, stop: int) -> list[Piece]:
        """Look up, and check that what is offered are these tokens, one run after another."""
        pieces = self.rig.store.find(sequence_of(tokens), start, stop)
        position = start
        for piece in pieces:
            assert piece.start == position < piece.stop <= stop
            name = piece.chunk.name
            inside = sequence_of(tokens).tokens(name.position, piece.stop)
            assert name.tokens.startswith(inside)
            assert name.position <= piece.start
            assert name.position + len(name.tokens) // TOKEN_BYTES >= piece.stop
            position = piece.stop
        return pieces

    @rule(tokens=sequences, start=ends, stop=ends)
    def prefetch(self, tokens: list[int], start: int, stop: int) -> None:
        self.find(tokens, min(start, stop), stop)

    @rule(tokens=sequences, start=st.sampled_from([0, 0, 0, 16, 20]), stop=ends)
    def get(self, tokens: list[int], start: int, stop: int) -> None:
        """What a request does: look up, let it come up, look up again, hold."""
        self.find(tokens, start, stop)
        self.device.settle()
        for piece in self.rig.store.hold_ready(self.find(tokens, start, stop)):
            chunk = piece.chunk
            payload = bytes(self.rig.pool.slot(chunk.dram_slot))
            if chunk.name.key in self.now:
                assert payload == self.now[chunk.name.key], "wrong bytes"
            else:
                assert payload in self.on_disk[chunk.name.key], "bytes of nobody, or of before"
                self.now[chunk.name.key] = payload
            self.held.append((chunk, payload))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0), aborted=st.booleans())
    def end_load(self, which: int, aborted: bool) -> None:
        chunk, _ = self.held.pop(which % len(self.held))
        if aborted:
            self.rig.store.release([chunk])
        else:
            self.rig.store.loaded([chunk])

    # ---- the device --------------------------------------------------------------------

    @rule()
    def hold_device(self) -> None:
        self.device.hold()

    @rule()
    def release_device(self) -> None:
        self.device.release()

    @precondition(lambda self: self.device.pending)
    @rule(which=st.integers(0))
    def step(self, which: int) -> None:
        self.device.step(which % len(self.device.pending))

    @rule(record=st.integers(0, 6), byte=st.integers(0, RECORD_BYTES - 1))
    def damage(self, record: int, byte: int) -> None:
        if record < self.rig.slab.num_records:
            self.device.damage(self.rig.slab.offset(record) + byte)
            self.is_damaged = True

    # ---- reset, crash, restart ---------------------------------------------------------

    @rule()
    def reset(self) -> None:
        was_held = self.device.is_holding
        with ThreadPoolExecutor(1) as executor:
            done = executor.submit(self.rig.store.reset)
            while not done.done():
                self.device.release()
            assert done.result()
        if was_held:
            self.device.hold()
        self.now.clear()
        self.on_disk.clear()
        self.is_volatile = True

    @rule()
    def crash(self) -> None:
        after = self.device.crash()
        self.begin_anew(after)

    @rule(num_records=capacities)
    def restart(self, num_records: int) -> None:
        """A clean end, which writes back what is dirty; then a start with another capacity."""
        self.device.release()
        self.device.settle()
        residency = self.rig.store.residency
        clean = [c for c in residency.index if c.nvme is Nvme.READY and c.nvme_slot < num_records]
        volatile = self.is_volatile
        after = PowerLossDevice(slab_bytes(num_records), self.device._rng)
        size = min(after.size_bytes, self.device.size_bytes)
        after.image[:size] = after.durable[:size] = self.device.image[:size]
        self.begin_anew(after)
        self.device.settle()
        found = self.rig.store.residency.index
        for chunk in clean:
            if volatile:
                assert found.get(chunk.name.key) is None, "it was to be forgotten"
            elif not self.is_damaged:
                assert found.get(chunk.name.key) or found.extends(chunk.name), "lost for no reason"

    def begin_anew(self, device: PowerLossDevice) -> None:
        for chunk, _ in self.held:
            self.rig.store.release([chunk])
        for chunk, _ in self.saving:
            self.rig.store.finish_saves([chunk])
        self.rig.close()
        self.device = device
        self.rig = Rig(device, found_slab(device.image), DRAM_SLOTS)
        self.held, self.saving, self.is_volatile = [], [], False
        self.now.clear()

    # ---- what always holds -------------------------------------------------------------

    @invariant()
    def no_slot_in_use_is_given_away_and_capacity_holds(self) -> None:
        self.device.settle()
        for chunk, payload in (*self.held, *self.saving):
            assert self.rig.pool.slot(chunk.dram_slot) == payload, "a slot in use was given away"
        residency = self.rig.store.residency
        residency.check_integrity()
        assert residency.dram_used <= DRAM_SLOTS
        assert residency.nvme_used <= self.rig.slab.num_records
        in_use = {id(chunk) for chunk, _ in (*self.held, *self.saving)}
        assert len(in_use) <= residency.num_held() <= len(in_use) + len(self.device.pending)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        while self.held:
            self.end_load(0, aborted=True)
        while self.saving:
            self.finish_save(0)
        self.device.release()
        self.device.settle()
        self.rig.store.residency.check_integrity()
        assert self.rig.store.residency.num_held() == 0
        assert self.rig.store.is_idle()
        self.rig.close()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=250, stateful_step_count=40)
