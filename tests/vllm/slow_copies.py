# SPDX-License-Identifier: Apache-2.0
"""Our connector with copies that run beside the model, as a GPU's do, on a machine without one.

vLLM finds it by `kv_connector_module_path`. The engine, its worker and the streams of copies are in
one process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so whoever runs there may slow the streams down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attnstore_lab.testing.memory_engine import MemoryEngine, ThrottledStream
from attnstore_vllm.connector.connector import AttnStoreConnector
from attnstore_vllm.connector.worker import Worker
from attnstore_vllm.transfer.layout import LayerLayout

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

HBM_BYTES = 16 << 30
"""Of the device that is imitated: the write buffer is a part of it."""


class Copies(NamedTuple):
    """What a test may slow down."""

    worker: Worker
    engine: MemoryEngine
    loads: ThrottledStream
    saves: ThrottledStream


_made: list[Copies] = []


def copies() -> Copies:
    """Those of this process's worker. As fast as this machine copies, until somebody says less."""
    (made,) = _made
    return made


class SlowCopies(AttnStoreConnector):
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.worker is not None:
            make = partial(_make_engine, self.worker)
            self.worker._make_engine = make  # type: ignore[method-assign]


def _make_engine(worker: Worker, device: torch.device, layouts: list[LayerLayout]) -> MemoryEngine:
    assert device.type == "cpu"
    geometry = worker.geometry
    loads, saves = ThrottledStream(math.inf), ThrottledStream(math.inf)
    engine = MemoryEngine(
        *worker.place(), layouts,
        loads=loads, saves=saves,
        num_rows=worker._write_buffer_bytes(HBM_BYTES)
        // (geometry.num_layers * geometry.page_bytes),
    )  # fmt: skip
    _made[:] = [Copies(worker, engine, loads, saves)]
    return engine


def transfer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The KVTransferConfig that names this connector; `settings` are the store's."""
    return {
        "kv_connector": "SlowCopies",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(settings),
    }
