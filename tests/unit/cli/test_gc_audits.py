# SPDX-License-Identifier: Apache-2.0
"""`attnstore gc`, and KV that an audit has kept aside."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attnstore_vllm.cli.main import EXIT_OK, main
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.tiers.nvme.aside import Aside
from tests.helpers import NAMESPACE
from tests.unit.cli.test_cli import put, start
from tests.unit.cli.test_gc import OLD_S, OTHER, gc, refused

KEPT = {
    "old": (NAMESPACE, "alice", OLD_S),
    "new": (NAMESPACE, "alice", 0),
    "bob": (NAMESPACE, "bob", 0),
    "other": (OTHER, None, 0),
    "ahead": (NAMESPACE, "bob", -OLD_S),
}
BYTES = b"k" * 5000


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """All that is stored is of no tenant; what an audit has removed was."""
    where = tmp_path / "kv"
    rig = start(where)
    put(rig, 0)
    rig.close()
    for name, (namespace, salt, age_s) in KEPT.items():
        head = {
            "namespace": namespace.hex(),
            "tenant": tenant_hash(salt).hex(),
            "at": int(time.time() - age_s),
        }
        path = Aside(where, 1 << 20).keep(head, bytes(32), [memoryview(BYTES)])
        assert path is not None
        path.rename(path.with_name(f"{name}.kv"))
    (where / "audit" / "torn.kv").write_bytes(b"{")
    (where / "audit" / "learned").touch()
    (where / "audit" / "stopped-00").touch()
    return where


def names(directory: Path) -> set[str]:
    return {path.stem for path in (directory / "audit").glob("*.kv")}


CASES = [
    (("--tenant", "alice"), {"old", "new", "torn"}),
    (("--tenant", "alice", "--older-than", "30d"), {"old", "torn"}),
    (("--older-than", "30d"), {"old", "ahead", "torn"}),
    (("--namespace", OTHER.hex()), {"other", "torn"}),
    (("--namespace", NAMESPACE.hex(), "--tenant", "bob"), {"bob", "ahead", "torn"}),
    (("--to-size", "4KiB"), set[str]()),
]


@pytest.mark.parametrize(("rule", "gone"), CASES, ids=[" ".join(c[0]) for c in CASES])
def test_what_the_rules_name_goes(
    directory: Path, rule: tuple[str, ...], gone: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Though nothing else of that tenant or namespace is stored any more."""
    before = names(directory)
    assert gc(capsys, directory, *rule)["audit_files"] == len(gone)
    assert names(directory) == before, "a dry run has removed it"
    found = gc(capsys, directory, *rule, "--yes")
    assert found["audit_files"] == len(gone)
    assert found["freed_bytes"] >= len(BYTES) * len(gone - {"torn"})
    assert names(directory) == before - gone
    assert (directory / "audit" / "learned").exists()
    assert (directory / "audit" / "stopped-00").exists()
    assert main(["verify", str(directory)]) == EXIT_OK


def test_it_is_told(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", str(directory), "--tenant", "alice"]) == EXIT_OK
    assert "3 chunks that an audit has kept aside" in capsys.readouterr().out
    assert main(["gc", str(directory), "--older-than", "90d"]) == EXIT_OK
    assert "2 chunks that an audit has kept aside" in capsys.readouterr().out


def test_a_typing_error_removes_none(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(directory)
    refused(capsys, directory, "--tenant", "alcie", "--yes")
    assert names(directory) == before
