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

import pytest

from attnstore_vllm.testing.tiny_model import TINY, make_model
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
        self._url = f"http://127.0.0.1:{port}/query"

    def tokens(self, prompt: list[int]) -> tuple[int, int, int]:
        """Of the prompt's tokens those in HBM, in DRAM, and in any tier, as Dynamo counts them."""
        body = json.dumps({"token_ids": prompt, "model_name": MODEL_NAME}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._url, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            found = json.load(answer)["instances"].get("1", {})
        return tuple(found.get(name, 0) for name in ("gpu", "cpu", "disk"))


@contextmanager
def indexer(endpoint: str, log: Path) -> Iterator[Indexer]:
    port = free_port()
    command = [sys.executable, "-m", "dynamo.indexer", "--block-size", str(BLOCK)]
    command += ["--port", str(port), "--model-name", MODEL_NAME, "--workers", f"1={endpoint}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    found = Indexer(port)

    def answers() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        try:
            found.tokens([1] * BLOCK)
        except OSError:
            return False
        return True

    try:
        wait_until(answers, "the indexer answers")
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
        endpoint = f"ipc://{name}/events"
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint,
            "topic": f"kv@127.0.0.1@{MODEL_NAME}",
        }  # fmt: skip
        arguments = (
            FLAG,
            serving.in_json(serving.settings(tmp_path / "store", dram="4MiB")),
            "--kv-events-config",
            json.dumps(events),
            "--num-gpu-blocks-override",
            str(HBM_BLOCKS),
        )
        with indexer(endpoint, tmp_path / "indexer.log") as router:

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
        with indexer(endpoint, tmp_path / "indexer2.log") as router:
            log = tmp_path / "again.log"
            with serving.server(model, log, *arguments) as server:
                reaches("after a restart", server, 0, 0, WHOLE)
                serving.empty_hbm(server, drop_store=True)
                reaches("all dropped", server, 0, 0, 0)
                ask(server, "dynamo")
                reaches("computed anew", server, WHOLE, WHOLE, WHOLE)
