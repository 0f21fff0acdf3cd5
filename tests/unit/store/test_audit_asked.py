# SPDX-License-Identifier: Apache-2.0
"""Hits that clients ask to have compared (`audit: true`): they may ask for any number."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnstore_vllm.tiers.nvme.aside import kept
from tests.helpers import PAYLOAD_BYTES, Rigs, conversation, payload_of
from tests.unit.store.test_auditor import (
    audited,
    by_distance,
    compare,
    learns,
    off_by,
    outcomes,
    stored,
)


def test_clients_that_ask_teach_no_bound(open_rig: Rigs, tmp_path: Path) -> None:
    """Alone on the server all rounds alike: what a crowd rounds would then be an alarm."""
    rig = by_distance(open_rig, tmp_path)
    learns(rig, is_asked=True)
    assert off_by(rig, 100, 0.2, is_ours=False)["agreed"] == 1, "nothing is known yet"
    assert not (tmp_path / "audit" / "learned").exists()
    learns(rig)
    assert off_by(rig, 101, 0.2)["differed"] == 1, "who is drawn teaches"


def test_clients_that_ask_end_no_serving(
    open_rig: Rigs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What they find is removed and told all the same."""
    rig, _ = audited(open_rig, tmp_path, audit={"stop_after": 2})
    for number in range(4):
        chunk = stored(rig, conversation(number), payload=bytes(PAYLOAD_BYTES))
        compare(rig, chunk, payload_of(chunk.name), hit=number, is_asked=number != 1)
        assert chunk.dropped
    assert outcomes(rig) == {"differed": 4}
    assert len(caplog.records) == len(list(kept(tmp_path))) == 4
    assert not rig.store.is_distrusted, "one was drawn"
    chunk = stored(rig, conversation(5), payload=bytes(PAYLOAD_BYTES))
    compare(rig, chunk, payload_of(chunk.name), hit=5)
    assert rig.store.is_distrusted
