# SPDX-License-Identifier: Apache-2.0
"""Conversations in ShareGPT format: what the human said, turn by turn, and what was answered.

    [{"id": "a", "conversations": [{"from": "human", "value": "..."},
                                   {"from": "gpt", "value": "..."}, ...]}, ...]

A "value" may be a list of token ids in place of a text, if all of its conversation's are; a human
turn may have a "timestamp", in seconds from any origin. Files may be compressed with gzip.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeGuard

from attnstore_vllm.errors import AttnStoreError

HUMAN: Final = frozenset({"human", "user"})
ASSISTANT: Final = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})

Piece: TypeAlias = "str | array[int]"
"""Words of one side in one turn: a text, or token ids (four bytes each)."""


class DatasetError(AttnStoreError):
    """A file is not in a format we know. The message says where and what was expected."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation; `questions` are its human turns, in order, at least one.

    Args:
        system: a text that comes before the first question.
        answers: to each question what the file has as its answer, None if it has none. Empty if
            it has no answers at all.
        times_s: when each question was asked; empty unless the file says so for all of them.
    """

    id: str
    questions: tuple[Piece, ...]
    system: Piece | None = None
    answers: tuple[Piece | None, ...] = ()
    times_s: tuple[float, ...] = ()

    @property
    def is_text(self) -> bool:
        return isinstance(self.questions[0], str)

    def answer(self, turn: int) -> Piece | None:
        """The file's answer to a question, counted from 0; None if it has none."""
        return self.answers[turn] if self.answers else None


def read_conversations(path: Path) -> list[Conversation]:
    """Read a file in ShareGPT format.

    Ids that are missing or not unique are replaced by the position in the file; conversations
    in which no human speaks are left out. What an assistant says before the first question is
    left out too; texts of one assistant after each other are joined.
    Raises: DatasetError naming the file, the conversation and the turn.
    """
    try:
        data = json.loads(read_bytes(path))
    except ValueError as error:
        raise DatasetError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, list):
        raise DatasetError(f"{path}: a list of conversations is expected, not {_kind(data)}")
    conversations: dict[str, Conversation] = {}
    for n, entry in enumerate(data):
        conversation = _conversation(f"{path}: conversation {n}", n, entry)
        if conversation is None:
            continue
        if conversation.id in conversations:
            conversation = replace(conversation, id=f"{conversation.id}#{n}")
        conversations[conversation.id] = conversation
    if not conversations:
        raise DatasetError(f"{path}: there is no conversation in it")
    return list(conversations.values())


def read_bytes(path: Path) -> bytes:
    """The whole file, decompressed if it is gzip. Raises: DatasetError."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DatasetError(f"{path}: the gzip data ends too soon or is damaged") from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error


def _conversation(where: str, n: int, entry: Any) -> Conversation | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise DatasetError(
            f'{where}: {{"id": ..., "conversations": [...]}} is expected, not {_kind(entry)}'
            + (f" with keys {sorted(entry)}" if isinstance(entry, dict) else "")
        )
    questions: list[Piece] = []
    answers: list[Piece | None] = []
    times: list[float] = []
    system = None
    for t, turn in enumerate(turns):
        speaker, said = _turn(f"{where}, turn {t}", turn)
        if speaker in HUMAN:
            questions.append(said)
            answers.append(None)
            times += _time(f"{where}, turn {t}", turn, after=times)
        elif speaker == "system" and t == 0:
            system = said
        elif speaker not in ASSISTANT:
            raise DatasetError(f'{where}, turn {t}: "from" is {speaker!r}, not human or gpt')
        elif answers:
            answers[-1] = _joined(answers[-1], said)
    if not questions:
        return None
    if len({type(piece) for piece in (*questions, *answers, system) if piece is not None}) > 1:
        raise DatasetError(f"{where}: texts and token ids are mixed; expected one of them")
    name = str(entry.get("id", n))
    has_answers = any(answer is not None for answer in answers)
    return Conversation(
        name,
        tuple(questions),
        system,
        tuple(answers) if has_answers else (),
        tuple(times) if len(times) == len(questions) else (),
    )


def _turn(where: str, turn: Any) -> tuple[str, Piece]:
    if not isinstance(turn, dict):
        raise DatasetError(f"{where}: an object is expected, not {_kind(turn)}")
    speaker, said = turn.get("from"), turn.get("value")
    if isinstance(speaker, str) and isinstance(said, str):
        return speaker.lower(), said
    if isinstance(speaker, str) and isinstance(said, list) and said and are_ids(said):
        return speaker.lower(), array("I", said)
    raise DatasetError(f'{where}: texts "from" and "value", or lists of token ids, are expected')


def are_ids(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 32 for value in values)


def _time(where: str, turn: dict[str, Any], after: Sequence[float]) -> list[float]:
    value = turn.get("timestamp")
    if value is None:
        return []
    if not is_seconds(value):
        raise DatasetError(f'{where}: "timestamp" is {value!r}; seconds are expected')
    if after and value < after[-1]:
        raise DatasetError(f'{where}: "timestamp" {value} is before that of an earlier turn')
    return [float(value)]


def is_seconds(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


def _joined(first: Piece | None, then: Piece) -> Piece:
    if isinstance(first, str) and isinstance(then, str):
        return f"{first}\n{then}"
    if isinstance(first, array) and isinstance(then, array):
        return first + then
    return then


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), "a number")
