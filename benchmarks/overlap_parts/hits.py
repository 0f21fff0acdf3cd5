# SPDX-License-Identifier: Apache-2.0
"""TTFT of hits in DRAM over hits in HBM: by layers, history, batch and new tokens.

A real `vllm serve`. A batch is one request to the completions API with several prompts, which come
to the scheduler together; each prompt is a history of its own and new tokens, and its TTFT is the
time from the request to its first token. What one batch gives is the mean. By turns: vLLM's own
cache is emptied and the batch is served from DRAM; then the same histories with other new tokens
from HBM. A ratio is of one such pair. Histories are whole blocks, so that both compute the same
tokens; neither saves anything. What came from where is checked against /metrics.

The histories are stored without computing them (filling.py).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.bench.summary import table
from attnstore_lab.testing.tiny_model import ModelShape, make_model
from attnstore_vllm.prometheus import total
from benchmarks.hit_latency import DEV, LOADED, ROOT, Client
from benchmarks.overlap_parts.common import BLOCK_TOKENS, SHAPES, Line, Settings, say, spread
from benchmarks.server import VllmServer

GOAL = 1.05
HISTORY_BLOCKS = (15, 31, 62, 125)
BATCHES = (1, 2, 4, 8)
NEW_TOKENS = (1, 128)
CELL_S = 6.0
ROUNDS_MIN, ROUNDS_MAX = 5, 40
BYTES = "vllm:attnstore_bytes_total"
WRITE_DEADLINE_S = 300.0
IN_HBM = "vllm:prefix_cache_hits_total"
NO_SAVE = {"attnstore": {"store": False}}


class BatchClient(Client):
    """Asks for several prompts at once."""

    def ttfts_ms(self, prompts: list[list[int]]) -> list[float]:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompts,
                "max_tokens": 1,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "kv_transfer_params": NO_SAVE,
            }
        )
        headers = {"Content-Type": "application/json"}
        started = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, headers)
        answer = self._connection.getresponse()
        lines = [(line, time.perf_counter() - started) for line in answer]
        assert answer.status == 200, lines
        found: dict[int, float] = {}
        for line, seconds in lines:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    found.setdefault(choice["index"], 1000 * seconds)
        assert len(found) == len(prompts), lines
        return list(found.values())

    def fill(self, step: str) -> None:
        body = json.dumps({"method": "attnstore_fill", "args": [step]}).encode()
        url = f"{self._server.base_url}/collective_rpc"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=120) as answer:
            assert answer.status == 200


class Model:
    """A server of one model, with histories in its store.

    Args:
        histories: as long as the longest that is asked for; a shorter one is its beginning.
    """

    def __init__(self, name: str, server: VllmServer, histories: list[list[int]]) -> None:
        self._name = name
        self._server = server
        self._histories = histories
        self._client = BatchClient(server)
        self._random = Random(5)
        self._client.fill("begin")
        for history in tqdm(histories, desc=f"{name}: fill", unit="history", leave=False):
            self._client.ttft_ms([*history, 1])
        self._client.fill("end")
        self._let_it_write()

    def _let_it_write(self) -> None:
        """Return when NVMe has what was stored: from here on nothing is written."""
        deadline, before, calm = time.monotonic() + WRITE_DEADLINE_S, -1.0, 0
        while calm < 3:
            assert time.monotonic() < deadline, "the store still writes"
            time.sleep(0.5)
            self._client.ttfts_ms([[1]])  # figures come with a step
            written = total(self._server.metrics(), BYTES, direction="dram_to_nvme")
            calm, before = (calm + 1 if written == before else 0), written

    def cell(self, new: int, tokens: int, batch: int, *, quick: bool) -> dict[str, Any]:
        """One cell of the table."""
        warm = sum(self._pair(new, tokens, batch)) / 1000
        rounds = min(max(int(CELL_S / warm), ROUNDS_MIN), ROUNDS_MAX) if not quick else 2
        before = self._server.metrics()
        pairs = [self._pair(new, tokens, batch) for _ in range(rounds)]
        after = self._server.metrics()
        expected = rounds * batch * tokens
        loaded = total(after, LOADED, tier="dram") - total(before, LOADED, tier="dram")
        in_hbm = total(after, IN_HBM) - total(before, IN_HBM)
        assert loaded == in_hbm == expected, f"{loaded} loaded, {in_hbm} in HBM, not {expected}"
        return {
            "model": self._name, "new_tokens": new, "history_tokens": tokens, "batch": batch,
            "rounds": rounds,
            "dram_ms": round(statistics.median(dram for dram, _ in pairs), 2),
            "hbm_ms": round(statistics.median(hbm for _, hbm in pairs), 2),
            "dram_over_hbm": spread([dram / hbm for dram, hbm in pairs]),
        }  # fmt: skip

    def _pair(self, new: int, tokens: int, batch: int) -> tuple[float, float]:
        """Milliseconds from DRAM and from HBM."""
        self._client.empty_hbm()
        dram, hbm = (
            statistics.fmean(
                self._client.ttfts_ms(
                    [h[:tokens] + self._new(new) for h in self._histories[:batch]]
                )
            )
            for _ in range(2)
        )
        return dram, hbm

    def _new(self, count: int) -> list[int]:
        """No history has any of these, so none goes on with them."""
        return [self._random.randrange(2000, 4000) for _ in range(count)]


def cells(settings: Settings) -> Iterator[tuple[int, int, int]]:
    """New tokens, tokens of history, batch."""
    for new in NEW_TOKENS:
        for blocks in HISTORY_BLOCKS[:1] if settings.quick else HISTORY_BLOCKS:
            for batch in BATCHES[:2] if settings.quick else BATCHES:
                yield new, blocks * BLOCK_TOKENS, batch


def serve(settings: Settings, name: str, shape: ModelShape) -> list[dict[str, Any]]:
    """All cells of one model."""
    wanted = list(cells(settings))
    longest, widest = max(tokens for _, tokens, _ in wanted), max(batch for *_, batch in wanted)
    random = Random(longest)
    histories = [[random.randrange(300, 2000) for _ in range(longest)] for _ in range(widest)]
    shape = replace(shape, max_position=longest + 4 * BLOCK_TOKENS)
    model = make_model(settings.work / "model", shape)
    # A slot of 256 tokens for each chunk, the last one of a history is half full; room to spare.
    kv_bytes = int(shape.kv_bytes_per_token * (longest + 512) * (widest + 1))
    config = settings.work / "hits.yaml"
    store = settings.work / f"hits, {name}"
    nvme = {"path": str(store), "capacity": kv_bytes * 5 // 4}
    config.write_text(
        json.dumps({"dram": kv_bytes, "nvme": nvme, "compute_if_sooner": False, "audit": "off"})
    )
    blocks = widest * (longest // BLOCK_TOKENS + 1 + 4)
    arguments = [
        "--max-model-len", str(shape.max_position), "--num-gpu-blocks-override", str(blocks + 1),
        "--kv-transfer-config", str(config),
        "--worker-extension-cls", "benchmarks.overlap_parts.filling.Filling",
    ]  # fmt: skip
    environment = {
        **DEV,
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
    }
    say(f"hits, {name}: vllm serve, and {widest} histories of {longest} tokens")
    log = settings.work / f"hits {name}.log"
    with VllmServer(str(model), arguments, log, environment=environment) as server:
        serving = Model(name, server, histories)
        bar = tqdm(wanted, desc=f"hits, {name}", unit="cell")
        found = [serving.cell(*cell, quick=settings.quick) for cell in bar]
    shutil.rmtree(store)
    return found


def measure(settings: Settings) -> dict[str, Any]:
    shapes = list(SHAPES.items())[: 1 if settings.quick else None]
    return {"cells": [cell for name, shape in shapes for cell in serve(settings, name, shape)]}


def lines(result: dict[str, Any]) -> list[Line]:
    found = []
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        groups.setdefault((cell["model"], cell["new_tokens"]), []).append(cell)
    for (model, new), group in groups.items():
        worst = max(group, key=lambda cell: float(cell["dram_over_hbm"]["median"]))
        within = sum(cell["dram_over_hbm"]["median"] <= GOAL for cell in group)
        what = f"TTFT, DRAM hit over HBM hit, {model}, {new} new tokens, worst cell"
        detail = f"{worst['history_tokens']} x {worst['batch']}; {within} of {len(group)} cells in"
        found.append(Line(what, worst["dram_over_hbm"]["median"], f"<= {GOAL}", detail))
    return found


def text(result: dict[str, Any]) -> str:
    """Ratios by history and batch, with the TTFT of the HBM hits and the rounds."""
    batches = sorted({cell["batch"] for cell in result["cells"]})
    rows = [
        ("TTFT of DRAM hits over HBM hits (HBM ms; rounds)", *(f"{b} at once" for b in batches))
    ]
    by_row: dict[str, dict[int, str]] = {}
    for cell in result["cells"]:
        label = f"{cell['model']}, {cell['new_tokens']} new, {cell['history_tokens']:,} of history"
        by_row.setdefault(label, {})[cell["batch"]] = (
            f"{cell['dram_over_hbm']['median']:.3f} ({cell['hbm_ms']:.0f}; {cell['rounds']})"
        )
    rows += [(label, *(row.get(b, "-") for b in batches)) for label, row in by_row.items()]
    return table(rows)
