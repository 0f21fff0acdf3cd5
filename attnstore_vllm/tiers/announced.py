# SPDX-License-Identifier: Apache-2.0
"""Books of what routers are told: which whole blocks are in which tier, as vLLM's KV events say it.

vLLM names blocks, the store keeps chunks. A block may be in several chunks of one tier: tails, and
chunks that part inside. A router is to hear of each block once when it comes and once when it goes:
so they are counted.

What is to be told is no list of events, but the chunks whose tiers are not as they were told. So
it cannot outgrow the store: what comes and goes before it was told is never told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.types import DRAM, NVME, Key

_BITS = {DRAM: 1, NVME: 2}
Name = int | bytes
"""A block, as events name it."""


@dataclass(frozen=True, slots=True)
class NamedBlocks:
    """The whole blocks of one chunk, from its first token on."""

    names: tuple[Name, ...]
    parent: Name | None
    """The block before them."""
    tokens: bytes
    """All their token ids, encoded."""
    last: bytes
    """The whole hash of the last one: that of the next chunk's first block continues it."""
    like: Any = None
    """Keys that name them beside their tokens, for who makes the events; None: there are none."""


class Stored(NamedTuple):
    """NamedBlocks that have come to a tier: those of a chunk from number `first` on."""

    tier: str
    blocks: NamedBlocks
    first: int


class Removed(NamedTuple):
    """NamedBlocks that have left a tier."""

    tier: str
    names: tuple[Name, ...]


@dataclass(slots=True, eq=False)
class _Entry:
    blocks: NamedBlocks
    now: int = 0
    """Bits of the tiers that have it."""
    told: int = 0
    is_coming: bool = False
    """It is being saved."""


class Change(NamedTuple):
    """A chunk that is to be told of: the tiers that it was told to be in, and those it is in."""

    blocks: NamedBlocks
    told: int
    now: int


def media_of(chunk: Chunk) -> int:
    """Bits of the tiers that have the chunk READY."""
    in_dram = chunk.dram.state is State.READY
    return _BITS[DRAM] * in_dram + _BITS[NVME] * (chunk.at(NVME).state is State.READY)


class Announced:
    """See the module. tell() and forget_told() are for one thread, all else for who has the lock.

    A chunk that was given no names is not told of.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._changed: dict[Key, None] = {}
        self._counts: dict[int, dict[Name, int]] = {bit: {} for bit in _BITS.values()}
        """By tier: in how many chunks a router was told that it has the block."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_changed(self) -> int:
        return len(self._changed)

    def keys(self) -> list[Key]:
        return list(self._entries)

    def named(self, key: Key) -> NamedBlocks | None:
        entry = self._entries.get(key)
        return entry.blocks if entry is not None else None

    # ---- what the store does -----------------------------------------------------------

    def name(self, key: Key, blocks: NamedBlocks) -> None:
        """The chunk is being saved, and has these blocks."""
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(blocks, is_coming=True)
            return
        entry.is_coming = True
        if not entry.told:  # else it is told to be gone under the names it had
            entry.blocks = blocks

    def at(self, chunk: Chunk) -> None:
        """The state of a chunk that is found has changed."""
        key = chunk.name.key
        entry = self._entries.get(key)
        now = 0 if entry is None else media_of(chunk)
        if entry is not None and entry.now != now:
            self._set(key, entry, now)

    def gone(self, key: Key) -> None:
        """The chunk is not found any more."""
        entry = self._entries.get(key)
        if entry is not None:
            self._set(key, entry, 0)

    def lose(self, tier: str) -> None:
        """The tier has nothing any more. Cost: all chunks."""
        bits = _BITS.get(tier, 0)  # what others keep was not told
        for key, entry in list(self._entries.items()):
            if entry.now & bits:
                self._set(key, entry, entry.now & ~bits)

    def clear(self) -> None:
        """No chunk is found any more. Cost: all chunks."""
        for key, entry in list(self._entries.items()):
            self._set(key, entry, 0)

    def _set(self, key: Key, entry: _Entry, now: int) -> None:
        entry.now, entry.is_coming = now, False
        self._place(key, entry)

    def _place(self, key: Key, entry: _Entry) -> None:
        """Is there something to tell of it, and does it stay?"""
        if entry.now != entry.told:
            self._changed[key] = None
            return
        self._changed.pop(key, None)
        if not (entry.now or entry.is_coming):
            del self._entries[key]

    # ---- what routers are told ---------------------------------------------------------

    def take_changes(self, limit: int) -> list[Change]:
        """Chunks that are to be told of, `limit` at most. The caller tells of them."""
        changes: list[Change] = []
        while self._changed and len(changes) < limit:
            key = next(iter(self._changed))
            entry = self._entries[key]
            changes.append(Change(entry.blocks, entry.told, entry.now))
            entry.told = entry.now
            self._place(key, entry)
        return changes

    def tell(self, change: Change) -> Iterator[Stored | Removed]:
        """Words for a change: first what has come, so that nothing seems to be away between
        two tiers. Needs no lock: no other thread looks at the counts."""
        blocks, told, now = change
        names = blocks.names
        for tier, bit in _BITS.items():
            if now & bit and not told & bit:
                num_new = sum(self._add(bit, name) for name in names)
                # Chunks that share a block share all before it, so the new ones are the last.
                if num_new:
                    yield Stored(tier, blocks, len(names) - num_new)
        for tier, bit in _BITS.items():
            if told & bit and not now & bit:
                left = tuple(name for name in names if self._take(bit, name))
                if left:
                    yield Removed(tier, left)

    def _add(self, bit: int, name: Name) -> bool:
        """Whether the tier did not have the block."""
        counts = self._counts[bit]
        counts[name] = count = counts.get(name, 0) + 1
        return count == 1

    def _take(self, bit: int, name: Name) -> bool:
        """Whether the tier has the block no more."""
        counts = self._counts[bit]
        counts[name] -= 1
        if counts[name]:
            return False
        del counts[name]
        return True

    def forget_told(self) -> None:
        """Routers have forgotten all: everything is to be told again. Cost: all chunks."""
        for counts in self._counts.values():
            counts.clear()
        for key, entry in list(self._entries.items()):
            entry.told = 0
            self._place(key, entry)
