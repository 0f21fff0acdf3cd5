# SPDX-License-Identifier: Apache-2.0
"""The shared tier, by two real servers and a real store on one machine.

    python -m benchmarks.shared_tier [--kind redis|mooncake|both] [--model small|medium]

    ttft      server A computes a prompt, and writes it; server B is asked for it (from the shared
              tier), and once more (from HBM). Over computing it, and over HBM.
    bytes     gets and puts of 32 records through the tier as the store uses it, sealed and
              verified, over those of its client alone in a loop
    faults    what a request that nobody has stored takes more while the store hangs, and when it
              is dead: the first ones, and those after the breaker has opened

Prompts are whole chunks and one token. What each was served from is checked against /metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from attnstore_lab.testing.network_stores import KINDS, NetworkStore, missing
from attnstore_lab.testing.small_store import open_store
from attnstore_lab.testing.tiny_model import make_model
from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.index.keys import root_key
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.prometheus import total
from attnstore_vllm.tiers.nvme.format import SegmentHeader
from attnstore_vllm.tiers.nvme.slab import open_slab
from attnstore_vllm.tiers.shared.backend import open_backend
from attnstore_vllm.tiers.shared.record import HEADER_BYTES
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.shared_io import SharedIo
from attnstore_vllm.tiers.shared.start import MakeShared
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.types import Key
from benchmarks.hit_latency import ARGUMENTS, CASES, DEV, LOADED, Client
from benchmarks.server import NO_AUDIT, VllmServer

ROOT = Path(__file__).resolve().parent.parent
CHUNK_TOKENS = 256
STORE_BYTES = 2 << 30
DEADLINE_MS = 500
VALUES, VALUE_BYTES = 32, 2 << 20
"""As many as the tier has in flight at most."""
BATCH = 8
"""Of the client alone, in one call."""
SETTLE_S = 60.0


def settings_of(store: NetworkStore) -> str:
    if store.kind == "redis":
        return f"{{redis: 'redis://127.0.0.1:{store.port}', deadline: {DEADLINE_MS}ms}}"
    return f"{{mooncake: {{master: '127.0.0.1:{store.port}'}}, deadline: {DEADLINE_MS}ms}}"


def server_of(name: str, store: NetworkStore, model: Path, work: Path) -> VllmServer:
    config = work / f"{name}.yaml"
    config.write_text(
        f"dram: 256MiB\nnvme: {{path: {work / name}, capacity: 1GiB}}\n"
        f"shared: {settings_of(store)}\ncompute_if_sooner: false\n{NO_AUDIT}"
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
    assert found == expected, (
        f"{found} tokens came from the shared tier, not {expected}\n{two.log_tail()}"
    )
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


@contextmanager
def our_tier(store: NetworkStore, directory: Path) -> Iterator[SharedIo]:
    """The tier of a store that does nothing else."""
    pool = SharedPool(f"attnstore-bench-{os.getpid()}", 2, VALUE_BYTES, num_ranks=1, member=1)
    pool._path.unlink()
    shape = SegmentHeader(-1, CHUNK_TOKENS, VALUE_BYTES, bytes(32), b"", 0, "benchmark")
    slab = open_slab(directory / "rates", 8 * VALUE_BYTES, shape)
    device, _ = open_device(slab.path, 8, "auto")
    tier = MakeShared(
        store.settings,
        keys=SharedKeys.of(None),
        namespace=secrets.token_bytes(32),
        where="the benchmark's store",
        chunk_tokens=CHUNK_TOKENS,
        deadline_s=10.0,
        directory=None,
    )
    stored = open_store(pool, slab, device, more_tiers=(tier,))
    assert stored.remote is not None
    stored.remote.weights_seen(True)
    io = stored.thread.tiers[1]
    assert isinstance(io, SharedIo)
    deadline = time.monotonic() + SETTLE_S
    while io.generation.usable is None:
        assert time.monotonic() < deadline, "the store does not answer"
        time.sleep(0.01)
    try:
        yield io
    finally:
        stored.close()


def rates(store: NetworkStore, rounds: int, directory: Path) -> dict[str, float]:
    """GB/s of our tier's puts (sealed) and gets (verified), and of the client alone, by turns."""
    payloads = [np.frombuffer(secrets.token_bytes(VALUE_BYTES), np.uint8) for _ in range(VALUES)]
    slots = [np.zeros(VALUE_BYTES, np.uint8) for _ in range(VALUES)]
    own = memoryview(bytearray(BATCH * (HEADER_BYTES + VALUE_BYTES)))
    size = HEADER_BYTES + VALUE_BYTES
    parts = [own[i * size : (i + 1) * size] for i in range(BATCH)]
    client = open_backend(store.settings, None, {})
    times: dict[str, list[float]] = {"put": [], "client_put": [], "get": [], "client_get": []}
    with our_tier(store, directory) as io:
        for _ in range(rounds):
            # Both write what is not there: memory that a store has had before is sooner written.
            chunks = [chunk_of(secrets.token_bytes(32)) for _ in range(VALUES)]
            texts = [f"as1/{secrets.token_hex(32)}" for _ in range(VALUES)]
            batches = [texts[at : at + BATCH] for at in range(0, VALUES, BATCH)]
            times["put"].append(in_flight(io, io.begin_store, chunks, payloads))
            put = partial(client.put, overwrite=False)
            times["client_put"].append(alone(put, batches, parts))
            times["get"].append(in_flight(io, partial(load_of, io), chunks, slots))
            times["client_get"].append(alone(client.get, batches, parts))
            assert all(map(np.array_equal, payloads, slots))
    num_bytes = VALUES * VALUE_BYTES
    return {what: num_bytes / statistics.median(found) / 1e9 for what, found in times.items()}


