# SPDX-License-Identifier: Apache-2.0
"""The whole store against a dict, with power loss, damage and late completions at any point.

It is long since three machines share their rules.

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
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from attnstore_lab.testing.devices import PowerLossDevice
from attnstore_lab.testing.dict_tier import MakeDictTier
from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.types import NVME, Key
from tests.helpers import (
    CHUNK_TOKENS,
    RECORD_BYTES,
    Rig,
    format_device,
    found_slab,
    lookup_of,
    name_of,
    names_of,
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
    tokens_of(3, TOKENS),
]
sequences = st.sampled_from(SEQUENCES)
ends = st.sampled_from([5, 16, 20, 32, 40, TOKENS, TOKENS])
starts = st.sampled_from([0, 0, 0, 0, 3, CHUNK_TOKENS])
WINDOW, BLOCK = 10, 4
"""Tokens of a window, and of a block of its group."""
capacities = st.integers(4, 12)  # records


def prefix_name(tokens: list[int], end: int) -> ChunkName:
    """The chunk, or tail, that ends at token `end`."""
    return name_of(sequence_of(tokens[:end]), (end - 1) // CHUNK_TOKENS)


def section_name(tokens: list[int], end: int, group: int, hole: int) -> ChunkName:
    """What a group keeps of the chunk, or tail, that ends at token `end`."""
    number = (end - 1) // CHUNK_TOKENS
    return sequence_of(tokens).section(group, hole).name_up_to(number, tenant_hash(None), end)


class StoreMachine(RuleBasedStateMachine):
    options: ClassVar[dict[str, Any]] = {}
    dram_slots: ClassVar[int] = DRAM_SLOTS

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[Key, bytes] = {}
        self.on_disk: defaultdict[Key, set[bytes]] = defaultdict(set)
        self.is_volatile = False  # a reset came: nothing of this process survives its end
        self.is_damaged = False
        self.is_torn = False  # power was lost: records may be half new
        self.held: list[tuple[Chunk, bytes]] = []
        self.saving: list[tuple[Chunk, bytes]] = []
        self.num_puts = 0

    @initialize(seed=st.integers(0, 2**32), hold=st.booleans(), num_records=capacities)
    def start(self, seed: int, hold: bool, num_records: int) -> None:
        self.device = PowerLossDevice(slab_bytes(num_records), Random(seed), hold=hold)
        slab = new_slab(num_records)
        format_device(self.device, slab)
        self.device.durable[:] = self.device.image
        self.rig = Rig(self.device, slab, self.dram_slots, options=self.options)

    # ---- saving ------------------------------------------------------------------------

    @rule(tokens=sequences, end=ends)
    def begin_save(self, tokens: list[int], end: int) -> None:
        self.begin(prefix_name(tokens, end))

    def begin(self, name: ChunkName) -> None:
        chunk = self.rig.store.begin_save(name)
        if chunk is not None:
            self.num_puts += 1
            payload = payload_of(name, self.num_puts)
            self.rig.pool.slot(chunk.dram.slot)[:] = payload
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
        self.device.settle()

    def put(self, tokens: list[int], end: int) -> None:
        self.put_chunk(prefix_name(tokens, end))

    def put_chunk(self, name: ChunkName) -> None:
        before = len(self.saving)
        self.begin(name)
        if len(self.saving) > before:
            self.finish_save(before)

    def put_all(self, tokens: list[int], end: int) -> None:
        """What a request leaves: its whole chunks, and its tail."""
        for start in range(0, end, CHUNK_TOKENS):
            self.put(tokens, min(start + CHUNK_TOKENS, end))

    @rule(count=st.sampled_from([1, DRAM_SLOTS]))
    def pressure(self, count: int) -> None:
        """Chunks of conversations that nobody asks for push out what is least recently used."""
        for _ in range(count):
            self.put(tokens_of(1000 + self.num_puts, CHUNK_TOKENS), CHUNK_TOKENS)

    # ---- loading -----------------------------------------------------------------------

    def find(self, tokens: list[int], start: int, stop: int) -> list[Piece]:
        """Look up, and check that what is offered are these tokens, one run after another."""
        pieces = self.rig.store.find(lookup_of(tokens), start, stop)
        position = start
        for piece in pieces:
            assert piece.start == position < piece.stop <= stop
            name = piece.chunk.name
            inside = sequence_of(tokens).tokens(name.position, piece.stop)
            assert name.tokens.startswith(inside) or not name.tokens  # on NVMe: confirmed later
            assert name.position <= piece.start
            assert name.position + name.num_tokens >= piece.stop
            position = piece.stop
        return pieces

    @rule(tokens=sequences, start=starts, stop=ends)
    def prefetch(self, tokens: list[int], start: int, stop: int) -> None:
        self.find(tokens, start, stop)

    @rule(
        tokens=sequences,
        start=starts,
        end=ends,
        before=st.sampled_from(["nothing", "pressure", "pressure", "damage", "crash"]),
        fate=st.sampled_from(["loaded", "aborted", "in flight"]),
        byte=st.integers(0, RECORD_BYTES - 1),
    )
    def turn(
        self, tokens: list[int], start: int, end: int, before: str, fate: str, byte: int
    ) -> None:
        """A whole request, in one rule, because an example uses only some of the rules."""
        if before == "crash":
            self.crash()
        elif before != "nothing":
            self.pressure(self.dram_slots)
        if before == "damage" and self.records():
            self.damage(0, byte)
        num_held = len(self.held)
        self.get(tokens, start, end)
        while fate != "in flight" and len(self.held) > num_held:
            self.end_load(num_held, fate == "aborted")
        self.put_all(tokens, end)

    def get(self, tokens: list[int], start: int, stop: int) -> None:
        """Look up, let it come up, look up again, and load what is there by then."""
        self.find(tokens, start, stop)
        self.device.settle()
        pieces = self.find(tokens, start, stop)
        self.device.settle()
        for piece in self.rig.store.hold_ready(pieces, sequence_of(tokens), stop):
            chunk = piece.chunk
            payload = bytes(self.rig.pool.slot(chunk.dram.slot))
            self.check_payload(chunk.name.key, payload)
            self.held.append((chunk, payload))

    def check_payload(self, key: Key, payload: bytes) -> None:
        if key in self.now:
            assert payload == self.now[key], "wrong bytes"
        else:
            assert payload in self.on_disk[key], "bytes of nobody, or of before"
            self.now[key] = payload

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0), aborted=st.booleans())
    def end_load(self, which: int, aborted: bool) -> None:
        chunk, _ = self.held.pop(which % len(self.held))
        if aborted:
            self.rig.store.release([chunk])
        else:
            self.rig.store.loaded([chunk])
        self.device.settle()

    # ---- the device --------------------------------------------------------------------

    @rule(steps=st.lists(st.integers(0, 7), max_size=4), release=st.booleans())
    def hold_device(self, steps: list[int], release: bool) -> None:
        """From here requests stay in flight; some of them are carried out, in any order."""
        self.device.hold()
        for which in steps:
            if self.device.pending:
                self.device.step(which % len(self.device.pending))
                self.device.settle()
        if release:
            self.device.release()

    @precondition(lambda self: self.records())
    @rule(which=st.integers(0), byte=st.integers(0, RECORD_BYTES - 1))
    def damage(self, which: int, byte: int) -> None:
        records = self.records()
        self.device.damage(self.rig.slab.offset(records[which % len(records)]) + byte)
        self.is_damaged = True

    def records(self) -> list[int]:
        """Records that the store may read; first those of SEQUENCES that are in no other tier."""
        chunks = [c for c in self.rig.store.residency.index if c.at(NVME).state is State.READY]
        names = {name.key for tokens in SEQUENCES for name in names_of(sequence_of(tokens))}
        chunks.sort(key=lambda c: (c.dram.state is not State.ABSENT, c.name.key not in names))
        return [chunk.at(NVME).slot for chunk in chunks]

    # ---- reset, crash, restart ---------------------------------------------------------

    @rule(crash=st.sampled_from(["no", "before", "after"]))
    def reset(self, crash: str) -> None:
        """Also while recovery runs, and with the power lost right after it was reported."""
        if crash == "before":
            self.device.hold()
            self.crash()
        was_held = self.device.is_holding
        with ThreadPoolExecutor(1) as executor:
            done = executor.submit(self.rig.store.reset)
            self.rig.until(lambda: len(self.rig.store.residency.index) == 0)
            self.device.release()  # what was in flight ends only after the reset was asked for
            assert done.result()
        if was_held:
            self.device.hold()
        self.now.clear()
        self.on_disk.clear()
        self.is_volatile = True
        if crash == "after":
            self.crash()

    @rule()
    def crash(self) -> None:
        self.is_torn = True
        self.begin_anew(self.device.crash())

    @rule()
    def restart(self) -> None:
        """A clean end, which writes back what is dirty; then another start."""
        self.device.release()
        self.device.settle()
        residency = self.rig.store.residency
        clean = [c for c in residency.index if c.at(NVME).state is State.READY]
        volatile = self.is_volatile
        after = PowerLossDevice(self.device.size_bytes, self.device.rng)
        after.image[:] = after.durable[:] = self.device.image
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
        self.rig = Rig(device, found_slab(device.image), self.dram_slots, options=self.options)
        self.held, self.saving, self.is_volatile = [], [], False
        self.now.clear()

    # ---- what always holds -------------------------------------------------------------

    @invariant()
    def no_slot_in_use_is_given_away_and_capacity_holds(self) -> None:
        self.device.settle()
        for chunk, payload in (*self.held, *self.saving):
            assert self.rig.pool.slot(chunk.dram.slot) == payload, "a slot in use was given away"
        residency = self.rig.store.residency
        residency.check_integrity()
        for chunk in residency.index:
            assert self.is_known(chunk) or chunk.dram.state is State.SAVING, (
                "nobody put this, or a reset dropped it"
            )
        assert residency.dram.num_used <= self.dram_slots
        assert residency.nvme.num_used <= self.rig.slab.records_per_segment
        if not (self.is_damaged or self.is_torn):
            assert residency.counts["corrupt"] == 0, "a record was overwritten while it was read"
        in_use = {id(chunk) for chunk, _ in (*self.held, *self.saving)}
        assert len(in_use) <= residency.num_held() <= len(in_use) + len(self.device.pending)

    def is_known(self, chunk: Chunk) -> bool:
        return chunk.name.key in self.now or bool(self.on_disk[chunk.name.key])

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        while self.held:
            self.end_load(0, aborted=True)
        while self.saving:
            self.finish_save(0)
        self.device.release()
        self.device.settle()
        self.rig.store.check_integrity()
        assert self.rig.store.residency.num_held() == 0
        assert self.rig.store.is_idle()
        self.rig.close()


class GroupsMachine(StoreMachine):
    """The same with KV cache groups beside the spine: a window, and a recurrent one. What is
    offered has all that they need where it ends."""

    options: ClassVar[dict[str, Any]] = {
        "needs": (Need(1, Reach.WINDOW, WINDOW, BLOCK), Need(2, Reach.STATE, 0, CHUNK_TOKENS))
    }
    dram_slots: ClassVar[int] = 8

    def __init__(self) -> None:
        super().__init__()
        self.holes: defaultdict[Key, int] = defaultdict(int)  # the most blocks that it may lack

    @rule(tokens=sequences, end=ends, group=st.integers(1, 2), hole=st.integers(0, 2))
    def begin_section(self, tokens: list[int], end: int, group: int, hole: int) -> None:
        self.begin(self.section(tokens, end, group, hole if group == 1 else 0))

    def put(self, tokens: list[int], end: int) -> None:
        super().put(tokens, end)
        self.put_chunk(self.section(tokens, end, 1, self.num_puts % 2))
        self.put_chunk(self.section(tokens, end, 2, 0))

    def section(self, tokens: list[int], end: int, group: int, hole: int) -> ChunkName:
        name = section_name(tokens, end, group, hole)
        self.holes[name.key] = max(hole, self.holes[name.key])
        return name

    def find(self, tokens: list[int], start: int, stop: int) -> list[Piece]:
        pieces = self.rig.store.find(lookup_of(tokens), start, stop)
        self.check_groups(pieces, tokens, start)
        return pieces

    def check_groups(self, pieces: list[Piece], tokens: list[int], start: int) -> None:
        spine = [piece for piece in pieces if piece.group == 0]
        if not spine:
            assert not pieces
            return
        stop = spine[-1].stop
        there: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for piece in pieces:
            there[piece.group] += range(piece.start, piece.stop)
            self.check_section(piece, tokens)
        assert there[0] == list(range(start, stop))
        assert there[1][-(WINDOW - 1) :] == list(range(max(start, stop - WINDOW + 1), stop))
        assert there[2] == [stop - 1]

    def check_section(self, piece: Piece, tokens: list[int]) -> None:
        """It has these tokens, and no hole where they are."""
        name = piece.chunk.name
        inside = sequence_of(tokens).tokens(name.position, piece.stop)
        assert name.tokens.startswith(inside) or not name.tokens  # on NVMe: confirmed later
        assert name.position + self.holes[name.key] * BLOCK <= piece.start
        end = name.position + name.num_tokens
        assert piece.stop == end if piece.group == 2 else piece.stop <= end


class ThreeTiersMachine(StoreMachine):
    """The same with a third tier, of which nothing but the list of tiers knows."""

    options: ClassVar[dict[str, Any]] = {"more_tiers": (MakeDictTier(6),)}


EXAMPLES = settings().max_examples
"""Of the profile: 100, or many more at night."""

TestThreeTiers = ThreeTiersMachine.TestCase
TestThreeTiers.settings = settings(max_examples=EXAMPLES // 4, stateful_step_count=50)

TestGroups = GroupsMachine.TestCase
TestGroups.settings = settings(max_examples=EXAMPLES // 5, stateful_step_count=50)

TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=EXAMPLES // 5 * 2, stateful_step_count=50)
