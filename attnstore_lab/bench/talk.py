# SPDX-License-Identifier: Apache-2.0
"""One conversation while it is held: its history, and the next question."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from attnstore_lab.bench.client import RequestSettings, ask, request_body
from attnstore_lab.bench.conversations import Conversation, Piece
from attnstore_lab.bench.records import NOT_SENT, TurnRecord
from attnstore_vllm.errors import ConfigError

LETTERS_A_TOKEN: Final = 4
DEFAULT_ANSWER_TOKENS: Final = 128
"""For an answer that the file does not have."""


class Talk:
    """Turns count from 0 and are taken in order: ask(0), ask(1) and so on.

    Args:
        use: how many held the same conversation before. From the second on the first question
            begins differently, so that none of them finds the KV of another.
    Raises: ConfigError if the conversation is texts and the API wants ids, or the other way.
    """

    def __init__(self, conversation: Conversation, settings: RequestSettings, use: int = 0) -> None:
        if conversation.is_text != (settings.api == "chat"):
            wanted = "texts" if settings.api == "chat" else "token ids"
            raise ConfigError(f"{conversation.id}: --api {settings.api} wants {wanted}")
        self._conversation = conversation
        self._settings = settings
        self._use = use
        self._failed: int | None = None  # counted from 1
        self._messages: list[dict[str, str]] = []
        self._ids: array[int] = array("I")
        self._num_pieces = 0
        if conversation.system is not None:
            self._add("system", conversation.system)

    @property
    def why_over(self) -> str | None:
        """Why no further question can be asked."""
        return None if self._failed is None else NOT_SENT.format(turn=self._failed)

    def question(self, turn: int) -> Mapping[str, Any]:
        """Add the next question; returns the prompt, as the API wants it."""
        said = self._conversation.questions[turn]
        self._add("user", marked(said, self._use) if turn == 0 else said)
        if self._settings.api == "chat":
            return {"messages": self._messages}
        return {"prompt": self._ids.tolist()}

    def answer(self, turn: int, record: TurnRecord) -> None:
        """Add what stands in the history as the answer, or end the conversation."""
        said = self._conversation.answer(turn) if self._settings.history == "data" else None
        if said is None and record.error is None:
            said = record.answer if self._settings.api == "chat" else array("I", record.token_ids)
        if said is None:
            self._failed = turn + 1
        else:
            self._add("assistant", said)

    async def ask(
        self,
        http: aiohttp.ClientSession,
        base_url: str,
        turn: int,
        record: TurnRecord,
        origin_s: float = 0.0,
    ) -> None:
        """Send one question and fill in `record`, as client.ask() does."""
        body = request_body(self._settings, self.question(turn), self.max_tokens(turn))
        record.input_num_turns = self._num_pieces
        await ask(http, base_url, self._settings, body, record, origin_s=origin_s)
        self.answer(turn, record)

    def max_tokens(self, turn: int) -> int:
        return answer_tokens(self._conversation, turn, self._settings)

    def _add(self, role: str, said: Piece) -> None:
        self._num_pieces += 1
        if isinstance(said, str):
            self._messages.append({"role": role, "content": said})
        else:
            self._ids += said


def answer_tokens(conversation: Conversation, turn: int, settings: RequestSettings) -> int:
    """How long the answer may be. A token of a text is taken for four letters."""
    if settings.max_tokens is not None:
        return settings.max_tokens
    said = conversation.answer(turn)
    if said is None:
        return DEFAULT_ANSWER_TOKENS
    return max(1, len(said) // LETTERS_A_TOKEN if isinstance(said, str) else len(said))


def marked(question: Piece, use: int) -> Piece:
    """The same question, beginning differently for each use but the first.

    Ids are marked with the bits of `use`, written with two ids that the question has (after its
    first one, which may mean the beginning of a text).
    """
    if use == 0 or not question:
        return question
    if isinstance(question, str):
        return f"({use}) {question}"
    first = question[0]
    other = next((id for id in question if id != first), first ^ 1)
    bits = array("I", [other if bit == "1" else first for bit in f"{use:b}"])
    return question[:1] + bits + question[1:]
