# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake of a real `vllm serve`, over HTTP: between requests, and in the midst of some.

The CPU build frees no memory when it sleeps, and refuses --enable-sleep-mode; the rest it does.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm.serve_helpers import FLAG, ask, ask_and_count, loaded, post, story

ANSWER_TOKENS = 1400
"""So many take some seconds, in which the server is put to sleep."""


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    home = tmp_path_factory.mktemp("sleep")
    model, settings = make_model(models / "serve", TINY), serving.settings(home / "store")
    with serving.server(model, home / "log", FLAG, serving.in_json(settings)) as started:
        yield started
    serving.assert_no_region()


def sleep(server: VllmServer, level: int, mode: str) -> None:
    for path in (f"/sleep?level={level}&mode={mode}", "/wake_up"):
        status, answer = post(server, path)
        assert status == 200, f"{path}: {status}: {answer!r}\n{server.log_tail()}"


@pytest.mark.parametrize("level", [1, 2])
def test_every_tier_stays(server: VllmServer, level: int) -> None:
    """vLLM empties its own cache when it sleeps, so the hit is ours."""
    text = story(("sleep", level))
    first = ask(server, text)
    before = loaded(server)
    sleep(server, level, "wait")
    again = ask(server, text)
    serving.nudge(server)
    assert again == first
    new = sum(loaded(server).values()) - sum(before.values())
    assert new >= first.prompt_tokens // serving.CHUNK * serving.CHUNK


def sleep_in_the_midst(server: VllmServer, mode: str, text: str) -> bool:
    """Let three answers be written and the server sleep. Returns whether some were cut, or written
    on. A busy server may hear of the sleep after they have ended."""
    lengths: list[int] = []

    def answer(number: int) -> None:
        _, found = post(server, "/v1/chat/completions", {
            "model": serving.MODEL_NAME, "max_tokens": ANSWER_TOKENS, "ignore_eos": True,
            "temperature": 0, "messages": [{"role": "user", "content": f"{text} {number}"}],
        })  # fmt: skip
        lengths.append(json.loads(found)["usage"]["completion_tokens"])

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    sleep(server, 1, mode)
    goes_on = any(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(serving.DEADLINE_S)
        assert not thread.is_alive(), mode
    assert len(lengths) == len(threads)
    return goes_on if mode == "keep" else min(lengths) < ANSWER_TOKENS


def test_a_sleep_in_the_midst_of_answers(server: VllmServer) -> None:
    """Requests that are given up or kept leave nothing wrong behind."""
    for mode in ("abort", "keep"):
        text = story(("midst", mode), 200)
        assert any(sleep_in_the_midst(server, mode, text) for _ in range(10))
        first, _ = ask_and_count(server, text)
        again, tokens = ask_and_count(server, text)
        assert again == first
        assert sum(tokens.values()) > 0
