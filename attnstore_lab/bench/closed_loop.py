# SPDX-License-Identifier: Apache-2.0
"""Conversations held by a few clients, each of which asks when it has its last answer.

Each client has some of the conversations and takes the next turn of each in rotation, so that
between two turns of one conversation the others have theirs. A slow server is asked more slowly:
good for what depends on the order of requests only; times under load want open_loop.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
from tqdm import tqdm

from attnstore_lab.bench.client import RequestSettings, open_http
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.records import TurnRecord
from attnstore_lab.bench.talk import Talk


async def take_turns(
    base_url: str,
    conversations: Sequence[Conversation],
    settings: RequestSettings,
    *,
    clients: int = 2,
    turns: int | None = None,
    title: str = "replay",
    progress: bool = True,
) -> list[TurnRecord]:
    """Hold all conversations; return a record for each turn, by conversation and turn.

    After a failure the rest of that conversation is not held, which is recorded as well.

    Args:
        turns: at most so many of each conversation.
    """
    if clients < 1 or (turns is not None and turns < 1):
        raise ValueError("clients and turns must be at least 1")
    num_turns = sum(len(c.questions[:turns]) for c in conversations)
    with tqdm(total=num_turns, desc=title, unit="turn", disable=not progress) as bar:
        async with open_http(settings) as http:
            shares = (
                _client(http, base_url, conversations[n::clients], settings, turns, bar)
                for n in range(clients)
            )
            records = [r for part in await asyncio.gather(*shares) for r in part]
    assert len(records) == num_turns
    place = {c.id: n for n, c in enumerate(conversations)}
    return sorted(records, key=lambda r: (place[r.conversation_id], r.turn))


async def _client(
    http: aiohttp.ClientSession,
    base_url: str,
    conversations: Sequence[Conversation],
    settings: RequestSettings,
    turns: int | None,
    bar: tqdm[Any],
) -> list[TurnRecord]:
    talks = [Talk(c, settings) for c in conversations]
    records: list[TurnRecord] = []
    for t in range(max((len(c.questions[:turns]) for c in conversations), default=0)):
        for conversation, talk in zip(conversations, talks, strict=True):
            if t >= len(conversation.questions):
                continue
            record = TurnRecord(conversation_id=conversation.id, turn=t + 1, error=talk.why_over)
            if record.error is None:
                await talk.ask(http, base_url, t, record)
                if record.error is not None:
                    bar.write(f"{conversation.id}, turn {t + 1}: {record.error}")
            records.append(record)
            bar.update()
    return records
