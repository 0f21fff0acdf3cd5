# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a hit in HBM, in DRAM and on NVMe, and of no hit at all.

    python -m benchmarks.hit_latency [--model small|medium|both] [--rounds N] [--codec NAME]

A real `vllm serve` and its completions API, one client. Prompts are whole blocks and one token,
so that every kind of hit leaves the same one token to compute. Each round asks for each of
four prompts, one after the other:

    NVMe   vLLM's own cache is emptied, and since the other prompts came DRAM has lost this one;
           the file is read with O_DIRECT, so the page cache has no part in it
    HBM    the same again
    DRAM   vLLM's own cache is emptied
    HBM    the same again

so that all kinds see the same noise. What each request was served from is checked against
/metrics. The same is then asked of a server without the store. Both bind the same processors.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import shutil
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.testing.tiny_model import MEDIUM, SMALL, ModelShape, make_model
from attnstore_vllm.io.codec import CODEC_NAMES, NONE
from attnstore_vllm.prometheus import total
from benchmarks.server import NO_AUDIT, VllmServer

ROOT = Path(__file__).resolve().parent.parent
LOADED = "vllm:attnstore_loaded_tokens_total"
BF16_BYTES = 2


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    num_tokens: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * BF16_BYTES


CASES = {"small": Case(SMALL, 1921), "medium": Case(MEDIUM, 3969)}


IDLE_MAX_S = 2.0
"""The server closes a connection that was idle for 5 s."""


class Client:
    """One keep-alive connection. `ttft_ms` is the time to the first streamed token."""

    def __init__(self, server: VllmServer) -> None:
        self._model = server.model
        self._server = server
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        self._used_at = 0.0

    def ttft_ms(self, prompt: list[int], max_tokens: int = 1, **fields: Any) -> float:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                **fields,
            }
        )
        headers = {"Content-Type": "application/json"}
        if time.monotonic() - self._used_at > IDLE_MAX_S:
            self._connection.close()
            self._connection.connect()
        started = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, headers)
        answer = self._connection.getresponse()
        line = answer.readline()
        ms = (time.perf_counter() - started) * 1000
        assert answer.status == 200 and line.startswith(b"data: {"), line
        answer.read()
        self._used_at = time.monotonic()
        return ms

    def gaps(self, prompt: list[int], max_tokens: int, ended: threading.Event) -> Iterator[float]:
        """Seconds between the tokens of an answer, till its end or `ended`."""
        with self._asked(prompt, max_tokens=max_tokens, stream=True) as answer:
            before = None
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if before is not None:
                    yield now - before
                before = now
                if ended.is_set():
                    return

    def ask(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """The whole answer of one token."""
        with self._asked(prompt, max_tokens=1, stream=False, **fields) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def _asked(self, prompt: list[int], **fields: Any) -> Any:
        body = {"model": self._model, "prompt": prompt, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._server.base_url}/v1/completions",
            json.dumps(body | fields).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=300)

    def empty_hbm(self) -> None:
        """Empty vLLM's own prefix cache; it refuses while a finished request is being saved."""
        deadline = time.monotonic() + 10
        request = urllib.request.Request(
            f"{self._server.base_url}/reset_prefix_cache", method="POST"
        )
        while time.monotonic() < deadline:
            with urllib.request.urlopen(request, timeout=10) as answer:
                if json.loads(answer.read() or b"{}").get("success", True):
                    # The next request waits until the workers have looked at their weights.
                    self.ttft_ms([20, 21])
                    return
            time.sleep(0.01)
        raise TimeoutError("vLLM's prefix cache could not be emptied within 10 s")


