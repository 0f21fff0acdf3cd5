# SPDX-License-Identifier: Apache-2.0
"""From the settings to the shared tier; and a try of it, for a start and for `attnstore doctor`."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attnstore_vllm.config.shared import KINDS, SharedConfig
from attnstore_vllm.config.tenants import Quota, slots_of
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.lookahead import LookAhead
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.dram_tier import DramTier
from attnstore_vllm.tiers.shared.helper import Helper
from attnstore_vllm.tiers.shared.lanes import Lanes
from attnstore_vllm.tiers.shared.record import HEADER_BYTES
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.shared_io import BANDWIDTH_BURST_S, DAILY_BURST_S, SharedIo
from attnstore_vllm.tiers.shared.shared_tier import PAUSE_S, SharedTier
from attnstore_vllm.tiers.tier import TierBehind
from attnstore_vllm.types import SHARED

logger = logging.getLogger(__name__)

TRIAL_NAME = b"attnstore doctor".ljust(32, b"\0")


def check_client(shared: SharedConfig) -> None:
    """Raises ConfigError if the client is not installed, or the password or the secret cannot be
    read."""
    kind = KINDS[shared.kind]
    if kind.client and importlib.util.find_spec(kind.client) is None:
        raise ConfigError(
            f"shared.{shared.kind} needs {kind.title}'s client; run: "
            f"pip install 'attnstore-vllm[{shared.kind}]'"
        )
    shared.for_client()
    SharedKeys.of_file(shared.secret_file)


def without_secret(shared: SharedConfig) -> str:
    """Text of a start and of `attnstore doctor`, where there is no secret."""
    return (
        f"who can write to {shared.where} can have forged KV "
        "served to any tenant. Who can read there reads KV, and can test guesses of prompts by "
        "names alone. Give all servers one shared.secret_file, or close that network"
    )


class MakeShared:
    """For Store's `more_tiers`."""

    name = SHARED

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        keys: SharedKeys,
        namespace: bytes,
        where: str,
        chunk_tokens: int,
        deadline_s: float,
        directory: Path | None,
        bandwidth: int | None = None,
        daily_writes: int | None = None,
        pause_s: float = PAUSE_S,
        put_quotas: Mapping[bytes, int] | None = None,
        tenants: Mapping[bytes, str] | None = None,
    ) -> None:
        """Args: put_quotas: see SharedTier. tenants: those that have one, by the operator's
        names."""
        self.keys = keys
        self._tier = partial(
            SharedTier, chunk_tokens=chunk_tokens, pause_s=pause_s, put_quotas=put_quotas
        )
        self._io = partial(
            SharedIo,
            settings=settings,
            keys=keys,
            namespace=namespace,
            where=where,
            deadline_s=deadline_s,
            directory=directory,
            tenants=tenants or {},
            write_rates={
                BANDWIDTH_BURST_S: bandwidth,
                DAILY_BURST_S: daily_writes / 86_400 if daily_writes else None,
            },
        )

    def tier(
        self, policy: Callable[[int], Departures], dram: DramTier, look_ahead: LookAhead[Chunk]
    ) -> SharedTier:
        return self._tier(policy, dram, look_ahead)

    def io(self, context: Context, tier: TierBehind) -> SharedIo:
        assert isinstance(tier, SharedTier)
        return self._io(context, tier)


def make_shared(
    shared: SharedConfig,
    chunk_tokens: int,
    namespace: bytes,
    directory: Path,
    *,
    slot_bytes: int,
    quotas: Mapping[bytes, Quota],
) -> MakeShared:
    """Raises ConfigError if the password or the secret cannot be read.

    Args:
        slot_bytes: of a payload.
        quotas: by tenant.
    """
    if shared.secret_file is None:
        logger.warning("shared: there is no secret: %s", without_secret(shared))
    return MakeShared(
        shared.for_client(),
        keys=SharedKeys.of_file(shared.secret_file, shared.prefix),
        namespace=namespace,
        where=shared.where,
        chunk_tokens=chunk_tokens,
        deadline_s=shared.deadline_ms / 1000,
        directory=directory,
        bandwidth=shared.bandwidth_bytes,
        daily_writes=shared.daily_writes_bytes,
        put_quotas={
            tenant: slots_of(quota.shared, 0, HEADER_BYTES + slot_bytes)
            for tenant, quota in quotas.items()
            if quota.shared is not None
        },
        tenants={tenant: quota.name for tenant, quota in quotas.items()},
    )


def try_store(shared: SharedConfig) -> float:
    """Seconds of one question to the store. Raises ConfigError, DeviceError."""
    check_client(shared)
    helper = Helper(shared.for_client(), Lanes(4096, 2, 1))
    try:
        helper.start()
        helper.read(TRIAL_NAME, shared.deadline_ms / 1000)
        begun_at = time.monotonic()
        helper.read(TRIAL_NAME, shared.deadline_ms / 1000)
        return time.monotonic() - begun_at
    finally:
        helper.close()
