# SPDX-License-Identifier: Apache-2.0
"""Keys for a trace's chunks. A trace has no tokens: all tokens of a chunk are its number."""

from __future__ import annotations

from collections.abc import Sequence

from attnstore_vllm.index.keys import SequenceKeys, chunk_key, root_key
from attnstore_vllm.types import TOKEN_BYTES, Key

_ROOT = root_key(b"simulated", None, b"")


class TraceKeys(SequenceKeys):
    """See SequenceKeys.

    Args:
        numbers: of the chunks; equal ones have equal chunks before them.
        num_tokens: that they stand for; all are whole but the last.
        known: keys by chunk number, shared by all requests of a trace.
    """

    def __init__(
        self, numbers: Sequence[int], num_tokens: int, chunk_tokens: int, known: dict[int, Key]
    ) -> None:
        super().__init__(_ROOT, range(num_tokens), chunk_tokens)
        self._numbers = numbers
        self._known = known

    def key(self, chunk: int) -> Key:
        for i in range(len(self._keys), chunk + 1):
            number = self._numbers[i]
            tokens = number.to_bytes(TOKEN_BYTES, "big") * self.chunk_tokens
            key = self._known.get(number)
            if key is None:
                key = self._known[number] = chunk_key(self.parent(i), b"", tokens)
            self._keys.append(key)
            self._chunks.append(tokens)
        return self._keys[chunk]

    def tokens(self, start: int, stop: int) -> bytes:
        assert stop <= len(self.token_ids)
        size, parts = self.chunk_tokens, []
        while start < stop:
            number, end = start // size, min(stop, start // size * size + size)
            parts.append(self._numbers[number].to_bytes(TOKEN_BYTES, "big") * (end - start))
            start = end
        return b"".join(parts)
