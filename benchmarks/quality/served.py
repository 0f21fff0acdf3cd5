# SPDX-License-Identifier: Apache-2.0
"""The same through a real server: greedy answers after a cut, token by token.

Each document fills the context window. Its beginning is cut, a few tokens follow, and the server
goes on greedily, in three ways that see the same tokens:

CA     the kept tokens' KV was stored with the whole window, and is moved
TT     all is computed
again  TT once more, with the kept part from the store, in its place: exact KV, but other rounding

Rounding alone flips a greedy choice now and then, and all that follows is then other text; how
often is what `again` shows. How many tokens were moved is checked against the server's own report.
"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.data import Ids
from benchmarks.quality.evaluate import Settings, documents, interval
from benchmarks.server import NO_AUDIT, VllmServer

BESIDE = {"attnstore": {"store": False}}
MOVED = {"attnstore": {"truncation": True, "report": True}}
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
NEW = 32
"""Tokens that follow what is kept."""
ANSWER = 64
"""Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    report: dict[str, Any]
    """The server's, of where the prompt's KV came from; empty where nobody asked for it."""

    @property
    def moved(self) -> int:
        found: int = self.report.get("moved_tokens", 0)
        return found


class Client:
    """Completions of token ids, and an HBM that can be emptied."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server

    def ask(self, prompt: Ids, salt: str, params: dict[str, Any], max_tokens: int) -> Answer:
        """A greedy answer; `salt` keeps askers from each other's KV."""
        found = self._post("/v1/completions", {
            "model": self._server.model, "prompt": prompt.tolist(), "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True, "cache_salt": salt,
            "kv_transfer_params": params,
        })  # fmt: skip
        said = (found.get("kv_transfer_params") or {}).get("attnstore", {})
        return Answer(found["choices"][0]["token_ids"], said)

    def empty_hbm(self) -> None:
        self._post("/reset_prefix_cache", {})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._server.base_url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or b"{}")


def measure_served(
    directory: Path,
    held_out: dict[str, Ids],
    window: int,
    settings: Settings,
    many: int,
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """One entry for each ratio of settings.

    Args:
        directory: the model, as `export` left it.
        many: documents.
    Raises: ServerError; RuntimeError if the server did not move what it should have.
    """
    pieces = documents(held_out, window + NEW, many)
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as name:
        work = Path(name)
        config = work / "attnstore.yaml"
        config.write_text(
            f"dram: 1GiB\nnvme: {{path: {work / 'store'}, capacity: 1GiB}}\n{NO_AUDIT}"
        )
        arguments = [
            "--max-model-len",
            str(window),
            "--kv-transfer-config",
            str(config),
            "--max-num-seqs",
            "4",
        ]
        with VllmServer(str(directory), arguments, work / "log", environment=DEV) as server:
            client = Client(server)
            found = []
            for ratio in settings.ratios:
                drop = settings.drop(ratio, window)
                found.append(_at_ratio(client, pieces, window, drop, tick) | {"ratio": ratio})
            return found


def _at_ratio(
    client: Client, pieces: list[Ids], window: int, drop: int, tick: Callable[[], object]
) -> dict[str, Any]:
    answer = min(ANSWER, drop - NEW)
    shares: dict[str, list[float]] = {"CA": [], "again": []}
    first: dict[str, list[float]] = {"CA": [], "again": []}
    moved = 0
    for number, piece in enumerate(pieces):
        salt = f"{drop} {number}"
        prompt = np.concatenate((piece[drop:window], piece[window : window + NEW]))
        client.ask(piece[: window - 1], f"{salt} CA", MOVED, 1)
        client.ask(piece[drop:window], f"{salt} again", {}, 1)
        client.empty_hbm()
        reused = client.ask(prompt, f"{salt} CA", MOVED, answer)
        if reused.moved < window - drop - 64:
            raise RuntimeError(f"{reused.moved} of {window - drop} kept tokens were moved")
        moved += reused.moved
        computed = client.ask(prompt, f"{salt} TT", BESIDE, answer)
        again = client.ask(prompt, f"{salt} again", {}, answer)
        for name, other in (("CA", reused), ("again", again)):
            shares[name].append(equal(computed.tokens, other.tokens) / answer)
            first[name].append(float(computed.tokens[0] == other.tokens[0]))
        tick()
    return {
        "documents": len(pieces),
        "answer_tokens": answer,
        "moved_tokens": moved,
        "equal_until_first_difference": {n: interval(np.array(v)) for n, v in shares.items()},
        "first_token_equal": {n: float(np.mean(v)) for n, v in first.items()},
        "whole_answer_equal": {n: float(np.mean(np.array(v) == 1)) for n, v in shares.items()},
    }


def equal(a: list[int], b: list[int]) -> int:
    """How many tokens two answers begin with alike."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in same)
