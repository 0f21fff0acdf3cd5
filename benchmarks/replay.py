# SPDX-License-Identifier: Apache-2.0
"""Replay conversations over the OpenAI-compatible chat API, as their users would hold them.

Each client has some of the conversations and takes the next turn of each in rotation, so that
between two turns of one conversation the others have theirs. The history that is sent holds the
model's own answers. Each request is recorded, the failed ones too; after a failure the rest of
that conversation cannot be held, which is recorded as well.

    python -m benchmarks.replay --base-url http://127.0.0.1:8000 --model NAME --clients 4
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from tqdm import tqdm

from benchmarks.conversations import SAMPLE, Conversation, DatasetError, read_conversations
from benchmarks.records import Step, TurnRecord, failures, summary_table

READ_BUFFER_BYTES: Final = 1 << 20  # a line of the stream must fit
ERROR_CHARS: Final = 500
Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How to ask. `turns` limits the turns of each conversation; None means all of them."""

    model: str
    clients: int = 2
    turns: int | None = None
    max_tokens: int = 128
    top_logprobs: int = 5
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.clients < 1 or (self.turns is not None and self.turns < 1) or self.max_tokens < 1:
            raise ValueError("clients, turns and max_tokens must be at least 1")
        if not 1 <= self.top_logprobs <= 20:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; it must be 1 to 20")


class RequestError(Exception):
    """The server answered with an error, or with something that is no answer."""


async def replay(
    base_url: str,
    conversations: Sequence[Conversation],
    settings: ReplaySettings,
    *,
    title: str = "replay",
    progress: bool = True,
) -> list[TurnRecord]:
    """Replay all conversations; return a record for each turn, by conversation and turn."""
    num_turns = sum(len(c.questions[: settings.turns]) for c in conversations)
    with tqdm(total=num_turns, desc=title, unit="turn", disable=not progress) as bar:
        async with open_session(settings.timeout_s) as session:
            clients = (
                _client(session, base_url, conversations[n :: settings.clients], settings, bar)
                for n in range(settings.clients)
            )
            records = [r for part in await asyncio.gather(*clients) for r in part]
    assert len(records) == num_turns
    place = {c.id: n for n, c in enumerate(conversations)}
    return sorted(records, key=lambda r: (place[r.conversation], r.turn))


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=READ_BUFFER_BYTES,
    )


async def _client(
    session: aiohttp.ClientSession,
    base_url: str,
    conversations: Sequence[Conversation],
    settings: ReplaySettings,
    bar: "tqdm[Any]",
) -> list[TurnRecord]:
    histories = [opening(c) for c in conversations]
    failed: dict[str, int] = {}  # conversation to the turn that failed
    records: list[TurnRecord] = []
    longest = max((len(c.questions[: settings.turns]) for c in conversations), default=0)
    for t in range(longest):
        for conversation, history in zip(conversations, histories, strict=True):
            if t >= len(conversation.questions):
                continue
            record = TurnRecord(conversation=conversation.id, turn=t + 1)
            if conversation.id in failed:
                record.error = f"not sent, because turn {failed[conversation.id]} failed"
            else:
                history.append({"role": "user", "content": conversation.questions[t]})
                await ask(session, base_url, history, settings, record)
                history.append({"role": "assistant", "content": record.answer})
                if record.error is not None:
                    failed[conversation.id] = t + 1
                    bar.write(f"{conversation.id}, turn {t + 1}: {record.error}")
            records.append(record)
            bar.update()
    return records


def opening(conversation: Conversation) -> list[Message]:
    if conversation.system is None:
        return []
    return [{"role": "system", "content": conversation.system}]


