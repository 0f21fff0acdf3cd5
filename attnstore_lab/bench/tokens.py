# SPDX-License-Identifier: Apache-2.0
"""Facts that only the server knows: its models (/v1/models) and its tokens (vLLM's /tokenize)."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final

import aiohttp
from tqdm import tqdm

from attnstore_lab.bench.client import RequestError, RequestSettings, open_http
from attnstore_lab.bench.conversations import Conversation, Piece, are_ids
from attnstore_lab.bench.talk import answer_tokens

FIRST_ANSWER_S: Final = 10.0
"""A server that has not said its models after so long is taken to be no server."""


async def check_server(base_url: str, settings: RequestSettings) -> None:
    """Ask for the models, so that a wrong URL, key or name is said once and before the run.

    A server that has no list of its models is believed to have the one that is wanted.
    Raises: RequestError.
    """
    async with open_http(replace(settings, timeout_s=FIRST_ANSWER_S)) as http:
        try:
            async with http.get(f"{base_url}/v1/models") as response:
                status = response.status
                answer = await response.json() if status == 200 else None
        except asyncio.TimeoutError as error:
            raise RequestError(f"{base_url}: no answer within {FIRST_ANSWER_S:g} s") from error
        except (aiohttp.ContentTypeError, ValueError):  # something answers, and may yet serve
            return
        except (aiohttp.ClientError, OSError) as error:
            raise RequestError(f"{base_url}: {error}; is the server up?") from error
    if status in (401, 403):
        raise RequestError(f"{base_url}: HTTP {status}; is the key of --api-key-file right?")
    models = _models(answer)
    if models and settings.model not in models:
        raise RequestError(f"the server has no {settings.model!r}; it has {sorted(models)}")


def _models(answer: Any) -> dict[str, dict[str, Any]]:
    """By name; empty if this is no list of models."""
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return {}
    return {m["id"]: m for m in entries if isinstance(m, dict) and isinstance(m.get("id"), str)}


async def fitting(
    base_url: str,
    conversations: Sequence[Conversation],
    settings: RequestSettings,
    *,
    turns: int | None = None,
) -> list[Conversation]:
    """Return the conversations whose last turn fits the model's context, answers included.

    With the file's answers as history those count, else the longest ones the model may give.
    Raises: RequestError if the server cannot say.
    """
    async with open_http(settings) as http:
        limit = await _context_tokens(http, base_url, settings)
        return [
            conversation
            for conversation in conversations
            if await _size(http, base_url, conversation, settings, turns) <= limit
        ]


async def _context_tokens(
    http: aiohttp.ClientSession, base_url: str, settings: RequestSettings
) -> int:
    models = _models(await _json(http.get(f"{base_url}/v1/models")))
    if settings.model not in models:
        raise RequestError(f"the server has no {settings.model!r}; it has {sorted(models)}")
    limit: int | None = models[settings.model].get("max_model_len")
    if limit is None:
        raise RequestError("the server does not say its max_model_len; is it vLLM?")
    return limit


async def _size(
    http: aiohttp.ClientSession,
    base_url: str,
    conversation: Conversation,
    settings: RequestSettings,
    turns: int | None,
) -> int:
    """Tokens of the last prompt and its answer, at most."""
    questions = conversation.questions[:turns]
    answers: list[Piece | None] = [
        conversation.answer(t) if settings.history == "data" else None
        for t in range(len(questions))
    ]
    # The last answer is not in the prompt, and answers of the model's own are counted apart.
    open_ended = {t for t, said in enumerate(answers) if said is None} | {len(questions) - 1}
    generated = sum(answer_tokens(conversation, t, settings) for t in open_ended)
    pieces: list[tuple[str, Piece | None]] = []
    if conversation.system is not None:
        pieces.append(("system", conversation.system))
    for question, answer in zip(questions, answers, strict=True):
        pieces += [("user", question), ("assistant", answer)]
    del pieces[-1]
    if not conversation.is_text:
        return generated + sum(len(said) for _, said in pieces if said is not None)
    messages = [{"role": role, "content": said or "-"} for role, said in pieces]
    body = {"model": settings.model, "messages": messages}
    return generated + int((await _tokenize(http, base_url, body))["count"])


async def as_ids(
    base_url: str,
    conversations: Sequence[Conversation],
    settings: RequestSettings,
    *,
    progress: bool = True,
) -> list[Conversation]:
    """Turn texts into token ids, turn by turn and without a chat template; ids stay as they are.

    The first piece of a conversation begins with the model's special tokens, if it has any.
    Raises: RequestError if the server cannot do it.
    """
    bar = tqdm(conversations, desc="tokenize", disable=None if progress else True)
    async with open_http(settings) as http:
        return [
            await _as_ids(http, base_url, conversation, settings)
            if conversation.is_text
            else conversation
            for conversation in bar
        ]


async def _as_ids(
    http: aiohttp.ClientSession,
    base_url: str,
    conversation: Conversation,
    settings: RequestSettings,
) -> Conversation:
    async def ids(said: Piece | None, first: bool = False) -> array[int] | None:
        if said is None:
            return None
        body = {"model": settings.model, "prompt": said, "add_special_tokens": first}
        tokens = (await _tokenize(http, base_url, body)).get("tokens")
        if not isinstance(tokens, list) or not are_ids(tokens):
            raise RequestError("/tokenize: no token ids in the answer; is it vLLM?")
        return array("I", tokens)

    system = await ids(conversation.system, True)
    questions = [
        await ids(q, system is None and n == 0) for n, q in enumerate(conversation.questions)
    ]
    answers = [await ids(said) for said in conversation.answers]
    return replace(
        conversation,
        system=system,
        questions=tuple(q for q in questions if q is not None),
        answers=tuple(answers),
    )


async def _tokenize(
    http: aiohttp.ClientSession, base_url: str, body: dict[str, Any]
) -> dict[str, Any]:
    return await _json(http.post(f"{base_url}/tokenize", json=body))


async def _json(asking: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> dict[str, Any]:
    """Raises: RequestError unless the answer is a JSON object."""
    try:
        async with asking as response:
            path = response.url.path
            if response.status != 200:
                raise RequestError(f"{path}: HTTP {response.status}; is it vLLM?")
            answer = await response.json()
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, OSError) as error:
        raise RequestError(f"no answer: {error or 'it took too long'}") from error
    if not isinstance(answer, dict):
        raise RequestError(f"{path}: a JSON object was expected; is it vLLM?")
    return answer
