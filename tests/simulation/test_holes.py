# SPDX-License-Identifier: Apache-2.0
"""No room is spent on chunks that no request can reach, since one before them is missing.

Prompts that are larger than DRAM, alone and many at once, over disks of all speeds. A server whose
blocks have vLLM's names: what requests leave in them stays until others need the room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.hbm import Hbm
from attnstore_lab.sim.jobs import Job
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.simulated_store import NAMESPACE
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace
from attnstore_vllm.index.keys import root_key
from attnstore_vllm.scheduler.adapters import NO_ADAPTER

CHUNK = 64
KV = 1000
RECORD = KV * CHUNK
MACHINE = Machine(
    kv_bytes_per_token=KV, hbm=RECORD * 200, dram=RECORD * 14, nvme=RECORD * 400,
    prefill_tokens_per_s=20_000, decode_step_s=0.01, max_num_seqs=4,
    max_num_batched_tokens=1024, prefix_cache=False, hbm_bandwidth=KV * 1_000_000,
    nvme_read=RECORD * 1000, nvme_write=RECORD * 1000, chunk_tokens=CHUNK,
)  # fmt: skip


@dataclass(eq=False)
class _Block:
    block_hash: object = field(default_factory=object)


@dataclass
class _Pool:
    """See vllm/v1/core/block_pool.py."""

    blocks: list[_Block]
    hash_block_size: int = CHUNK
    cached_block_hash_to_block: dict[int, None] = field(default_factory=dict)
    free: deque[int] = field(default_factory=deque)

    def get_num_free_blocks(self) -> int:
        return len(self.free)


class PagedHbm(Hbm):
    """Of one block a chunk. A block that is given away is named anew."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, CHUNK)
        num_blocks = machine.hbm // RECORD + machine.max_num_seqs  # a request's last one is partial
        self.block_pool = _Pool([_Block() for _ in range(num_blocks + 1)])  # type: ignore[assignment]
        self._free = self.block_pool.free  # type: ignore[attr-defined]
        self._free.extend(range(1, num_blocks + 1))
        self._tables: dict[str, list[int]] = {}

    def take(self, job: Job) -> bool:
        count = -(-job.num_in_all // CHUNK)
        if len(self._free) < count or not super().take(job):
            return False
        self._tables[job.request_id] = taken = [self._free.popleft() for _ in range(count)]
        for number in taken:
            self.block_pool.blocks[number].block_hash = object()  # type: ignore[attr-defined]
        return True

    def give_back(self, job: Job) -> None:
        super().give_back(job)
        self._free.extend(reversed(self._tables.pop(job.request_id)))

    def get_block_ids(self, request_id: str) -> tuple[Sequence[int], ...]:
        return (self._tables[request_id],)

    def tables(self, job: Job, computed: int) -> tuple[Sequence[int], ...]:
        return self.get_block_ids(job.request_id)


def serve(trace: Trace, machine: Machine, policy: str = "attnstore") -> Server:
    server = Server(trace, machine, policy, hbm=PagedHbm(machine))
    server.run()
    assert server.store is not None
    server.store.check_integrity()
    assert server.store.residency.num_held() == 0
    return server


def prompt(at: float, number: int, tokens: int, answer: int = 8, session: int = -1) -> TraceRequest:
    known = tokens + answer
    chunks = np.arange(-(-known // CHUNK), dtype=np.int64) + number * 1000
    return TraceRequest(at, chunks, tokens, answer, known, session, 0.0)


def reachable(server: Server) -> tuple[int, int]:
    """Chunks that are stored, and those of them of which all before them are."""
    assert server.store is not None
    children: dict[bytes, list[bytes]] = {}
    index = server.store.residency.index
    for chunk in index:
        children.setdefault(chunk.name.parent, []).append(chunk.name.key)
    count, front = 0, [bytes(root_key(NAMESPACE, None, NO_ADAPTER))]
    while front:
        found = children.get(front.pop(), [])
        count += len(found)
        front += found
    return len(index), count


@pytest.mark.parametrize("policy", ["attnstore", "lru", "fifo"])
@pytest.mark.parametrize("speed", [20, 200, 2000])
def test_a_prompt_of_twice_dram(policy: str, speed: int) -> None:
    """All of it is stored once the disk has had the time, be it slower than the prompt is computed
    (310 chunks a second)."""
    machine = MACHINE.with_sizes(nvme_write=RECORD * speed, nvme_read=RECORD * speed)
    server = serve(make_trace("one", CHUNK, [prompt(0.0, 0, 28 * CHUNK)]), machine, policy)
    stored, found = reachable(server)
    assert stored == found
    assert found >= 0.9 * 28


@pytest.mark.parametrize("speed", [20, 200, 2000])
def test_a_prompt_of_twice_dram_that_is_asked_again(speed: int) -> None:
    """All of it is loaded where the disk has the time: in parts, since DRAM has room for half. The
    prompt is computed at 310 chunks a second, so from a slow disk less is waited for."""
    machine = MACHINE.with_sizes(nvme_write=RECORD * speed, nvme_read=RECORD * speed)
    requests = [prompt(0.0, 0, 28 * CHUNK), prompt(60.0, 0, 28 * CHUNK)]
    server = serve(make_trace("again", CHUNK, requests), machine)
    out = server.end()
    found = out.nvme_tokens + out.dram_tokens
    if speed >= 200:
        assert found >= 0.9 * 28 * CHUNK
    assert found <= 28 * CHUNK


def test_two_prompts_of_twice_dram_at_once() -> None:
    """One is loaded in parts, the other as far as DRAM has room; neither waits for the other."""
    sizes = [prompt(0.0, 0, 28 * CHUNK), prompt(30.0, 1, 28 * CHUNK)]
    again = [prompt(60.0 + n / 100, n, 28 * CHUNK) for n in range(2)]
    server = serve(make_trace("two", CHUNK, [*sizes, *again]), MACHINE)
    out = server.end()
    assert len(out.ttft_s) == 4
    assert out.nvme_tokens + out.dram_tokens >= 0.9 * 28 * CHUNK


def test_many_long_prompts_at_once_on_a_slow_disk() -> None:
    """What is stored is beginnings; and all that the disk has written is of use."""
    machine = MACHINE.with_sizes(nvme_write=RECORD * 40, nvme_read=RECORD * 40)
    requests = [prompt(0.01 * n, n, 40 * CHUNK) for n in range(12)]
    server = serve(make_trace("many", CHUNK, requests), machine)
    stored, found = reachable(server)
    assert stored == found
    assert server.store is not None
    assert found >= 0.9 * server.store.figures().counts["written"] > 100


def some(random: Random) -> tuple[Trace, Machine, str]:
    machine = MACHINE.with_sizes(
        dram=RECORD * random.choice((3, 8, 20, 50)),
        nvme=RECORD * random.choice((5, 30, 100, 400)),
        hbm=RECORD * random.choice((60, 100, 300)),
        nvme_write=RECORD * random.choice((10, 50, 300, 2000)),
        nvme_read=RECORD * random.choice((50, 2000)),
        max_num_seqs=random.choice((1, 4, 16)),
    )
    requests, now = [], 0.0
    for number in range(random.randint(5, 40)):
        tokens = 0
        for _ in range(random.choice((1, 1, 2, 4))):
            tokens += random.randint(20, 40 * CHUNK // 4)
            requests.append(prompt(now, number, tokens, random.randint(1, 40), session=number))
        now += random.expovariate(random.choice((0.5, 4, 50)))
    policy = random.choice(("attnstore", "lru-ahead"))
    return make_trace("some", CHUNK, requests), machine, policy


def test_nothing_is_kept_that_cannot_be_reached() -> None:
    """But for what lies behind a chunk that a tier has given up since: few, as the ends of a
    conversation go before its beginning. Not so with fifo, where each turn's chunks are as old as
    the turn."""
    counts = [reachable(serve(*some(Random(seed)))) for seed in range(24)]
    stored = sum(stored for stored, _ in counts)
    assert stored > 1500
    assert stored - sum(found for _, found in counts) <= 0.04 * stored
