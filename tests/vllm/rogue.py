# SPDX-License-Identifier: Apache-2.0
"""A connector whose loads fail: it fills blocks with garbage and then says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

GARBAGE = 3.0
BLOCK = 128


@dataclass
class Spoil(KVConnectorMetadata):
    blocks: list[int] = field(default_factory=list)


class RogueConnector(KVConnectorBase_V1, SupportsHMA):
    """Offers all whole blocks of a prompt that begins with FIRST, while it is on."""

    FIRST = 15
    """No other prompt of these tests begins with it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.is_on = True
        self._spoil = Spoil()
        self._failed: set[int] = set()
        self._layers: list[Any] = []

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        tokens = request.prompt_token_ids
        if not self.is_on or tokens[0] != self.FIRST:
            return 0, False
        return (len(tokens) - 1) // BLOCK * BLOCK - num_computed, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        if num_external:
            (ids,) = blocks.get_block_ids()
            self._spoil.blocks += ids[: (len(request.prompt_token_ids) - 1) // BLOCK]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        spoil, self._spoil = self._spoil, Spoil()
        return spoil

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        spoil = self._get_connector_metadata()
        assert isinstance(spoil, Spoil)
        for kv in self._layers:
            kv[spoil.blocks] = GARBAGE
        self._failed |= set(spoil.blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
