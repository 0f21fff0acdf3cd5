# SPDX-License-Identifier: Apache-2.0
"""POST /attnstore/prefetch: brings a conversation's KV up from NVMe before its next turn comes.

For a UI that sees a user open a chat or begin to type. Off unless VLLM_PLUGINS names it:

    VLLM_PLUGINS=attnstore,attnstore_prefetch vllm serve ...

The body is {"messages": [...]} with all that the chat requests of this conversation have (model,
tools, chat_template_kwargs, cache_salt, ...), or {"prompt": "text"}, or {"tokens": [...]}. It is
rendered by vLLM's own code for chats and completions, so the tokens are those of the real request.

To the scheduler side it travels as a request that vLLM ends as soon as the connector has seen it
(EngineClient.notify_kv_transfer_request_rejected): nothing is scheduled or computed, an engine that
sleeps wakes for it, and each data-parallel rank is told, since any may have the conversation. The
carrier has no answer, so the route says 202, and vllm:attnstore_prefetches what came of it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.datastructures import State
from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from attnstore_vllm.hints import PrefetchOrder
from attnstore_vllm.plugin import ours_in

PATH = "/attnstore/prefetch"
BODY_BYTES_MAX = 16 << 20
"""A million tokens of English are some 4 MB."""
FORMS = ("messages", "prompt", "tokens")
TOKEN_MAX = (1 << 31) - 1
REASON_MAX = 1000

router = APIRouter()


class PrefetchRoute:
    """vLLM's EndpointPlugin."""

    name = "attnstore_prefetch"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        state.attnstore_engine = engine_client
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        state.attnstore_guard = AuthenticationMiddleware(_nothing, keys) if keys else None


async def _nothing(*_: Any) -> None:
    """An application that the guard stands before: it is asked for its verdict alone."""


@router.post(PATH)
async def prefetch(request: Request) -> JSONResponse:
    """202 with the number of tokens that are looked for, on each engine; 4xx with a reason."""
    state = request.app.state
    # vLLM's own guard stands before its own paths only.
    if state.attnstore_guard is not None and not state.attnstore_guard.verify_token(
        request.headers
    ):
        raise HTTPException(401, "Unauthorized")
    engine: EngineClient | None = state.attnstore_engine
    if engine is None or not _has_store(engine.vllm_config):
        raise HTTPException(501, "this server runs without AttnStore")
    longest = engine.vllm_config.model_config.max_model_len
    found = await _token_ids(parse(await _body(request), longest), state)
    if isinstance(found, ErrorResponse):
        return JSONResponse(found.model_dump(), found.error.code)
    await send(engine, found)
    return JSONResponse({"prompt_tokens": len(found.token_ids)}, 202)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise HTTPException(413, f"the body has more than {BODY_BYTES_MAX} bytes")
    return bytes(body)


def parse(body: bytes, tokens_max: int) -> dict[str, Any]:
    """The body as JSON, with exactly one of FORMS in it. Raises: HTTPException."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON that can be read: {error}") from None
    if not isinstance(given, dict):
        raise HTTPException(400, "the body must be an object")
    present = [form for form in FORMS if form in given]
    if len(present) != 1:
        raise HTTPException(400, f"give one of {', '.join(FORMS)}, not {len(present)} of them")
    (form,) = present
    wanted = str if form == "prompt" else list
    if not isinstance(given[form], wanted) or not given[form]:
        raise HTTPException(400, f"{form} must be a {wanted.__name__} that is not empty")
    if form == "tokens" and len(given[form]) > tokens_max:
        raise HTTPException(
            400, f"{len(given[form])} tokens are more than the model's {tokens_max}"
        )
    if form == "tokens" and not all(
        isinstance(t, int) and not isinstance(t, bool) and 0 <= t <= TOKEN_MAX
        for t in given["tokens"]
    ):
        raise HTTPException(400, "tokens must be token ids")
    salt = given.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise HTTPException(400, "cache_salt must be a text that is not empty, as in requests")
    return given


async def _token_ids(given: dict[str, Any], state: State) -> PrefetchOrder | ErrorResponse:
    """The prompt of the request that is expected.

    Raises: HTTPException, and what vLLM raises for a request that makes no sense, of which its
    handlers make an answer.
    """
    is_chat = "messages" in given
    if "tokens" in given:
        given = {key: given[key] for key in given if key != "tokens"} | {"prompt": given["tokens"]}
    asked: ChatCompletionRequest | CompletionRequest
    try:
        asked = (ChatCompletionRequest if is_chat else CompletionRequest).model_validate(given)
    except ValidationError as error:
        raise HTTPException(400, str(error)[:REASON_MAX]) from None
    if is_chat:
        rendered = await state.openai_serving_chat.render_chat_request(asked)
        inputs = rendered if isinstance(rendered, ErrorResponse) else rendered[1]
    else:
        inputs = await state.openai_serving_completion.render_completion_request(asked)
    if isinstance(inputs, ErrorResponse):
        return inputs
    if asked.model in state.openai_serving_models.lora_requests:
        raise HTTPException(400, "the KV of LoRA adapters is not prefetched")
    if len(inputs) != 1 or inputs[0]["type"] != "token":
        raise HTTPException(400, "only text can be prefetched")
    return PrefetchOrder(inputs[0]["prompt_token_ids"], inputs[0].get("cache_salt"))


async def send(engine: EngineClient, order: PrefetchOrder) -> None:
    """Give the order to each engine that this server's front end talks to."""
    parallel = engine.vllm_config.parallel_config
    ranks: list[int | None] = [None]
    if parallel.data_parallel_size > 1:
        is_local = parallel.local_engines_only
        count = parallel.data_parallel_size_local if is_local else parallel.data_parallel_size
        ranks = list(range(count))
    for rank in ranks:
        # Each under a name of its own: vLLM sends what it knows by name where it was sent before.
        await engine.notify_kv_transfer_request_rejected(
            f"{PrefetchRoute.name}-{uuid4().hex}", order.as_params(), data_parallel_rank=rank
        )


def _has_store(vllm_config: Any) -> bool:
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return False
    keys = ("kv_connector", "kv_connector_extra_config")
    return any(ours_in({key: getattr(transfer, key) for key in keys}))
