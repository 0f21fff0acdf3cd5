# SPDX-License-Identifier: Apache-2.0
"""AttnStoreConnector over a disk that is slowed down, or without one. Imported by vLLM.

    --kv-transfer-config '{"kv_connector": "AttnStoreConnector",
                           "kv_connector_module_path": "benchmarks.throttled", ...}'

The environment says what the disk reads in a second, and writes beside that (slow_disk.py: RATE);
0: there is none, and DRAM is all.
"""

from __future__ import annotations

import os
from typing import Any

from attnstore_lab.testing.slow_device import SlowDevice
from attnstore_vllm.connector import AttnStoreConnector, build
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.io.device import Device
from attnstore_vllm.store.store import Store
from benchmarks.slow_disk import RATE

__all__ = ["AttnStoreConnector"]

_bytes_per_s = float(os.environ[RATE])


def _open_device(*args: Any) -> tuple[Device, str]:
    device, kind = open_device(*args)
    if not _bytes_per_s:
        return device, kind
    slow = SlowDevice(device, bytes_per_s=_bytes_per_s)
    return slow, f"{kind}, slowed down to {_bytes_per_s:,.0f} bytes a second"


def _open_store(*args: Any, **kwargs: Any) -> Store:
    store = Store(*args, **kwargs)
    if not _bytes_per_s:
        with store.queue():  # its lock
            store.residency.lose(store.residency.nvme)
    return store


build.open_device = _open_device  # type: ignore[assignment, attr-defined]
build.Store = _open_store  # type: ignore[assignment, attr-defined]
