# SPDX-License-Identifier: Apache-2.0
"""Conversations in ShareGPT format: what the human said, turn by turn.

    [{"id": "a", "conversations": [{"from": "human", "value": "..."},
                                   {"from": "gpt", "value": "..."}, ...]}, ...]

The answers in the file are not used: a replay puts the model's own in their place.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SAMPLE: Final = Path(__file__).parent / "data" / "conversations.json"
HUMAN: Final = frozenset({"human", "user"})
ASSISTANT: Final = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})


class DatasetError(Exception):
    """The file is not in ShareGPT format. The message says where and what was expected."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation; `questions` are its human turns, in order, at least one."""

    id: str
    questions: tuple[str, ...]
    system: str | None = None


def read_conversations(path: Path) -> list[Conversation]:
    """Read a file in ShareGPT format.

    Ids that are missing or not unique are replaced by the position in the file; conversations
    in which no human speaks are left out.
    Raises: DatasetError naming the file, the conversation and the turn.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DatasetError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, list):
        raise DatasetError(f"{path}: a list of conversations is expected, not {_kind(data)}")
    conversations: dict[str, Conversation] = {}
    for n, entry in enumerate(data):
        conversation = _conversation(f"{path}: conversation {n}", n, entry)
        if conversation.id in conversations:
            conversation = Conversation(
                f"{conversation.id}#{n}", conversation.questions, conversation.system
            )
        if conversation.questions:
            conversations[conversation.id] = conversation
    if not conversations:
        raise DatasetError(f"{path}: there is no conversation in it")
    return list(conversations.values())


def _conversation(where: str, n: int, entry: Any) -> Conversation:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise DatasetError(
            f'{where}: {{"id": ..., "conversations": [...]}} is expected, not {_kind(entry)}'
            + (f" with keys {sorted(entry)}" if isinstance(entry, dict) else "")
        )
    questions: list[str] = []
    system = None
    for t, turn in enumerate(turns):
        speaker, text = _turn(f"{where}, turn {t}", turn)
        if speaker in HUMAN:
            questions.append(text)
        elif speaker == "system" and t == 0:
            system = text
        elif speaker not in ASSISTANT:
            raise DatasetError(f'{where}, turn {t}: "from" is {speaker!r}, not human or gpt')
    return Conversation(str(entry.get("id", n)), tuple(questions), system)


def _turn(where: str, turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise DatasetError(f"{where}: an object is expected, not {_kind(turn)}")
    speaker, text = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise DatasetError(f'{where}: texts "from" and "value" are expected')
    return speaker.lower(), text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), "a number")