def chunk_of(key: bytes) -> Chunk:
    root = root_key(bytes(32), None, b"")
    return Chunk(ChunkName(Key(key), root, b"", bytes(32), 0, CHUNK_TOKENS, b""))


def load_of(io: SharedIo, chunk: Chunk, payload: memoryview, done: Callable[..., None]) -> None:
    io.begin_load(chunk, payload, done, lambda: None)


def in_flight(
    io: SharedIo,
    begin: Callable[[Chunk, memoryview, Callable[..., None]], None],
    chunks: Sequence[Chunk],
    payloads: Sequence[np.ndarray],
) -> float:
    """Begin all of them; the seconds until the last has ended well."""
    ended: list[Any] = []
    over = threading.Event()

    def done(outcome: Any, *_: Any) -> None:
        ended.append(outcome)
        if len(ended) == len(chunks):
            over.set()

    begun_at = time.perf_counter()
    with io.context.progress:
        for chunk, payload in zip(chunks, payloads, strict=True):
            begin(chunk, memoryview(payload.data), done)
    io.submit()
    assert over.wait(SETTLE_S)
    seconds = time.perf_counter() - begun_at
    assert all(outcome is None or isinstance(outcome, bytes) for outcome in ended), ended
    return seconds


def alone(
    call: Callable[[Sequence[str], Sequence[memoryview]], list[int]],
    batches: Sequence[Sequence[str]],
    parts: Sequence[memoryview],
) -> float:
    begun_at = time.perf_counter()
    for batch in batches:
        assert min(call(batch, parts)) >= 0
    return time.perf_counter() - begun_at


def measure(kind: str, name: str, count: int) -> dict[str, Any]:
    case = CASES[name]
    num_tokens = case.num_tokens // CHUNK_TOKENS * CHUNK_TOKENS + 1
    result: dict[str, Any] = {"kind": kind, "model": name, "prompt_tokens": num_tokens}
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = make_model(work / name, case.shape)
        full = NetworkStore(kind, memory=STORE_BYTES)  # by the time that rates have been taken
        try:
            result["gb_s"] = rates(full, 10, work)
        finally:
            full.kill()
        store = NetworkStore(kind, memory=STORE_BYTES)
        try:
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
