# SPDX-License-Identifier: Apache-2.0
"""A KV cache of several groups, as vLLM has it, in small; and an oracle that knows all its bytes.

Blocks of all groups are drawn from one pool. Their tables are positional, with the null block, 0,
where nothing is: before a window, before a local chunk, before the last state. Nothing here knows
how the store names or cuts what it keeps: which tokens a layer may see is written down once more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from attnstore_lab.sim.hbm import BlockPool
from attnstore_vllm.transfer.geometry import Geometry, Group

CHUNK_TOKENS = 64
ENTRY_BYTES = 16
"""Of the KV of one token in one group."""
BLOCK_BYTES = 512
"""A physical block has room for 32 tokens; groups with fewer leave the rest of it alone."""

Bytes = npt.NDArray[np.uint8]


def model(*groups: tuple[str, int, int], spine_at: int = 0) -> tuple[Group, ...]:
    """Groups with the spine first: it has blocks of 16 tokens.

    Args:
        groups: beside the spine: reach, its tokens, and tokens a block.
        spine_at: the spine's number among vLLM's groups.
    """
    numbers = [n for n in range(len(groups) + 1) if n != spine_at]
    return (
        Group(16, ("spine",), spine_at),
        *(
            Group(block_tokens, (f"beside {number}",), number, reach, tokens)
            for number, (reach, tokens, block_tokens) in zip(numbers, groups, strict=True)
        ),
    )


MODELS = {
    "window": model(("window", 40, 16)),
    "small blocks": model(("window", 70, 8), spine_at=1),
    "local": model(("local", 32, 16)),
    "wide local": model(("local", 128, 32), spine_at=1),
    "state": model(("state", 0, 32)),
    "state of a chunk": model(("state", 0, 64), spine_at=1),
    "two windows": model(("window", 24, 8), ("window", 100, 32), spine_at=1),
    "window and local": model(("window", 33, 16), ("local", 64, 16), spine_at=2),
    "window and state": model(("window", 24, 16), ("state", 0, 32), spine_at=1),
    "two states": model(("state", 0, 32), ("state", 0, 32), spine_at=2),
    "short window": model(("window", 10, 4), spine_at=1),
    "full and window": model(("full", 0, 32), ("window", 48, 16)),
}


def geometry_of(groups: tuple[Group, ...]) -> Geometry:
    return Geometry(1, (BLOCK_BYTES,), groups, CHUNK_TOKENS)


def first_seen(group: Group, position: int) -> int:
    """The first token that this group's layers look at when they compute the one at `position`."""
    if group.reach == "window":
        return max(0, position - group.reach_tokens + 1)
    if group.reach == "local":
        return position - position % group.reach_tokens
    return 0


