# SPDX-License-Identifier: Apache-2.0
"""The connector with one wrong bit in each load, to see that a wrong answer is seen.

vLLM finds it by `kv_connector_module_path`. One number of the first block that is loaded gets the
highest bit of its exponent, in the pool, before it is copied: on the CPU and on a GPU alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnstore_vllm.connector.connector import AttnStoreConnector
from attnstore_vllm.connector.envelopes import PlanEnvelope

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

HIGHEST = 0x40
"""In the upper byte of a bf16 number; a number below 2 does not have it."""


class Double(AttnStoreConnector):
    """See the module."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, PlanEnvelope)
        if self.worker is not None:
            page_bytes = self.worker.geometry.regions[0]
            for load in kv_connector_metadata.plan.loads:
                first = load.copies[0]
                slot = self.worker.pool.slot(first.slot)
                page = slot[first.first * page_bytes : (first.first + 1) * page_bytes]
                at = next(i for i in range(1, page_bytes, 2) if not page[i] & HIGHEST)
                page[at] |= HIGHEST
        super().handle_preemptions(kv_connector_metadata)
