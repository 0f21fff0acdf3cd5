# SPDX-License-Identifier: Apache-2.0
"""Greedy answers behind KV that an approximate codec has changed, through a real server.

The beginning of each document is asked for, and leaves its KV. All of them together do not fit
into DRAM, so that it is decoded when the document comes again, with a few tokens more. The server
then goes on greedily, in three ways that see the same tokens:

computed  all is computed
again     the beginning comes from DRAM: exact KV, but other rounding
near      the beginning comes from NVMe, through the codec

How often rounding alone flips a greedy choice is what `again` shows. Where the KV came from is
checked against the server's own report.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.data import Ids
from benchmarks.quality.evaluate import documents, interval
from benchmarks.quality.served import ANSWER, BESIDE, DEV, NEW, Answer, Client, equal
from benchmarks.server import NO_AUDIT, VllmServer

NEAR = {"attnstore": {"approximate": True, "report": True}}
EXACT = {"attnstore": {"approximate": False, "report": True}}
DRAM = "12MiB"
SHORT = 64
"""Tokens at the end of what is stored that need not be found."""


def measure_served_codec(
    codec: str,
    directory: Path,
    held_out: dict[str, Ids],
    window: int,
    many: int,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Of one codec, with `many` documents; see measure_served.

    Raises: ServerError; RuntimeError if KV did not come from where it should have.
    """
    stored = (window - ANSWER - NEW) // 128 * 128
    pieces = documents(held_out, stored + NEW, many)
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as name:
        work = Path(name)
        config = work / "attnstore.yaml"
        nvme = f"{{path: {work / 'store'}, capacity: 1GiB, codec: {codec}}}"
        # Whatever is on NVMe is waited for: answers are compared, and not times.
        said = (
            f"dram: {DRAM}\nnvme: {nvme}\ncompute_if_sooner: false\nload_deadline: 60s\n{NO_AUDIT}"
        )
        config.write_text(said)
        arguments = ["--max-model-len", str(window), "--max-num-seqs", "4", "--enforce-eager"]
        arguments += ["--kv-transfer-config", str(config)]
        with VllmServer(str(directory), arguments, work / "log", environment=DEV) as server:
            return ask_all(Client(server), pieces, stored, codec, tick)


def ask_all(
    client: Client, pieces: list[Ids], stored: int, codec: str, tick: Callable[[], object]
) -> dict[str, Any]:
    for number, piece in enumerate(pieces):
        client.ask(piece[:stored], f"{number} near", NEAR, 1)
    decoded = 0
    answers: dict[str, list[Answer]] = {"computed": [], "again": [], "near": []}
    for number, piece in enumerate(pieces):
        client.empty_hbm()
        near = client.ask(piece, f"{number} near", NEAR, ANSWER)
        client.ask(piece[:stored], f"{number} again", EXACT, 1)
        client.empty_hbm()
        again = client.ask(piece, f"{number} again", EXACT, ANSWER)
        computed = client.ask(piece, f"{number} computed", BESIDE, ANSWER)
        _check(near, "nvme_tokens", stored, f"{codec}/1")
        _check(again, "dram_tokens", stored, None)
        decoded += near.report["nvme_tokens"]
        for name, answer in (("computed", computed), ("again", again), ("near", near)):
            answers[name].append(answer)
        tick()
    return {"codec": codec, "documents": len(pieces), "decoded_tokens": decoded} | compared(answers)


def _check(answer: Answer, tier: str, stored: int, codec: str | None) -> None:
    report = answer.report
    if report.get(tier, 0) < stored - SHORT or report.get("approximate") != codec:
        raise RuntimeError(f"{stored} tokens should have come as {tier}, of {codec}: {report}")


def compared(answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """How far the answers agree with those that were computed."""
    found: dict[str, Any] = {"answer_tokens": ANSWER, "agreement": {}}
    for name in ("again", "near"):
        pairs = [
            (a.tokens, b.tokens) for a, b in zip(answers["computed"], answers[name], strict=True)
        ]
        begin = np.array([equal(a, b) / len(a) for a, b in pairs])
        same = np.array([np.mean(np.array(a) == np.array(b)) for a, b in pairs])
        found["agreement"][name] = {
            "same_tokens": interval(same),
            "equal_until_first_difference": interval(begin),
            "first_token_equal": float(np.mean([a[0] == b[0] for a, b in pairs])),
            "whole_answer_equal": float(np.mean(begin == 1)),
        }
    return found