def ask_in_turn(
    client: Client, prompts: list[list[int]], kinds: tuple[str, ...], rounds: int, title: str
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in tqdm(range(rounds), desc=title, unit="round"):
        for prompt in prompts:
            for kind in kinds:
                if kind.strip() != "HBM":
                    client.empty_hbm()
                times[kind].append(client.ttft_ms(prompt))
    return times


def with_store(
    case: Case, model: Path, work: Path, rounds: int, codec: str
) -> dict[str, list[float]]:
    prompts = make_prompts(case)
    # Room for two prompts and a half: the third of four pushes the first one out (lru: what is
    # most likely to return would stay).
    dram = int(2.5 * case.num_tokens * case.token_bytes) + (2 << 20)
    config = work / "attnstore.yaml"
    store = work / "store"
    config.write_text(
        f"dram: {dram}\nnvme: {{path: {store}, capacity: 2GiB, codec: {codec}}}\n"
        f"load_deadline: 10s\neviction: lru\n{NO_AUDIT}"
    )
    arguments = [*ARGUMENTS, "--kv-transfer-config", str(config)]
    with VllmServer(str(model), arguments, work / "store.log", environment=DEV) as server:
        client = Client(server)
        cold = [client.ttft_ms(prompt) for prompt in tqdm(prompts, desc="cold", unit="prompt")]
        before = server.metrics()
        times = ask_in_turn(client, prompts, ("NVMe", "HBM", "DRAM", "HBM "), rounds, "store")
        after = server.metrics()
        loaded = {
            tier: total(after, LOADED, tier=tier) - total(before, LOADED, tier=tier)
            for tier in ("dram", "nvme")
        }
    hits = rounds * len(prompts) * (case.num_tokens - 1)
    assert loaded == {"dram": hits, "nvme": hits}, f"{loaded}, expected {hits} of each"
    times["HBM"] += times.pop("HBM ")
    return {"cold": cold, **times}


def without_store(case: Case, model: Path, work: Path, rounds: int) -> dict[str, list[float]]:
    prompts = make_prompts(case)
    with VllmServer(str(model), ARGUMENTS, work / "plain.log", environment=DEV) as server:
        client = Client(server)
        cold = [client.ttft_ms(prompt) for prompt in tqdm(prompts, desc="cold", unit="prompt")]
        times: list[float] = []
        for _ in tqdm(range(rounds), desc="plain", unit="round"):
            for prompt in prompts:
                client.ttft_ms(prompt)
                times += [client.ttft_ms(prompt), client.ttft_ms(prompt)]
    return {"cold": cold, "HBM": times}


ARGUMENTS = ["--max-model-len", "4096", "--num-gpu-blocks-override", "200"]
DEV = {"VLLM_SERVER_DEV_MODE": "1"}


def make_prompts(case: Case) -> list[list[int]]:
    random = Random(case.num_tokens)
    return [[random.randrange(300, 2000) for _ in range(case.num_tokens)] for _ in range(4)]


def measure(name: str, rounds: int, codec: str) -> dict[str, Any]:
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = make_model(work / name, case.shape)
        store = with_store(case, model, work, rounds, codec)
        shutil.rmtree(work / "store")
        plain = without_store(case, model, work, rounds)
    median: Callable[[list[float]], float] = statistics.median
    hbm = median(store["HBM"])
    return {
        "model": name,
        "codec": codec,
        "prompt_tokens": case.num_tokens,
        "kv_mib": round((case.num_tokens - 1) * case.token_bytes / 2**20, 1),
        "rounds": rounds,
        "ttft_ms": {kind: round(median(values), 2) for kind, values in store.items()},
        "ttft_ms_without_store": {kind: round(median(v), 2) for kind, v in plain.items()},
        "dram_over_hbm": round(median(store["DRAM"]) / hbm, 3),
        "nvme_over_hbm": round(median(store["NVMe"]) / hbm, 3),
        "hbm_over_hbm_without_store": round(hbm / median(plain["HBM"]), 3),
        "all_ms": {kind: [round(v, 2) for v in sorted(values)] for kind, values in store.items()},
    }


def show(result: dict[str, Any]) -> None:
    times, plain = result["ttft_ms"], result["ttft_ms_without_store"]
    print(
        f"\n{result['model']}: {result['prompt_tokens']} tokens, {result['kv_mib']} MiB of KV, "
        f"median TTFT in ms of {len(result['all_ms']['DRAM'])} hits of a kind"
    )
    print(f"{'':>16} {'cold':>8} {'HBM':>8} {'DRAM':>8} {'NVMe':>8}")
    print(f"{'without store':>16} {plain['cold']:>8} {plain['HBM']:>8} {'-':>8} {'-':>8}")
    cells = " ".join(f"{times[kind]:>8}" for kind in ("cold", "HBM", "DRAM", "NVMe"))
    print(f"{'with store':>16} {cells}")
    over = f"{'1':>8} {result['dram_over_hbm']:>8} {result['nvme_over_hbm']:>8}"
    print(f"{'over HBM':>16} {times['cold'] / times['HBM']:>8.1f} {over}")


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT of hits by tier, on a real server.")
    parser.add_argument("--model", choices=[*CASES, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--codec", choices=CODEC_NAMES, default=NONE, help="of NVMe")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "hit_latency.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    args = parser.parse_args()
    names = list(CASES) if args.model == "both" else [args.model]
    results = [measure(name, args.rounds, args.codec) for name in names]
    report = {"machine": f"{platform.processor() or platform.machine()}", "results": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    for result in results:
        show(result)


if __name__ == "__main__":
    main()
