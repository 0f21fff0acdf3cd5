# SPDX-License-Identifier: Apache-2.0
"""Chunks that wait for being written back, in the order they came. Bounded."""

from __future__ import annotations

from attnstore_vllm.index.chunk import Chunk, Dram, Nvme


class DirtyQueue:
    """What was evicted or dropped since it came is passed over, and does not pile up.

    Args:
        limit: chunks that can be dirty at a time: the slots of DRAM.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._oldest_first: dict[Chunk, None] = {}

    def __len__(self) -> int:
        """At most twice the limit."""
        return len(self._oldest_first)

    def add(self, chunk: Chunk) -> None:
        if len(self._oldest_first) >= 2 * self._limit:
            self._oldest_first = {c: None for c in self._oldest_first if _is_dirty(c)}
        self._oldest_first[chunk] = None

    def next(self, *, newest_first: bool) -> Chunk | None:
        """The chunk to write next; it stays until remove()."""
        while self._oldest_first:
            queue = self._oldest_first
            chunk = next(reversed(queue) if newest_first else iter(queue))
            if _is_dirty(chunk):
                return chunk
            del queue[chunk]
        return None

    def remove(self, chunk: Chunk) -> None:
        del self._oldest_first[chunk]

    def clear(self) -> None:
        self._oldest_first.clear()


def _is_dirty(chunk: Chunk) -> bool:
    return not chunk.dropped and chunk.dram is Dram.READY and chunk.nvme is Nvme.ABSENT
