# SPDX-License-Identifier: Apache-2.0
"""The command that users type: `vllm serve MODEL --kv-transfer-config attnstore.yaml`.

One store, and one server on it after the other: most of the time goes into starts, so a test
takes the server that runs if it was started as the test wants it, and leaves it running.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import attnstore_vllm
from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.prefix import whole_blocks
from attnstore_vllm.plugin import expand
from attnstore_vllm.prometheus import total
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm.serve_helpers import FLAG, MODEL_NAME, ask, ask_and_count, ask_and_store, story


class Servers:
    """See the module."""

    def __init__(self, model: Path, home: Path) -> None:
        self.model = model
        self.home = home
        self.store = home / "store"
        extra = serving.settings(self.store)
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(home / "example")},
        }
        ours = json.loads(serving.in_json(extra))
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [ours, example]},
        }
        self.forms = {
            "yaml": serving.in_yaml(home / "attnstore.yaml", extra),
            "json": serving.in_json(extra),
            "multi": json.dumps(both),
        }
        self._form = ""
        self._running: VllmServer | None = None
        self._starts = 0

    def get(self, form: str) -> VllmServer:
        """The running server if it was started in that form, else a new one."""
        if self._running is None or self._form != form:
            self.stop()
            self._starts += 1
            log = self.home / f"log-{self._starts}-{form}"
            started = serving.server(self.model, log, FLAG, self.forms[form])
            self._running = started.__enter__()
            self._form = form
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None


@pytest.fixture(scope="module")
def servers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    found = Servers(make_model(models / "serve", TINY), tmp_path_factory.mktemp("serve"))
    yield found
    found.stop()
    serving.assert_no_region()


# ---- while it runs ------------------------------------------------------------------------


def test_a_repeated_chat_comes_from_dram(servers: Servers) -> None:
    server = servers.get("yaml")
    computed = ask(server, story("dram"))
    assert computed.prompt_tokens > 2 * serving.CHUNK
    again, tokens = ask_and_count(server, story("dram"))
    assert again == computed
    assert tokens == {"dram": whole_blocks(computed.prompt_tokens - 1), "nvme": 0}


def test_figures_move_while_the_engine_is_idle(servers: Servers) -> None:
    """What is written after the last step is seen without another one."""
    server = servers.get("yaml")
    ask(server, story("idle", 700))

    def figures() -> tuple[float, float, float]:
        saved = serving.count(server, "chunks", event="saved")
        written = serving.count(server, "chunks", event="written")
        return written, saved, total(server.metrics(), "vllm:attnstore_dirty_bytes")

    serving.wait_until(lambda: figures()[0] >= figures()[1] > 0, "what was saved is written")
    serving.wait_until(lambda: figures()[2] == 0, "nothing is dirty")
    metrics = server.metrics()
    assert total(metrics, "vllm:attnstore_nvme_write_seconds_count") >= figures()[0]
    assert total(metrics, "vllm:attnstore_info", eviction="attnstore") == 1
    capacity = total(metrics, "vllm:attnstore_capacity_bytes", tier="dram")
    assert 0 < total(metrics, "vllm:attnstore_held_bytes", tier="dram") <= capacity <= 32 << 20


def test_all_series_of_the_runbook_are_there(servers: Servers) -> None:
    server = servers.get("yaml")
    serving.wait_until(
        lambda: set(serving.SERIES) <= {name for name, _ in server.metrics()},
        "all series are there",
    )
    runbook = Path(__file__).parents[2].joinpath("docs/runbook.md").read_text(encoding="utf-8")
    for series in serving.SERIES:
        assert f"`{series.removesuffix('_count')}" in runbook, f"{series} is not in the runbook"


def test_the_log_is_short_and_for_people(servers: Servers) -> None:
    """At most twelve lines of ours at the start, then one every so often."""
    server = servers.get("yaml")
    ours = {path.name for path in Path(attnstore_vllm.__file__).parent.rglob("*.py")}
    printed = server.log.read_text(errors="replace")
    head = printed.partition("Application startup complete")[0]
    named = re.findall(r"(?:INFO|WARNING) \S+ \S+ \[(?:\S*/)?(\w+\.py):\d+\] (.+)", head)
    said = [text for file, text in named if file in ours - {"__init__.py", "main.py"}]
    assert 3 <= len(said) <= 12, "\n".join(said)
    assert any(text.startswith("AttnStore ") and "a chunk has" in text for text in said)
    assert any("DRAM: " in text and "32MiB" in text for text in said)
    ask(server, story("log"))
    found = re.compile(r"KV Transfer metrics: AttnStore=[\d,]+ prompt tokens: HBM ")
    serving.wait_until(
        lambda: found.search(server.log.read_text(errors="replace")),
        "a line of what came of it",
        poll_s=1.0,
    )


def test_a_route_that_nobody_asked_for_is_not_there(servers: Servers) -> None:
    assert serving.post(servers.get("yaml"), "/attnstore/prefetch", {"tokens": [1]})[0] == 404


def test_a_running_server_has_no_name_in_shared_memory(servers: Servers) -> None:
    servers.get("yaml")
    serving.assert_no_region()


def test_a_second_server_on_the_directory_is_refused(servers: Servers) -> None:
    first = servers.get("yaml")
    core = serving.engine_core(first)
    printed = serving.refused(servers.model, servers.home / "second", FLAG, servers.forms["yaml"])
    assert_one_message(printed, "nvme.path", repr(str(servers.store)), "directory of its own")
    assert f"process {core.pid}" in printed
    assert serving.is_healthy(first)


HOSTILE: dict[str, dict[str, Any]] = {
    "lone surrogate as salt": {"cache_salt": "\ud800"},
    "surrogates within a salt": {"cache_salt": "a\udfff\ud800b"},
    "lone surrogate as text": {"messages": [{"role": "user", "content": "\ud800" * 40}]},
    "huge salt": {"cache_salt": "salt" * 250_000},
    "empty salt": {"cache_salt": ""},
    "salt of zeros": {"cache_salt": "\0" * 32},
    "salt of another type": {"cache_salt": {"a": 1}},
    "parameters of another connector": {"kv_transfer_params": {"do_remote_prefill": True}},
    "a number for us": {"kv_transfer_params": {"attnstore": 5}},
    "nesting for us": {"kv_transfer_params": {"attnstore": {"a": [{"b": None}, [[[]]]]}}},
    "parameters that are none": {"kv_transfer_params": 5},
    "no content": {"messages": [{"role": "user", "content": ""}]},
    "no messages": {"messages": []},
    "one token": {"max_tokens": 1},
    "no tokens": {"max_tokens": 0},
    "four samples": {"n": 4, "temperature": 1.0, "seed": 1},
    "log-probabilities of the prompt": {"prompt_logprobs": 1},
    "too long": {"messages": [{"role": "user", "content": story("long", 4000)}]},
    "truncated": {"truncate_prompt_tokens": 300},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_requests(servers: Servers, fields: dict[str, Any]) -> None:
    """A server answers or says that the request is wrong; the next request is as ever."""
    server = servers.get("yaml")
    before = ask(server, story("bystander"))
    messages = [{"role": "user", "content": story("hostile")}]
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 4} | fields
    for _ in range(2):  # the second time there may be something to find
        status, answer = serving.post(server, "/v1/chat/completions", body)
        assert status == 200 or 400 <= status < 500, answer
        serving.empty_hbm(server)
    assert serving.is_healthy(server)
    again, tokens = ask_and_count(server, story("bystander"))
    assert again == before
    assert tokens["dram"] + tokens["nvme"] == whole_blocks(before.prompt_tokens - 1)


@pytest.mark.parametrize("prompt", ["", " ", [], [5], [[5, 6], [7]], [-1], [10**9]], ids=repr)
def test_hardly_any_prompt(servers: Servers, prompt: object) -> None:
    server = servers.get("yaml")
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1}
    status, answer = serving.post(server, "/v1/completions", body)
    assert status == 200 or 400 <= status < 500, answer
    assert serving.is_healthy(server)


def test_clients_that_hang_up(servers: Servers) -> None:
    server = servers.get("yaml")
    before = ask(server, story("bystander"))
    for seed in range(4):
        messages = [{"role": "user", "content": story(("gone", seed))}]
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 900, "stream": True}
        request = urllib.request.Request(
            server.base_url + "/v1/chat/completions",
            data=json.dumps(body | {"ignore_eos": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=serving.DEADLINE_S) as answer:
            assert answer.read(10)
    again, tokens = ask_and_count(server, story("bystander"))  # empties HBM: no block is held
    assert again == before
    assert tokens["dram"] + tokens["nvme"] == whole_blocks(before.prompt_tokens - 1)


def test_a_salt_sees_its_own_cache_only(servers: Servers) -> None:
    server = servers.get("yaml")
    unsalted = ask(server, story("salted"))
    for salt in ("one", "two"):
        serving.empty_hbm(server)
        before = serving.loaded(server)
        assert ask(server, story("salted"), cache_salt=salt) == unsalted
        serving.nudge(server)
        assert serving.loaded(server) == before


# ---- ends and starts ----------------------------------------------------------------------


def test_sigterm_then_the_same_yaml(servers: Servers) -> None:
    server = servers.get("yaml")
    computed = ask_and_store(server, story("sigterm"))
    os.kill(server.pid, signal.SIGTERM)
    assert serving.exit_code(server) == 0
    session = server.pid
    servers.stop()
    assert_nothing_is_left(session)

    again, tokens = ask_and_count(servers.get("yaml"), story("sigterm"))
    assert again == computed
    assert tokens == {"dram": 0, "nvme": whole_blocks(computed.prompt_tokens - 1)}


def test_the_engine_core_is_killed_then_the_settings_come_as_json(servers: Servers) -> None:
    server = servers.get("yaml")
    computed = ask_and_store(server, story("core"))
    session = server.pid
    serving.engine_core(server).kill()
    serving.exit_code(server)  # vLLM notices, and ends with code 0
    serving.wait_until(lambda: not serving.members(session), "its workers have ended too")
    servers.stop()
    assert_nothing_is_left(session)

    again, tokens = ask_and_count(servers.get("json"), story("core"))
    assert again == computed
    assert tokens == {"dram": 0, "nvme": whole_blocks(computed.prompt_tokens - 1)}


@pytest.mark.long
def test_all_are_killed_then_another_connector_stands_beside_ours(servers: Servers) -> None:
    server = servers.get("json")
    computed = ask_and_store(server, story("group"))
    session = server.pid
    os.killpg(session, signal.SIGKILL)
    assert serving.exit_code(server) == -signal.SIGKILL
    servers.stop()
    assert_nothing_is_left(session)

    again, tokens = ask_and_count(servers.get("multi"), story("group"))
    assert again == computed
    assert tokens == {"dram": 0, "nvme": whole_blocks(computed.prompt_tokens - 1)}


def test_beside_another_connector_ours_hits(servers: Servers) -> None:
    server = servers.get("multi")
    computed = ask(server, story("beside"))
    again, tokens = ask_and_count(server, story("beside"))
    assert again == computed
    assert tokens == {"dram": whole_blocks(computed.prompt_tokens - 1), "nvme": 0}
    assert any((servers.home / "example").rglob("*.safetensors")), "the other one saves as well"
    serving.wait_until(  # what never changes comes within a second of the start
        lambda: set(serving.SERIES) <= {name for name, _ in server.metrics()},
        "all series are there",
    )
    saved = serving.count(server, "chunks", event="saved")
    assert saved >= computed.prompt_tokens // serving.CHUNK
    serving.assert_no_region()


def assert_nothing_is_left(session: int) -> None:
    serving.wait_until(lambda: not serving.members(session), "all processes have ended")
    serving.assert_no_region()


# ---- wrong settings -----------------------------------------------------------------------


def assert_one_message(printed: str, *parts: str) -> None:
    """One message, of ours, and it came before anything of the model was touched."""
    assert printed.count("AttnStore cannot start: ") == 1, printed
    message = printed.partition("AttnStore cannot start: ")[2]
    for part in parts:
        assert part in message, printed
    assert "Traceback" not in printed
    assert "Loading weights" not in printed
    assert "Initializing a V1 LLM engine" not in printed


def test_a_misspelt_key_on_the_command_line(servers: Servers, tmp_path: Path) -> None:
    extra = serving.settings(tmp_path / "store")
    (tmp_path / "a.yaml").write_text(json.dumps(extra | {"chunk_token": 64}))
    printed = serving.refused(servers.model, tmp_path / "log", FLAG, str(tmp_path / "a.yaml"))
    assert_one_message(printed, "chunk_token is not a setting", "did you mean chunk_tokens?")
    assert not (tmp_path / "store").exists()


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "size": ({"dram": "much"}, ("dram is 'much'", "as in 64GiB")),
    "no unit": ({"dram": 64}, ("dram is 64: 64 bytes", "did you mean 64GiB?")),
    "dram": ({"dram": "900TiB"}, ("dram is 900TiB", "has", "Ask for less", "remount,size=921601g")),
    "relative": (
        {"nvme": {"path": "kv", "capacity": "1MiB"}},
        ("nvme.path is 'kv'", "absolute", str(Path.cwd() / "kv")),
    ),
    "no parent": (
        {"nvme": {"path": "/nowhere/kv", "capacity": "1MiB"}},
        ("nvme.path is '/nowhere/kv'", "parent '/nowhere'", "create it"),
    ),
    "link": (
        {"nvme": {"path": "/proc/self/cwd", "capacity": "1MiB"}},
        ("nvme.path is '/proc/self/cwd'", "a link or a file", "must be a directory"),
    ),
    "nvme key": (
        {"nvme": {"pathe": "/tmp/kv", "capacity": "1MiB"}},
        ("nvme.pathe is not a setting", "did you mean path?"),
    ),
}


@pytest.mark.parametrize(("wrong", "parts"), WRONG.values(), ids=WRONG.keys())
def test_wrong_settings_in_both_forms(
    tmp_path: Path, wrong: dict[str, Any], parts: tuple[str, ...]
) -> None:
    extra = serving.settings(tmp_path / "store") | wrong
    (tmp_path / "a.yaml").write_text(json.dumps(extra))
    for value in (str(tmp_path / "a.yaml"), serving.in_json(extra)):
        with pytest.raises(ConfigError) as caught:
            expand(["vllm", "serve", "model", FLAG, value])
        for part in parts:
            assert part in str(caught.value)


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    too_much = str(stat.f_blocks * stat.f_frsize + (1 << 40))
    extra = serving.settings(tmp_path / "store", capacity=f"{too_much}B")
    with pytest.raises(ConfigError) as caught:
        expand([f"{FLAG}={serving.in_json(extra)}"])
    assert f"nvme.capacity is {format_size(int(too_much))}" in str(caught.value)
    assert "ask for less" in str(caught.value)
