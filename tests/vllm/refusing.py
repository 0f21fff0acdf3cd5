# SPDX-License-Identifier: Apache-2.0
"""A connector of ours whose worker fails when it is shown the model's KV."""

from __future__ import annotations

from typing import Any

from attnstore_vllm.connector import AttnStoreConnector


class RefusingConnector(AttnStoreConnector):
    def _live_facts(self, *_: Any) -> dict[str, str]:
        raise RuntimeError("planted: " + "a long message " * 1000)