async def ask(
    session: aiohttp.ClientSession,
    base_url: str,
    messages: Sequence[Message],
    settings: ReplaySettings,
    record: TurnRecord,
) -> None:
    """Send one request and fill in `record`; whatever goes wrong is its `error`."""
    body = {
        "model": settings.model,
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": settings.max_tokens,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": settings.top_logprobs,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    try:
        async with session.post(f"{base_url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise RequestError(f"HTTP {response.status}: {(await response.text()).strip()}")
            async for event in _events(response.content):
                try:
                    _take(event, record, started)
                except (KeyError, TypeError) as error:
                    raise RequestError(f"unexpected event {event}") from error
    except asyncio.TimeoutError:  # an OSError too, since Python 3.11
        record.error = f"no complete answer within {settings.timeout_s:.0f} s"
    except (aiohttp.ClientError, RequestError, ValueError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    record.latency_ms = (time.perf_counter() - started) * 1e3
    if record.error is None and (record.ttft_ms is None or not record.steps):
        record.error = "the answer has no text, or no log-probabilities"
    if record.ttft_ms is not None and len(record.steps) > 1:
        record.tpot_ms = (record.latency_ms - record.ttft_ms) / (len(record.steps) - 1)


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event. Raises: RequestError if the stream breaks off."""
    async for line in stream:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        yield event
    raise RequestError("the stream ended before [DONE]")


def _take(event: dict[str, Any], record: TurnRecord, started: float) -> None:
    """Add one event of the stream to the record."""
    if "error" in event:
        raise RequestError(f"in the stream: {event['error']}")
    for choice in event.get("choices", ()):
        if text := choice["delta"].get("content"):
            if record.ttft_ms is None:
                record.ttft_ms = (time.perf_counter() - started) * 1e3
            record.answer += text
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            top = {t["token"]: t["logprob"] for t in entry["top_logprobs"]}
            record.steps.append(Step(entry["token"], entry["logprob"], top))
    if usage := event.get("usage"):
        record.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens")


async def fitting(
    base_url: str, conversations: Sequence[Conversation], settings: ReplaySettings
) -> list[Conversation]:
    """Return the conversations whose last turn fits the model's context, answers included.

    Asks the server for its context length and for the number of tokens (vLLM's /tokenize).
    Raises: RequestError if it cannot say.
    """
    fit = []
    async with open_session(settings.timeout_s) as session:
        async with session.get(f"{base_url}/v1/models") as response:
            models = {m["id"]: m for m in (await response.json())["data"]}
        if settings.model not in models:
            raise RequestError(f"the server has no {settings.model!r}; it has {sorted(models)}")
        limit = models[settings.model].get("max_model_len")
        if limit is None:
            raise RequestError("the server does not say its max_model_len; is it vLLM?")
        for conversation in conversations:
            questions = conversation.questions[: settings.turns]
            messages = opening(conversation)
            for question in questions:
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": "-"})
            body = {"model": settings.model, "messages": messages[:-1]}
            async with session.post(f"{base_url}/tokenize", json=body) as response:
                if response.status != 200:
                    raise RequestError(f"/tokenize: HTTP {response.status}")
                num_tokens = (await response.json())["count"]
            if num_tokens + len(questions) * settings.max_tokens <= limit:
                fit.append(conversation)
    return fit


def main() -> int:
    """Replay against a running server, print the table, return 1 if a request failed."""
    parser = argparse.ArgumentParser(description="replay conversations over the chat API")
    parser.add_argument("--base-url", required=True, help="e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the name the server gives it")
    parser.add_argument("--dataset", type=Path, default=SAMPLE, help="a file in ShareGPT format")
    parser.add_argument("--clients", type=int, default=2, help="how many ask at the same time")
    parser.add_argument("--turns", type=int, help="at most so many turns of each conversation")
    parser.add_argument("--conversations", type=int, help="at most so many conversations")
    parser.add_argument("--max-tokens", type=int, default=128, help="length of each answer")
    parser.add_argument("--json", type=Path, help="write the records to this file")
    args = parser.parse_args()
    settings = ReplaySettings(
        model=args.model, clients=args.clients, turns=args.turns, max_tokens=args.max_tokens
    )
    try:
        conversations = read_conversations(args.dataset)[: args.conversations]
    except DatasetError as error:
        print(error, file=sys.stderr)
        return 2
    records = asyncio.run(replay(args.base_url, conversations, settings))
    print(summary_table(records))
    if args.json:
        args.json.write_text(json.dumps([r.to_json() for r in records], indent=1) + "\n")
    return 1 if failures(records) else 0


if __name__ == "__main__":
    sys.exit(main())
