# SPDX-License-Identifier: Apache-2.0
"""Hints of requests and POST /attnstore/prefetch in a real `vllm serve`, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.index.prefix import whole_blocks
from attnstore_vllm.prometheus import total
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm.serve_helpers import FLAG, MODEL_NAME, ask, ask_and_count, ask_and_store, story

PATH = "/attnstore/prefetch"
NOTHING = {"dram": 0, "nvme": 0}


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    names = [point.name for point in entry_points(group="vllm.endpoint_plugins")]
    assert "attnstore_prefetch" in names, "install this checkout anew: it has a new entry point"
    home = tmp_path_factory.mktemp("hints")
    extra = serving.settings(home / "store", dram="4MiB") | {
        "pinning": {"share": 0.5, "tenant_share": 0.25},
        "truncation": {"enabled": False, "share": "everyone"},
    }
    plugins = {"VLLM_PLUGINS": "attnstore,attnstore_prefetch"}
    model, settings = make_model(models / "serve", TINY), serving.in_json(extra)
    with serving.server(model, home / "log", FLAG, settings, environment=plugins) as started:
        yield started
    serving.assert_no_region()


def hinted(server: VllmServer, text: str, **hints: Any) -> serving.Answer:
    return ask(server, text, kv_transfer_params={"attnstore": hints})


def hints(server: VllmServer) -> tuple[float, float]:
    """Keys that were applied and ignored so far."""
    serving.nudge(server)
    applied, ignored = (serving.count(server, "hints", outcome=o) for o in ("applied", "ignored"))
    return applied, ignored


# ---- hints -------------------------------------------------------------------------------


def test_what_is_not_to_be_stored_is_not(server: VllmServer) -> None:
    applied, ignored = hints(server)
    before = hinted(server, story("secret"), store=False)
    again, tokens = ask_and_count(server, story("secret"))
    assert (again, tokens) == (before, NOTHING)
    assert hints(server) == (applied + 1, ignored)
    loads, tokens = ask_and_count(server, story("secret"))
    assert tokens["dram"] == whole_blocks(loads.prompt_tokens - 1), "without the hint it was stored"


def test_what_has_expired_is_computed_again(server: VllmServer) -> None:
    first = hinted(server, story("brief"), ttl=1, priority="low")
    began = time.monotonic()
    serving.wait_until(lambda: time.monotonic() > began + 1.1, "its time is over")
    expired = serving.count(server, "chunks", event="expired")
    again, tokens = ask_and_count(server, story("brief"))
    assert (again, tokens) == (first, NOTHING)
    assert serving.count(server, "chunks", event="expired") > expired


def test_what_is_pinned_is_still_in_dram_after_others(server: VllmServer) -> None:
    first = hinted(server, story("pinned"), pin=True, ttl="1h")
    for seed in range(12):
        ask(server, story(("crowd", seed)))
    assert serving.count(server, "chunks", event="evicted_dram") > 0
    again, tokens = ask_and_count(server, story("pinned"))
    assert again == first
    assert tokens["dram"] >= first.prompt_tokens // serving.CHUNK * serving.CHUNK
    assert tokens["nvme"] == 0
    assert serving.count(server, "chunks", event="pinned") > 0


def test_a_tenant_that_pins_everything_has_its_share(server: VllmServer) -> None:
    for seed in range(6):
        body = {"attnstore": {"pin": True}}
        ask(server, story(("greedy", seed)), kv_transfer_params=body, cache_salt="greedy")
    serving.nudge(server)
    assert serving.count(server, "chunks", event="pin_refused") > 0


MALFORMED: dict[str, Any] = {
    "not an object": 5, "a list": [{"ttl": 5}], "text": "pin",
    "wrong types": {"store": "no", "priority": 3, "ttl": True, "pin": "yes"},
    "absurd times": {"ttl": -1e308}, "a huge time": {"ttl": 1e300},
    "unknown keys": {"evict": "others", "": None},
    "nested": {"ttl": [[[[[{}]]]]], "pin": {"pin": {"pin": True}}},
    "large": {f"key {n}": "x" * 100 for n in range(2000)},
    "forged": {"prefetch": "\u0000" * 4000, "cache_salt": "other"},
}  # fmt: skip


@pytest.mark.parametrize("section", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_hints_change_nothing(server: VllmServer, section: Any) -> None:
    applied, ignored = hints(server)
    first = ask(server, story("malformed"), kv_transfer_params={"attnstore": section})
    assert ask(server, story("malformed")) == first
    keys = len(section) if isinstance(section, dict) else 1
    assert hints(server) == (applied, ignored + keys)


# ---- the route ---------------------------------------------------------------------------


def away(server: VllmServer, name: object) -> serving.Answer:
    """A chat whose KV is on NVMe, and pushed out of DRAM by others."""
    answer = ask_and_store(server, story(name))
    for seed in range(12):
        ask_and_store(server, story((name, seed)))
    return answer


def fetched(server: VllmServer) -> float:
    return serving.count(server, "bytes", direction="nvme_to_dram")


def found(server: VllmServer) -> float:
    """Tokens that prefetches found so far, in either tier."""
    return sum(serving.count(server, "prefetch_tokens", tier=tier) for tier in NOTHING)


def prefetch(server: VllmServer, **body: Any) -> dict[str, Any]:
    status, answer = serving.post(server, PATH, body)
    assert status == 202, answer
    said: dict[str, Any] = json.loads(answer)
    return said


def test_a_chat_is_brought_up_before_its_turn_and_nothing_is_computed(server: VllmServer) -> None:
    first = away(server, "opened")
    serving.empty_hbm(server)
    serving.nudge(server)
    before, computed = fetched(server), total(server.metrics(), "vllm:prompt_tokens_total")
    messages = [{"role": "user", "content": story("opened")}]
    assert prefetch(server, messages=messages) == {"prompt_tokens": first.prompt_tokens}
    # The engine is idle: it is its thread that reads. Its metrics are seen with the next step.
    assert total(server.metrics(), "vllm:prompt_tokens_total") == computed

    def is_there() -> bool:
        serving.nudge(server)
        return serving.count(server, "prefetches", outcome="hit") >= 1 and fetched(server) > before

    serving.wait_until(is_there, "it came up from NVMe")
    tokens = found(server)
    # The tokens are those of the chat itself; of a tail on NVMe 32 at a time are known.
    assert first.prompt_tokens - 32 < tokens <= first.prompt_tokens
    serving.wait_until(lambda: settled(server), "all of it came up")
    before = fetched(server)
    again, loaded = ask_and_count(server, story("opened"))
    assert again == first
    # It was in DRAM when the request came.
    assert loaded == {"dram": whole_blocks(first.prompt_tokens - 1), "nvme": 0}
    assert fetched(server) == before, "the request itself read nothing"


def settled(server: VllmServer) -> bool:
    """Nothing was read since a moment ago."""
    before = fetched(server)
    for _ in range(3):
        serving.nudge(server)
    return fetched(server) == before


def test_text_and_tokens_find_the_same(server: VllmServer) -> None:
    text = story("completion")
    body = {"model": MODEL_NAME, "prompt": text, "max_tokens": 4, "temperature": 0}
    status, answer = serving.post(server, "/tokenize", {"model": MODEL_NAME, "prompt": text})
    assert status == 200
    token_ids = json.loads(answer)["tokens"]

    def store() -> int:
        assert serving.post(server, "/v1/completions", body)[0] == 200
        return len(token_ids)

    serving.do_and_store(server, store)
    for ask_for in ({"prompt": text}, {"tokens": token_ids}):
        serving.nudge(server)
        before = found(server)
        assert prefetch(server, **ask_for) == {"prompt_tokens": len(token_ids)}
        serving.nudge(server)
        assert found(server) == before + whole_blocks(len(token_ids))


def test_another_tenants_kv_is_not_found(server: VllmServer) -> None:
    ask(server, story("tenant"), cache_salt="a")
    messages = [{"role": "user", "content": story("tenant")}]
    for salt, hit in (("b", 0), ("a", 1)):
        serving.nudge(server)
        before = serving.count(server, "prefetches", outcome="hit")
        prefetch(server, messages=messages, cache_salt=salt)
        serving.nudge(server)
        assert serving.count(server, "prefetches", outcome="hit") == before + hit


BAD: dict[str, Any] = {
    "no messages": {"messages": []}, "nothing": {}, "two forms": {"prompt": "a", "tokens": [1]},
    "messages that are none": {"messages": [5]}, "tokens that are none": {"tokens": ["a"]},
    "too long": {"prompt": story("long", 4000)}, "too many tokens": {"tokens": [5] * 4000},
    "another model": {"prompt": "a", "model": "gpt-4"},
    "a template of its own": {
        "messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages }}"},
    "a picture": {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]},
    "a salt that cannot be sent": {"tokens": [1] * 40, "cache_salt": "\ud800"},
}  # fmt: skip


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_bad_bodies_get_a_reason(server: VllmServer, body: Any) -> None:
    status, answer = serving.post(server, PATH, body)
    assert 400 <= status < 500, answer
    assert json.loads(answer)["error"]["message"]
    assert serving.is_healthy(server)


def test_after_all_that_the_server_answers_as_ever(server: VllmServer) -> None:
    first = ask_and_store(server, story("end"))
    again, tokens = ask_and_count(server, story("end"))
    assert again == first
    # From either tier: what the tests before it pinned leaves little room in DRAM.
    assert sum(tokens.values()) == whole_blocks(first.prompt_tokens - 1)


# ---- truncated prompts -------------------------------------------------------------------

MOVES = {"attnstore": {"truncation": True, "report": True}}
Turns = list[tuple[str, str]]


def chat(server: VllmServer, turns: Turns, **fields: Any) -> tuple[int, int, dict[str, Any]]:
    """Tokens of the prompt, tokens that were moved, and what the response says of them."""
    serving.empty_hbm(server)
    before = serving.count(server, "moved_tokens", tier="dram")
    body = {
        "model": MODEL_NAME,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "messages": [{"role": role, "content": text} for role, text in turns],
        **fields,
    }
    status, answer = serving.post(server, "/v1/chat/completions", body)
    assert status == 200, answer
    found = json.loads(answer)
    serving.nudge(server)
    moved = int(serving.count(server, "moved_tokens", tier="dram") - before)
    said = found["kv_transfer_params"] or {}
    return found["usage"]["prompt_tokens"], moved, said.get("attnstore", {})


def dialogue(seed: str, system: str | None = None) -> Turns:
    turns = [("system", system)] if system is not None else []
    for turn in range(3):
        turns += [
            ("user", story((seed, turn), 60)),
            ("assistant", story((seed, turn, "said"), 60)),
        ]
    return [*turns, ("user", story((seed, "last"), 30))]


def test_vllm_cuts_the_prompt_itself(server: VllmServer) -> None:
    turns = dialogue("cut")
    length, moved, said = chat(server, turns, kv_transfer_params=MOVES)
    assert (moved, said["moved_tokens"]) == (0, 0)
    keep = length - 301
    cut, moved, said = chat(
        server, turns, kv_transfer_params=MOVES, truncate_prompt_tokens=keep, truncation_side="left"
    )
    assert cut == keep
    assert moved == said["moved_tokens"] == whole_blocks(length - 1) - (length - keep)


def test_a_report_says_where_the_prompt_came_from(server: VllmServer) -> None:
    turns = dialogue("report")
    asks: dict[str, Any] = {"kv_transfer_params": {"attnstore": {"report": True}}}
    length, _, first = chat(server, turns, **asks)
    assert first == {
        "prompt_tokens": length,
        "hbm_tokens": 0,
        "dram_tokens": 0,
        "nvme_tokens": 0,
        "moved_tokens": 0,
        "own_pass_tokens": 0,
        "computed_tokens": length,
        "why_computed": "not_stored",
        "why_not_stored": None,
        "waited_ms": 0,
        "approximate": None,
    }
    _, _, again = chat(server, turns, **asks)
    found = whole_blocks(length - 1)
    assert again["dram_tokens"] + again["nvme_tokens"] == found
    assert again["computed_tokens"] == length - found
    assert again["why_computed"] is None


@pytest.mark.parametrize("system", [None, story("system", 50)])
def test_a_client_drops_whole_turns(server: VllmServer, system: str | None) -> None:
    turns = dialogue(f"drop {system is None}", system)
    length, moved, _ = chat(server, turns, kv_transfer_params=MOVES)
    assert moved == 0
    first = 0 if system is None else 1
    kept = [*turns[:first], *turns[first + 2 :], ("assistant", "yes"), ("user", story("new", 30))]
    cut, moved, said = chat(server, kept, kv_transfer_params=MOVES)
    assert moved == said["moved_tokens"]
    begin = 0 if system is None else 100
    assert moved > 0.55 * length - begin, (moved, length, cut)
    again, nothing, said = chat(server, kept)
    assert (again, nothing, said) == (cut, 0, {}), "nobody else"


def test_hints_of_truncation_that_make_no_sense(server: VllmServer) -> None:
    applied, ignored = hints(server)
    for value in ("yes", 1, None, [True], {"enabled": True}):
        assert hinted(server, "hello", truncation=value, report=value).prompt_tokens
    assert hints(server) == (applied, ignored + 10)
