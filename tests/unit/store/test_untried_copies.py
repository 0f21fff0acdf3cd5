# SPDX-License-Identifier: Apache-2.0
"""KV of others that is on trial, and what of it has come to NVMe meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others
from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.index.chunk import State
from attnstore_vllm.policy.kv_compare import Comparison, Unit
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.types import NVME, Event
from tests.helpers import (
    PAYLOAD_BYTES,
    Rig,
    Rigs,
    conversation,
    lookup_of,
    names_of,
    payload_of,
    push_out_of_dram,
    sequence_of,
)

BITS = Comparison([Unit(0, 0, 0, PAYLOAD_BYTES // 8)], None)
NUM_TOKENS = 49
"""Three whole chunks, and one token to compute."""


def asks(rig: Rig, request_id: str, tokens: list[int]) -> None:
    """A request comes, and all that it finds comes up."""
    lookup = lookup_of(tokens, may_ask=True)
    _, visit = rig.store.arrive(request_id, lookup, len(tokens))
    rig.until(lambda: not awaits_remote(lookup))
    find = rig.store.find
    find(lookup, 0, len(tokens) - 1, request_id=request_id, visit=visit)
    rig.until_idle()
    find(lookup, 0, len(tokens) - 1, request_id=request_id, visit=visit)
    rig.until_idle()


def two_ask(
    open_rig: Rigs, path: Path, stop_after: int = 100
) -> tuple[Rig, MemoryDevice, list[int]]:
    """Others give wrong KV to two requests, before any of it was compared."""
    others = Others()
    tokens = conversation(1, NUM_TOKENS)
    for name in names_of(sequence_of(tokens))[:3]:
        others.put(name, bytes(PAYLOAD_BYTES))
    audit = AuditConfig(rate=1.0, stop_after=stop_after)
    given = {"audit": audit, "path": path, "comparisons": (BITS,), "dram_slots": 32}
    rig, device = open_rig(more_tiers=(MakeRemoteDict(others),), **given)
    for request_id in ("one", "two"):
        asks(rig, request_id, tokens)
    device.settle()
    rig.until_idle()
    return rig, device, tokens


def test_a_trial_that_fails_leaves_nothing_of_the_tier_to_the_next_start(
    open_rig: Rigs, tmp_path: Path
) -> None:
    rig, device, tokens = two_ask(open_rig, tmp_path)
    names = names_of(sequence_of(tokens))[:3]
    chunk = rig.chunk(names[0])
    assert chunk.brought_by == "asked" and chunk.dram.state is State.READY
    copy = rig.store.begin_audit(1, chunk, chunk.dram, [range(4)])
    assert copy is not None
    rig.pool.slot(copy.dram.slot)[:] = payload_of(names[0])
    rig.store.finish_saves([copy])
    rig.until_idle()
    device.settle()
    assert rig.read(sequence_of(tokens)) == []
    again, _ = open_rig(image=bytes(device.image))
    assert again.store.figures().counts.get("recovered", 0) == 0


def test_a_trial_that_fails_twice_at_once_ends_no_other_tier(
    open_rig: Rigs, tmp_path: Path
) -> None:
    """Two requests have drawn what one tier gave, before the first of them was compared."""
    rig, _, tokens = two_ask(open_rig, tmp_path, stop_after=1)
    names = names_of(sequence_of(tokens))[:2]
    chunks = [rig.chunk(name) for name in names]
    copies = [rig.store.begin_audit(n, c, c.dram, [range(4)]) for n, c in enumerate(chunks)]
    for copy, name in zip(copies, names, strict=True):
        assert copy is not None
        rig.pool.slot(copy.dram.slot)[:] = payload_of(name)
    rig.store.finish_saves([copy for copy in copies if copy is not None])
    rig.until_idle()
    assert rig.store.figures().counts[Event.DIFFERED] == 2
    assert not rig.store.is_distrusted


def test_what_is_on_trial_is_not_served_as_of_another_tier(open_rig: Rigs, tmp_path: Path) -> None:
    """It leaves DRAM before it was compared."""
    rig, device, tokens = two_ask(open_rig, tmp_path)
    assert rig.store.audit is not None
    rig.store.audit.trial.close(NVME)  # other chunks of NVMe have agreed
    push_out_of_dram(rig, device, rig.dram_slots)
    lookup = lookup_of(tokens)
    pieces = rig.store.find(lookup, 0, len(tokens) - 1)
    rig.until_idle()
    pieces = rig.store.find(lookup, 0, len(tokens) - 1)
    assert not pieces or rig.store.audit.trial.awaits(pieces)


def test_what_has_agreed_comes_to_nvme_with_its_next_use(open_rig: Rigs, tmp_path: Path) -> None:
    rig, _, tokens = two_ask(open_rig, tmp_path)
    assert rig.store.audit is not None
    rig.store.audit.trial.close("asked")
    asks(rig, "three", tokens)
    for name in names_of(sequence_of(tokens))[:3]:
        assert rig.chunk(name).at(NVME).state is State.READY


def test_what_was_computed_here_says_nothing_of_the_tier(open_rig: Rigs, tmp_path: Path) -> None:
    """A chunk leaves DRAM before it was compared, and is saved anew by the request that computed it
    for the trial: the next one that is drawn is compared with that."""
    tokens = conversation(1, NUM_TOKENS)
    name = names_of(sequence_of(tokens))[0]
    old, device = open_rig()
    assert old.put(name, bytes(PAYLOAD_BYTES)) is not None
    device.settle()
    image = bytes(device.image)
    audit = AuditConfig(rate=1.0, stop_after=100)
    given = {"audit": audit, "path": tmp_path, "comparisons": (BITS,)}
    rig, device = open_rig(image=image, dram_slots=2, **given)
    asks(rig, "one", tokens)
    chunk = rig.chunk(name)
    assert (chunk.brought_by, chunk.dram.state) == (NVME, State.READY)
    push_out_of_dram(rig, device, rig.dram_slots)
    assert (chunk.brought_by, chunk.dram.state) == (NVME, State.ABSENT)
    assert rig.store.begin_save(name, again=True) is chunk
    rig.pool.slot(chunk.dram.slot)[:] = payload_of(name)
    rig.store.finish_saves([chunk])
    pieces = rig.store.find(lookup_of(tokens), 0, 16)
    assert rig.store.audit is not None
    rig.store.audit.put_off(pieces, pieces)
    copy = rig.store.begin_audit(1, chunk, chunk.dram, [range(4)])
    assert copy is not None
    rig.pool.slot(copy.dram.slot)[:] = payload_of(name)
    rig.store.finish_saves([copy])
    rig.until_idle()
    assert rig.store.audit.trial.is_open(NVME), "what NVMe has was compared with nothing"


def one_of_before(
    open_rig: Rigs, path: Path, tokens: list[int], **more: Any
) -> tuple[Rig, MemoryDevice]:
    """A start after a process that has left wrong KV of this prompt."""
    old, device = open_rig()
    for name in names_of(sequence_of(tokens))[:3]:
        assert old.put(name, bytes(PAYLOAD_BYTES)) is not None
    device.settle()
    image = bytes(device.image)
    audit = AuditConfig(rate=1.0, stop_after=100)
    return open_rig(image=image, **{"audit": audit, "path": path, "comparisons": (BITS,), **more})


def on_trial(rig: Rig, tokens: list[int]) -> bool:
    """Whether a hit on this prompt is put off."""
    assert rig.store.audit is not None
    pieces = rig.store.find(lookup_of(tokens), 0, len(tokens) - 1)
    assert len(pieces) == 3
    return rig.store.audit.trial.awaits(pieces)


def test_what_this_process_has_written_ends_no_trial_of_what_was_there(
    open_rig: Rigs, tmp_path: Path
) -> None:
    """It is written, leaves DRAM and comes up again, and agrees with itself."""
    left, own = conversation(1, NUM_TOKENS), conversation(2, NUM_TOKENS)
    rig, device = one_of_before(open_rig, tmp_path, left)
    for name in names_of(sequence_of(own))[:3]:
        assert rig.put(name) is not None
        device.settle()
    push_out_of_dram(rig, device, rig.dram_slots)
    chunks = [rig.chunk(name) for name in names_of(sequence_of(own))[:3]]
    assert all(chunk.dram.state is State.ABSENT for chunk in chunks)
    assert not on_trial(rig, own), "it is to come up"
    asks(rig, "own", own)
    assert all(chunk.dram.state is State.READY and not chunk.brought_by for chunk in chunks)
    assert not on_trial(rig, own)
    audit = rig.store.audit
    assert audit is not None
    found = rig.store.find(lookup_of(own), 0, 48)
    audit.put_off(found, found)
    for chunk in chunks:
        copy = rig.store.begin_audit(1, chunk, chunk.dram, [range(4)])
        assert copy is not None
        rig.pool.slot(copy.dram.slot)[:] = payload_of(chunk.name)
        rig.store.finish_saves([copy])
        rig.until_idle()
    assert rig.store.figures().counts["agreed"] == 3
    assert audit.trial.is_open(NVME)
    asks(rig, "left", left)
    assert on_trial(rig, left), "wrong KV of an earlier process would be served"


def test_a_slot_that_is_written_anew_is_of_this_process(open_rig: Rigs, tmp_path: Path) -> None:
    """And what recovery found stays on trial, though it was in DRAM meanwhile."""
    left = conversation(1, NUM_TOKENS)
    rig, device = one_of_before(open_rig, tmp_path, left)
    names = names_of(sequence_of(left))[:3]
    found = {rig.chunk(name).at(NVME).slot for name in names}

    def leave_dram() -> None:
        residency = rig.store.residency
        chunks = [rig.chunk(name) for name in names]
        assert all(chunk.is_behind and not chunk.dram.uses for chunk in chunks)
        assert rig.store.audit is not None
        with rig.store.audit.context.progress:
            residency.leave_dram(*chunks)

    for turn in ("one", "two"):
        assert on_trial(rig, left), "it is to come up"
        asks(rig, turn, left)
        assert [rig.chunk(name).brought_by for name in names] == 3 * [NVME]
        leave_dram()
    rig.store.drop([rig.chunk(name) for name in names])
    rig.until_idle()
    for name in names:
        assert rig.put(name) is not None
        device.settle()
    leave_dram()
    assert {rig.chunk(name).at(NVME).slot for name in names} == found
    assert not on_trial(rig, left)
    asks(rig, "three", left)
    assert not any(rig.chunk(name).brought_by for name in names)


def test_what_an_earlier_process_left_goes_to_others_once_some_of_it_has_agreed(
    open_rig: Rigs, tmp_path: Path
) -> None:
    """They would serve it, if they have passed their own trial of that tier."""
    tokens = conversation(1, NUM_TOKENS)
    names = names_of(sequence_of(tokens))[:3]
    old, device = open_rig()
    for name in names:
        assert old.put(name, bytes(PAYLOAD_BYTES)) is not None
    device.settle()
    image = bytes(device.image)
    others = Others()
    given = {"audit": AuditConfig(rate=1.0), "path": tmp_path, "comparisons": (BITS,)}
    rig, _ = open_rig(image=image, more_tiers=(MakeRemoteDict(others, takes_writes=True),), **given)
    for request_id in ("one", "two"):
        asks(rig, request_id, tokens)
    assert rig.chunk(names[0]).brought_by == NVME
    assert not others.records, "NVMe is on trial"
    assert rig.store.audit is not None
    rig.store.audit.trial.close(NVME)
    asks(rig, "three", tokens)
    assert len(others.records) == 3
