# SPDX-License-Identifier: Apache-2.0
"""One conversation with a server: what is sent, what is recorded, and what fails how."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from attnstore_lab.bench.client import RequestSettings, server_root
from attnstore_lab.bench.closed_loop import take_turns
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.records import TurnRecord, failures
from attnstore_lab.bench.talk import DEFAULT_ANSWER_TOKENS, Talk, answer_tokens, marked
from attnstore_vllm.errors import ConfigError
from tests.fake_openai import Fake, Handler, send, serving, stream

CHAT = RequestSettings(model="m", max_tokens=4, timeout_s=10)
IDS = replace(CHAT, api="completions")
TALK = Conversation("c", ("hello", "and?", "so"), "Be brief.", answers=("x", None, "y"))
IDS_TALK = Conversation(
    "i", (array("I", [5, 6]), array("I", [7])), array("I", [1]), (array("I", [8, 9]), None)
)


def hold(
    handler: Handler,
    *conversations: Conversation,
    settings: RequestSettings = CHAT,
    clients: int = 2,
) -> list[TurnRecord]:
    async def session() -> list[TurnRecord]:
        async with serving(handler) as url:
            return await take_turns(url, conversations, settings, clients=clients, progress=False)

    return asyncio.run(session())


def texts(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


# ---- what is sent -------------------------------------------------------------------------------


def test_own_history_is_what_the_model_said() -> None:
    fake = Fake()
    hold(fake, TALK)
    assert texts(fake.bodies[0]) == ["Be brief.", "hello"]
    assert texts(fake.bodies[2]) == ["Be brief.", "hello", "2..", "and?", "4..", "so"]
    roles = [message["role"] for message in fake.bodies[2]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]


def test_history_of_the_data_is_the_files_as_far_as_it_has_any() -> None:
    fake = Fake()
    hold(fake, TALK, settings=replace(CHAT, history="data"))
    assert texts(fake.bodies[2]) == ["Be brief.", "hello", "x", "and?", "4..", "so"]


def test_own_history_of_ids_is_what_the_model_generated() -> None:
    fake = Fake()
    [_, last] = hold(fake, IDS_TALK, settings=IDS)
    assert fake.bodies[0]["prompt"] == [1, 5, 6]
    assert fake.bodies[0]["return_token_ids"] is True
    assert fake.bodies[1]["prompt"] == [1, 5, 6, 1000, 1001, 1002, 7]
    assert last.token_ids == [1000, 1001, 1002]


def test_ids_history_of_the_data_asks_for_no_ids() -> None:
    fake = Fake()
    hold(fake, IDS_TALK, settings=replace(IDS, history="data"))
    assert fake.bodies[1]["prompt"] == [1, 5, 6, 8, 9, 7]
    assert "return_token_ids" not in fake.bodies[0]


def test_body_is_the_apis_and_extra_fields_change_it() -> None:
    fake = Fake()
    extra = {"temperature": None, "top_p": 0.5}
    hold(fake, TALK, settings=replace(CHAT, ignore_eos=True, api_key="secret", extra=extra))
    body = {name: value for name, value in fake.bodies[0].items() if name != "messages"}
    assert body == {
        "model": "m",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_p": 0.5,
    }
    assert fake.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(replace(CHAT, api_key="secret"))


def test_answers_may_be_as_long_as_the_files() -> None:
    settings = replace(CHAT, max_tokens=None)
    long = Conversation("c", ("a", "b"), answers=("x" * 400, None))
    assert answer_tokens(long, 0, settings) == 100
    assert answer_tokens(long, 1, settings) == DEFAULT_ANSWER_TOKENS
    assert answer_tokens(IDS_TALK, 0, settings) == 2


def test_each_use_of_a_conversation_begins_differently() -> None:
    ids = array("I", [1, 5, 5, 6])
    for question in ("hello", ids, array("I", [1, 1])):
        prompts = [marked(question, use) for use in range(9)]
        assert prompts[0] == question
        assert len({tuple(prompt) for prompt in prompts}) == 9
    assert all(list(marked(ids, use))[-3:] == [5, 5, 6] for use in range(9))
    assert marked(ids, 3)[0] == 1  # may mean the beginning of a text


def test_conversations_of_a_client_take_turns() -> None:
    fake = Fake()
    both = [Conversation(str(n), tuple(f"{n}{t}" for t in "abc"[: 3 - n])) for n in (0, 1)]
    records = hold(fake, *both, clients=1)
    assert [texts(body)[-1] for body in fake.bodies] == ["0a", "1a", "0b", "1b", "0c"]
    assert [(r.conversation_id, r.turn) for r in records] == [
        ("0", 1),
        ("0", 2),
        ("0", 3),
        ("1", 1),
        ("1", 2),
    ]


# ---- what is recorded ---------------------------------------------------------------------------


def test_times_and_counts_of_an_answer() -> None:
    fake = Fake(tokens=4, first_s=0.1, gap_s=0.05)
    record = hold(fake, TALK)[0]
    assert record.ttft_ms is not None
    assert record.latency_ms is not None
    assert record.tpot_ms is not None
    served_ms = (fake.first_token_s[0] - fake.came_s[0]) * 1e3
    assert 100 <= served_ms <= record.ttft_ms < record.latency_ms - 75
    assert record.tpot_ms == pytest.approx((record.latency_ms - record.ttft_ms) / 3)
    assert record.answer == "2..."
    assert record.input_num_turns == 2
    assert (record.input_num_tokens, record.cached_tokens) == (2, 1)
    assert (record.output_num_tokens, record.output_num_chunks) == (4, 3)
    assert record.has_usage


def test_without_usage_pieces_are_counted() -> None:
    fake = Fake(usage=False)
    record = hold(fake, TALK, settings=replace(CHAT, usage=False))[0]
    assert "stream_options" not in fake.bodies[0]
    assert record.error is None
    assert not record.has_usage
    assert (record.input_num_tokens, record.output_num_tokens) == (None, 3)


def choice(text: str, *tokens: str) -> dict[str, Any]:
    content = [
        {"token": t, "logprob": -0.1, "top_logprobs": [{"token": t, "logprob": -0.1}]}
        for t in tokens
    ]
    return {"choices": [{"delta": {"content": text}, "logprobs": {"content": content}}]}


def test_log_probabilities_are_kept_where_they_were_asked_for() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, choice("n", "t1"), choice("m", "t2", "t3"), "[DONE]")

    settings = replace(CHAT, top_logprobs=5)
    [record] = hold(handler, Conversation("c", ("a",)), settings=settings)
    assert record.error is None
    assert record.tokens == ("t1", "t2", "t3")
    assert record.output_num_tokens == 3
    [without] = hold(Fake(), Conversation("c", ("a",)), settings=settings)
    assert without.error == "the answer has no log-probabilities"


def test_server_that_ends_without_done_has_answered_if_it_said_why_it_stopped() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        last = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        return await stream(request, choice("n"), last)

    [record] = hold(handler, Conversation("c", ("a",)))
    assert (record.error, record.finish_reason) == (None, "stop")


# ---- what fails ---------------------------------------------------------------------------------


async def refusing(request: web.Request) -> web.StreamResponse:
    return web.Response(status=400, text="too long")


async def failing_in_the_stream(request: web.Request) -> web.StreamResponse:
    return await stream(request, choice("n"), {"error": {"message": "engine died"}})


async def breaking_off(request: web.Request) -> web.StreamResponse:
    return await stream(request, choice("n"))


async def dying(request: web.Request) -> web.StreamResponse:
    response = await stream(request, choice("n"))
    assert request.transport is not None
    request.transport.abort()
    return response


async def saying_nothing(request: web.Request) -> web.StreamResponse:
    return await stream(request, "[DONE]")


async def talking_nonsense(request: web.Request) -> web.StreamResponse:
    return await stream(request, {"choices": [{"no": "delta"}]}, "[DONE]")


async def breaking_json(request: web.Request) -> web.StreamResponse:
    return await stream(request, '{"choices": [')


async def nesting(request: web.Request) -> web.StreamResponse:
    return await stream(request, "[" * 200_000)


async def sending_a_list(request: web.Request) -> web.StreamResponse:
    return await stream(request, "[1]", "[DONE]")


async def never_ending_a_line(request: web.Request) -> web.StreamResponse:
    return await stream(request, "x" * (5 << 20))


async def not_streaming(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"message": {"content": "n"}}]})


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (refusing, "HTTP 400: too long"),
        (failing_in_the_stream, "engine died"),
        (breaking_off, "ended before [DONE]"),
        (dying, "Client"),
        (saying_nothing, "the answer is empty"),
        (talking_nonsense, "unexpected event"),
        (breaking_json, """a JSON object was expected, found '{"choices": ['"""),
        (nesting, "a JSON object was expected"),
        (sending_a_list, "a JSON object was expected, found '[1]'"),
        (never_ending_a_line, "LineTooLong"),
        (not_streaming, "does not stream"),
    ],
)
def test_failures_are_recorded_and_end_their_conversation(handler: Handler, message: str) -> None:
    records = hold(handler, Conversation("c", ("a", "b")), Conversation("d", ("a",)))
    assert len(failures(records)) == len(records) == 3
    assert message in str(records[0].error)
    assert len(str(records[0].error)) <= 500
    assert records[1].error == "not sent, because turn 1 failed"
    assert not records[1].was_sent


def test_failed_turn_does_not_end_a_conversation_whose_history_is_the_files() -> None:
    fake = Fake(fails=frozenset({0}))
    records = hold(fake, TALK, settings=replace(CHAT, history="data"))
    assert [record.error is None for record in records] == [False, True, True]


def test_ids_that_do_not_come_are_told() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, {"choices": [{"text": "n"}]}, "[DONE]")

    record = hold(handler, IDS_TALK, settings=IDS)[0]
    assert "does the server know return_token_ids?" in str(record.error)


@pytest.mark.parametrize("tokens_first", [0, 1])
def test_each_request_has_a_deadline(tokens_first: int) -> None:
    """Before the first token and after it, and also where each token comes in time."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = await stream(request, *[choice("n")] * tokens_first)
        for _ in range(100):
            await asyncio.sleep(0.1)
            if tokens_first:
                await send(response, choice("n"))
        return response

    started = time.perf_counter()
    [record] = hold(handler, Conversation("c", ("a",)), settings=replace(CHAT, timeout_s=0.3))
    assert time.perf_counter() - started < 5
    assert record.error == "no complete answer within 0.3 s"
    assert (record.ttft_ms is not None) == bool(tokens_first)


def test_server_that_is_not_there_is_recorded() -> None:
    closed = "http://127.0.0.1:9"
    [record] = asyncio.run(take_turns(closed, [Conversation("c", ("a",))], CHAT, progress=False))
    assert "Connect" in str(record.error)


def test_urls_are_taken_with_v1_and_without() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert server_root(url) == "http://h:1"
    assert server_root("https://h/some/v1") == "https://h/some"
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        server_root("localhost:8000")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 0), ("top_logprobs", 21), ("timeout_s", 0), ("timeout_s", float("inf"))],
)
def test_wrong_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(CHAT, **{name: value})


def test_texts_for_ids_and_ids_for_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match="i: --api chat wants texts"):
        Talk(IDS_TALK, CHAT)
    with pytest.raises(ConfigError, match="c: --api completions wants token ids"):
        Talk(TALK, IDS)
