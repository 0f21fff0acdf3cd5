# SPDX-License-Identifier: Apache-2.0
"""vLLM's envelopes of what crosses between the scheduler side and the workers, each step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from attnstore_vllm.scheduler.messages import StepPlan, StepReport


@dataclass(slots=True)
class PlanEnvelope(KVConnectorMetadata):
    plan: StepPlan


@dataclass(slots=True)
class ReportEnvelope(KVConnectorWorkerMetadata):
    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportEnvelope:
        assert isinstance(other, ReportEnvelope)
        self.report.aggregate(other.report)
        return self
