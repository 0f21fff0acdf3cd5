# SPDX-License-Identifier: Apache-2.0
"""What crosses between the scheduler side and the workers, each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from attnstore_vllm.transfer.plan import TransferPlan


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """Scheduler side to workers: the copies of this step."""

    number: int = 0
    loads: list[TransferPlan] = field(default_factory=list)
    saves: list[TransferPlan] = field(default_factory=list)
    finished_saving: list[str] = field(default_factory=list)
    """Finished requests whose blocks the saves of this step are the last to read."""


class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler side: plans that this many ranks have completed.

    Args:
        number: of the step.
        load_wait_s: that its forward pass waited for its loads: what they have cost it.
    """

    def __init__(self, number: int, completed: Iterable[int], load_wait_s: float = 0.0) -> None:
        self.number = number
        self.ranks = Counter(completed)
        self.load_wait_s = load_wait_s

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        self.ranks.update(other.ranks)
        self.load_wait_s = max(self.load_wait_s, other.load_wait_s)
        return self
