# SPDX-License-Identifier: Apache-2.0
"""Messages that cross between the scheduler side and the workers, each step: plans and reports. And
counts, which cross to the server's process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import LoadPlan, TransferPlan


class Seen(IntEnum):
    """The result of a look at the live weights. Of several ranks the largest counts."""

    NOTHING = 0
    """Nobody has looked."""
    SAME = 1
    UNKNOWN = 2
    """This model's cannot be seen."""
    CHANGED = 3


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """A request computes for the first time behind stored KV of an adapter."""

    lora_id: int
    digests: tuple[bytes | None, ...]
    """By rank: what the adapter was when the KV was offered."""
    block_ids: tuple[int, ...]
    """With that KV. Where the adapter is another one now, vLLM is to compute them."""


@dataclass(slots=True)
class StepPlan:
    """Scheduler side to workers: the copies of this step."""

    number: int = 0
    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[TransferPlan] = field(default_factory=list)
    """Saves of blocks that are computed when the step ends."""
    saves_before: list[TransferPlan] = field(default_factory=list)
    """Saves of finished requests, whose blocks vLLM may have given away in this step."""
    finished_saving: list[str] = field(default_factory=list)
    """Finished requests whose blocks vLLM keeps until their saves have left them."""
    ended_loads: list[int] = field(default_factory=list)
    """Plans whose requests are gone, or have lost their blocks."""
    preempted: list[str] = field(default_factory=list)
    """Requests with open saves whose blocks are others' from this step on."""
    may_replay: bool = False
    """The forward pass may be a CUDA graph that calls no hook."""
    adapters: tuple[int, ...] = ()
    """LoRA ids of which the workers are to say what they are when the step ends."""
    checks: list[LoadCheck] = field(default_factory=list)
    is_idle: bool = False
    """The scheduler side does without the store: so do the workers, and give back their memory."""
    looks_at_weights: bool = False
    """The report is to say whether the weights have changed."""


class StepReport:
    """Workers to scheduler side: plans that this many ranks have completed.

    Args:
        number: of the step.
        given_up: of the completed ones, saves that have not reached their slot.
        freed: finished requests whose blocks this rank does not read any more.
        load_wait_s: that forward passes waited for their loads: what they have cost.
        measured: bytes and seconds of copies from DRAM, of one rank.
        rank, adapters: what the adapters of the plan are on this rank; None: not loaded.
        weights: what a look at them has shown.
    """

    def __init__(
        self,
        number: int,
        completed: Iterable[int] = (),
        given_up: Iterable[int] = (),
        freed: Iterable[str] = (),
        load_wait_s: float = 0.0,
        measured: Sequence[tuple[int, float]] = (),
        rank: int = 0,
        adapters: Mapping[int, bytes | None] | None = None,
        weights: Seen = Seen.NOTHING,
    ) -> None:
        self.number = number
        self.given_up = set(given_up)
        self.ranks = Counter(completed)
        self.ranks.update(self.given_up)
        self.freed = Counter(freed)
        self.load_wait_s = load_wait_s
        self.measured = list(measured)
        self.adapters = {number: {rank: told} for number, told in (adapters or {}).items()}
        """By id, by rank."""
        self.weights = weights

    def aggregate(self, other: StepReport) -> None:
        """Take in what another rank says of the same step."""
        self.ranks.update(other.ranks)
        self.given_up |= other.given_up
        self.freed.update(other.freed)
        self.load_wait_s = max(self.load_wait_s, other.load_wait_s)
        self.weights = max(self.weights, other.weights)
        # The slowest rank's: all wait for it.
        self.measured = max(self.measured, other.measured, key=lambda m: sum(s for _, s in m))
        for number, by_rank in other.adapters.items():
            self.adapters.setdefault(number, {}).update(by_rank)


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


def add_stats(data: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add what others have counted. Both are StepStats.data."""
    counters = data["counters"]
    for key, amount in other["counters"].items():
        counters[key] = counters.get(key, 0) + amount
    data["gauges"].update(other["gauges"])
    for name, values in other["observed"].items():
        data["observed"].setdefault(name, []).extend(values)


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
