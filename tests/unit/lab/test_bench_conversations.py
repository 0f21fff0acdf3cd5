# SPDX-License-Identifier: Apache-2.0
"""Reading conversations: what is kept, and what is said of a file that is none."""

from __future__ import annotations

import gzip
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.bench.conversations import Conversation, DatasetError, read_conversations


def write(tmp_path: Path, value: object) -> Path:
    path = tmp_path / "data.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def entry(*turns: tuple[str, object], **more: object) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": what} for who, what in turns]} | more


def test_both_sides_are_read(tmp_path: Path) -> None:
    both = entry(("system", "S"), ("human", "a"), ("gpt", "x"), ("user", "b"), ("assistant", "y"))
    assert read_conversations(write(tmp_path, [both])) == [
        Conversation("0", ("a", "b"), "S", answers=("x", "y"))
    ]


def test_ids_are_unique_and_conversations_without_a_human_left_out(tmp_path: Path) -> None:
    asked, silent = entry(("human", "a")), entry(("gpt", "x"), id="silent")
    path = write(tmp_path, [asked, silent, asked | {"id": "0"}])
    assert [c.id for c in read_conversations(path)] == ["0", "0#2"]


def test_answers_belong_to_the_question_before_them(tmp_path: Path) -> None:
    """One that comes first has none; two in a row are joined; the last question may have none."""
    turns = (("gpt", "hi"), ("human", "a"), ("gpt", "x"), ("gpt", "y"), ("human", "b"))
    [found] = read_conversations(write(tmp_path, [entry(*turns)]))
    assert found.questions == ("a", "b")
    assert found.answers == ("x\ny", None)
    [alone] = read_conversations(write(tmp_path, [entry(("human", "a"), ("human", "b"))]))
    assert alone.answers == ()
    assert alone.answer(1) is None


def test_token_ids_take_four_bytes_each(tmp_path: Path) -> None:
    turns = (("human", [5, 6]), ("gpt", [7]), ("gpt", [8]), ("human", [9]))
    [found] = read_conversations(write(tmp_path, [entry(*turns)]))
    assert found.questions == (array("I", [5, 6]), array("I", [9]))
    assert found.answers == (array("I", [7, 8]), None)
    assert not found.is_text


def test_times_are_kept_if_each_question_has_one(tmp_path: Path) -> None:
    timed = [{"from": "human", "value": "a", "timestamp": t} for t in (5, 7.5)]
    some = [*timed, {"from": "human", "value": "a"}]
    path = write(tmp_path, [{"conversations": timed}, {"conversations": some}])
    assert [c.times_s for c in read_conversations(path)] == [(5, 7.5), ()]


def test_gzip_is_read_and_damage_to_it_told(tmp_path: Path) -> None:
    path = tmp_path / "data.json.gz"
    data = gzip.compress(json.dumps([entry(("human", "a" * 500))]).encode())
    path.write_bytes(data)
    assert len(read_conversations(path)) == 1
    for damaged in (data[:20], data[:12] + b"\xff\xff\xff" + data[15:]):
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"data\.json\.gz: .*gzip"):
            read_conversations(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('[\n{"a": }]', "not JSON: .* line 2 column 7"),
        ({"a": 1}, "a list of conversations is expected, not an object"),
        ([], "there is no conversation in it"),
        ([3], "conversation 0: .* expected, not a number"),
        ([{"items": []}], r"conversation 0: .* not an object with keys \['items'\]"),
        ([{"conversations": ["hi"]}], "conversation 0, turn 0: an object is expected"),
        ([{"conversations": [{"from": "human"}]}], "turn 0: texts .* are expected"),
        ([entry(("human", [1, -1]))], "turn 0: texts .* or lists of token ids"),
        ([entry(("human", [1, True]))], "turn 0: texts .* or lists of token ids"),
        ([entry(("human", "a"), ("gpt", [1]))], "texts and token ids are mixed"),
        ([entry(("human", "a"), ("cat", "m"))], "turn 1: \"from\" is 'cat', not human or gpt"),
    ],
)
def test_malformed_files_say_where_and_what(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        read_conversations(write(tmp_path, value))
    assert "data.json" in str(caught.value)


@pytest.mark.parametrize("times", [("5", 6), (6, 5), (0, float("nan")), (0, float("inf"))])
def test_times_that_are_none_are_told(tmp_path: Path, times: tuple[object, ...]) -> None:
    turns = [{"from": "human", "value": "a", "timestamp": t} for t in times]
    with pytest.raises(DatasetError, match=r'turn \d: "timestamp"'):
        read_conversations(write(tmp_path, [{"conversations": turns}]))


def test_missing_file_is_a_dataset_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read: No such file"):
        read_conversations(tmp_path / "none.json")
