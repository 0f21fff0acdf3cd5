# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server before the run: its models, its tokens, its context."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest
from aiohttp import web

from attnstore_lab.bench.client import RequestError, RequestSettings
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.tokens import as_ids, check_server, fitting
from tests.fake_openai import Fake, serving

CHAT = RequestSettings(model="m", max_tokens=4, timeout_s=10)
T = TypeVar("T")


def asking(question: Callable[[str], Awaitable[T]]) -> T:
    async def session() -> T:
        async with serving(Fake()) as url:
            return await question(url)

    return asyncio.run(session())


def fit(
    *conversations: Conversation, settings: RequestSettings, turns: int | None = None
) -> list[str]:
    found = asking(lambda url: fitting(url, conversations, settings, turns=turns))
    return [conversation.id for conversation in found]


def test_conversations_beyond_the_context_are_left_out() -> None:
    """A letter is a token here; of the 20, answers take twice 4 and one stands in their place."""
    fits = Conversation("fits", ("12345", "123456"))
    long = Conversation("long", ("12345", "1234567"))
    assert fit(fits, long, settings=CHAT) == ["fits"]
    assert fit(fits, long, settings=CHAT, turns=1) == ["fits", "long"]
    with pytest.raises(RequestError, match="no 'other'; it has \\['m'\\]"):
        fit(fits, settings=replace(CHAT, model="other"))


def test_the_files_answers_count_where_they_are_the_history() -> None:
    fits = Conversation("fits", ("123", "456"), answers=("x" * 10, "y" * 99))
    long = Conversation("long", ("123", "456"), answers=("x" * 11, "y"))
    data = replace(CHAT, history="data")
    assert fit(fits, long, settings=data) == ["fits"]
    assert fit(fits, long, settings=CHAT) == ["fits", "long"]


def test_ids_are_counted_without_asking() -> None:
    def ids(n: int) -> Conversation:
        return Conversation(str(n), (array("I", range(n)), array("I", [1])), array("I", [1]))

    settings = replace(CHAT, api="completions")
    assert fit(ids(10), ids(11), settings=settings) == ["10"]


def test_texts_become_ids_and_only_the_first_begins_with_the_special_token() -> None:
    talk = Conversation("c", ("ab", "c"), answers=("d", None))
    done = Conversation("i", (array("I", [3]),))
    settings = replace(CHAT, api="completions")
    found, same = asking(lambda url: as_ids(url, [talk, done], settings, progress=False))
    assert found.questions == (array("I", [1, 97, 98]), array("I", [99]))
    assert found.answers == (array("I", [100]), None)
    assert same is done
    briefed = replace(talk, system="S")
    [found] = asking(lambda url: as_ids(url, [briefed], settings, progress=False))
    assert found.system == array("I", [1, 83])
    assert found.questions[0] == array("I", [97, 98])


async def check(app: web.Application, settings: RequestSettings = CHAT) -> None:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await check_server("http://{}:{}".format(*runner.addresses[0][:2]), settings)
    finally:
        await runner.cleanup()


def answering(body: object, status: int = 200) -> web.Application:
    async def models(request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    return app


@pytest.mark.parametrize(
    "app",
    [
        web.Application(),  # 404
        answering({"data": []}),
        answering({"models": ["other"]}),
        answering([1]),
        answering({"data": [{"id": "other"}, {"id": "m"}]}),
        answering("down", status=503),
    ],
)
def test_server_that_does_not_say_otherwise_is_believed(app: web.Application) -> None:
    asyncio.run(check(app))


@pytest.mark.parametrize(
    ("app", "message"),
    [
        (answering({"data": [{"id": "b"}, {"id": "a"}]}), r"no 'm'; it has \['a', 'b'\]"),
        (answering({}, status=401), "HTTP 401; is the key of --api-key-file right"),
    ],
)
def test_wrong_name_or_key_is_told_before_the_run(app: web.Application, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        asyncio.run(check(app))


def test_server_that_is_not_there_is_told() -> None:
    with pytest.raises(RequestError, match=r"127\.0\.0\.1:9.*is the server up"):
        asyncio.run(check_server("http://127.0.0.1:9", CHAT))


def test_server_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnstore_lab.bench.tokens.FIRST_ANSWER_S", 0.2)

    async def models(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/models", models)
    with pytest.raises(RequestError, match=r"no answer within 0\.2 s"):
        asyncio.run(check(app))
