# SPDX-License-Identifier: Apache-2.0
"""`attnstore bench replay` as its user sees it: exit codes, what is printed, what is written."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from attnstore_vllm.cli.main import main
from tests.fake_openai import Fake, served_aside

OK, FAILED, ERROR, INTERRUPTED = 0, 1, 2, 130
TALKS = [
    {"id": "x", "conversations": [
        {"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"},
        {"from": "human", "value": "and?"},
    ]},
    {"id": "y", "conversations": [{"from": "human", "value": "ho"}]},
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(TALKS))
    return path


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def url(fake: Fake) -> Iterator[str]:
    with served_aside(fake) as url:
        yield url


def bench(url: str, data: Path, *options: str) -> int:
    return main(
        [
            "bench",
            "replay",
            "--base-url",
            url,
            "--model",
            "m",
            "--data",
            str(data),
            "--rate",
            "inf",
            "--think",
            "constant:0",
            *options,
        ]
    )


def test_summary_is_printed(url: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(f"{url}/v1", data) == OK
    out = capsys.readouterr().out
    assert "3 requests: 3 answered, 0 failed" in out
    rows = {line.split("  ")[0].strip() for line in out.splitlines()}
    assert {"ttft_ms", "tpot_ms", "latency_ms", "due_ttft_ms", "lag_ms", "ttft_ms turn 2+"} <= rows


def test_json_has_the_numbers_and_the_options(
    url: str, fake: Fake, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, records = tmp_path / "key", tmp_path / "records.jsonl"
    key.write_text("secret\n")
    options = ("--json", "--records", str(records), "--answers", "--api-key-file", str(key))
    assert bench(url, data, *options) == OK
    result = json.loads(capsys.readouterr().out)
    assert result["requests"]["answered"] == 3
    assert result["statistics"]["ttft_ms"]["count"] == 3
    assert result["options"]["rate"] == "inf"
    assert result["options"]["seed"] == 1
    assert "secret" not in json.dumps(result)
    assert fake.headers[0]["Authorization"] == "Bearer secret"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert sorted((line["conversation_id"], line["turn"]) for line in lines) == [
        ("x", 1),
        ("x", 2),
        ("y", 1),
    ]
    assert all(line["answer"] for line in lines)


def test_options_reach_the_server(url: str, fake: Fake, data: Path) -> None:
    options = (
        "--history",
        "data",
        "--max-tokens",
        "data",
        "--ignore-eos",
        "--no-usage",
        "--extra-body",
        '{"top_p": 0.5}',
        "--max-concurrency",
        "1",
    )
    assert bench(url, data, *options) == OK
    [second] = [body for body in fake.bodies if len(body["messages"]) == 3]
    assert [m["content"] for m in second["messages"]] == ["hello", "hi", "and?"]
    assert second["ignore_eos"] is True
    assert second["top_p"] == 0.5
    assert "stream_options" not in second
    first = (
        fake.bodies[0] if fake.bodies[0]["messages"][0]["content"] == "hello" else fake.bodies[1]
    )
    assert first["max_tokens"] == 1  # "hi" is less than a token
    assert fake.most == 1


def test_texts_are_asked_as_ids(url: str, fake: Fake, data: Path) -> None:
    assert bench(url, data, "--api", "completions", "--turns", "1") == OK
    prompts = [body["prompt"] for body in fake.bodies]
    assert sorted(prompts) == sorted([1, *map(ord, text)] for text in ("hello", "ho"))


def test_fit_leaves_out_what_is_too_long(
    url: str, fake: Fake, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context is 20: x takes 5 + 1 + 4 letters and twice 6 tokens, y 2 letters and 6."""
    assert bench(url, data, "--fit", "--max-tokens", "6") == OK
    assert len(fake.bodies) == 1
    assert "1 of 2 conversations fit" in capsys.readouterr().err
    assert bench(url, data, "--fit", "--max-tokens", "19") == ERROR
    assert "no conversation fits" in capsys.readouterr().err


def test_think_times_come_from_a_trace(url: str, data: Path, tmp_path: Path) -> None:
    trace, records = tmp_path / "trace.jsonl", tmp_path / "records.jsonl"
    trace.write_text('{"requests": [{"t": 0}, {"t": 2}]}\n')
    options = ("--think", f"trace:{trace}", "--think-scale", "0.05", "--records", str(records))
    assert bench(url, data, *options) == OK
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert sorted(line["due_ms"] for line in lines) == [0, 0, 100]


def test_failed_request_is_exit_1(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served_aside(Fake(fails=frozenset({0}))) as url:
        assert bench(url, data) == FAILED
    assert "1 x the stream ended before [DONE]" in capsys.readouterr().out


def test_wrong_options_are_exit_2_and_named(
    url: str, fake: Fake, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        (("--model", "other"), "the server has no 'other'; it has ['m']"),
        (("--base-url", "http://127.0.0.1:9"), "is the server up?"),
        (("--base-url", "127.0.0.1:9"), "expected http://HOST:PORT"),
        (("--data", "/none"), "/none: cannot be read"),
        (("--rate", "0"), "--rate: expected more than 0"),
        (("--warmup", "1"), "--warmup: expected a share"),
        (("--think", "soon"), "--think: 'soon' was found"),
        (("--think", "constant:x"), "--think: 'constant:x'"),
        (("--think", "trace:/none"), "/none: cannot be read"),
        (("--think", "data"), "'x' has no \"timestamp\""),
        (("--max-tokens", "few"), "--max-tokens: 'few'"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--max-concurrency", "0"), "--max-concurrency"),
        (("--timeout", "inf"), "timeout_s is inf"),
        (("--extra-body", "[]"), "--extra-body: expected a JSON object"),
        (("--extra-body", "{"), "--extra-body: not JSON"),
        (("--api-key-file", "/none"), "/none"),
        (("--records", "/none/records"), "/none/records"),
    ):
        assert bench(url, data, *options) == ERROR, options
        error = capsys.readouterr().err
        assert message in error, options
        assert "Traceback" not in error
    assert fake.bodies == []


def test_full_disk_is_exit_2(url: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(url, data, "--records", "/dev/full", "--max-concurrency", "1") == ERROR
    captured = capsys.readouterr()
    assert "/dev/full: No space left on device" in captured.err
    assert "1 answered" in captured.out


def test_interruption_is_exit_130(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(10)
        return web.Response()

    with served_aside(handler) as url:
        assert bench(url, data, "--json", "--max-concurrency", "1") == INTERRUPTED
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["interrupted"] is True
    assert result["requests"]["interrupted"] == 1
