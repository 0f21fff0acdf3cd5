# SPDX-License-Identifier: Apache-2.0
"""Records of the shared tier: what lies in a network store under one name.

    name    tag of the tenant; hash of the namespace, the generation, the chunk's key and the format
    record  header of 128 bytes, payload

Everybody in that network may read a record, and whoever can write may write anything. So a record
has neither token ids nor a tenant's name, and nothing of it is believed before it was verified in
memory that is ours alone. The tag is a hash of the salt: by it a tenant's records can be deleted,
and whoever lists the store sees which belong together.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from blake3 import blake3

from attnstore_vllm.errors import CorruptRecordError
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.io.device import CHECKSUM_BYTES

if TYPE_CHECKING:
    from attnstore_vllm.index.chunk import ChunkName

MAGIC = b"ASSHARED"
VERSION = 1
"""Raise it whenever the bytes of a record mean something else. It is in the name, too."""
NAME_BYTES = 32
TAG_BYTES = 8
"""The first bytes of a name. The rest, 24 bytes of a hash, is what tells records apart."""
PAGE_BYTES = 4096

_HEADER = struct.Struct("<8sIIQQ32s32s16s16s")
"""Magic, version, size of the header, size of the payload, tokens, namespace, key, checksum of the
payload, checksum of all before."""
HEADER_BYTES = _HEADER.size
HEADER_AT = PAGE_BYTES - HEADER_BYTES
"""The start of a record in its place in a bounce buffer: so its payload begins with a page."""


def place_bytes(payload_bytes: int) -> int:
    """The bytes that a record takes of a bounce buffer: whole pages."""
    return PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


@lru_cache(maxsize=1024)
def tenant_tag(tenant: bytes) -> bytes:
    """The beginning of the names of a tenant's records, in all namespaces and generations.

    Args:
        tenant: its hash (index/keys.py: tenant_hash).
    """
    return blake3(b"attnstore shared tenant" + tenant).digest()[:TAG_BYTES]


@dataclass(frozen=True, slots=True)
class RecordNames:
    """RecordNames of one namespace in one generation (shared_generation.py)."""

    namespace: bytes
    generation: bytes

    def of(self, key: bytes, tenant: bytes) -> bytes:
        """Args: tenant: the hash of the salt that `key` has in it."""
        parts = (b"attnstore shared", VERSION.to_bytes(4, "big"), self.namespace, self.generation)
        digest = blake3(b"".join((*parts, key))).digest()
        return tenant_tag(tenant) + digest[: NAME_BYTES - TAG_BYTES]


def seal(name: ChunkName, namespace: bytes, payload_bytes: int, payload_checksum: bytes) -> bytes:
    """The header of a record. The checksum is of the payload in memory that is ours alone."""
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        payload_bytes,
        name.num_tokens,
        namespace,
        name.key,
        payload_checksum,
        bytes(CHECKSUM_BYTES),
    )
    body = header[:-CHECKSUM_BYTES]
    return body + checksum(body)


def check_header(header: bytes, name: ChunkName, namespace: bytes, payload_bytes: int) -> bytes:
    """The checksum that the payload must have. Raises CorruptRecordError.

    Args:
        header: a copy that nobody else can write.
    """
    where = "shared tier"
    body, digest = header[:-CHECKSUM_BYTES], header[-CHECKSUM_BYTES:]
    magic, version, size, payload, tokens, space, key, payload_checksum, _ = _HEADER.unpack(header)
    for field, want, got in (
        ("magic", MAGIC, magic),
        ("version", VERSION, version),
        ("header", HEADER_BYTES, size),
        ("checksum", checksum(body).hex(), digest.hex()),
        ("namespace", namespace.hex(), space.hex()),
        ("key", bytes(name.key).hex(), key.hex()),
        ("size", payload_bytes, payload),
        ("tokens", name.num_tokens, tokens),
    ):
        if want != got:
            raise CorruptRecordError(where, field, want, got)
    return bytes(payload_checksum)
