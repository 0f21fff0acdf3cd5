# SPDX-License-Identifier: Apache-2.0
"""Messages that cross between the scheduler side and the workers, each step: plans and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from attnstore_vllm.tiers.nvme.node_disk import NodeOrder, NodeResult
from attnstore_vllm.transfer.plan import LoadPlan, PassPlan, TransferPlan
from attnstore_vllm.types import Seen


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
    passes: Sequence[PassPlan] = ()
    """Passes of our own, behind the step's own forward pass and before its loads."""
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
    orders: Sequence[NodeOrder] = ()
    """To the NVMe of every node but the first."""


@dataclass(slots=True)
class StepReport:
    """Workers to scheduler side: plans that ranks have completed."""

    number: int
    """The step's."""
    ranks: Counter[int] = field(default_factory=Counter)
    """How many ranks have completed each of these plans."""
    given_up: set[int] = field(default_factory=set)
    """Those of them that are saves which have not reached their slot."""
    freed: Counter[str] = field(default_factory=Counter)
    """Finished requests, and how many ranks do not read their blocks any more."""
    load_wait_s: float = 0.0
    """That forward passes waited for their loads: what they have cost."""
    measured: Sequence[tuple[int, float]] = ()
    """Bytes and seconds of copies from DRAM, of one rank."""
    adapters: dict[int, dict[int, bytes | None]] = field(default_factory=dict)
    """Digests of the plan's adapters, by id, by rank; None: not loaded."""
    weights: Seen = Seen.NOTHING
    """The result of a look at them."""
    live: dict[int, bytes | None] = field(default_factory=dict)
    """Their names, by rank (LiveWeights.name)."""
    results: Sequence[NodeResult] = ()
    """Answers to orders of this plan and of earlier ones."""

    def aggregate(self, other: StepReport) -> None:
        """Take in what another rank says of the same step."""
        self.ranks.update(other.ranks)
        self.given_up |= other.given_up
        self.freed.update(other.freed)
        self.load_wait_s = max(self.load_wait_s, other.load_wait_s)
        self.weights = max(self.weights, other.weights)
        self.live.update(other.live)
        if other.results:
            self.results = [*self.results, *other.results]
        # The slowest rank's: all wait for it.
        self.measured = max(self.measured, other.measured, key=lambda m: sum(s for _, s in m))
        for number, by_rank in other.adapters.items():
            self.adapters.setdefault(number, {}).update(by_rank)
