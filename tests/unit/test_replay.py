# SPDX-License-Identifier: Apache-2.0
"""The replay's parts: reading conversations, asking a real HTTP server, comparing answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.agreement import compare, gap_changes, rounding_bound
from benchmarks.conversations import SAMPLE, Conversation, DatasetError, read_conversations
from benchmarks.records import Step, TurnRecord, failures, percentile, summary_table, table
from benchmarks.replay import ReplaySettings, RequestError, fitting, replay
from benchmarks.server import parse_metrics, total
from benchmarks.sources import traffic

SETTINGS = ReplaySettings(model="m", clients=2, max_tokens=4)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# --- conversations ---


def write(tmp_path: Path, value: object) -> Path:
    path = tmp_path / "data.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_sample_has_long_and_varied_conversations() -> None:
    conversations = read_conversations(SAMPLE)
    assert len(conversations) >= 16
    assert len({c.id for c in conversations}) == len(conversations)
    for conversation in conversations:
        assert 4 <= len(conversation.questions) <= 7
        for question in conversation.questions:
            assert 40 <= len(question.split()) <= 250, conversation.id


def test_only_the_human_turns_are_kept(tmp_path: Path) -> None:
    turns = [("system", "S"), ("human", "a"), ("gpt", "x"), ("user", "b"), ("assistant", "y")]
    entry = {"conversations": [{"from": who, "value": what} for who, what in turns]}
    silent = {"id": "silent", "conversations": [{"from": "gpt", "value": "x"}]}
    path = write(tmp_path, [entry, silent, entry | {"id": "0"}])
    assert read_conversations(path) == [
        Conversation("0", ("a", "b"), "S"),
        Conversation("0#2", ("a", "b"), "S"),
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ({"a": 1}, "a list of conversations is expected, not an object"),
        ([], "there is no conversation in it"),
        ([3], "conversation 0: .* expected, not a number"),
        ([{"items": []}], r"conversation 0: .* not an object with keys \['items'\]"),
        ([{"conversations": ["hi"]}], "conversation 0, turn 0: an object is expected"),
        ([{"conversations": [{"from": "human"}]}], "turn 0: texts .* are expected"),
        ([{"conversations": [{"from": "cat", "value": "m"}]}], "'cat', not human or gpt"),
    ],
)
def test_malformed_files_say_where_and_what(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        read_conversations(write(tmp_path, value))
    assert "data.json" in str(caught.value)


def test_missing_file_is_a_dataset_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read: No such file"):
        read_conversations(tmp_path / "none.json")


# --- asking ---


@asynccontextmanager
async def serving(
    handler: Handler, *, models: Handler | None = None, tokenize: Handler | None = None
) -> AsyncIterator[str]:
    app = web.Application()
    if models is not None:
        app.router.add_get("/v1/models", models)
    if tokenize is not None:
        app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def choice(text: str, *tokens: str) -> dict[str, Any]:
    content = [
        {"token": t, "logprob": -0.1, "top_logprobs": [{"token": t, "logprob": -0.1}]}
        for t in tokens
    ]
    return {"choices": [{"delta": {"content": text}, "logprobs": {"content": content}}]}


async def stream(request: web.Request, *events: dict[str, Any] | str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {data}\n\n".encode())
    return response


async def echo(request: web.Request) -> web.StreamResponse:
    """Answer with the number of messages, as two tokens."""
    body = await request.json()
    text = str(len(body["messages"]))
    usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}
    first = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    last = {"choices": [], "usage": usage}
    return await stream(request, first, choice("n", "t1"), choice(text, "t2"), last, "[DONE]")


def run(handler: Handler, *conversations: Conversation) -> list[TurnRecord]:
    async def session() -> list[TurnRecord]:
        async with serving(handler) as url:
            return await replay(url, conversations, SETTINGS, progress=False)

    return asyncio.run(session())


def test_replay_sends_the_models_own_answers_as_history() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await echo(request)

    [first, second] = run(handler, Conversation("c", ("hello", "and?"), "Be brief."))
    assert (first.answer, second.answer) == ("n2", "n4")
    assert [m["content"] for m in seen[1]["messages"]] == ["Be brief.", "hello", "n2", "and?"]
    assert seen[0]["temperature"] == 0
    assert seen[0]["ignore_eos"] is True
    assert second.tokens == ("t1", "t2")
    assert (second.prompt_tokens, second.cached_tokens) == (7, 5)
    assert second.ttft_ms is not None
    assert second.latency_ms is not None
    assert 0 < second.ttft_ms <= second.latency_ms
    assert second.tpot_ms is not None


def test_conversations_of_a_client_take_turns() -> None:
    order: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        order.append((await request.json())["messages"][-1]["content"])
        return await echo(request)

    conversations = [Conversation(str(n), tuple(f"{n}{t}" for t in "abc"[: 3 - n])) for n in (0, 1)]
    settings = ReplaySettings(model="m", clients=1)

    async def session() -> list[TurnRecord]:
        async with serving(handler) as url:
            return await replay(url, conversations, settings, progress=False)

    records = asyncio.run(session())
    assert order == ["0a", "1a", "0b", "1b", "0c"]
    assert [(r.conversation, r.turn) for r in records] == [
        ("0", 1), ("0", 2), ("0", 3), ("1", 1), ("1", 2),
    ]  # fmt: skip


async def refusing(request: web.Request) -> web.StreamResponse:
    return web.Response(status=400, text="too long")


async def failing_in_the_stream(request: web.Request) -> web.StreamResponse:
    return await stream(request, choice("n", "t"), {"error": {"message": "engine died"}})


async def breaking_off(request: web.Request) -> web.StreamResponse:
    return await stream(request, choice("n", "t"))


async def saying_nothing(request: web.Request) -> web.StreamResponse:
    return await stream(request, "[DONE]")


async def talking_nonsense(request: web.Request) -> web.StreamResponse:
    return await stream(request, {"choices": [{"no": "delta"}]}, "[DONE]")


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (refusing, "HTTP 400: too long"),
        (failing_in_the_stream, "engine died"),
        (breaking_off, "ended before"),
        (saying_nothing, "no text"),
        (talking_nonsense, "unexpected event"),
    ],
)
def test_failures_are_recorded_and_end_their_conversation(handler: Handler, message: str) -> None:
    records = run(handler, Conversation("c", ("a", "b")), Conversation("d", ("a",)))
    assert len(records) == 3
    assert len(failures(records)) == 3
    assert message in str(records[0].error)
    assert records[1].error == "not sent, because turn 1 failed"
    text = summary_table(records)
    assert "3 requests, 3 failed" in text
    assert message in text


def test_server_that_is_not_there_is_recorded() -> None:
    closed = "http://127.0.0.1:9"
    [record] = asyncio.run(replay(closed, [Conversation("c", ("a",))], SETTINGS, progress=False))
    assert "Connect" in str(record.error)


def test_conversations_beyond_the_context_are_left_out() -> None:
    """The fake server has a context of 20 tokens and counts one token a character."""

    async def models(request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "m", "max_model_len": 20}]})

    async def tokenize(request: web.Request) -> web.StreamResponse:
        messages = (await request.json())["messages"]
        return web.json_response({"count": sum(len(m["content"]) for m in messages)})

    fits = Conversation("fits", ("12345", "123456"))  # and a stand-in answer, and twice 4 tokens
    long = Conversation("long", ("12345", "1234567"))

    async def session(settings: ReplaySettings) -> list[Conversation]:
        async with serving(echo, models=models, tokenize=tokenize) as url:
            return await fitting(url, [fits, long], settings)

    assert asyncio.run(session(SETTINGS)) == [fits]
    assert asyncio.run(session(replace(SETTINGS, turns=1))) == [fits, long]
    with pytest.raises(RequestError, match="no 'other'"):
        asyncio.run(session(replace(SETTINGS, model="other")))


# --- numbers ---


def test_percentiles_interpolate_between_ranks() -> None:
    assert percentile([5], 95) == 5
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3], 0) == 1
    assert percentile([1, 2, 3], 100) == 3


def test_table_is_aligned() -> None:
    rows = [("", "a", "bb"), ("row", "1,000", "2")]
    assert table(rows) == "         a  bb\n--------------\nrow  1,000   2"


def test_metrics_are_parsed_and_summed() -> None:
    text = """# HELP x:y_total help
