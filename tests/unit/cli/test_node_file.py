# SPDX-License-Identifier: Apache-2.0
"""The commands on a node's file: they say what it is, and check what its records say themselves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.cli.main import EXIT_BAD, EXIT_ERROR, EXIT_OK, main
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES
from attnstore_vllm.tiers.nvme.node_disk import MAGIC
from tests.unit.cli.test_cli import put, start
from tests.unit.tiers.nvme.test_crafted_directory import bad_ends
from tests.unit.tiers.nvme.test_node_disk import RECORD, A, B, Rig

PLACES = 10


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Records 3, 4 and 8, of different bytes."""
    found = Rig(tmp_path, PLACES * RECORD + PAGE_BYTES)
    for record, content, stamp in ((3, b"x", A), (4, b"y", B), (8, b"z", b"c" * 32)):
        found.write(record, content, stamp)
    found.disk.close()
    return found


def said(
    capsys: pytest.CaptureFixture[str], command: str, directory: Path, code: int = EXIT_OK
) -> Any:
    assert main([command, str(directory), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def bad(capsys: pytest.CaptureFixture[str], rig: Rig, code: int = EXIT_BAD) -> Any:
    return said(capsys, "verify", rig.path.parent, code)["bad"]


def test_what_it_holds(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "inspect", rig.path.parent) == [
        {
            "node_file": str(rig.path), "record_bytes": RECORD, "places": PLACES, "records": 3,
            "bytes": 3 * RECORD, "bad_headers": 0,
        }
    ]  # fmt: skip
    assert main(["inspect", str(rig.path.parent)]) == EXIT_OK
    out = capsys.readouterr().out
    assert "of a node that is not the first\n  3 records in 10 places of 12KiB, 36KiB" in out
    assert "nothing is stored" not in out


def test_whole_records_are_good(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", rig.path.parent) == {
        "good": 3, "free": PLACES - 3, "bad": {}, "read_bytes": 3 * RECORD, "examples": [],
    }  # fmt: skip


@pytest.mark.parametrize("record", [3, 4, 8])
@pytest.mark.parametrize("at", [8 + 32, 4096, RECORD - 1])
def test_a_damaged_one_is_told(
    record: int, at: int, rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.change(record * RECORD + at)
    found = said(capsys, "verify", rig.path.parent, EXIT_BAD)
    assert (found["good"], found["free"], found["bad"]) == (2, 7, {"payload checksum": 1})
    assert found["examples"] == [f"{rig.path}, record at byte {record * RECORD}: payload checksum"]


def test_a_header_with_more_in_it(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.change(4 * RECORD + 4095)
    assert bad(capsys, rig) == {"header": 1}


def test_a_record_in_another_ones_place(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """Stamps have the place in them, so no two are alike."""
    raw = rig.path.read_bytes()
    with rig.path.open("r+b") as file:
        file.seek(6 * RECORD)
        file.write(raw[3 * RECORD : 4 * RECORD])
    assert bad(capsys, rig) == {"another record's stamp": 1}


def test_all_are_damaged(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    for record in (3, 4, 8):
        rig.change(record * RECORD + 4096)
    assert bad(capsys, rig) == {"payload checksum": 3}
    assert main(["inspect", str(rig.path.parent)]) == EXIT_OK
    assert "no whole record" in capsys.readouterr().out


def test_records_of_an_earlier_shape_are_not_damaged(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is used again, for four records of another size."""
    size, payload = 7 * 4096, b"n" * 6 * 4096
    old = rig.path.read_bytes()[3 * RECORD : 4 * RECORD]
    with rig.path.open("r+b") as file:
        file.truncate(4 * size + PAGE_BYTES)
    found = said(capsys, "verify", rig.path.parent)
    assert (found["good"], found["free"], found["bad"]) == (0, 0, {}), "none of a size that fits"
    with rig.path.open("r+b") as file:
        for place in (0, 3):
            file.seek(place * size)
            file.write((MAGIC + bytes([place + 1]) * 32 + checksum(payload)).ljust(4096, b"\0"))
            file.write(payload)
        file.seek(2 * size)  # where one of the new size may begin
        file.write(old)
    found = said(capsys, "verify", rig.path.parent)
    assert (found["good"], found["free"], found["bad"]) == (2, 2, {})


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 40_000, b"ATTNNODE", b"ATTNNODE" * 9_000, b"x" * 12_345]
)
def test_it_may_be_anything(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node.bin").write_bytes(content)
    for command in ("inspect", "verify"):
        assert main([command, str(tmp_path)]) in (EXIT_OK, EXIT_BAD)
        assert "Traceback" not in capsys.readouterr().err


def test_a_file_that_was_made_to_harm(rig: Rig) -> None:
    """Records without end, of which none is whole; and holes that are not read."""
    directory = rig.path.parent
    names = ("inspect", "inspect --json", "verify", "gc", "gc --yes")
    os.truncate(rig.path, RECORD << 28)
    assert bad_ends(directory, *names) == []
    with rig.path.open("r+b") as file:
        for head in range(1, 64):
            file.seek((RECORD << 21) * head)
            file.write((MAGIC + A).ljust(8192, b"\0"))
    assert bad_ends(directory, *names) == []
    with rig.path.open("r+b") as file:
        file.truncate(0)
        file.truncate(1 << 42)
        for head in range(64):
            file.seek(head << 34)
            file.write((MAGIC + A).ljust(8192, b"\0"))
    assert bad_ends(directory, *names) == []
    payload = b"x" * (RECORD - 4096)
    good = (MAGIC + A + checksum(payload)).ljust(4096, b"\0") + payload
    rig.path.write_bytes(good + (MAGIC + B).ljust(RECORD, b"\0") * 3000)
    assert bad_ends(directory, *names) == []


def test_nothing_can_be_deleted_by_name(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    before = rig.path.read_bytes()
    assert main(["gc", str(rig.path.parent), "--tenant", "alice", "--yes"]) == EXIT_ERROR
    assert "neither model, tenant nor age" in capsys.readouterr().err
    assert rig.path.read_bytes() == before


def test_beside_a_slab(rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node that was the first one before. And data-parallel engines have directories each."""
    where = tmp_path / "kv"
    stored = start(where)
    put(stored, 1)
    stored.close()
    (where / "dp1").mkdir()
    shutil.copy(rig.path, where / "dp1")
    slab, node = said(capsys, "inspect", where)
    assert slab["chunks"] and node["node_file"] == str(where / "dp1" / "node.bin")
    assert said(capsys, "verify", where)["good"] == slab["chunks"] + 3
    assert main(["gc", str(where), "--older-than", "0s", "--yes"]) == EXIT_OK
    told = capsys.readouterr()
    assert "node.bin is of a node that is not the first" in told.err and "are gone" in told.out
    assert said(capsys, "verify", where)["good"] == 3
