# SPDX-License-Identifier: Apache-2.0
"""The shared tier against real stores: hits of other processes, and values that are not ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from attnstore_lab.testing.network_stores import NetworkStore
from attnstore_vllm.index.chunk import State
from attnstore_vllm.io.checksum import checksum, copy_checksums
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.tiers.shared import secret, shared_io
from attnstore_vllm.tiers.shared.lanes import LaneOp
from attnstore_vllm.tiers.shared.record import HEADER_BYTES, VERSION, RecordNames
from tests.helpers import Rig, conversation, lookup_of, name_of, names_of, sequence_of
from tests.shared.rigs import (
    DEADLINE_S,
    NO_KEYS,
    NUM_TOKENS,
    counts,
    fetch,
    io_of,
    stored_names,
    whole_chunks,
    write,
)
from tests.shared.stranger import Stranger

OpenShared = Callable[..., Rig]
WHOLE = NUM_TOKENS // 16


@contextmanager
def other_process(
    server: NetworkStore, namespace: bytes, first: int, count: int
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.shared.other_server", json.dumps(server.settings)]
    process = subprocess.Popen(
        [*command, namespace.hex(), str(first), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pids_of(process: subprocess.Popen[str]) -> tuple[int, int]:
    assert process.stdout is not None
    own, child = process.stdout.readline().split()
    return int(own), int(child)


def test_what_another_process_wrote_is_found_also_after_its_death(
    server: NetworkStore, namespace: bytes, open_shared: OpenShared
) -> None:
    with other_process(server, namespace, 1, 2) as process:
        _, child = pids_of(process)
        rig = open_shared(server)
        assert fetch(rig, conversation(1, NUM_TOKENS)) == WHOLE
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 5.0
        while os.path.exists(f"/proc/{child}"):
            assert time.monotonic() < deadline, "the child outlives its engine"
            time.sleep(0.02)
    assert fetch(rig, conversation(2, NUM_TOKENS)) == WHOLE
    assert counts(rig)["found"] == 2 * WHOLE
    assert not counts(rig).get("shared_corrupt")


def test_what_came_from_there_is_not_written_there(
    server: NetworkStore, open_shared: OpenShared
) -> None:
    one, two = open_shared(server), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    assert fetch(two, tokens) == WHOLE
    assert fetch(two, tokens) == WHOLE  # a second use
    time.sleep(0.4)
    assert two.store.figures().moved_bytes.get(io_of(two).flow_down, 0) == 0


@pytest.mark.long
def test_what_others_wrote_meanwhile_is_not_sent_again(
    server: NetworkStore, open_shared: OpenShared
) -> None:
    one, two = open_shared(server), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    for name in names_of(sequence_of(tokens))[:WHOLE]:
        two.put(name)
    two.until(lambda: counts(two).get("is_there", 0) == WHOLE)
    assert two.store.figures().moved_bytes.get(io_of(two).flow_down, 0) == 0


def flipped(record: bytes) -> bytes:
    at = len(record) - 100
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


def of_another_version(record: bytes) -> bytes:
    assert record[8:12] == VERSION.to_bytes(4, "little")
    return record[:8] + (VERSION + 1).to_bytes(4, "little") + record[12:]


def shorter(record: bytes) -> bytes:
    return record[:-4096]


def longer(record: bytes) -> bytes:
    return record + bytes(4096)


def torn(record: bytes) -> bytes:
    return bytes(HEADER_BYTES) + record[HEADER_BYTES:]


RARE = [pytest.param(damage, marks=pytest.mark.long) for damage in (longer, torn)]


@pytest.mark.parametrize("damage", [flipped, of_another_version, shorter, *RARE])
def test_a_damaged_value_is_a_miss_and_is_written_over(
    server: NetworkStore,
    open_shared: OpenShared,
    stranger: Stranger,
    damage: Callable[[bytes], bytes],
) -> None:
    one, two = open_shared(server), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    names = write(one, tokens)
    right = stranger.get(names[1])
    stranger.put(names[1], damage(right))
    assert fetch(two, tokens) == 1
    assert counts(two)["shared_corrupt"] == 1
    two.put(names_of(sequence_of(tokens))[1])  # computed again
    two.until(lambda: stranger.get(names[1]) == right)


def test_swapped_values_are_misses(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    one, two = open_shared(server), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    names = write(one, tokens)
    stranger.put(names[0], stranger.get(names[2]))
    assert fetch(two, tokens) == 0
    assert counts(two)["shared_corrupt"] == 1


def test_what_is_verified_is_the_copy(
    server: NetworkStore, open_shared: OpenShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte is wrong in the bounce buffer while it is copied, and right before and after."""
    one, two = open_shared(server), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)

    native = copy_checksums

    def copy(copies: list[tuple[memoryview, list[memoryview]]]) -> list[bytes]:
        for _, (of,) in copies:
            of[5] ^= 1
        digests = native(copies)
        for _, (of,) in copies:
            of[5] ^= 1
        return digests

    monkeypatch.setattr(secret, "copy_checksums", copy)
    assert fetch(two, tokens) == 0
    assert counts(two)["shared_corrupt"] >= 1


