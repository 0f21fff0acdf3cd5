# SPDX-License-Identifier: Apache-2.0
"""Things that the parts of the store share: the residency, the lock, DRAM's slots and the clock."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from attnstore_vllm.index.residency import Residency
from attnstore_vllm.types import Flow


class Pool(Protocol):
    """The DRAM tier's slots: transfer/pool.py, or a simulation's."""

    num_slots: int
    slot_bytes: int

    def slot(self, slot: int) -> memoryview: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Context:
    residency: Residency
    progress: threading.Condition
    """The store's one lock; it is notified when something has ended."""
    pool: Pool
    clock: Callable[[], float]
    moved_bytes: Counter[Flow] = field(default_factory=Counter)
