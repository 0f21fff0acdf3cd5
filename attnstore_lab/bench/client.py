# SPDX-License-Identifier: Apache-2.0
"""One streamed request to a server that speaks the OpenAI API; its outcome is recorded.

Each request has a connection of its own, whose opening is part of its times: a connection that
is kept may be closed by the server in the moment in which it is used again, and the error would
be the load generator's.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import aiohttp
from aiohttp.http import HttpProcessingError

from attnstore_lab.bench.conversations import are_ids
from attnstore_lab.bench.records import INTERRUPTED, Step, TurnRecord
from attnstore_vllm.errors import AttnStoreError, ConfigError

READ_BUFFER_BYTES: Final = 1 << 20  # a line of the stream may have twice that
ERROR_CHARS: Final = 500
PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """How to ask.

    Args:
        api: "chat" sends texts, "completions" sends and keeps token ids.
        history: "own": the model's own answers; "data": those of the file, as far as it has any.
        max_tokens: of an answer; None: as many as the file's answer has.
        ignore_eos: answers have exactly `max_tokens` (vLLM, SGLang).
        top_logprobs: ask for those of so many candidates (vLLM's names for tokens). Chat only.
        timeout_s: a request that took longer, from its connection to its last token, has failed.
        usage: ask for the number of tokens; some servers refuse the question.
        extra: more fields of the request's body; None takes one out.
    """

    model: str
    api: Literal["chat", "completions"] = "chat"
    history: Literal["own", "data"] = "own"
    max_tokens: int | None = 128
    ignore_eos: bool = False
    top_logprobs: int | None = None
    timeout_s: float = 300.0
    usage: bool = True
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises: ConfigError naming the setting."""
        for name, ok, expected in (
            ("max_tokens", self.max_tokens is None or self.max_tokens > 0, "1 or more"),
            ("top_logprobs", self.top_logprobs is None or 0 < self.top_logprobs <= 20, "1 to 20"),
            ("timeout_s", 0 < self.timeout_s < math.inf, "more than 0, and an end"),
        ):
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected {expected}")


class RequestError(AttnStoreError):
    """The server answered with an error, or with something that is no answer."""


def server_root(url: str) -> str:
    """The URL that paths are added to: users give it with /v1 or without."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url: {url!r} was found; expected http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def open_http(settings: RequestSettings) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    if settings.api_key:
        headers["Authorization"] = f"Bearer {settings.api_key}"
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        read_bufsize=READ_BUFFER_BYTES,
        headers=headers,
    )


def request_body(
    settings: RequestSettings, prompt: Mapping[str, Any], max_tokens: int
) -> dict[str, Any]:
    """`prompt` is {"messages": [...]} or {"prompt": [ids]}, as the API wants it."""
    body: dict[str, Any] = {
        "model": settings.model,
        **prompt,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
    }
    if settings.usage:
        body["stream_options"] = {"include_usage": True}
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.api == "completions" and settings.history == "own":
        body["return_token_ids"] = True
    if settings.top_logprobs is not None:
        body |= {
            "logprobs": True,
            "top_logprobs": settings.top_logprobs,
            "return_tokens_as_token_ids": True,
        }
    body |= settings.extra
    return {name: value for name, value in body.items() if value is not None}


async def ask(
    http: aiohttp.ClientSession,
    base_url: str,
    settings: RequestSettings,
    body: Mapping[str, Any],
    record: TurnRecord,
    *,
    origin_s: float = 0.0,
) -> None:
    """Send one request and fill in `record`; what goes wrong is its `error`.

    Args:
        origin_s: the value of time.perf_counter() from which `start_time_ms` counts.
    Raises: asyncio.CancelledError, after it was recorded.
    """
    data = json.dumps(body).encode()  # before the clock starts: long prompts take milliseconds
    started = time.perf_counter()
    record.start_time_ms = (started - origin_s) * 1e3
    answer = _Answer(settings, record, started)
    try:
        async with http.post(base_url + PATHS[settings.api], data=data) as response:
            if response.status != 200:
                text = (await response.content.read(ERROR_CHARS)).decode(errors="replace")
                raise RequestError(f"HTTP {response.status}: {text.strip()}")
            async for event in _events(response.content, record):
                answer.take(event)
    except asyncio.CancelledError:
        record.error = INTERRUPTED
        raise
    except asyncio.TimeoutError:  # an OSError too, since Python 3.11
        record.error = f"no complete answer within {settings.timeout_s:g} s"
    except RequestError as error:
        record.error = str(error)[:ERROR_CHARS]
    except (aiohttp.ClientError, HttpProcessingError, ValueError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    finally:
        answer.finish()


async def _events(
    stream: aiohttp.StreamReader, record: TurnRecord
) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event. Raises: RequestError if the stream breaks off."""
    async for line in stream:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            text = data[:ERROR_CHARS].decode(errors="replace")
            raise RequestError(f"in the stream: a JSON object was expected, found {text!r}")
        yield event
    if record.finish_reason is None:
        raise RequestError("the stream ended before [DONE]: the server died, or does not stream")


class _Answer:
    """Puts the events of a stream into a record."""

    def __init__(self, settings: RequestSettings, record: TurnRecord, started: float) -> None:
        self._settings = settings
        self._record = record
        self._started = started
        self._texts: list[str] = []
        self._pieces = 0

    def take(self, event: dict[str, Any]) -> None:
        """Raises: RequestError if it is an error, or nothing that we know."""
        if event.get("error"):
            raise RequestError(f"in the stream: {event['error']}")
        try:
            for choice in event.get("choices") or ():
                self._take_choice(choice)
            if usage := event.get("usage"):
                self._take_usage(usage)
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"unexpected event {event}") from error

    def _take_choice(self, choice: dict[str, Any]) -> None:
        record, logprobs = self._record, choice.get("logprobs") or {}
        if self._settings.api == "chat":
            delta = choice["delta"]
            text = delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            for entry in logprobs.get("content") or ():
                top = {t["token"]: t["logprob"] for t in entry["top_logprobs"]}
                record.steps.append(Step(entry["token"], entry["logprob"], top))
        else:
            text, thought = choice["text"], ""
        ids = choice.get("token_ids") or []
        if not isinstance(text, str) or not are_ids(ids):
            raise TypeError("text or ids of another type")
        if text or thought or ids:
            self._pieces += 1
            if record.ttft_ms is None:
                record.ttft_ms = (time.perf_counter() - self._started) * 1e3
            self._texts.append(text)
            record.token_ids += ids
        record.finish_reason = choice.get("finish_reason") or record.finish_reason

    def _take_usage(self, usage: dict[str, Any]) -> None:
        prompt, answer = usage.get("prompt_tokens"), usage.get("completion_tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for value in (prompt, answer, cached):
            if value is not None and type(value) is not int:
                raise TypeError("a number of tokens of another type")
        record = self._record
        record.has_usage = prompt is not None
        record.input_num_tokens, record.cached_tokens = prompt, cached
        record.output_num_tokens = answer

    def finish(self) -> None:
        """The stream has ended, well or not."""
        record = self._record
        record.latency_ms = (time.perf_counter() - self._started) * 1e3
        record.answer = "".join(self._texts)
        record.output_num_chunks = max(0, self._pieces - 1)  # vLLM's count: after the first
        if record.output_num_tokens is None:
            record.output_num_tokens = len(record.token_ids) or len(record.steps) or self._pieces
        if record.ttft_ms is not None and record.output_num_tokens > 1 and self._pieces > 1:
            decode_ms = record.latency_ms - record.ttft_ms
            record.tpot_ms = decode_ms / (record.output_num_tokens - 1)
        if record.error is not None:
            return
        if record.ttft_ms is None:
            record.error = f"the answer is empty (finish_reason {record.finish_reason!r})"
        elif self._settings.top_logprobs and not record.steps:
            record.error = "the answer has no log-probabilities"
        elif self._settings.api == "completions" and self._settings.history == "own":
            if not record.token_ids:
                record.error = "the answer has no token ids; does the server know return_token_ids?"