# TYPE x:y_total counter
x:y_total{engine="0",tier="dram"} 5.0
x:y_total{engine="0",tier="nvme"} 7.0
plain 1e3
"""
    metrics = parse_metrics(text)
    assert total(metrics, "x:y_total") == 12
    assert total(metrics, "x:y_total", tier="nvme") == 7
    assert total(metrics, "plain") == 1000
    assert total(metrics, "absent") == 0


def test_traffic_tells_the_sources_apart() -> None:
    prompt = "vllm:prompt_tokens_by_source_total"
    lines = [
        f'{prompt}{{engine="0",source="local_compute"}} 100',
        f'{prompt}{{engine="0",source="local_cache_hit"}} 20',
        f'{prompt}{{engine="0",source="external_kv_transfer"}} 30',
    ]
    alone = traffic({}, parse_metrics("\n".join(lines)))
    assert alone.prompt_tokens == {"computed": 100, "HBM": 20, "other": 30}
    assert not alone.has_store
    lines += [
        'vllm:attnstore_loaded_tokens_total{engine="0",tier="dram"} 10',
        'vllm:attnstore_loaded_tokens_total{engine="0",tier="nvme"} 20',
        'vllm:attnstore_bytes_total{engine="0",direction="dram_to_hbm"} 640',
    ]
    stored = traffic({}, parse_metrics("\n".join(lines)))
    assert stored.prompt_tokens == {"computed": 100, "HBM": 20, "DRAM": 10, "NVMe": 20}
    assert stored.moved_bytes == {"dram_to_hbm": 640}
    assert stored.has_store


# --- agreement ---


def answer(*tops: dict[str, float], turn: int = 1, error: str | None = None) -> TurnRecord:
    """An answer that takes the best candidate at each place."""
    steps = [Step(token := max(top, key=lambda t: top[t]), top[token], top) for top in tops]
    return TurnRecord(conversation="c", turn=turn, steps=steps, error=error)


SURE = {"a": -0.1, "b": -3.1}
CLOSE_A = {"a": -0.70, "b": -0.72}
CLOSE_B = {"a": -0.71, "b": -0.69}


def test_identical_answers_agree() -> None:
    result = compare([answer(SURE), answer(SURE, turn=2)], [answer(SURE), answer(SURE, turn=2)])
    assert (result.compared, result.identical, result.not_compared) == (2, 2, 0)


def test_difference_shows_both_gaps_and_ends_the_comparison() -> None:
    a = [answer(SURE, CLOSE_A, SURE), answer(SURE, turn=2)]
    b = [answer(SURE, CLOSE_B, SURE), answer(SURE, turn=2)]
    result = compare(a, b)
    assert (result.compared, result.identical, result.not_compared) == (1, 0, 1)
    [difference] = result.differences
    assert (difference.turn, difference.position) == (1, 1)
    assert (difference.token_a, difference.token_b) == ("a", "b")
    assert difference.gap_a == pytest.approx(0.02)
    assert difference.gap_b == pytest.approx(0.02)
    assert difference.is_within(0.05)
    assert not difference.is_within(0.03)


def test_token_that_the_other_side_never_considered_is_not_rounding() -> None:
    [difference] = compare(
        [answer({"a": -0.1, "b": -3})], [answer({"x": -0.1, "b": -3})]
    ).differences
    assert difference.change is None
    assert not difference.is_within(1e9)


def test_shorter_answer_is_a_difference() -> None:
    [difference] = compare([answer(SURE, SURE)], [answer(SURE)]).differences
    assert difference.position == 1
    assert not difference.is_within(1e9)


def test_failed_answers_are_not_compared() -> None:
    a = [answer(SURE, error="lost"), answer(SURE, turn=2)]
    b = [answer(SURE), answer(SURE, turn=2)]
    result = compare(a, b)
    assert (result.compared, result.not_compared) == (0, 2)


def test_gap_changes_cover_the_common_text_and_the_first_difference() -> None:
    moved = {"a": -0.1, "b": -3.3}
    changes = gap_changes([answer(SURE, CLOSE_A, SURE)], [answer(moved, CLOSE_B, SURE)])
    assert changes == pytest.approx([0.2, 0.04])
    assert rounding_bound(changes) == pytest.approx(0.4)
    assert rounding_bound([]) == 0
