# SPDX-License-Identifier: Apache-2.0
"""KV events: what a chunk costs, in time on each thread and in memory.

    python -m benchmarks.micro.kv_events [--chunks 20000]

Chunks of 256 tokens with blocks of 16, under vLLM's own hashes, come to DRAM and to NVMe.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

from attnstore_vllm.connector.kv_events import VllmTeller
from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.index.keys import SequenceKeys, root_key, tenant_hash
from attnstore_vllm.tiers.announced import Announced
from attnstore_vllm.types import NVME

CHUNK, BLOCK = 256, 16


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of KV events; see the module.")
    parser.add_argument("--chunks", type=int, default=20_000)
    options = parser.parse_args()
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
    teller = VllmTeller(config, BLOCK, lambda: b"")
    root = root_key(bytes(32), None, b"")
    requests = []
    for number in range(options.chunks):
        ids = [number * CHUNK + i for i in range(CHUNK)]
        name = SequenceKeys(root, ids, CHUNK).name(0, tenant_hash(None))
        hashes = [(number * CHUNK + i).to_bytes(32, "big") for i in range(CHUNK // BLOCK)]
        request: Any = SimpleNamespace(
            block_hashes=hashes, lora_request=None, mm_features=(), cache_salt=None
        )
        requests.append((Chunk(name, dram=InTier(State.READY)), request))
    named_s, told_s, num_events = run(teller, requests)
    print(f"named and noted, on the scheduler's thread: {1e6 * named_s / options.chunks:.1f} us")
    print(f"told, on the store's thread: {1e6 * told_s / options.chunks:.1f} us a chunk")
    tracemalloc.start()  # slows all that is measured with it
    books = Announced()
    run(teller, requests, books)
    held, _ = tracemalloc.get_traced_memory()
    print(f"{num_events} events; {held / options.chunks:.0f} bytes a chunk in the books")


def run(
    teller: VllmTeller, requests: list[tuple[Chunk, Any]], books: Announced | None = None
) -> tuple[float, float, int]:
    """Seconds of both threads, and how many events there were."""
    books = Announced() if books is None else books
    began = time.perf_counter()
    for chunk, request in requests:
        named = teller.blocks_of(request, 0, chunk.name.tokens)
        assert named is not None
        books.name(chunk.name.key, named)
        chunk.behind[NVME] = InTier(State.READY)
        books.at(chunk)
    ended = time.perf_counter()
    num_events = 0
    while changes := books.take_changes(64):
        num_events += sum(1 for c in changes for what in books.tell(c) if teller.event(what))
    return ended - began, time.perf_counter() - ended, num_events


if __name__ == "__main__":
    main()
