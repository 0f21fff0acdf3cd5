# SPDX-License-Identifier: Apache-2.0
"""The secret of a group of servers, and what is made with it: names, seals, digests of payloads.

With a secret, a stranger who reads and writes the store can neither make a record that is taken
for ours nor test a guess of a prompt by its name. Without one the keys are known to all: a seal
then finds damage, and no forger. KV is encrypted in neither case.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from attnstore_vllm.config.secret_files import read_secret_file
from attnstore_vllm.config.shared import PREFIX
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.io.checksum import checksum, copy_checksums

SECRET_BYTES_MIN, SECRET_BYTES_MAX = 32, 4096
SEAL_BYTES = 32
_CONTEXT = "attnstore_vllm 2026-11-28 shared tier: "
"""The beginning of each key's context, by the rules of BLAKE3's derive_key: it never changes."""


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys of 32 bytes, one for each use. None is in a repr, a log or the child process."""

    is_secret: bool
    _names: bytes = field(repr=False)
    _seals: bytes = field(repr=False)
    _payloads: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes | None, prefix: str = PREFIX) -> SharedKeys:
        """Args:
        secret: None: there is none, and anyone can make the same keys.
        prefix: of the group's names. Groups of one secret with another prefix are told apart: what
            one has written, put under a name of the other's, is forged there.
        """

        def derived(use: str) -> bytes:
            key = blake3(secret or b"", derive_key_context=_CONTEXT + use).digest()
            return key if prefix == PREFIX else blake3(prefix.encode(), key=key).digest()

        return cls(secret is not None, derived("names"), derived("seals"), derived("payloads"))

    @classmethod
    def of_file(cls, path: Path | None, prefix: str = PREFIX) -> SharedKeys:
        """Cost: the file is read. Raises ConfigError."""
        return cls.of(None if path is None else read_secret(path), prefix)

    def name(self, *parts: bytes) -> bytes:
        """A hash of 32 bytes. All uses with one first part have parts of the same lengths."""
        return blake3(b"".join(parts), key=self._names).digest()

    def seal(self, *parts: bytes) -> bytes:
        """A MAC of SEAL_BYTES. As for names."""
        return blake3(b"".join(parts), key=self._seals).digest()

    def is_seal(self, given: bytes, *parts: bytes) -> bool:
        """In a time that says nothing about where they differ."""
        return hmac.compare_digest(given, self.seal(*parts))

    def digest(self, payload: memoryview) -> bytes:
        """A payload as its seal has it. The GIL is released. Cost: a core for 2 to 4 GB/s with
        a secret (docs/notes/2026-11-remote-tiers.md); without one XXH3-128, a third of it."""
        if not self.is_secret:
            return checksum(payload)
        return blake3(payload, key=self._payloads).digest()

    def copy_digests(
        self, copies: Sequence[tuple[memoryview, Sequence[memoryview]]]
    ) -> list[bytes]:
        """Fill each first buffer, as copy_checksums() does. Returns the digest of each copy: what
        was copied may change meanwhile."""
        checksums = copy_checksums(copies)
        return [self.digest(to) for to, _ in copies] if self.is_secret else checksums

    @property
    def not_ours(self) -> str:
        """Why a seal is not what it should be. Never the right one: it would help a forger."""
        if self.is_secret:
            return "damaged, forged or another secret's"
        return "damaged, or another record's"


def read_secret(path: Path) -> bytes:
    """The secret in a file: all its bytes but white space at its ends. Raises ConfigError."""
    what = f"shared.secret_file is {str(path)!r}, which"
    secret = read_secret_file(path, what, "secret", SECRET_BYTES_MAX)
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ConfigError(
            f"{what} has a secret of {len(secret)} bytes; it must have {SECRET_BYTES_MIN} to "
            f"{SECRET_BYTES_MAX}, as `openssl rand -hex 32` writes them"
        )
    return secret
