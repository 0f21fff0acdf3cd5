# SPDX-License-Identifier: Apache-2.0
"""KV events as NVIDIA Dynamo's own indexer understands them, through all states of a prompt."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm.engine import BLOCK
from tests.vllm.prompts import random_tokens
from tests.vllm.serve_helpers import FLAG, MODEL_NAME, wait_until
from tests.vllm.test_beside_nixl import complete, free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("dynamo") is None
        or importlib.util.find_spec("dynamo.indexer") is None,
        reason="ai-dynamo-runtime is not installed",
    ),
]

LENGTH = 1100
WHOLE = LENGTH // BLOCK * BLOCK
HBM_BLOCKS = 24
STATE_DEADLINE_S = 60.0


class Indexer:
    """Dynamo's, of one worker."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def _post(self, path: str, body: dict[str, object]) -> Any:
        request = urllib.request.Request(
            self._url + path,
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def register(self, endpoint: str, replay: str | None) -> None:
        """Listen to the worker.

        Args:
            replay: where it publishes again what was missed.
        """
        worker = {"instance_id": 1, "model_name": MODEL_NAME, "block_size": BLOCK}
        self._post("/register", {**worker, "endpoint": endpoint, "replay_endpoint": replay})

    def tokens(self, prompt: list[int]) -> tuple[int, int, int]:
        """Of the prompt's tokens those in HBM, in DRAM, and in any tier, as Dynamo counts them."""
        answer = self._post("/query", {"token_ids": prompt, "model_name": MODEL_NAME})
        found = answer["instances"].get("1", {})
        return tuple(found.get(name, 0) for name in ("gpu", "cpu", "disk"))


@contextmanager
def indexer(log: Path, endpoint: str, replay: str | None = None) -> Iterator[Indexer]:
    port = free_port()
    command = [sys.executable, "-m", "dynamo.indexer", "--block-size", str(BLOCK)]
    command += ["--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    found = Indexer(port)

    def registers() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        try:
            found.register(endpoint, replay)
        except OSError:
            return False
        return True

    try:
        wait_until(registers, "the indexer registers a worker")
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(server: VllmServer, seed: str) -> list[int]:
    prompt = random_tokens(seed, LENGTH)
    complete(server, prompt, 2, None)
    return prompt


def test_states(models: Path, tmp_path: Path) -> None:
    model = make_model(models / "serve", TINY)
    with tempfile.TemporaryDirectory(prefix="attnstore-") as name:
        endpoint, replay = f"ipc://{name}/events", f"ipc://{name}/replay"
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint,
            "replay_endpoint": replay, "topic": f"kv@127.0.0.1@{MODEL_NAME}",
        }  # fmt: skip
        arguments = (
            FLAG,
            serving.in_json(serving.settings(tmp_path / "store", dram="4MiB")),
            "--kv-events-config",
            json.dumps(events),
            "--num-gpu-blocks-override",
            str(HBM_BLOCKS),
        )
        # It may connect when the first events are over: vLLM publishes them again for it.
        with indexer(tmp_path / "indexer.log", endpoint, replay) as router:

            def reaches(what: str, server: VllmServer, gpu: int, cpu: int, disk: int) -> None:
                seen = []

                def is_so() -> bool:
                    serving.nudge(server)  # an idle engine publishes nothing
                    seen.append(router.tokens(prompt))
                    return seen[-1] == (gpu, cpu, disk)

                try:
                    wait_until(is_so, what, STATE_DEADLINE_S)
                except AssertionError as error:
                    raise AssertionError(f"{what}: {seen[-1]}") from error

            with serving.server(model, tmp_path / "log", *arguments) as server:
                prompt = ask(server, "dynamo")
                reaches("in all tiers", server, WHOLE, WHOLE, WHOLE)
                for number in range(3):
                    ask(server, f"other {number}")
                reaches("evicted from HBM", server, 0, WHOLE, WHOLE)
                for number in range(3, 9):
                    ask(server, f"other {number}")
                reaches("evicted from DRAM", server, 0, 0, WHOLE)
                serving.empty_hbm(server)
                reaches("told again", server, 0, 0, WHOLE)
                assert ask(server, "dynamo") == prompt
                reaches("asked again", server, WHOLE, WHOLE, WHOLE)
        # This one asks for nothing again. It connects 5 s after the server's start, or sooner.
        with indexer(tmp_path / "indexer2.log", endpoint) as router:
            log = tmp_path / "again.log"
            with serving.server(model, log, *arguments) as server:
                reaches("after a restart", server, 0, 0, WHOLE)
                serving.empty_hbm(server, drop_store=True)
                reaches("all dropped", server, 0, 0, 0)
                ask(server, "dynamo")
                reaches("computed anew", server, WHOLE, WHOLE, WHOLE)
