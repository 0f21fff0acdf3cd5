# SPDX-License-Identifier: Apache-2.0
"""One pool, requests at their times, and how many of their prompt tokens are found in it.

Time passes between requests only: what they need is there at once or not at all. So the figures
are about what is kept, and not about how fast it moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.pools import POLICIES
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.trace import Trace
from attnstore_vllm.index.prefix import kept_end, stop_in
from attnstore_vllm.model_shape import KvShape


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of one trace under one policy. Shares are of all prompt tokens."""

    policy: str
    capacity: float
    """As a share of the trace's distinct chunks."""
    num_slots: int
    hit_tokens: int
    prompt_tokens: int

    @property
    def hit_tokens_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def replay(
    trace: Trace, policy: str, capacity: float, step: Callable[[], object] = lambda: None
) -> Replayed:
    """Replay the trace.

    Args:
        capacity: a share of the trace's distinct chunks; at least one slot is there.
        step: called after each request, for a progress bar.
    """
    num_slots = max(1, int(trace.num_chunks * capacity))
    pool = POLICIES[policy](num_slots, trace)
    stored = [0] * trace.num_chunks  # tokens of each chunk, when it was last stored
    size = trace.chunk_tokens
    hit = 0
    for request in trace.requests:
        chunks = request.chunks.tolist()
        found = tokens = 0
        for chunk in chunks:
            if chunk not in pool:
                break
            found += 1
            shared = min(stored[chunk], request.num_tokens - tokens)
            if shared < size:
                tokens += stop_in(shared, stored[chunk])
                break
            tokens += size
        hit += tokens
        pool.store(request, chunks, found)
        known = request.known_tokens
        end = max(known // size * size, kept_end(known, request.num_tokens))
        stored_chunks(stored, chunks, end, size)
        step()
    return Replayed(policy, capacity, num_slots, hit, trace.num_tokens)


AT_ONCE = Machine(
    kv_bytes_per_token=1,
    hbm=1 << 62,
    dram=1,
    nvme=1,
    prefill_tokens_per_s=1e6,
    decode_step_s=1e-6,
    max_num_seqs=1 << 20,
    prefix_cache=False,
    hbm_bandwidth=1 << 62,
    nvme_read=1 << 62,
    nvme_write=1 << 62,
    nvme_latency_s=1e-6,
)
"""Its steps cost next to nothing, and it has no NVMe to speak of: what is found is in DRAM."""


def replay_model(
    trace: Trace,
    shape: KvShape,
    policy: str,
    num_bytes: int,
    step: Callable[[], object] = lambda: None,
) -> Replayed:
    """The same for a model's KV, with its groups: a server that takes next to no time, so that
    what is stored, kept and found is the server's own code.

    Args:
        policy: one of sim.server.POLICIES.
        num_bytes: of the pool.
    """
    machine = AT_ONCE.with_model(shape).with_sizes(dram=num_bytes)
    out = Server(trace, machine, policy, step=step).run()
    capacity = num_bytes / distinct_bytes(trace, shape)
    num_slots = max(1, num_bytes // machine.chunk_bytes)
    return Replayed(policy, capacity, num_slots, out.hit_tokens, out.prompt_tokens)


def distinct_bytes(trace: Trace, shape: KvShape) -> int:
    """Bytes of the trace's distinct chunks, without sections: what a capacity is a share of."""
    geometry = shape.geometry
    num_tokens = trace.num_chunks * trace.chunk_tokens
    return -(-num_tokens // geometry.chunk_tokens) * geometry.slot_bytes


def stored_chunks(stored: list[int], chunks: list[int], num_tokens: int, size: int) -> None:
    """Note how many tokens each chunk has now: all are whole but the last, which may have none."""
    for chunk in chunks:
        stored[chunk] = size
    if chunks:
        stored[chunks[-1]] = max(0, num_tokens - (len(chunks) - 1) * size)
