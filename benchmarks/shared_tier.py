# SPDX-License-Identifier: Apache-2.0
"""The shared tier, by two real servers and a real store on one machine.

    python -m benchmarks.shared_tier [--kind redis|mooncake|both] [--model small|medium]

    ttft      server A computes a prompt, and writes it; server B is asked for it (from the shared
              tier), and once more (from HBM). Over computing it, and over HBM.
    bytes     gets and puts of records through the tier's child process and copies, over the same
              client's own in a loop
    faults    what a request that nobody has stored takes more while the store hangs, and when it
              is dead: the first ones, and those after the breaker has opened

Prompts are whole chunks and one token. What each was served from is checked against /metrics.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from attnstore_vllm.bench.server_metrics import total
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.shared.backend import open_backend
from attnstore_vllm.shared.helper import Helper
from attnstore_vllm.shared.lanes import LaneOp, Lanes
from attnstore_vllm.shared.record import HEADER_BYTES
from attnstore_vllm.testing.network_stores import KINDS, NetworkStore, missing
from attnstore_vllm.testing.tiny_model import make_model
from benchmarks.hit_latency import ARGUMENTS, CASES, DEV, LOADED, Client
from benchmarks.server import VllmServer

ROOT = Path(__file__).resolve().parent.parent
CHUNK_TOKENS = 256
STORE_BYTES = 1 << 30
DEADLINE_MS = 500
VALUES, VALUE_BYTES = 8, 2 << 20
SETTLE_S = 60.0


def settings_of(store: NetworkStore) -> str:
    if store.kind == "redis":
        return f"{{redis: 'redis://127.0.0.1:{store.port}', deadline_ms: {DEADLINE_MS}}}"
    return f"{{mooncake: {{master: '127.0.0.1:{store.port}'}}, deadline_ms: {DEADLINE_MS}}}"


def server_of(name: str, store: NetworkStore, model: Path, work: Path) -> VllmServer:
    config = work / f"{name}.yaml"
    config.write_text(
        f"dram: 256MiB\nnvme: {{path: {work / name}, capacity: 1GiB}}\n"
        f"shared: {settings_of(store)}\ncompute_if_sooner: false\n"
    )
    arguments = [*ARGUMENTS, "--kv-transfer-config", str(config)]
    return VllmServer(str(model), arguments, work / f"{name}.log", environment=DEV)


def prompts_of(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(300, 2000) for _ in range(num_tokens)] for _ in range(count)]


def shared_bytes(server: VllmServer, direction: str) -> float:
    return total(server.metrics(), "vllm:attnstore_bytes_total", direction=direction)


def until_written(server: VllmServer, num_bytes: int) -> None:
    """Figures of an idle server come once a second."""
    deadline = time.monotonic() + SETTLE_S
    while shared_bytes(server, "dram_to_shared") < num_bytes:
        assert time.monotonic() < deadline, f"it does not write\n{server.log_tail()}"
        time.sleep(0.2)


def ttft(one: VllmServer, two: VllmServer, prompts: Sequence[list[int]]) -> dict[str, list[float]]:
    """Times by kind of hit, in ms."""
    writer, reader = Client(one), Client(two)
    for client in (writer, reader):
        client.ttft_ms([20, 21])  # the workers have looked at their weights
    cold = [writer.ttft_ms(prompt) for prompt in prompts]
    case_bytes = sum(len(prompt) // CHUNK_TOKENS for prompt in prompts)
    until_written(one, case_bytes)  # some bytes at least; then until no more come
    before = -1.0
    while (now := shared_bytes(one, "dram_to_shared")) != before:
        before = now
        time.sleep(2.0)
    shared, hbm = [], []
    for prompt in prompts:
        shared.append(reader.ttft_ms(prompt))
        hbm += [reader.ttft_ms(prompt), reader.ttft_ms(prompt)]
    time.sleep(1.5)
    found = total(two.metrics(), LOADED, tier="shared")
    expected = sum(len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS for prompt in prompts)
    assert found == expected, f"{found} tokens came from the shared tier, not {expected}"
    return {"cold": cold, "shared": shared, "HBM": hbm}


def faults(
    store: NetworkStore, server: VllmServer, num_tokens: int, count: int
) -> dict[str, list[float]]:
    """Times of prompts that nobody has, in their order."""
    client = Client(server)
    client.ttft_ms([20, 21])
    times = {"well": [client.ttft_ms(p) for p in prompts_of(count, num_tokens, 1)]}
    store.signal(signal.SIGSTOP)
    times["hangs"] = [client.ttft_ms(p) for p in prompts_of(count, num_tokens, 2)]
    store.signal(signal.SIGCONT)
    until_in_use(server)
    store.signal(signal.SIGKILL)
    times["dead"] = [client.ttft_ms(p) for p in prompts_of(count, num_tokens, 3)]
    return times


def until_in_use(server: VllmServer) -> None:
    """Each request that comes looks whether the tier has come back."""
    client = Client(server)
    deadline = time.monotonic() + SETTLE_S
    while not total(server.metrics(), "vllm:attnstore_shared_in_use", direction="reads"):
        assert time.monotonic() < deadline, f"it stays out of use\n{server.log_tail()}"
        client.ttft_ms([20, 21])
        time.sleep(1.0)


def rates(store: NetworkStore, rounds: int) -> dict[str, float]:
    """GB/s of this tier's gets (verified) and puts (sealed), and of the client alone."""
    lanes = Lanes(VALUE_BYTES, 2, VALUES)
    helper = Helper(store.settings, lanes)
    helper.start()
    names = [secrets.token_bytes(32) for _ in range(VALUES)]
    payloads = [np.frombuffer(secrets.token_bytes(VALUE_BYTES), np.uint8) for _ in names]
    slots = [np.zeros(VALUE_BYTES, np.uint8) for _ in names]
    places = [lanes.place(helper.buffer, 1, number) for number in range(VALUES)]

    def put() -> None:
        for payload, place in zip(payloads, places, strict=True):
            checksum(memoryview(payload.data))
            np.copyto(np.frombuffer(place[HEADER_BYTES:], np.uint8), payload)
        assert not any(helper.numbers(1, LaneOp.OVERWRITE, names, 10.0))

    def get() -> None:
        assert min(helper.numbers(1, LaneOp.GET, names, 10.0)) > 0
        for slot, place in zip(slots, places, strict=True):
            np.copyto(slot, np.frombuffer(place[HEADER_BYTES:], np.uint8))
            checksum(memoryview(slot.data))

    found = {"put": _rate(put, rounds), "get": _rate(get, rounds)}
    helper.close()
    own = memoryview(bytearray(VALUES * (HEADER_BYTES + VALUE_BYTES)))
    size = HEADER_BYTES + VALUE_BYTES
    parts = [own[i * size : (i + 1) * size] for i in range(VALUES)]
    client = open_backend(store.settings, None, {})
    texts = [f"as1/{name.hex()}" for name in names]
    found["client_put"] = _rate(lambda: client.put(texts, parts, overwrite=True), rounds)
    found["client_get"] = _rate(lambda: client.get(texts, parts), rounds)
    return found


