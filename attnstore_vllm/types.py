# SPDX-License-Identifier: Apache-2.0
"""Small types that several packages share. Nothing here has behaviour."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Final, NewType

Clock = Callable[[], float]
"""Seconds since a beginning that is the same for all times it says."""

Key = NewType("Key", bytes)
"""32 bytes that name a whole prefix in one namespace (index/keys.py)."""

KEY_BYTES = 32
TOKEN_BYTES = 4
"""A token id is stored big-endian, so that byte order is token order (index/prefix.py)."""

DRAM: Final = "dram"
NVME: Final = "nvme"
SHARED: Final = "shared"
PEERS: Final = "peers"
"""Names of tiers, as metrics and messages have them."""


class Flow(Enum):
    """A direction that bytes move in. HBM to DRAM is a save, DRAM to HBM a load."""

    SAVE = "hbm_to_dram"
    LOAD = "dram_to_hbm"
    WRITE_BACK = "dram_to_nvme"
    PREFETCH = "nvme_to_dram"
    TO_SHARED = "dram_to_shared"
    FROM_SHARED = "shared_to_dram"
    FROM_PEERS = "peers_to_dram"


class StoreFailure(Enum):
    """Why a chunk was not written to a tier behind; the event that it counts as."""

    FAILED = "write_failed"
    DOES_NOT_FIT = "does_not_fit"
    """Nothing was sent to the tier."""
    IS_THERE = "is_there"
    """Others have written it to the shared tier: nothing was sent."""
    NOT_SHARED = "shared_write_failed"
    """As FAILED, of the shared tier."""


class Seen(IntEnum):
    """The result of a look at the live weights. Of several ranks the largest counts."""

    NOTHING = 0
    """No worker has looked."""
    SAME = 1
    UNKNOWN = 2
    """This model's cannot be seen."""
    CHANGED = 3
