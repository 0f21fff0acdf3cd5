# SPDX-License-Identifier: Apache-2.0
"""KV that an audit has kept aside, and resets: what an operator drops is gone there, too."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from attnstore_vllm.store.auditor import SLICE_S
from attnstore_vllm.tiers.nvme.aside import kept
from attnstore_vllm.types import NVME
from tests.helpers import NAMESPACE, PAYLOAD_BYTES, Rig, Rigs, conversation, payload_of
from tests.unit.store.test_auditor import audited, compare, stored


def keeps(rig: Rig, number: int) -> None:
    chunk = stored(rig, conversation(number), payload=bytes(PAYLOAD_BYTES))
    compare(rig, chunk, payload_of(chunk.name), hit=number)


def removed(rig: Rig) -> None:
    assert rig.store.audit is not None
    audit = rig.store.audit
    rig.until(lambda: not audit.is_busy)


def another_models(path: Path) -> Path:
    """A kept file of another namespace."""
    (name, _), *_ = kept(path)
    other = name.with_name("00-1.kv")
    other.write_bytes(name.read_bytes().replace(NAMESPACE.hex().encode(), b"00"))
    return other


def test_a_reset_removes_what_was_kept(open_rig: Rigs, tmp_path: Path) -> None:
    """Of its own namespace, as it drops KV of no other, and what is not whole."""
    rig, _ = audited(open_rig, tmp_path)
    for number in range(3):
        keeps(rig, number)
    other = another_models(tmp_path)
    (tmp_path / "audit" / "11-1.kv").write_bytes(b"{")
    (tmp_path / "audit" / "learned").touch()
    assert len(list(kept(tmp_path))) == 5
    assert rig.store.reset()
    removed(rig)
    assert {path.name for path in (tmp_path / "audit").iterdir()} == {other.name, "learned"}
    keeps(rig, 3)
    assert len(list(kept(tmp_path))) == 2, "what is found later is kept"


def test_the_stores_thread_removes_a_few_at_a_time(
    open_rig: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = audited(open_rig, tmp_path)
    for number in range(3):
        keeps(rig, number)
    rig.close()  # we are the thread
    audit, now = rig.store.audit, [0.0]
    assert audit is not None
    audit.remove_kept()
    unlink = Path.unlink

    def slow(path: Path, missing_ok: bool = False) -> None:
        now[0] += SLICE_S * 0.6
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    monkeypatch.setattr(audit.context, "clock", lambda: now[0])
    left = []
    while audit.tick():
        left.append(len(list(kept(tmp_path))))
        assert audit.is_busy
    assert left == [1]
    assert not list(kept(tmp_path)) and not audit.is_busy


def test_a_stop_waits_until_it_is_removed(
    open_rig: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = audited(open_rig, tmp_path)
    for number in range(3):
        keeps(rig, number)
    unlink = Path.unlink

    def slow(path: Path, missing_ok: bool = False) -> None:
        time.sleep(0.1)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    rig.store.reset()
    rig.close()
    assert not list(kept(tmp_path))


def test_a_reset_that_the_audit_begins_keeps_what_tells_the_cause(
    open_rig: Rigs, tmp_path: Path
) -> None:
    rig, _ = audited(open_rig, tmp_path)
    keeps(rig, 1)
    assert rig.store.audit is not None
    rig.store.audit.fail(NVME)
    assert rig.store.reset(keeps_aside=True)
    removed(rig)
    assert len(list(kept(tmp_path))) == 1


def test_what_cannot_be_removed_is_told_and_hangs_no_stop(
    open_rig: Rigs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, _ = audited(open_rig, tmp_path)
    keeps(rig, 1)
    caplog.clear()

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refused)
    with caplog.at_level(logging.WARNING):
        assert rig.store.reset()
        removed(rig)
    assert "not all that the audit has kept" in caplog.text
    assert str(tmp_path / "audit") in caplog.text
