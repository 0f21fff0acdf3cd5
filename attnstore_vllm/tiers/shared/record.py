# SPDX-License-Identifier: Apache-2.0
"""Records of the shared tier: what lies in a network store under one name.

    name    tag of the tenant; hash of the namespace, the generation, the chunk's key and the format
    record  header of 64 bytes, payload

All in that network may read a record, and one that can write may write anything. So a record
has neither token ids, a key nor a tenant's name, and nothing of it is believed before it was
verified in memory that is ours alone. Its seal is over its name, all that the name stands for, the
header and the payload. Names and seals are made with the servers' secret (secret.py).

The tag is a hash of the salt: by it a tenant's records can be deleted, and a reader of the names
sees which belong together.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.tiers.shared.secret import SEAL_BYTES, SharedKeys

if TYPE_CHECKING:
    from attnstore_vllm.index.chunk import ChunkName

MAGIC = b"ASSHARED"
VERSION = 2
"""Raise it whenever the bytes of a record mean something else. It is in the name, too."""
NAME_BYTES = 32
TAG_BYTES = 8
"""The first bytes of a name. The rest, 24 bytes of a hash, is what tells records apart."""
PAGE_BYTES = 4096

_HEAD = struct.Struct("<8sIIQQ")
"""Magic, version, size of the header, size of the payload, tokens. The seal follows."""
HEADER_BYTES = _HEAD.size + SEAL_BYTES
HEADER_AT = PAGE_BYTES - HEADER_BYTES
"""The start of a record in its place in a bounce buffer: so its payload begins with a page."""


def place_bytes(payload_bytes: int) -> int:
    """The bytes that a record takes of a bounce buffer: whole pages."""
    return PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


@lru_cache(maxsize=1024)
def tenant_tag(tenant: bytes, keys: SharedKeys) -> bytes:
    """The beginning of the names of a tenant's records, in all namespaces and generations.

    Args:
        tenant: its hash (index/keys.py: tenant_hash).
    """
    return keys.name(b"attnstore shared tenant", tenant)[:TAG_BYTES]


@dataclass(frozen=True, slots=True)
class RecordNames:
    """Names and seals of one namespace's records in one generation (shared_generation.py)."""

    namespace: bytes
    generation: bytes
    keys: SharedKeys

    def of(self, key: bytes, tenant: bytes) -> bytes:
        """Args: tenant: the hash of the salt that `key` has in it."""
        version = VERSION.to_bytes(4, "big")
        digest = self.keys.name(b"attnstore shared", version, self.namespace, self.generation, key)
        return tenant_tag(tenant, self.keys) + digest[: NAME_BYTES - TAG_BYTES]

    def header(self, name: bytes, chunk: ChunkName, payload_bytes: int, digest: bytes) -> bytes:
        """The header of a record.

        Args:
            name: under which it lies.
            digest: of the payload in memory that is ours alone (SharedKeys.digest).
        """
        head = _HEAD.pack(MAGIC, VERSION, HEADER_BYTES, payload_bytes, chunk.num_tokens)
        seal = self.keys.seal(
            b"attnstore shared record",
            self.namespace,
            self.generation,
            name,
            chunk.key,
            head,
            digest,
        )
        return head + seal

    def check(
        self, found: bytes, name: bytes, chunk: ChunkName, payload_bytes: int, digest: bytes
    ) -> None:
        """See that a record's header is the one that it must have. Raises CorruptRecordError.

        Args:
            found: a copy that no other process can write; `digest` is of one too.
        """
        if not hmac.compare_digest(found, self.header(name, chunk, payload_bytes, digest)):
            want = "one by this server's secret" if self.keys.is_secret else "that of its bytes"
            raise CorruptRecordError("shared tier", "seal", want, self.keys.not_ours)
