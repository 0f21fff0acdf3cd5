# SPDX-License-Identifier: Apache-2.0
"""Requests: what was asked, when, and which KV it needs: the input of every simulation.

A request's sequence, prompt and answer, is cut into chunks. A chunk's number names the chunk with
all that is before it, as a key does: two requests share a beginning exactly as far as their
numbers agree.

    chunks   [ 0 ][ 1 ][ 2 ][ 7 ][ 8 ]
    tokens   |<-- prompt -->|<- answer ->|      the last chunk is partly filled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from attnstore_vllm.errors import AttnStoreError


class TraceError(AttnStoreError):
    """A trace cannot be read. The message says where, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Args:
        chunks: int64, of the prompt and, where the trace says what became of it, the answer.
        num_tokens: of the prompt.
        answer_tokens: that it is answered with.
        known_tokens: of prompt and answer, those that `chunks` stands for.
        session: whose next request comes `think_s` after the answer of the one before, when the
            server is simulated too; -1: it comes at its time, whether or not the server is ready.
        told: what its client could say of it, by the names of hints, as far as the trace knows.
        hints: what it does say, as kv_transfer_params.
    """

    arrival_s: float
    chunks: npt.NDArray[np.int64]
    num_tokens: int
    answer_tokens: int
    known_tokens: int
    session: int = -1
    think_s: float = 0.0
    told: Mapping[str, Any] = field(default_factory=dict)
    hints: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival. Chunks are numbered from 0 without gaps."""

    name: str
    chunk_tokens: int
    requests: Sequence[TraceRequest]
    num_chunks: int

    @property
    def num_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        return self.requests[-1].arrival_s - self.requests[0].arrival_s


def at_speed(trace: Trace, speed: float) -> Trace:
    """The same requests, so many times as close to each other. What people think takes as long."""
    faster = [replace(r, arrival_s=r.arrival_s / speed) for r in trace.requests]
    return replace(trace, requests=faster)


def make_trace(name: str, chunk_tokens: int, requests: Sequence[TraceRequest]) -> Trace:
    """Sorts by arrival and renumbers the chunks, in the order in which they are first asked for."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    if not ordered:
        raise TraceError(f"{name}: there is no request in it")
    everything = np.concatenate([request.chunks for request in ordered])
    unique, first, inverse = np.unique(everything, return_index=True, return_inverse=True)
    rank = np.empty(len(unique), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(unique))
    numbered = np.split(rank[inverse], np.cumsum([len(r.chunks) for r in ordered])[:-1])
    renumbered = [
        replace(request, chunks=chunks) for request, chunks in zip(ordered, numbered, strict=True)
    ]
    return Trace(name, chunk_tokens, renumbered, len(unique))
