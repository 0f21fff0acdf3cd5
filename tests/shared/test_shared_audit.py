# SPDX-License-Identifier: Apache-2.0
"""KV in the shared tier that an audit finds wrong: its seal is right, and its content is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.network_stores import NetworkStore
from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.index.chunk import State
from attnstore_vllm.policy.kv_compare import Comparison, Unit
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.tiers.shared import shared_io
from attnstore_vllm.tiers.shared.record import HEADER_BYTES, RecordNames
from attnstore_vllm.types import SHARED, Event
from tests.helpers import PAYLOAD_BYTES, Rig, conversation, lookup_of, memory_rig, payload_of
from tests.shared import rigs
from tests.shared.rigs import NUM_TOKENS, io_of, stored_names, whole_chunks
from tests.shared.stranger import Stranger

OpenShared = Callable[..., Rig]
BITS = Comparison([Unit(0, 0, 0, PAYLOAD_BYTES // 8), Unit(0, 1, PAYLOAD_BYTES // 2, 1024)], None)
ALONE_S = 0.2


@pytest.mark.parametrize("is_known", [True, False], ids=["leased", "forgotten"])
def test_wrong_kv_is_not_served_again(
    server: NetworkStore,
    namespace: bytes,
    open_shared: OpenShared,
    stranger: Stranger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_known: bool,
) -> None:
    """Neither after the time for which it is left alone, nor once its lease there is over."""
    monkeypatch.setattr(shared_io, "ALONE_S", ALONE_S)
    if not is_known:
        monkeypatch.setattr(shared_io, "LEASE_S", 0.5)
        monkeypatch.setattr(shared_io.SharedIo, "lease_s", 0.5)
    one = open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    names = whole_chunks(tokens, None)
    wrong = bytes(PAYLOAD_BYTES)
    one.put(names[0], wrong)
    for name in names[1:]:
        one.put(name)
    one.until(lambda: all(SHARED in one.chunk(name).behind for name in names))
    one.until(lambda: io_of(one).num_storing == 0)
    place = stored_names(one, tokens)[0]
    assert stranger.get(place)[HEADER_BYTES:] == wrong

    audit = AuditConfig(rate=1.0, stop_after=100)
    tier = rigs.make(server.settings, namespace, directory=None)
    two = memory_rig(more_tiers=(tier,), audit=audit, comparisons=(BITS,), path=tmp_path)
    rigs.see_weights(two, same=True)
    two.until(lambda: io_of(two).generation.usable is not None)
    try:
        assert two.store.audit is not None
        two.store.audit.trial.close(SHARED)  # other chunks of the tier have agreed
        assert found(two, tokens)[0] == wrong
        chunk = two.chunk(names[0])
        if not is_known:
            two.until(lambda: SHARED not in chunk.behind)
        copy = two.store.begin_audit(1, chunk, chunk.dram, [range(4)])
        assert copy is not None
        two.pool.slot(copy.dram.slot)[:] = payload_of(names[0])
        two.store.finish_saves([copy])
        two.until_idle()
        assert chunk.dropped
        time.sleep(2 * ALONE_S)
        assert wrong not in found(two, tokens), "it is served once more"
        two.hears()
        two.put(names[0])  # computed again
        two.until(lambda: stranger.get(place)[HEADER_BYTES:] == payload_of(names[0]))
    finally:
        two.close()


def test_a_question_that_is_under_way_brings_no_wrong_kv_back(
    server: NetworkStore,
    namespace: bytes,
    open_shared: OpenShared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk without the one before it is asked for with that one, and found wrong meanwhile."""
    one = open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    names = whole_chunks(tokens, None)
    wrong = bytes(PAYLOAD_BYTES)
    one.put(names[0])
    one.put(names[1], wrong)
    one.until(lambda: all(SHARED in one.chunk(name).behind for name in names[:2]))
    audit = AuditConfig(rate=1.0, stop_after=100)
    tier = rigs.make(server.settings, namespace, directory=None)
    two = memory_rig(more_tiers=(tier,), audit=audit, comparisons=(BITS,), path=tmp_path)
    rigs.see_weights(two, same=True)
    two.until(lambda: io_of(two).generation.usable is not None)
    try:
        assert two.store.audit is not None
        two.store.audit.trial.close(SHARED)
        assert found(two, tokens)[1] == wrong
        chunk = two.chunk(names[1])
        two.store.drop([two.chunk(names[0])])
        there, go_on, ask = threading.Event(), threading.Event(), io_of(two).helper.numbers

        def slow(*given: Any) -> list[int]:
            answer = ask(*given)
            there.set()
            go_on.wait(rigs.DEADLINE_S)
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(io_of(two).helper, "numbers", slow)
            two.store.find(lookup_of(tokens, None, may_ask=True), 0, len(tokens))
            two.until(there.is_set)
            copy = two.store.begin_audit(1, chunk, chunk.dram, [range(4)])
            assert copy is not None
            two.pool.slot(copy.dram.slot)[:] = payload_of(names[1])
            two.store.finish_saves([copy])
            two.until(lambda: chunk.dropped)
            go_on.set()
            two.until(lambda: rigs.counts(two)[Event.FOUND] > 2)
        assert found(two, tokens) == [payload_of(names[0])]
    finally:
        two.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_wrong_kv_that_waits_to_be_written_is_not_sent(
    server: NetworkStore,
    namespace: bytes,
    open_shared: OpenShared,
    stranger: Stranger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool,
) -> None:
    """Nor does it take the place of the right one, which another server has written before."""
    one = open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    name = whole_chunks(tokens, None)[0]
    if is_there:
        one.put(name)
        one.until(lambda: one.chunk(name).at(SHARED).state is State.READY)
    place, go_on = stored_names(one, tokens)[0], threading.Event()
    audit = AuditConfig(rate=1.0, stop_after=100)
    tier = rigs.make(server.settings, namespace, directory=None)
    two = memory_rig(more_tiers=(tier,), audit=audit, comparisons=(BITS,), path=tmp_path)
    rigs.see_weights(two, same=True)
    two.until(lambda: io_of(two).generation.usable is not None)
    busy, ask = set[int](), io_of(two).helper.numbers

    def late(lane: int, *given: Any) -> list[int]:
        busy.add(lane)
        go_on.wait(rigs.DEADLINE_S)
        return ask(lane, *given)

    monkeypatch.setattr(io_of(two).helper, "numbers", late)
    try:
        for number in range(2, 2 + len(shared_io.STORE_LANES)):
            two.put(whole_chunks(conversation(number, NUM_TOKENS), None)[0])
            two.until(lambda: len(busy) == number - 1)  # noqa: B023 - it is called at once
        two.put(name, bytes(PAYLOAD_BYTES))
        chunk = two.chunk(name)
        two.until(lambda: chunk.at(SHARED).state is State.WRITING)
        copy = two.store.begin_audit(1, chunk, chunk.dram, [range(4)])
        assert copy is not None
        two.pool.slot(copy.dram.slot)[:] = payload_of(name)
        two.store.finish_saves([copy])
        two.until(lambda: chunk.dropped)
        go_on.set()
        two.until_idle()
        assert stranger.get(place)[HEADER_BYTES:] == (payload_of(name) if is_there else b"")
        assert found(two, tokens) == [], "it is not known that this one is right"
    finally:
        two.close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_this_engine_has_put_says_nothing_of_what_others_put(
    server: NetworkStore,
    namespace: bytes,
    open_shared: OpenShared,
    stranger: Stranger,
    tmp_path: Path,
    is_replaced: bool,
) -> None:
    """It comes back as it was: so it agrees, and says nothing of what others have written. Once
    others have put another record in its place, it is theirs."""
    one = open_shared(server)
    own, others = conversation(1, NUM_TOKENS), conversation(2, NUM_TOKENS)
    theirs = whole_chunks(others, None)[0]
    one.put(theirs, bytes(PAYLOAD_BYTES))
    one.until(lambda: one.chunk(theirs).at(SHARED).state is State.READY)
    audit = AuditConfig(rate=1.0, stop_after=100)
    tier = rigs.make(server.settings, namespace, directory=None)
    two = memory_rig(more_tiers=(tier,), audit=audit, comparisons=(BITS,), path=tmp_path)
    rigs.see_weights(two, same=True)
    io = io_of(two)
    two.until(lambda: io.generation.usable is not None)
    try:
        name = whole_chunks(own, None)[0]
        two.put(name)
        chunk = two.chunk(name)
        two.until(lambda: chunk.at(SHARED).state is State.READY)
        two.until_idle()
        if is_replaced:
            place, wrong = stored_names(one, own)[0], bytes(PAYLOAD_BYTES)
            assert io.generation.usable is not None
            names = RecordNames(io.namespace, io.generation.usable, io.keys)
            header = names.header(place, name, len(wrong), io.keys.digest(memoryview(wrong)))
            stranger.put(place, bytes(header) + wrong)
        two.store.drop([chunk])
        brought: dict[str, str] = {}
        for what, tokens, first in (("own", own, name), ("others", others, theirs)):
            assert len(found(two, tokens)) == 1
            brought[what] = two.chunk(first).brought_by
        assert brought == {"own": SHARED if is_replaced else "", "others": SHARED}
    finally:
        two.close()


def found(rig: Rig, tokens: list[int]) -> list[bytes]:
    lookup = lookup_of(tokens, None, may_ask=True)
    rig.store.find(lookup, 0, len(tokens))
    rig.until(lambda: not awaits_remote(lookup))
    rig.store.find(lookup, 0, len(tokens))
    rig.until(lambda: io_of(rig).num_loading == 0)
    return [payload for _, payload in rig.read(lookup.keys)]
