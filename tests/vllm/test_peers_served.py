# SPDX-License-Identifier: Apache-2.0
"""Real data-parallel engines that read each other: the first turn at one, the next at the other."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.prometheus import total
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm.serve_helpers import DEADLINE_S, FLAG, MODEL_NAME, story


def ask_engine(
    server: VllmServer, rank: int, messages: list[dict[str, str]], **fields: object
) -> str:
    """A greedy answer of one engine."""
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    request = urllib.request.Request(
        server.base_url + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "X-data-parallel-rank": str(rank)},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


def from_peers(server: VllmServer, rank: int) -> float:
    name = "vllm:attnstore_loaded_tokens_total"
    return total(server.metrics(), name, tier="peers", engine=str(rank))


@pytest.mark.long
def test_conversations_go_on_at_another_engine(models: Path, tmp_path: Path) -> None:
    model = make_model(models / "serve", TINY)
    extra = serving.settings(tmp_path / "store", dram="64MiB", capacity="128MiB")
    transfer = serving.in_yaml(tmp_path / "a.yaml", extra)
    arguments = (FLAG, transfer, "--data-parallel-size", "2")
    with serving.server(model, tmp_path / "log", *arguments, cores="0|1") as server:
        chats = [[{"role": "user", "content": story(n)}] for n in range(3)]
        for turn in range(3):
            for n, chat in enumerate(chats):
                before = from_peers(server, (turn + n) % 2)
                said = ask_engine(server, (turn + n) % 2, chat)
                if turn:
                    for _ in range(2):  # counters come with an engine's next step
                        ask_engine(server, (turn + n) % 2, [{"role": "user", "content": "hi"}])
                    assert from_peers(server, (turn + n) % 2) > before, server.log_tail()
                same = ask_engine(server, (turn + n) % 2, chat)
                assert same == said, "as from HBM"
                more = f"and then? {story((turn, n), 30)}"
                chat += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]
        # After a reset of all engines nothing of before comes back, and they read each other again.
        serving.empty_hbm(server, drop_store=True)
        assert from_peers(server, 0) + from_peers(server, 1) > 0
        before = from_peers(server, 0) + from_peers(server, 1)
        ask_engine(server, 0, chats[0])
        ask_engine(server, 0, [{"role": "user", "content": "hi"}])
        assert from_peers(server, 0) + from_peers(server, 1) == before
    serving.assert_no_region()


@pytest.mark.long
def test_a_truncated_conversation_goes_on_at_another_engine(models: Path, tmp_path: Path) -> None:
    """Its KV is moved from the sibling's chunks, to the same answer as at the sibling itself."""
    model = make_model(models / "serve", TINY)
    extra = serving.settings(tmp_path / "store", dram="64MiB", capacity="128MiB")
    transfer = serving.in_yaml(tmp_path / "a.yaml", {**extra, "truncation": "{share: everyone}"})
    asks: dict[str, object] = {"kv_transfer_params": {"attnstore": {"truncation": True}}}
    moved = "vllm:attnstore_moved_tokens_total"
    arguments = (FLAG, transfer, "--data-parallel-size", "2")
    with serving.server(model, tmp_path / "log", *arguments, cores="0|1") as server:

        def moved_at(rank: int) -> float:
            for _ in range(2):  # counters come with an engine's next step
                ask_engine(server, rank, [{"role": "user", "content": "hi"}])
            return total(server.metrics(), moved, engine=str(rank))

        turns = [{"role": "system", "content": story("system", 40)}]
        for turn in range(3):
            turns += [
                {"role": "user", "content": story(turn, 150)},
                {"role": "assistant", "content": story((turn, "said"), 60)},
            ]
        ask_engine(server, 0, [*turns, {"role": "user", "content": "first"}], **asks)
        cut = [turns[0], *turns[3:], {"role": "user", "content": "go on"}]
        said = ask_engine(server, 1, cut, **asks)
        assert moved_at(1) > 300, server.log_tail()
        assert from_peers(server, 1) > 300
        by_source = "vllm:prompt_tokens_cached_by_source_total"
        assert total(server.metrics(), by_source, source="p2p", engine="1") > 300
        assert moved_at(0) == 0
        assert ask_engine(server, 0, cut, **asks) == said, "as with its own"
        assert moved_at(0) == moved_at(1)
    serving.assert_no_region()
