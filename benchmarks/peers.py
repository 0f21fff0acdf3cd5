# SPDX-License-Identifier: Apache-2.0
"""Data-parallel engines that read each other: what they compute, and how soon a hit comes.

    python -m benchmarks.peers [--rounds N] [--chats N] [--turns N] [--small]

Chats: a few clients hold conversations of several turns with one server. Tokens computed by one
engine, by two that do not read each other, and by two that do; vLLM says which engine gets a turn.

TTFT: a prompt is computed at one engine, asked for at the other (in its sibling's DRAM), and after
HBM was emptied once more (in its own DRAM). Before each of the two, both engines have made a step:
who has slept answers later, whatever is asked. Where KV came from is checked against /metrics.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.tiny_model import SMALL, TINY, ModelShape, make_model
from attnstore_vllm.prometheus import total
from benchmarks.server import NO_AUDIT, VllmServer

ROOT = Path(__file__).resolve().parent.parent
FIRST, MORE, ANSWER = 640, 384, 128
"""Tokens of a chat's first message, of each later one, and of an answer."""
CLIENTS = 3
TTFT_TOKENS = 1921
PROMPT_TOKENS = "vllm:attnstore_prompt_tokens_total"
LOADED = "vllm:attnstore_loaded_tokens_total"
SETTLED_S = 0.3
"""Until what a request leaves is saved, and counters have come."""


@contextmanager
def serving(model: Path, work: Path, engines: int, *, peers: str) -> Iterator[VllmServer]:
    with tempfile.TemporaryDirectory(dir=work) as store:
        config = Path(store) / "attnstore.yaml"
        config.write_text(
            f"dram: 1GiB\nnvme: {{path: {store}/store, capacity: 2GiB}}\n"
            f"peers: {peers}\ncompute_if_sooner: false\n{NO_AUDIT}"
        )
        arguments = ["--max-model-len", "4096", "--num-gpu-blocks-override", "200"]
        arguments += ["--kv-transfer-config", str(config), "--data-parallel-size", str(engines)]
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(engines)),
        }
        log = work / f"{engines}-{peers}.log"
        with VllmServer(str(model), arguments, log, environment=environment) as server:
            yield server


def complete(
    server: VllmServer, prompt: list[int], max_tokens: int, rank: int | None = None
) -> tuple[list[int], float]:
    """The answer's tokens, and milliseconds until all of it had come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    milliseconds = (time.perf_counter() - began) * 1000
    connection.close()
    return list(answer["choices"][0]["token_ids"]), milliseconds


def nudge(server: VllmServer, engines: int) -> None:
    """One more step of each engine: counters come with it."""
    time.sleep(SETTLED_S)
    for _ in range(2):
        for rank in range(engines):
            complete(server, [20, 21], 1, rank if engines > 1 else None)


def hold_chats(server: VllmServer, engines: int, chats: int, turns: int) -> dict[str, float]:
    """Prompt tokens by where their KV came from."""

    def hold(client: int) -> None:
        random = Random(client)
        for _ in range(client, chats, CLIENTS):
            history = [random.randrange(300, 1000) for _ in range(FIRST)]
            for _ in range(turns):
                answer, _ = complete(server, history, ANSWER)
                more = [random.randrange(300, 1000) for _ in range(MORE)]
                history = [*history, *answer, *more]

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(hold, range(CLIENTS)))
    nudge(server, engines)
    metrics = server.metrics()
    sources = ("hbm", "dram", "nvme", "peers", "computed")
    return {source: total(metrics, PROMPT_TOKENS, source=source) for source in sources}


def empty_hbm(server: VllmServer) -> None:
    deadline = time.monotonic() + 10
    url = f"{server.base_url}/reset_prefix_cache"
    while time.monotonic() < deadline:
        request = urllib.request.Request(url, method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            if json.loads(answer.read() or b"{}").get("success", True):
                nudge(server, 2)  # the next request of each waits for a look at the weights
                return
        time.sleep(0.01)
    raise TimeoutError("vLLM's prefix cache could not be emptied within 10 s")


def measure_ttft(server: VllmServer, rounds: int) -> dict[str, list[float]]:
    """Milliseconds, by kind of hit."""
    random = Random(1)
    times: dict[str, list[float]] = {"cold": [], "sibling's DRAM": [], "own DRAM": [], "HBM": []}
    nudge(server, 2)
    for _ in tqdm(range(rounds), desc="TTFT", unit="round"):
        prompt = [random.randrange(300, 1000) for _ in range(TTFT_TOKENS)]
        times["cold"].append(complete(server, prompt, 1, 0)[1])
        nudge(server, 2)  # as empty_hbm() does
        times["sibling's DRAM"].append(complete(server, prompt, 1, 1)[1])
        empty_hbm(server)
        times["own DRAM"].append(complete(server, prompt, 1, 1)[1])
        times["HBM"].append(complete(server, prompt, 1, 1)[1])
    nudge(server, 2)
    hits = rounds * (TTFT_TOKENS - 1)
    for tier in ("peers", "dram"):
        loaded = total(server.metrics(), LOADED, tier=tier)
        assert loaded == hits, f"{loaded} tokens from {tier}, and not {hits}"
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Engines of one host that read each other.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--chats", type=int, default=9)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="a smaller model, to try it out")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "peers.json")
    args = parser.parse_args()
    shape: ModelShape = TINY if args.small else SMALL
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = make_model(work / "model", shape)
        chats: dict[str, dict[str, float]] = {}
        for name, engines, peers in (("1", 1, "off"), ("2, off", 2, "off"), ("2", 2, "auto")):
            with serving(model, work, engines, peers=peers) as server:
                chats[name] = hold_chats(server, engines, args.chats, args.turns)
        with serving(model, work, 2, peers="auto") as server:
            times = measure_ttft(server, args.rounds)
    report = summary(chats, times)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def summary(chats: dict[str, dict[str, float]], times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {kind: round(statistics.median(values), 2) for kind, values in times.items()}
    by_turns = zip(times["sibling's DRAM"], times["own DRAM"], strict=True)
    alone = chats["1"]["computed"]
    return {
        "machine": platform.processor() or platform.machine(),
        "prompt_tokens_by_source": chats,
        "computed_over_one_engine": {
            name: round(found["computed"] / alone, 3) for name, found in chats.items()
        },
        "ttft_ms": medians,
        "sibling_over_own_dram": round(statistics.median(s / own for s, own in by_turns), 3),
        "all_ms": {kind: [round(v, 2) for v in sorted(values)] for kind, values in times.items()},
    }


if __name__ == "__main__":
    main()
