# SPDX-License-Identifier: Apache-2.0
"""Connectors of ours whose worker cannot do what others can."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from attnstore_vllm.connector import AttnStoreConnector
from attnstore_vllm.transfer.engine import CpuEngine

FEW = 4
"""Slots."""


class RefusingConnector(AttnStoreConnector):
    """Its worker fails when it is shown the model's KV."""

    def _live_facts(self, *_: Any) -> dict[str, str]:
        raise RuntimeError("planted: " + "a long message " * 1000)


class FewSlotsConnector(AttnStoreConnector):
    """Its copy engine reaches a part of the pool, as where a driver refuses to page-lock more."""

    def register_kv_caches(self, *arguments: Any, **named: Any) -> None:
        with patch.object(CpuEngine, "num_slots", FEW, create=True):
            super().register_kv_caches(*arguments, **named)
