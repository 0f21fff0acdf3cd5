# SPDX-License-Identifier: Apache-2.0
"""Clients of a real `vllm serve` that ask without pause and keep what was answered.

Prompts are token ids and answers come with candidates, so that soak.judge() can compare every
token with an engine that has no store.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import replace
from typing import Any

from benchmarks.rounding import CANDIDATES
from benchmarks.server import VllmServer
from tests.vllm.engine import Answer
from tests.vllm.serve_helpers import MODEL_NAME, post
from tests.vllm.soak import Author, Job

CLIENTS = 4
JOIN_DEADLINE_S = 180.0


def complete(server: VllmServer, job: Job) -> Job:
    """Ask; returns the job with its answer. Raises: OSError, HTTPException if the server is gone,
    AssertionError if it refuses."""
    body = {
        "model": MODEL_NAME, "prompt": job.tokens, "logprobs": CANDIDATES,
        "return_tokens_as_token_ids": True, "ignore_eos": True, "temperature": 0.0,
        "priority": 0, **job.sampling,
    }  # fmt: skip
    if job.salt is not None:
        body["cache_salt"] = job.salt
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, f"{status}: {answer.decode(errors='replace')}"
    (choice,) = json.loads(answer)["choices"]
    return replace(job, found=[_answer(choice["logprobs"])])


def _answer(logprobs: dict[str, Any]) -> Answer:
    tokens = tuple(_token(text) for text in logprobs["tokens"])
    positions = []
    for token, own, top in zip(
        tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        named = {_token(text): value for text, value in top.items()} | {token: own}
        positions.append(tuple(sorted(named.items(), key=lambda c: (-c[1], c[0]))))
    return Answer(tokens, tuple(positions), 0)


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))


class Load:
    """CLIENTS threads that ask what `author` writes, until end() or the server's death."""

    def __init__(self, server: VllmServer, author: Author) -> None:
        self.jobs: list[Job] = []
        self.failures: list[str] = []
        self.slowest_s = 0.0
        self._server = server
        self._author = author
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._over.is_set():
            with self._lock:
                job = self._author.write()
            for name in ("n", "prompt_logprobs"):
                job.sampling.pop(name, None)
            started = time.monotonic()
            try:
                job = complete(self._server, job)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                if not self._over.is_set():
                    self.failures.append(repr(error))
                return
            with self._lock:
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                self.jobs.append(job)
                self._author.heard(job)

    def stop_asking(self) -> None:
        """No new requests, and what fails from now on is no failure: the server is to die."""
        self._over.set()

    def end(self) -> None:
        """Wait until all that was asked is answered, or refused by a dead server."""
        self._over.set()
        for thread in self._threads:
            thread.join(JOIN_DEADLINE_S)
            assert not thread.is_alive(), "a request hangs"
