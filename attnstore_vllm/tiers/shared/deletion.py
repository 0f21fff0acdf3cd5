# SPDX-License-Identifier: Apache-2.0
"""Deletion of one tenant's records from the shared tier, in all namespaces and generations.

Their names begin alike (record.py). Run by a command and by no server: a look at all names of a
store takes longer than a request may wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from attnstore_vllm.config.shared import SharedConfig
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.tiers.shared.backend import Backend, BackendError, open_backend
from attnstore_vllm.tiers.shared.record import tenant_tag
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.start import check_client

COMMAND_S = 60.0
"""For each command to Redis."""
MASTER_S = 5.0
"""For each of the calls that Mooncake's client makes of one; it makes up to 20."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """Records of a tenant that go, or are gone."""

    where: str
    is_done: bool
    records: int | None
    """None: the store cannot say before it deletes."""
    bytes: int | None
    left: int | None = None
    """Records that are there afterwards: written meanwhile. None: the store cannot say."""

    def as_json(self) -> dict[str, Any]:
        return {
            "store": self.where,
            "deleted": self.is_done,
            "records": self.records,
            "bytes": self.bytes,
            "left": self.left,
        }


def delete_tenant(shared: SharedConfig, salt: str, *, is_dry: bool) -> Deletion:
    """Find a tenant's records, and delete them unless `is_dry`.

    Args:
        shared: with the servers' secret, if they have one: without it names are others.
        salt: the cache_salt of its requests.
    Raises: ConfigError; DeviceError if the store cannot be asked, or does not let us.
    """
    check_client(shared)
    keys = SharedKeys.of_file(shared.secret_file, shared.prefix)
    prefix = shared.prefix + tenant_tag(tenant_hash(salt), keys).hex()
    with _opened(shared) as backend:
        found = backend.count(prefix)
        records, num_bytes = found if found is not None else (None, None)
        if is_dry:
            return Deletion(shared.where, is_done=False, records=records, bytes=num_bytes)
        removed = backend.remove(prefix)
        after = backend.count(prefix)
        left = after[0] if after is not None else None
        return Deletion(shared.where, is_done=True, records=removed, bytes=num_bytes, left=left)


@contextmanager
def _opened(shared: SharedConfig) -> Iterator[Backend]:
    # For Mooncake's client, which is loaded below. A server's 0.3 s are too short for this.
    os.putenv("MC_LOG_LEVEL", "ERROR")
    os.putenv("MC_RPC_TIMEOUT_MS", str(int(1000 * MASTER_S)))
    settings = shared.for_client()
    settings[shared.kind]["timeout_s"] = COMMAND_S
    try:
        backend = open_backend(settings, None, {})
        try:
            yield backend
        finally:
            backend.close()
    except BackendError as error:
        raise DeviceError(f"{shared.where}: {error}") from error
