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

    loads: list[TransferPlan] = field(default_factory=list)
    saves: list[TransferPlan] = field(default_factory=list)
    finished_saving: list[str] = field(default_factory=list)
    """Finished requests whose blocks the saves of this step are the last to read."""


class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler side: plans that this many ranks have completed."""

    def __init__(self, completed: Iterable[int]) -> None:
        self.ranks = Counter(completed)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        self.ranks.update(other.ranks)
        return self