class Truth:
    """Every byte that the KV of a sequence must have. All of them depend on all tokens before, and
    on the weights, of which there is an edition after each reset."""

    def __init__(self, tokens: list[int], edition: int) -> None:
        self._tokens = tokens
        self._last = edition.to_bytes(15, "little")
        self._entries: list[bytes] = []

    def _rows(self, start: int, stop: int, kind: int) -> Bytes:
        for token in self._tokens[len(self._entries) : stop]:
            self._last = blake3(self._last + token.to_bytes(4, "little")).digest(length=15)
            self._entries.append(self._last)
        rows = b"".join(entry + bytes([kind]) for entry in self._entries[start:stop])
        return np.frombuffer(rows, np.uint8).reshape(-1, ENTRY_BYTES)

    def kv(self, group: Group, start: int, stop: int) -> Bytes:
        """KV of tokens [start, stop): a row each."""
        return self._rows(start, stop, group.number)

    def state(self, group: Group, stop: int) -> Bytes:
        """The state after `stop` tokens: a whole block."""
        row = self._rows(stop - 1, stop, 128 + group.number)[0]
        return np.tile(row, BLOCK_BYTES // ENTRY_BYTES)


@dataclass(slots=True)
class GroupMemory:
    """vLLM's KVCacheManager, and the memory behind it.

    Args:
        groups: the spine first. Tables are handed out in the order of their numbers.
    """

    groups: tuple[Group, ...]
    num_blocks: int
    random: Random
    memory: Bytes = field(init=False)
    tables: dict[str, list[list[int]]] = field(init=False, default_factory=dict)
    """In the order of `groups`."""
    fresh: list[int] = field(init=False, default_factory=list)
    """Blocks of attention that were given out since the last step."""
    block_pool: Any = field(init=False)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.zeros((self.num_blocks + 1, BLOCK_BYTES), np.uint8)
        self._free = list(range(1, self.num_blocks + 1))
        self.block_pool = BlockPool(16, OrderedDict(), lambda: len(self._free))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """As vLLM gives them."""
        tables = self.tables[request_id]
        places = sorted(range(len(tables)), key=lambda place: self.groups[place].number)
        return tuple(list(tables[place]) for place in places)

    def kinds_of(self, request_id: str) -> dict[int, str]:
        """Of each block of the request, how far its group looks back."""
        return {
            block: group.reach
            for group, table in zip(self.groups, self.tables[request_id], strict=True)
            for block in table
        }

    def forget_before(self, request_id: str, computed: int) -> None:
        """Take back the blocks that nothing looks at any more, once so many are computed."""
        for group, table in zip(self.groups, self.tables[request_id], strict=True):
            for i in range(min(_skipped(group, computed), len(table))):
                if table[i]:
                    self._free.append(table[i])
                table[i] = 0

    def grow(self, request_id: str, computed: int, stop: int, *, is_ahead: bool = False) -> bool:
        """Room for tokens up to `stop`, of which `computed` are there or will be loaded."""
        tables = self.tables.setdefault(request_id, [[] for _ in self.groups])
        self.forget_before(request_id, computed)
        wanted: list[tuple[int, int]] = []
        for place, group in enumerate(self.groups):
            first, end = _skipped(group, computed), -(-stop // group.block_tokens)
            indices = {*range(first, end)}
            if group.reach == "state":
                indices = {end - 1} | ({first} if computed else set())
            held = tables[place]
            wanted += [(place, i) for i in sorted(indices) if i >= len(held) or not held[i]]
        if len(wanted) > len(self._free):
            return False
        for place, index in wanted:
            table = tables[place]
            table += [0] * (index + 1 - len(table))
            table[index] = block = self._free.pop(self.random.randrange(len(self._free)))
            if not is_ahead and self.groups[place].reach != "state":
                self.fresh.append(block)
        return True

    def give_back(self, request_id: str) -> None:
        tables = self.tables.pop(request_id, [])
        self._free += [block for table in tables for block in table if block]

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    # ---- bytes -------------------------------------------------------------------------

    def fill(self, request_id: str, truth: Truth, start: int, stop: int) -> None:
        """Write the KV of tokens [start, stop), where there are blocks for it, and the state."""
        for group, table in zip(self.groups, self.tables[request_id], strict=True):
            if group.reach == "state":
                block = table[(stop - 1) // group.block_tokens]
                if block:
                    self.memory[block] = truth.state(group, stop)
                continue
            blocks, within = _places(group, table, start, stop)
            rows = truth.kv(group, start, stop)
            there = blocks > 0
            self._entries()[blocks[there], within[there]] = rows[there]

    def move_states(self, request_id: str, start: int, stop: int) -> None:
        """Before a step computes [start, stop): its state begins as that of the block before."""
        for group, table in zip(self.groups, self.tables[request_id], strict=True):
            source, target = (start - 1) // group.block_tokens, (stop - 1) // group.block_tokens
            if group.reach == "state" and start and source != target:
                self.memory[table[target]] = self.memory[table[source]]

    def check(self, request_id: str, truth: Truth, start: int, stop: int, where: str) -> None:
        """What the layers of every group see when a step computes [start, stop) is right."""
        if start == 0:
            return
        for group, table in zip(self.groups, self.tables[request_id], strict=True):
            if group.reach == "state":
                block = table[(stop - 1) // group.block_tokens]
                right = truth.state(group, start)
                assert (self.memory[block] == right).all(), f"{where}: wrong state at {start}"
                continue
            first = first_seen(group, start)
            if first == start:
                continue
            blocks, within = _places(group, table, first, start)
            kind = f"group {group.number} ({group.reach})"
            assert blocks.all(), f"{where}: {kind} has no block for a token before {start}"
            right = truth.kv(group, first, start)
            wrong = (self._entries()[blocks, within] != right).any(axis=1)
            assert not wrong.any(), f"{where}: {kind}: wrong KV at {first + int(wrong.argmax())}"

    def _entries(self) -> Bytes:
        return self.memory.reshape(len(self.memory), -1, ENTRY_BYTES)


def _skipped(group: Group, computed: int) -> int:
    """Leading blocks that nothing looks at when the token after so many is computed."""
    if group.reach == "state":
        return max(0, computed - 1) // group.block_tokens
    return first_seen(group, computed) // group.block_tokens


def _places(
    group: Group, table: list[int], start: int, stop: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each token, its block, 0 where there is none, and its place within."""
    tokens = np.arange(start, stop)
    ends = np.array([*table, 0], np.int64)
    index = np.minimum(tokens // group.block_tokens, len(table))
    return ends[index], tokens % group.block_tokens
