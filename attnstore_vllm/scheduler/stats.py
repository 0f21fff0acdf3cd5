# SPDX-License-Identifier: Apache-2.0
"""Counts of the scheduler side: of a request when vLLM asks for its KV, once each, though vLLM
asks again and again while it has no room; and what the store has counted since the last step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.types import DRAM, NVME


class StepStats:
    """`data`: {"counters" and "gauges": {"name:label": n}, "observed": {"name": [n, ...]}}.

    A plain dict of strings and numbers, because it crosses processes. connector/metrics.py has
    what they mean.
    """

    def __init__(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "gauges": {}, "observed": {}}

    def add(self, name: str, label: str, amount: float) -> None:
        if amount:
            counters = self.data["counters"]
            counters[f"{name}:{label}"] = counters.get(f"{name}:{label}", 0) + amount

    def set(self, name: str, label: str, value: float) -> None:
        self.data["gauges"][f"{name}:{label}"] = value

    def observe(self, name: str, value: float) -> None:
        self.data["observed"].setdefault(name, []).append(value)

    def aggregate(self, data: Mapping[str, Any]) -> None:
        """Add what another one has as its data."""
        for key, amount in data["counters"].items():
            name, label = key.split(":")
            self.add(name, label, amount)
        self.data["gauges"].update(data["gauges"])
        for name, values in data["observed"].items():
            self.data["observed"].setdefault(name, []).extend(values)

    def is_empty(self) -> bool:
        return not any(self.data.values())


def count_wanted(stats: StepStats, state: RequestState, pieces: Sequence[Piece]) -> None:
    """The request is first offered a place: where is what it wants then?"""
    if state.counted.wanted:
        return
    state.counted.wanted = True
    spine = [piece for piece in pieces if piece.group == 0]
    in_dram = sum(p.stop - p.start for p in spine if p.chunk.dram.state is State.READY)
    wanted = sum(piece.stop - piece.start for piece in spine)
    stats.add("wanted_tokens", DRAM, in_dram)
    stats.add("wanted_tokens", NVME, wanted - in_dram)


def count_recomputation(stats: StepStats, state: RequestState, cause: str) -> None:
    """Before count_offer."""
    if not state.counted.offered:
        stats.add("recomputations", cause, 1)


def count_offer(stats: StepStats, state: RequestState, tokens: Mapping[str, int]) -> None:
    """The request's first answer."""
    if state.counted.offered:
        return
    state.counted.offered = True
    for tier, number in tokens.items():
        stats.add("offered_tokens", tier, number)


def count_short(counts: GroupCounts, state: RequestState) -> None:
    """The groups that lack something of what the spine has. Before count_offer."""
    if not state.counted.offered:
        for group in state.sequence.short_of:
            counts.add("shortened_hits", group, 1)


def count_taken(
    stats: StepStats, state: RequestState, sources: dict[str, int], moved_tokens: int
) -> None:
    """vLLM has taken an offer."""
    state.counted.sources = sources
    for tier, tokens in sources.items():
        stats.add("loaded_tokens", tier, tokens)
    stats.add("moved_tokens", DRAM, moved_tokens)


class GroupCounts:
    """Figures by kind of KV cache group (index/sections.py: Reach), of models with several: of
    others they say nothing."""

    def __init__(self, geometry: Geometry) -> None:
        self._kinds = [group.reach for group in geometry.groups]
        self._block_bytes = geometry.num_ranks // geometry.replicas * geometry.block_bytes
        self._counts = Counter[tuple[str, str]]()

    def add(self, name: str, group: int, amount: float) -> None:
        """Args: group: its place in the geometry."""
        if len(self._kinds) > 1:
            self._counts[name, self._kinds[group]] += int(amount)

    def add_blocks(self, name: str, group: int, num_blocks: int) -> None:
        """The bytes of so many blocks, on all ranks."""
        self.add(name, group, num_blocks * self._block_bytes)

    def move_to(self, stats: StepStats) -> None:
        """Add to `stats` what was counted since the last call."""
        for (name, kind), amount in self._counts.items():
            stats.add(name, kind, amount)
        self._counts.clear()


class StoreFigures:
    """The store's own counts and gauges, as differences.

    Args:
        token_bytes: KV bytes of a token, all ranks.
    """

    def __init__(self, store: Store, token_bytes: float) -> None:
        self._store = store
        self._token_bytes = token_bytes
        self._reported: dict[tuple[str, str], float] = {}

    def add_to(self, stats: StepStats) -> None:
        """Add what has changed since the last call."""
        first = int(self._store.first_written_tokens() * self._token_bytes)
        totals: dict[tuple[str, str], float] = {
            **{("chunks", event): count for event, count in self._store.counts().items()},
            **{("bytes", flow.value): n for flow, n in self._store.moved_bytes().items()},
            ("first_written_bytes", NVME): first,
        }
        for (name, label), total in totals.items():
            stats.add(name, label, total - self._reported.get((name, label), 0))
        self._reported.update(totals)
        for (name, label), value in self._store.gauges().items():
            if self._reported.get((name, label)) != value:
                self._reported[name, label] = value
                stats.set(name, label, value)
