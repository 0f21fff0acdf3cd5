# SPDX-License-Identifier: Apache-2.0
"""KV of a sibling that an audit finds wrong here: its checksum is right, and its content is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.kv_compare import Comparison, Unit
from attnstore_vllm.types import DRAM, NVME, PEERS
from tests.helpers import (
    PAYLOAD_BYTES,
    as_of_before,
    conversation,
    names_of,
    payload_of,
    sequence_of,
)
from tests.peer_engine import SLOTS, PeerEngine

BITS = Comparison([Unit(0, 0, 0, PAYLOAD_BYTES // 4)], None)
TOKENS = 4 * 16


def test_wrong_kv_is_not_taken_from_a_sibling_again(tmp_path: Path) -> None:
    audit = AuditConfig(rate=1.0, stop_after=100)
    here = PeerEngine(tmp_path, 0, audit=audit, comparisons=(BITS,))
    sibling = PeerEngine(tmp_path, 1)
    try:
        here.wait_ready()
        sibling.put(1, TOKENS)
        assert here.store.audit is not None
        here.store.audit.trial.close(PEERS)  # other chunks of siblings have agreed
        assert here.tokens(1, TOKENS) == TOKENS
        name = names_of(sequence_of(conversation(1, TOKENS)))[1]
        chunk = here.store.residency.index.get(name.key)
        assert chunk is not None
        copy = here.store.begin_audit(1, chunk, chunk.dram, [range(4)])
        assert copy is not None
        here.pool.slot(copy.dram.slot)[:] = payload_of(name, version=1)
        here.store.finish_saves([copy])
        here.wait(lambda: chunk.dropped and here.is_idle())
        assert here.read(1, TOKENS)["tiers"] == {DRAM: 16}, "up to the wrong one"
        assert here.store.reset() and sibling.store.reset()
        sibling.put(1, TOKENS)
        assert here.tokens(1, TOKENS) == TOKENS, "of after the reset"
    finally:
        for engine in (here, sibling):
            engine.wait(engine.is_idle)
            engine.close()


@pytest.mark.parametrize("is_tried", [True, False])
def test_what_is_on_trial_is_given_to_no_sibling(tmp_path: Path, is_tried: bool) -> None:
    """It would be served there, if siblings have passed their own trial."""
    here = PeerEngine(tmp_path, 0, audit=AuditConfig(rate=1.0), comparisons=(BITS,))
    sibling = PeerEngine(tmp_path, 1)
    try:
        sibling.wait_ready()
        here.put(1, TOKENS)
        for name in names_of(sequence_of(conversation(1, TOKENS))):
            chunk = here.store.residency.index.get(name.key)
            assert chunk is not None
            chunk.origin = PEERS  # as a copy from one that has gone since
        assert here.store.audit is not None
        if is_tried:
            here.store.audit.trial.close(PEERS)
        assert sibling.tokens(1, TOKENS) == (TOKENS if is_tried else 0)
    finally:
        for engine in (here, sibling):
            engine.wait(engine.is_idle)
            engine.close()


@pytest.mark.parametrize("is_tried", [True, False])
@pytest.mark.parametrize("has_come_up", [True, False])
def test_what_nvme_has_is_given_to_no_sibling_before_it_is_tried(
    tmp_path: Path, has_come_up: bool, is_tried: bool
) -> None:
    """An earlier process may have left it. It would be served there, as a sibling's."""
    here = PeerEngine(tmp_path, 0, audit=AuditConfig(rate=1.0), comparisons=(BITS,))
    sibling = PeerEngine(tmp_path, 1)
    try:
        sibling.wait_ready()
        here.put(1, TOKENS)
        here.wait(here.is_idle)
        here.push_out(2, SLOTS)
        as_of_before(here.store)
        if has_come_up:
            assert here.read(1, TOKENS)["tiers"] == {NVME: TOKENS}
        assert here.store.audit is not None
        if is_tried:
            here.store.audit.trial.close(NVME)
        assert sibling.tokens(1, TOKENS) == (TOKENS if is_tried else 0)
    finally:
        for engine in (here, sibling):
            engine.wait(engine.is_idle)
            engine.close()


@pytest.mark.parametrize("is_tried", [True, False])
def test_what_comes_up_on_trial_while_a_sibling_waits_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tried: bool
) -> None:
    """When it was asked for, NVMe had what this engine wrote."""
    here = PeerEngine(tmp_path, 0, audit=AuditConfig(rate=1.0), comparisons=(BITS,))
    sibling = PeerEngine(tmp_path, 1)
    try:
        sibling.wait_ready()
        here.put(1, TOKENS)
        here.wait(here.is_idle)
        here.push_out(2, SLOTS)
        residency = here.store.residency
        begin = residency.begin_fetch

        def of_before(chunk: Chunk, *given: Any) -> bool:
            has_begun = begin(chunk, *given)
            chunk.brought_by = NVME
            return has_begun

        monkeypatch.setattr(residency, "begin_fetch", of_before)
        assert here.store.audit is not None
        if is_tried:
            here.store.audit.trial.close(NVME)
        assert sibling.tokens(1, TOKENS) == (TOKENS if is_tried else 0)
    finally:
        for engine in (here, sibling):
            engine.wait(engine.is_idle)
            engine.close()
