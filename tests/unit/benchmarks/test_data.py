# SPDX-License-Identifier: Apache-2.0
"""Public data: brought from a folder, held against its hash, and named in results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks import data
from benchmarks.data import __main__ as command

CONTENT = json.dumps([{"id": "a", "conversations": []}, {"id": "b", "conversations": []}]).encode()
SOURCE = replace(
    data.SOURCES["sharegpt"], num_bytes=len(CONTENT), sha256=sha256(CONTENT).hexdigest()
)


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small file in place of ShareGPT."""
    monkeypatch.setattr(data, "SOURCES", {"sharegpt": SOURCE})
    monkeypatch.setattr(command, "SOURCES", {"sharegpt": SOURCE})
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / SOURCE.file).write_bytes(CONTENT)
    return folder


def fetch(origin: Path, to: Path) -> int:
    return command.main(["fetch", "sharegpt", "--from", str(origin), "--to", str(to)])


def test_a_file_comes_from_a_folder(origin: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    assert fetch(origin, to) == 0
    assert [path.name for path in to.iterdir()] == [SOURCE.file]
    assert (to / SOURCE.file).read_bytes() == CONTENT


def test_what_is_here_is_not_read_again(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "to"
    fetch(origin, to)
    (origin / SOURCE.file).unlink()
    assert fetch(origin, to) == 0
    assert "here already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [b"x" + CONTENT[1:], CONTENT[:-1], CONTENT + b" ", b""], ids=range(4)
)
def test_other_data_is_refused_and_not_kept(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: bytes
) -> None:
    (origin / SOURCE.file).write_bytes(wrong)
    to = tmp_path / "to"
    assert fetch(origin, to) == 2
    printed = capsys.readouterr().err
    assert SOURCE.sha256 in printed
    assert "not kept" in printed
    assert not list(to.iterdir())


def test_a_damaged_file_is_replaced(origin: Path, tmp_path: Path) -> None:
    (tmp_path / SOURCE.file).write_bytes(b"half")
    assert fetch(origin, tmp_path) == 0
    assert (tmp_path / SOURCE.file).read_bytes() == CONTENT


def test_what_is_not_to_be_had_names_the_way_out(
    tmp_path: Path, origin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (origin / SOURCE.file).unlink()
    assert fetch(origin, tmp_path / "to") == 2
    assert "--from FOLDER" in capsys.readouterr().err


def test_more_than_the_file_has_is_not_read(tmp_path: Path) -> None:
    """A public place that sends without end fills no disk."""
    came: list[int] = []

    @contextmanager
    def bar(_file: str, _num_bytes: int) -> Iterator[Callable[[int], object]]:
        yield came.append

    (tmp_path / SOURCE.file).write_bytes(bytes(8 * data.READ_BYTES))
    with pytest.raises(data.DataError):
        data.fetch(SOURCE, tmp_path / "to", bar, tmp_path)
    assert sum(came) == data.READ_BYTES


def test_the_list_says_what_is_here(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(origin, tmp_path)
    capsys.readouterr()
    assert command.main(["--json", "--to", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["is_here"]
    assert row["sha256"] == SOURCE.sha256


def test_a_file_that_is_absent_keeps_back_none_of_the_others(
    origin: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources = {"absent": replace(SOURCE, file="absent.json"), "sharegpt": SOURCE}
    monkeypatch.setattr(command, "SOURCES", sources)
    to = tmp_path / "to"
    assert command.main(["fetch", "--all", "--from", str(origin), "--to", str(to)]) == 2
    assert [path.name for path in to.iterdir()] == [SOURCE.file]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("benchmarks.data: absent: ")
    assert said[-1] == "absent, of 2 files: absent"


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_the_list_has_whole_names_in_any_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert command.main(["--to", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in data.SOURCES)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_every_source_is_pinned() -> None:
    for name, source in data.SOURCES.items():
        assert source.url.startswith("https://"), name
        assert len(bytes.fromhex(source.sha256)) == 32, name
        assert source.licence, name


def test_a_result_names_its_data(origin: Path) -> None:
    facts = data.facts(origin / SOURCE.file)
    assert facts == {"data": SOURCE.file, "data_sha256": SOURCE.sha256, "data_conversations": 2}
    assert data.is_papers(facts)
    assert not data.is_papers(facts | {"data_sha256": "0" * 64})
    assert not data.is_papers({"data": SOURCE.file}), "a name is no proof"