def _rate(act: Any, rounds: int) -> float:
    act()
    times = []
    for _ in range(rounds):
        begun_at = time.perf_counter()
        act()
        times.append(time.perf_counter() - begun_at)
    return VALUES * VALUE_BYTES / statistics.median(times) / 1e9


def measure(kind: str, name: str, count: int) -> dict[str, Any]:
    case = CASES[name]
    num_tokens = case.num_tokens // CHUNK_TOKENS * CHUNK_TOKENS + 1
    result: dict[str, Any] = {"kind": kind, "model": name, "prompt_tokens": num_tokens}
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = make_model(work / name, case.shape)
        store = NetworkStore(kind, memory=STORE_BYTES)
        try:
            result["gb_s"] = rates(store, 10)
            with (
                server_of("one", store, model, work) as one,
                server_of("two", store, model, work) as two,
            ):
                result["ttft_ms"] = ttft(one, two, prompts_of(count, num_tokens, 0))
                result["fault_ms"] = faults(store, two, num_tokens, 8)
        finally:
            store.kill()
    return result


def show(result: dict[str, Any]) -> None:
    times = {kind: statistics.median(values) for kind, values in result["ttft_ms"].items()}
    print(f"\n{result['kind']}, {result['model']}: {result['prompt_tokens']} tokens, median TTFT")
    print("  " + ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in times.items()))
    print(
        f"  shared over HBM {times['shared'] / times['HBM']:.2f}, "
        f"over computing {times['shared'] / times['cold']:.3f}"
    )
    gb_s = result["gb_s"]
    for what in ("get", "put"):
        alone = gb_s[f"client_{what}"]
        print(
            f"  {what}: {gb_s[what]:.2f} GB/s, client alone {alone:.2f}: {gb_s[what] / alone:.2f}"
        )
    usual = statistics.median(result["fault_ms"]["well"])
    for what in ("hangs", "dead"):
        more = [f"{ms - usual:.0f}" for ms in result["fault_ms"][what]]
        print(f"  a store that {what}: ms more, request by request: {', '.join(more)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The shared tier, by two real servers.")
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--model", choices=list(CASES), default="small")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "shared_tier.json")
    args = parser.parse_args()
    results = []
    for kind in KINDS if args.kind == "both" else [args.kind]:
        if reason := missing(kind):
            raise SystemExit(f"{kind}: {reason}")
        results.append(measure(kind, args.model, args.prompts))
        show(results[-1])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
