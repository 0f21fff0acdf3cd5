# SPDX-License-Identifier: Apache-2.0
"""`attnstore gc`: deletes what all rules name, once it was told to, and nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.cli.main import EXIT_ERROR, EXIT_OK, main
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.preflight import lock_directory
from attnstore_vllm.types import NVME
from tests.helpers import NAMESPACE, RECORD_BYTES, names_of
from tests.unit.cli.test_cli import CHUNKS, put, sequence, start

OTHER = b"\x00o" * 16  # NAMESPACE begins with 00 as well
OLD_S = 40 * 86_400


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """KV of nobody, of alice and of bob, all of it old, with some new of alice; another model's."""
    where, now = tmp_path / "kv", time.time
    with monkeypatch.context() as earlier:
        earlier.setattr(time, "time", lambda: now() - OLD_S)
        rig = start(where)
        for number, salt in enumerate((None, "alice", "bob")):
            put(rig, number, salt)
        rig.close()
    rig = start(where)
    put(rig, 3, salt="alice")
    rig.close()
    other = start(where, namespace=OTHER)
    put(other, 4)
    other.close()
    return where


def gc(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> dict[str, Any]:
    assert main(["gc", str(directory), "--json", *options]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> str:
    assert main(["gc", str(directory), *options]) == EXIT_ERROR
    return capsys.readouterr().err


def kept(directory: Path) -> list[int]:
    """Numbers of the sequences of ours that are still whole; none is in part."""
    rig = start(directory)
    salts = (None, "alice", "bob", "alice")
    found = [len(rig.read(sequence(number, salt))) for number, salt in enumerate(salts)]
    rig.close()
    assert set(found) <= {0, CHUNKS}
    other = start(directory, namespace=OTHER)
    found.append(len(other.read(sequence(4, None))))
    other.close()
    assert found[-1] in (0, CHUNKS)
    return [number for number, chunks in enumerate(found) if chunks]


CASES = [
    (("--tenant", "alice"), [0, 2, 4]),
    (("--tenant", "alice", "--older-than", "30d"), [0, 2, 3, 4]),
    (("--older-than", "30d"), [3, 4]),
    (("--older-than", "50d"), [0, 1, 2, 3, 4]),
    (("--older-than", "30d", "--namespace", OTHER.hex()), [0, 1, 2, 3, 4]),
    (("--namespace", NAMESPACE.hex()[:4].upper()), [4]),
    (("--namespace", NAMESPACE.hex()[:4], "--tenant", "bob"), [0, 1, 3, 4]),
    (("--to-size", "1GiB"), [0, 1, 2, 3, 4]),
    (("--to-size", "4KiB"), []),
    (("--to-size", "4KiB", "--namespace", OTHER.hex()), [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("options", "left"), CASES, ids=[" ".join(c[0]) for c in CASES])
def test_what_all_rules_name_goes_and_nothing_else(
    directory: Path, options: tuple[str, ...], left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (directory / "slab").read_bytes()
    would = gc(capsys, directory, *options)
    assert (directory / "slab").read_bytes() == before, "a dry run has changed the file"
    assert not would["deleted"]
    goes = (5 - len(left)) * CHUNKS
    assert (would["records"], would["bytes"]) == (goes, goes * RECORD_BYTES)
    assert sum(part["records"] for part in would["parts"]) == goes
    done = gc(capsys, directory, *options, "--yes")
    assert done["deleted"]
    assert {key: done[key] for key in ("records", "bytes", "parts")} == {
        key: would[key] for key in ("records", "bytes", "parts")
    }
    assert done["freed_bytes"] >= goes * RECORD_BYTES
    assert (directory / "slab").stat().st_blocks * 512 <= (5 - goes // CHUNKS) * (
        CHUNKS * RECORD_BYTES + 2 * 4096
    ) + (64 << 10)
    assert main(["verify", str(directory)]) == EXIT_OK
    capsys.readouterr()
    assert kept(directory) == left


def test_the_oldest_segments_go_until_it_is_enough(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 2 * CHUNKS * (RECORD_BYTES + 4096)  # segments of one record each
    assert gc(capsys, directory, "--to-size", f"{size}B", "--yes")["records"] == 3 * CHUNKS
    assert (directory / "slab").stat().st_blocks * 512 <= size + (64 << 10)
    assert kept(directory) == [3, 4]


def test_a_segment_that_holds_anything_else_is_not_given_up_for_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, per_segment = tmp_path / "kv", 0
    rig = start(where, num_records=600)
    put(rig, 1, salt="bob")
    per_segment = rig.slab.records_per_segment
    assert per_segment > CHUNKS, "segments of one record show nothing"
    for number in range(2, 2 + per_segment):
        put(rig, number, salt="alice")
    rig.close()
    found = gc(capsys, where, "--to-size", "4KiB", "--tenant", "alice", "--yes")
    # All but those beside bob's.
    assert found["records"] == per_segment * CHUNKS - (per_segment - CHUNKS)
    left = run_inspect(capsys, where)
    assert (left["tenants"], left["chunks"]) == (2, per_segment)


def run_inspect(capsys: pytest.CaptureFixture[str], directory: Path) -> dict[str, Any]:
    assert main(["inspect", str(directory), "--json"]) == EXIT_OK
    (found,) = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_person_is_told_what_would_go_and_of_whom(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", str(directory), "--tenant", "alice", "--older-than", "30d"]) == EXIT_OK
    printed = capsys.readouterr().out
    name = f"{NAMESPACE.hex()[:16]} a test, {tenant_hash('alice').hex()[:16]}"
    assert f"{name}: {CHUNKS} of {2 * CHUNKS} records" in printed
    assert "would go; nothing was changed. --yes deletes" in printed
    assert main(["gc", str(directory), "--tenant", "alice", "--older-than", "30d", "--yes"]) == 0
    assert f"{CHUNKS} records (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--namespace", "00"), ("--namespace '00' is several of", "no cache_salt: 3 records")),
        (("--namespace", "ff"), ("--namespace 'ff' is none of", NAMESPACE.hex()[:16])),
        (("--namespace", ""), ("--namespace '' is none of", OTHER.hex()[:16])),
        (("--tenant", "carol"), ("the tenant has nothing", tenant_hash("bob").hex()[:16])),
        (("--tenant", ""), ("the tenant has nothing",)),
        (("--tenant", "bob", "--namespace", OTHER.hex()), ("the tenant has nothing",)),
        (("--older-than", "soon"), ("'soon'", "7d")),
        (("--older-than", ""), ("7d",)),
        (("--to-size", "0"), ("--to-size", "64GiB")),
        (("--to-size", "500"), ("--to-size is 500: 500 bytes", "did you mean 500GiB?")),
        ((), ("say what is to go",)),
        (("--yes",), ("say what is to go",)),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_is(
    directory: Path,
    options: tuple[str, ...],
    parts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = (directory / "slab").read_bytes()
    for yes in ((), ("--yes",)):
        printed = refused(capsys, directory, *options, *yes)
        for part in parts:
            assert part in printed
    assert (directory / "slab").read_bytes() == before


def test_it_looks_beside_a_running_server_and_deletes_nothing(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = lock_directory(directory)
    before = (directory / "slab").read_bytes()
    assert gc(capsys, directory, "--tenant", "bob")["records"] == CHUNKS
    assert "running engine" in refused(capsys, directory, "--tenant", "bob", "--yes")
    assert (directory / "slab").read_bytes() == before
    os.close(lock)


def test_damaged_records_go_with_any_rule(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = start(directory)
    at = rig.slab.offset(rig.chunk(sequence_name(0)).at(NVME).slot) + 100
    rig.close()
    with (directory / "slab").open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
    assert main(["verify", str(directory)]) != EXIT_OK
    capsys.readouterr()
    assert gc(capsys, directory, "--tenant", "bob", "--yes")["records"] == CHUNKS
    assert main(["verify", str(directory)]) == EXIT_OK


def sequence_name(number: int) -> Any:
    from tests.helpers import name_of

    return name_of(sequence(number, None), CHUNKS - 1)


# ---- what nothing holds ------------------------------------------------------------------------


def tokens_left(directory: Path, salt: str) -> int:
    """Chunks of alice whose token ids the file has, wherever they stand."""
    data = (directory / "slab").read_bytes()
    names = names_of(sequence(1, salt))
    assert len(names) == CHUNKS
    return sum(name.tokens in data for name in names) + (tenant_hash(salt) in data)


@pytest.mark.parametrize(
    "rule",
    [("--tenant", "alice"), ("--namespace", NAMESPACE.hex()), ("--tenant", "carol")],
    ids=" ".join,
)
def test_what_a_reset_has_deleted_is_erased_though_the_rule_names_nothing(
    tmp_path: Path, rule: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "kv"
    rig = start(where)
    put(rig, 1, "alice")
    rig.until_idle()
    assert rig.store.reset()
    rig.close()
    assert tokens_left(where, "alice"), "or it shows nothing"
    before = (where / "slab").read_bytes()
    said = refused(capsys, where, *rule)
    assert "--yes erases it" in said
    assert (where / "slab").read_bytes() == before, "a dry run has changed the file"
    assert "What nothing holds is erased" in refused(capsys, where, *rule, "--yes")
    assert tokens_left(where, "alice") == 0
    assert main(["verify", str(where)]) == EXIT_OK


def test_a_typing_error_deletes_nothing_that_is_stored(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rule in (("--tenant", "alcie"), ("--namespace", "00"), ("--namespace", "ff")):
        refused(capsys, directory, *rule, "--yes")
    assert kept(directory) == [0, 1, 2, 3, 4]


# ---- a salt in a file --------------------------------------------------------------------------


def test_the_salt_may_be_in_a_file_that_others_cannot_read(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    salt = tmp_path / "salt"
    salt.write_text("alice\n")
    salt.chmod(0o400)
    assert gc(capsys, directory, "--tenant-file", str(salt), "--yes")["records"] == 2 * CHUNKS
    assert kept(directory) == [0, 2, 4]
    said = refused(capsys, directory, "--tenant-file", str(salt), "--yes")
    assert "the tenant has nothing" in said
    assert "alice" not in said
    salt.chmod(0o644)
    said = refused(capsys, directory, "--tenant-file", str(salt))
    assert f"--tenant-file is '{salt}', which has mode 0644" in said


@pytest.mark.parametrize(("text", "words"), [(b"", "has no salt"), (b"\xff", "is not UTF-8")])
def test_a_file_without_a_salt_is_refused(
    directory: Path, tmp_path: Path, text: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    salt = tmp_path / "salt"
    salt.write_bytes(text)
    salt.chmod(0o600)
    before = (directory / "slab").read_bytes()
    for file in (salt, tmp_path / "none"):
        said = refused(capsys, directory, "--tenant-file", str(file), "--yes")
        assert (words if file == salt else "cannot be read") in said
    assert (directory / "slab").read_bytes() == before


def test_a_salt_is_given_once(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gc", str(directory), "--tenant", "bob", "--tenant-file", "/salt", "--yes"])
    assert ended.value.code == EXIT_ERROR
    assert "not allowed with" in capsys.readouterr().err
