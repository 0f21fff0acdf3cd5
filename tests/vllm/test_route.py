# SPDX-License-Identifier: Apache-2.0
"""POST /attnstore/prefetch without a server: what it lets in, and whom it tells.

vLLM's rendering is the real server's business (test_serve_hints.py); here a prompt is its words'
lengths.
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from attnstore_vllm.connector.prefetch_route import BODY_BYTES_MAX, PATH, PrefetchRoute
from attnstore_vllm.hints import PrefetchOrder, prefetch_order

OURS = {"kv_connector": "AttnStoreConnector", "kv_connector_extra_config": {}}
OTHER = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {}}


class Engine:
    """What the route uses of vLLM's EngineClient. Keeps what it is sent."""

    def __init__(self, transfer: dict[str, Any] | None, ranks: int, local: int = 0) -> None:
        parallel = Namespace(
            data_parallel_size=ranks, data_parallel_size_local=local, local_engines_only=local > 0
        )
        self.vllm_config = Namespace(
            kv_transfer_config=Namespace(**transfer) if transfer else None,
            parallel_config=parallel,
            model_config=Namespace(max_model_len=4096),
        )
        self.sent: list[tuple[str, int | None, PrefetchOrder | None]] = []

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        self.sent.append((request_id, data_parallel_rank, prefetch_order(params)))


class Serving:
    """Renders as vLLM's serving classes do, as far as the route sees."""

    async def render_completion_request(self, request: Any) -> list[dict[str, Any]]:
        prompt = request.prompt
        ids = prompt if isinstance(prompt, list) else [len(word) for word in prompt.split()]
        kind = "embeds" if prompt == "embeds" else "token"
        return [{"type": kind, "prompt_token_ids": ids, "cache_salt": request.cache_salt}]

    async def render_chat_request(self, request: Any) -> tuple[list[Any], list[dict[str, Any]]]:
        ids = [len(message["content"]) for message in request.messages]
        return [], [{"type": "token", "prompt_token_ids": ids, "cache_salt": request.cache_salt}]


def client_of(engine: Engine | None, *keys: str) -> TestClient:
    app, route = FastAPI(), PrefetchRoute()
    route.attach_router(app)
    serving = Serving()
    app.state.openai_serving_chat = app.state.openai_serving_completion = serving
    app.state.openai_serving_models = SimpleNamespace(lora_requests={"adapter": object()})
    args = Namespace(api_key=list(keys))
    asyncio.run(route.init_state(engine, app.state, args))
    return TestClient(app)


def test_each_form_reaches_the_engine() -> None:
    engine = Engine(OURS, 1)
    client = client_of(engine)
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    for body, token_ids in (
        ({"messages": messages, "cache_salt": "salt"}, [3, 2]),
        ({"prompt": "a bc", "cache_salt": "salt"}, [1, 2]),
        ({"tokens": [7, 8, 9], "cache_salt": "salt"}, [7, 8, 9]),
    ):
        answer = client.post(PATH, json=body)
        assert (answer.status_code, answer.json()) == (202, {"prompt_tokens": len(token_ids)})
        assert engine.sent.pop()[1:] == (None, PrefetchOrder(token_ids, "salt"))
    assert not engine.sent


@pytest.mark.parametrize(("ranks", "local", "told"), [(3, 0, 3), (4, 2, 2), (4, 1, 1)])
def test_every_engine_is_told_under_a_name_of_its_own(ranks: int, local: int, told: int) -> None:
    engine = Engine(OURS, ranks, local)
    assert client_of(engine).post(PATH, json={"tokens": [1]}).status_code == 202
    names, engines, _ = zip(*engine.sent, strict=True)
    assert list(engines) == list(range(told))
    assert len(set(names)) == told


def test_the_servers_keys_are_asked_for() -> None:
    engine = Engine(OURS, 1)
    client, body = client_of(engine, "key", "other"), {"tokens": [1]}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "key"}):
        assert client.post(PATH, json=body, headers=headers).status_code == 401
    assert not engine.sent
    for key in ("key", "other"):
        headers = {"Authorization": f"Bearer {key}"}
        assert client.post(PATH, json=body, headers=headers).status_code == 202


def test_a_server_without_the_store_says_so() -> None:
    children = {"kv_connector": "MultiConnector"}
    for engine, status in (
        (None, 501),
        (Engine(None, 1), 501),
        (Engine(OTHER, 1), 501),
        (Engine({**children, "kv_connector_extra_config": {"connectors": [OTHER]}}, 1), 501),
        (Engine({**children, "kv_connector_extra_config": {"connectors": [OTHER, OURS]}}, 1), 202),
    ):
        assert client_of(engine).post(PATH, json={"tokens": [1]}).status_code == status


BAD: dict[str, Any] = {
    "nothing": {}, "a list": [], "a number": 5, "none": None,
    "no messages": {"messages": []}, "messages of another type": {"messages": "hi"},
    "messages that are none": {"messages": [5]}, "a role that is none": {"messages": [{"role": 1}]},
    "no prompt": {"prompt": ""}, "several prompts": {"prompt": ["a", "b"]},
    "no tokens": {"tokens": []}, "tokens of another type": {"tokens": "1 2"},
    "a negative token": {"tokens": [-1]}, "half a token": {"tokens": [1.5]},
    "a token that is true": {"tokens": [True]}, "a huge token": {"tokens": [2**31]},
    "lists of tokens": {"tokens": [[1], [2]]},
    "two forms": {"tokens": [1], "prompt": "a"},
    "an empty salt": {"tokens": [1], "cache_salt": ""},
    "a salt of another type": {"tokens": [1], "cache_salt": 5},
    "an adapter": {"tokens": [1], "model": "adapter"}, "a model of another type": {
        "prompt": "a", "model": ["adapter"]},
    "embeddings": {"prompt": "embeds"}, "half a character": {"tokens": [1], "cache_salt": "\ud800"},
    "more tokens than the model takes": {"tokens": [1] * 5000},
}  # fmt: skip


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_what_makes_no_sense_gets_a_reason(body: Any) -> None:
    engine = Engine(OURS, 1)
    answer = client_of(engine).post(PATH, content=json.dumps(body).encode())
    assert 400 <= answer.status_code < 500
    assert answer.json()["detail"]
    assert not engine.sent


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"tokens": [1]'])
def test_what_is_no_json_gets_a_reason(body: bytes) -> None:
    answer = client_of(Engine(OURS, 1)).post(PATH, content=body)
    assert answer.status_code == 400
    assert answer.json()["detail"]


def test_a_body_has_a_limit() -> None:
    engine = Engine(OURS, 1)
    body = b'{"prompt": "' + b"a" * BODY_BYTES_MAX + b'"}'
    assert client_of(engine).post(PATH, content=body).status_code == 413
    assert not engine.sent
