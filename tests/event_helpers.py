# SPDX-License-Identifier: Apache-2.0
"""A router in small: it rebuilds from events which blocks each tier has, and accepts no slip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from blake3 import blake3

from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import root_key
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.announced import Name, NamedBlocks, Removed, Stored
from attnstore_vllm.types import DRAM, NVME, TOKEN_BYTES, Key
from tests.helpers import NAMESPACE

BLOCK_TOKENS = 4
Content = dict[str, set[Name]]


class TestTeller:
    """Names blocks by a chain of hashes, as vLLM does, and tells of them as they are."""

    __test__ = False

    def root(self) -> Key:
        return root_key(NAMESPACE, None, b"")

    def blocks(self, parent: bytes | None, tokens: bytes) -> NamedBlocks:
        size, names, last = BLOCK_TOKENS * TOKEN_BYTES, [], parent or b""
        whole = len(tokens) // size * size
        for start in range(0, whole, size):
            last = blake3(last + tokens[start : start + size]).digest()
            names.append(_short(last))
        return NamedBlocks(tuple(names), _short(parent) if parent else None, tokens[:whole], last)

    def event(self, what: Stored | Removed) -> Stored | Removed:
        return what


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


class Subscriber:
    """What a router knows of one engine. Each block comes once and goes once."""

    def __init__(self) -> None:
        self.content: Content = {DRAM: set(), NVME: set()}
        self.parents: dict[Name, Name | None] = {}
        self.tokens: dict[Name, bytes] = {}
        self.num_heard = 0

    def hear(self, events: Iterable[Any]) -> None:
        for event in events:
            self.num_heard += 1
            if isinstance(event, Removed):
                self.removed(event.tier, event.names)
                continue
            blocks, first = event.blocks, event.first
            parent = blocks.names[first - 1] if first else blocks.parent
            size = BLOCK_TOKENS * TOKEN_BYTES
            tokens = [
                blocks.tokens[i * size : (i + 1) * size] for i in range(first, len(blocks.names))
            ]
            self.stored(event.tier, blocks.names[first:], parent, tokens)

    def stored(
        self, tier: str, names: Iterable[Name], parent: Name | None, tokens: list[bytes]
    ) -> None:
        for name, of_block in zip(names, tokens, strict=True):
            assert name not in self.content[tier], f"{name!r} came to {tier} twice"
            assert self.parents.setdefault(name, parent) == parent, "another block before it"
            assert self.tokens.setdefault(name, of_block) == of_block, "other tokens"
            self.content[tier].add(name)
            parent = name

    def removed(self, tier: str, names: Iterable[Name]) -> None:
        for name in names:
            assert name in self.content[tier], f"{name!r} left {tier}, where it was not"
            self.content[tier].remove(name)

    def all_cleared(self) -> None:
        for names in self.content.values():
            names.clear()


def content_of(store: Store, names: dict[Key, tuple[Name, ...]]) -> Content:
    """NamedBlocks that the store has, of the chunks with these names."""
    found: defaultdict[str, set[Name]] = defaultdict(set)
    with store.queue():
        for chunk in store.residency.index:
            blocks = names.get(chunk.name.key, ())
            if chunk.dram.state is State.READY:
                found[DRAM].update(blocks)
            if chunk.at(NVME).state is State.READY:
                found[NVME].update(blocks)
    return {tier: found[tier] for tier in (DRAM, NVME)}
