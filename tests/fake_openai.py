# SPDX-License-Identifier: Apache-2.0
"""A small server of the OpenAI API in the test's own process, whose behaviour a test chooses."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CONTEXT_TOKENS = 20


@asynccontextmanager
async def serving(
    handler: Handler, model: str = "m", context_tokens: int = CONTEXT_TOKENS
) -> AsyncIterator[str]:
    """Serve chat and completions by `handler`; a token of the model is a letter.

    The special token that begins a text has the id 1. /metrics has none.
    """

    async def models(request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": model, "max_model_len": context_tokens}]})

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def tokenize(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        texts = [m["content"] for m in body.get("messages", ())] or [body["prompt"]]
        ids = [1] if body.get("add_special_tokens") else []
        ids += [ord(letter) for text in texts for letter in text]
        return web.json_response({"count": len(ids), "tokens": ids})

    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextmanager
def served_aside(
    handler: Handler, model: str = "m", context_tokens: int = CONTEXT_TOKENS
) -> Iterator[str]:
    """The same server in a thread of its own, for programs that have an event loop of theirs."""
    started: Queue[tuple[str, Callable[[], object]]] = Queue()

    async def serve() -> None:
        end, loop = asyncio.Event(), asyncio.get_running_loop()
        async with serving(handler, model, context_tokens) as url:
            started.put((url, lambda: loop.call_soon_threadsafe(end.set)))
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, stop = started.get(timeout=10)
    try:
        yield url
    finally:
        stop()
        thread.join(10)


async def stream(request: web.Request, *events: dict[str, Any] | str) -> web.StreamResponse:
    """Send these at once. A text is sent as it is, an event as JSON."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await send(response, event)
    return response


async def send(response: web.StreamResponse, event: dict[str, Any] | str) -> None:
    data = event if isinstance(event, str) else json.dumps(event)
    await response.write(f"data: {data}\n\n".encode())


@dataclass(kw_only=True)
class Fake:
    """Answers with `tokens` words: the number of messages, or of ids, and "." after it.

    Args:
        first_s: before the first token of an answer.
        gap_s: before each other one.
        stall_s: (from, until): nothing is answered between these times after the first request.
        fails: the requests, counted from 0, that break off after their first token.
    """

    tokens: int = 3
    first_s: float = 0.0
    gap_s: float = 0.0
    stall_s: tuple[float, float] = (0.0, 0.0)
    usage: bool = True
    fails: frozenset[int] = frozenset()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    now: int = 0
    most: int = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        number = len(self.came_s)
        self.came_s.append(time.perf_counter())
        self.headers.append(dict(request.headers))
        body = await request.json()
        self.bodies.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._answer(request, body, number)
        finally:
            self.now -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], number: int
    ) -> web.StreamResponse:
        response = await stream(request)
        since_s = time.perf_counter() - self.came_s[0]
        if self.stall_s[0] <= since_s < self.stall_s[1]:
            await asyncio.sleep(self.stall_s[1] - since_s)
        await asyncio.sleep(self.first_s)
        self.first_token_s.append(time.perf_counter())
        prompt = body.get("messages") or body["prompt"]
        for n in range(self.tokens):
            if n:
                await asyncio.sleep(self.gap_s)
            await send(response, self._token(body, n, len(prompt)))
            if number in self.fails:
                return response
        if self.usage:
            counts = {"prompt_tokens": len(prompt), "completion_tokens": self.tokens}
            details = {"prompt_tokens_details": {"cached_tokens": len(prompt) - 1}}
            await send(response, {"choices": [], "usage": counts | details})
        await send(response, "[DONE]")
        return response

    def _token(self, body: dict[str, Any], n: int, length: int) -> dict[str, Any]:
        text = "." if n else str(length)
        if "messages" in body:
            return {"choices": [{"delta": {"content": text}}]}
        choice: dict[str, Any] = {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = [1000 + n]
        return {"choices": [choice]}