def test_the_checksum_is_of_what_was_copied(
    server: NetworkStore, open_shared: OpenShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of the bounce buffer changes before it is written: it must not be sealed as right."""
    one, two = open_shared(server), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    native = shared_io._copy

    def copy(to: memoryview, of: memoryview) -> None:
        native(to, of)
        to[5] ^= 1

    monkeypatch.setattr(shared_io, "_copy", copy)
    write(one, tokens)
    assert fetch(two, tokens) == 0
    assert counts(two)["shared_corrupt"] >= 1


def test_two_lanes_share_the_work(
    server: NetworkStore, open_shared: OpenShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_io, "PLACES_MAX", 2)
    one, two = open_shared(server), open_shared(server)
    parts: dict[LaneOp, list[tuple[int, int]]] = {LaneOp.GET: [], LaneOp.PUT: []}
    for rig in (one, two):
        rig_ask = io_of(rig).helper.numbers

        def slow(
            lane: int,
            op: LaneOp,
            wanted: list[bytes],
            deadline_s: float,
            ask: Callable[..., list[int]] = rig_ask,
        ) -> list[int]:
            if op in parts:
                parts[op].append((lane, len(wanted)))
                time.sleep(0.05)
            return ask(lane, op, wanted, deadline_s)

        io_of(rig).helper.numbers = slow  # type: ignore[method-assign, assignment]
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    assert fetch(two, tokens) == WHOLE
    lanes, sizes = zip(*parts[LaneOp.GET], strict=True)
    assert (len(set(lanes)), sorted(sizes)) == (2, [1, 2]), "three chunks, two at most in a part"
    # What ripens later may be a part of its own, in a lane that is free again.
    stored = [size for _, size in parts[LaneOp.PUT]]
    assert sum(stored) == 3
    assert max(stored) <= 2


def test_a_value_that_vanishes_after_it_was_asked_for_is_a_miss(
    server: NetworkStore, open_shared: OpenShared
) -> None:
    one, two = open_shared(server), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    names = write(one, tokens)
    helper = io_of(two).helper
    ask = helper.numbers

    def vanishing(lane: int, op: LaneOp, wanted: list[bytes], deadline_s: float) -> list[int]:
        if op is LaneOp.GET:  # as if the store had evicted the second
            wanted = [name[::-1] if name == names[1] else name for name in wanted]
        return ask(lane, op, wanted, deadline_s)

    helper.numbers = vanishing  # type: ignore[method-assign, assignment]
    assert fetch(two, tokens) == 1
    assert counts(two)["gone"] == 1
    assert not counts(two).get("shared_corrupt") and not counts(two).get("shared_read_failed")
    helper.numbers = ask  # type: ignore[method-assign]
    assert fetch(two, tokens) == 1, "it is left alone for some seconds"


def test_a_question_that_nobody_is_asked_any_more_ends_at_once(
    server: NetworkStore, open_shared: OpenShared
) -> None:
    """The tier's thread sees it, and tells who waits: that is no failure of the store."""
    rig = open_shared(server)
    io, go_on = io_of(rig), threading.Event()
    ask = io.helper.numbers

    def late(*args: Any) -> list[int]:
        go_on.wait(DEADLINE_S)
        return ask(*args)

    io.helper.numbers = late  # type: ignore[method-assign, assignment]
    before, behind = (
        lookup_of(conversation(number, NUM_TOKENS), may_ask=True) for number in (1, 2)
    )
    for lookup in (before, behind):
        rig.store.find(lookup, 0, NUM_TOKENS)
        assert awaits_remote(lookup)
    io.generation.is_behind = True  # others were reset: whose KV there is nobody knows
    go_on.set()
    assert rig.store.wait_for_any((), DEADLINE_S / 2, [behind]), "long before its deadline"
    rig.until(lambda: not awaits_remote(before))
    assert io.health.reads.in_use
    assert not counts(rig).get("answers_late") and not counts(rig).get("shared_read_failed")


def test_no_token_and_no_tenant_is_in_a_record(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    rig = open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    name = names_of(sequence_of(tokens))[0]
    record = stranger.get(write(rig, tokens)[0])
    assert name.tokens not in record
    assert name.tokens[:16] not in record
    assert name.tenant == bytes(32) or name.tenant not in record


def test_a_request_alone_is_not_written_before_it_pauses(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    rig = open_shared(server, pause_s=60.0)
    tokens = conversation(1, NUM_TOKENS)
    sequence = sequence_of(tokens)
    for name in names_of(sequence)[:WHOLE]:
        rig.put(name)
    assert len(io_of(rig).tier.waiting) == 0
    rig.store.find(Lookup(sequence), 0, NUM_TOKENS)  # a second use
    rig.until(lambda: sum(stranger.has(stored_names(rig, tokens))) == WHOLE)


@pytest.mark.long
def test_no_more_is_written_than_the_bandwidth_allows(
    server: NetworkStore, open_shared: OpenShared
) -> None:
    rig = open_shared(server, bandwidth=4096, dram_slots=16)
    for number in range(4):
        for name in names_of(sequence_of(conversation(number, NUM_TOKENS)))[:WHOLE]:
            rig.put(name)
    time.sleep(1.5)
    written = rig.store.figures().moved_bytes.get(io_of(rig).flow_down, 0)
    assert 0 < written <= 3 * io_of(rig).record_bytes


def test_another_servers_copy_has_no_checksum_of_ours(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    """The store has evicted what we put, and has it again of a server that rounds otherwise. What
    comes back is that one's: siblings are told its checksum, or are told none."""
    one = open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    places, names = write(one, tokens), whole_chunks(tokens, None)
    generation = io_of(one).generation.usable
    assert generation is not None
    other = bytes(range(256)) * (one.pool.slot_bytes // 256)
    for place, name in zip(places, names, strict=True):
        made = RecordNames(io_of(one).namespace, generation, NO_KEYS)
        header = made.header(place, name, len(other), NO_KEYS.digest(memoryview(other)))
        stranger.put(place, header + other)
    for number in range(20):  # they leave DRAM
        one.put(name_of(sequence_of(conversation(700 + number, 16)), 0))
        one.until(lambda: not one.store.is_writing)
    chunks, residency = [one.chunk(name) for name in names], one.store.residency
    for chunk in chunks:  # the store is idle
        if chunk.at(residency.nvme.name).state is State.READY:
            residency.leave(residency.nvme, chunk)
    lookup = lookup_of(tokens, None, may_ask=True)
    one.store.find(lookup, 0, len(tokens))
    one.until(lambda: not awaits_remote(lookup))
    one.store.find(lookup, 0, len(tokens))
    one.until(lambda: all(chunk.dram.state is State.READY for chunk in chunks))
    for chunk in chunks:
        slot = one.pool.slot(chunk.dram.slot)
        assert bytes(slot) == other
        assert chunk.dram.checksum in (b"", checksum(slot))
