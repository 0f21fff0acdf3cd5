# SPDX-License-Identifier: Apache-2.0
"""Parts of a simulated server: requests under way, a step, and DRAM without bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.visits import Visit
from attnstore_vllm.sim.trace import Request
from attnstore_vllm.sim.trace_keys import TraceKeys
from attnstore_vllm.store.format import PAGE_BYTES
from attnstore_vllm.types import Key


@dataclass(slots=True, eq=False)
class Job:
    """A request of the trace in the server."""

    name: str
    request: Request
    is_counted: bool
    history: int
    """Tokens of the conversation before it."""
    arrived_s: float
    keys: TraceKeys
    visit: Visit | None = None
    was_asked: bool = False
    ready: frozenset[Key] = frozenset()
    """What of it was in DRAM when it was first asked for."""
    deadline_s: float = 0.0
    stuck_s: float | None = None
    """Since when it waits for KV alone."""
    computed: int = 0
    computed_from: int = 0
    generated: int = 0
    num_saved: int = 0

    @property
    def stop(self) -> int:
        """Up to which token stored KV is of use: one is left to compute."""
        return min(self.request.num_tokens - 1, self.request.known_tokens)


@dataclass(slots=True)
class Step:
    generating: list[Job]
    prompts: list[tuple[Job, int]] = field(default_factory=list)
    loaded: list[Chunk] = field(default_factory=list)
    loaded_tokens: int = 0
    num_repeats: int = 1


class NoPool:
    """store.context.Pool without bytes."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = PAGE_BYTES
        self._page = memoryview(bytearray(PAGE_BYTES))

    def slot(self, slot: int) -> memoryview:
        return self._page

    def close(self) -> None:
        """Nothing is held."""


def num_answer(job: Job) -> int:
    return max(1, job.request.answer_tokens)


def num_reserved(job: Job) -> int:
    return job.request.num_tokens + num_answer(job)
