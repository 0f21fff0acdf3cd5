# SPDX-License-Identifier: Apache-2.0
"""`attnstore verify` and `inspect` on a directory that a store has left."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from attnstore_vllm.cli.main import EXIT_BAD, EXIT_ERROR, EXIT_OK, main
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.tiers.nvme.slab import open_slab
from attnstore_vllm.transfer.geometry import Group, groups_in, groups_text
from attnstore_vllm.types import NVME
from tests.helpers import NAMESPACE, SHAPE, Rig, capacity_for, name_of, tokens_of

CHUNKS = 3


def sequence(number: int, salt: str | None) -> SequenceKeys:
    return SequenceKeys(root_key(NAMESPACE, salt, b""), tokens_of(number, 48), 16)


def start(
    directory: Path, namespace: bytes = NAMESPACE, num_records: int = 24, label: str = "a test"
) -> Rig:
    directory.mkdir(exist_ok=True)
    path = directory / "slab"
    shape = replace(SHAPE, namespace=namespace, label=label)
    slab = open_slab(path, capacity_for(num_records), shape)
    device, _ = open_device(path, 8, "auto")
    rig = Rig(device, slab, dram_slots=16)
    rig.until_idle()
    return rig


def put(rig: Rig, number: int, salt: str | None = None) -> None:
    for i in range(CHUNKS):
        assert rig.put(name_of(sequence(number, salt), i, salt))
    rig.until_idle()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two tenants' conversations of one model, and one of another."""
    where = tmp_path / "kv"
    rig = start(where)
    put(rig, 1)
    put(rig, 2, salt="alice")
    rig.close()
    other = start(where, namespace=b"o" * 32)
    put(other, 3)
    other.close()
    return where


def run_json(
    capsys: pytest.CaptureFixture[str], command: str, directory: Path, *options: str
) -> object:
    assert main([command, str(directory), "--json", *options]) == EXIT_OK
    return json.loads(capsys.readouterr().out)


def test_what_is_sound_is_said_to_be(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "verify", directory)
    assert isinstance(found, dict)
    assert found["good"] == 3 * CHUNKS
    assert found["bad"] == {}


@pytest.mark.parametrize(
    ("at", "cause"), [(100, "header checksum"), (4096 + 77, "payload checksum")]
)
def test_a_flipped_bit_is_found(
    directory: Path, at: int, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = start(directory)
    chunk = rig.chunk(name_of(sequence(1, None), 1))
    at += rig.slab.offset(chunk.at(NVME).slot)
    rig.close()
    with (directory / "slab").open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
    assert main(["verify", str(directory)]) == EXIT_BAD
    assert cause in capsys.readouterr().out


def test_inspect_says_what_there_is(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "inspect", directory)
    assert isinstance(found, list)
    by_name = {namespace["namespace"]: namespace for namespace in found}
    ours = by_name[NAMESPACE.hex()]
    assert (ours["chunks"], ours["tokens"], ours["tenants"]) == (2 * CHUNKS, 96, 2)
    assert ours["sequences"]["up to 1024"] == 2
    assert by_name[(b"o" * 32).hex()]["chunks"] == CHUNKS
    assert main(["inspect", str(directory)]) == EXIT_OK
    said = capsys.readouterr().out
    assert ", 2 tenants\n" in said and ", 1 tenant\n" in said
    assert not re.search(r"\b1 \w+s\b", said), "one thing is named as one"


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_directory_without_a_slab_is_an_error_that_teaches(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == EXIT_ERROR
    assert "nvme.path" in capsys.readouterr().err


GROUPS = (Group(4, (), 0), Group(4, (), 1, "window", 10), Group(16, (), 2, "state"))


@pytest.fixture
def with_groups(tmp_path: Path) -> Path:
    """A conversation of 48 tokens with sections, two of them with holes, and states; a section
    whose spine is not stored; and a short one that nothing continues."""
    where = tmp_path / "kv"
    label = f"a model {groups_text(GROUPS)}"
    rig = start(where, label=label)
    put(rig, 1)
    keys = sequence(1, None)
    for number, hole in ((0, 0), (1, 2), (2, 1)):
        assert rig.put(keys.section(1, hole).name_up_to(number, bytes(32), 16 * number + 16))
    for stop in (32, 40):
        number = (stop - 1) // 16
        assert rig.put(keys.section(2, 0).name_up_to(number, bytes(32), stop))
    assert rig.put(sequence(5, None).section(1, 0).name_up_to(1, bytes(32), 32))
    assert rig.put(sequence(6, None).name_up_to(0, bytes(32), 12))
    rig.until_idle()
    rig.close()
    return where


def test_inspect_tells_groups_apart(with_groups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "inspect", with_groups)
    assert isinstance(found, list)
    (ours,) = found
    figures = {
        group["kind"]: (group["records"], group["tokens"], group["with_holes"])
        for group in ours["groups"]
    }
    assert figures == {
        "full": (4, 60, 0),
        "window": (3, 48, 2),
        "state": (2, 0, 0),
        "unknown": (1, 16, 0),
    }
    assert sum(group["bytes"] for group in ours["groups"]) == ours["bytes"]
    assert (ours["chunks"], ours["tokens"]) == (10, 60)
    assert ours["sequences"]["up to 1024"] == 2
    assert main(["inspect", str(with_groups)]) == EXIT_OK
    out = capsys.readouterr().out
    assert "window of 10 tokens: 3 records, 48 tokens" in out
    assert "2 of them without leading blocks" in out
    assert "states: 2" in out
    assert "group not told: 1 record" in out


@pytest.mark.parametrize("groups", [GROUPS[:2], GROUPS, GROUPS[:1]])
def test_a_label_tells_the_groups(groups: tuple[Group, ...]) -> None:
    read = groups_in(f"groups: x/y (bfloat16, 1 rank(s)) {groups_text(groups)}")
    assert read == (groups if len(groups) > 1 else ())


@pytest.mark.parametrize("label", ["", "groups: ", "groups: full/0", "groups: full/16 and more"])
def test_a_label_that_tells_no_groups(label: str) -> None:
    assert groups_in(label) == ()
