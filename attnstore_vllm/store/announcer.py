# SPDX-License-Identifier: Apache-2.0
"""KV events: tells routers which blocks DRAM and NVMe have, on the store's thread.

The books are tiers/announced.py. Events are made here, a few in each tick, and wait for the next
step of the engine, which takes them along: vLLM publishes in steps alone.

After a restart the chunks that recovery has found are named again: the hash of a block follows from
the one before it and from its tokens, which are in the record's header. That goes for text without
salt or adapter. What else a block was named by, no record says: so it is not told of.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Protocol

from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.policy.budget import Budget
from attnstore_vllm.tiers.announced import Announced, NamedBlocks, Removed, Stored, media_of
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.nvme.format import chunk_names
from attnstore_vllm.types import Key

logger = logging.getLogger(__name__)

CHANGES_A_TURN = 64
"""Chunks that one tick tells of: about a millisecond, in which the engine may want the GIL."""
READY_MAX = 4096
"""Events that wait for a step. Beyond, changes wait in the books, where they do not pile up."""
NAMED_A_TURN = 32
NAMED_PER_S = 2000.0
"""Recovered chunks that are named, and so told of, in a second."""
NAMED_BURST_S = 0.05


class Teller(Protocol):
    """Makes the events, and names blocks as vLLM does (connector/kv_events.py)."""

    def root(self) -> Key | None:
        """The parent of first chunks that are named by their tokens alone; None: not known yet."""

    def blocks(self, parent: bytes | None, tokens: bytes) -> NamedBlocks:
        """The blocks with these tokens behind the block with this hash."""

    def event(self, what: Stored | Removed) -> Any: ...


class Announcer:
    """See the module."""

    def __init__(self, context: Context, teller: Teller) -> None:
        self._context = context
        self._teller = teller
        self.books = context.residency.watch = Announced()
        context.found, context.announce = self._found, self.tick
        self._lock = context.progress
        self.ready: deque[Any] = deque()
        self._generation = self._told_in = 0
        self.recovered: list[ChunkName] = []
        """To be named yet; once recovery is over the nearest to the beginning are last."""
        self._is_recovered = False
        self._budget = Budget(NAMED_PER_S, NAMED_BURST_S)

    # ---- on the scheduler's thread -----------------------------------------------------

    def name(self, chunk: Chunk, blocks: NamedBlocks) -> None:
        """The chunk, which is being saved, has these blocks."""
        with self._lock:
            if not chunk.dropped and self._context.residency.watch is not None:
                self.books.name(chunk.name.key, blocks)

    def take(self, limit: int) -> list[Any]:
        """The next events, in order."""
        with self._lock:
            count = min(limit, len(self.ready))
            return [self.ready.popleft() for _ in range(count)]

    def all_cleared(self) -> None:
        """Routers were told that this engine has nothing: tell all again."""
        with self._lock:
            self._generation += 1
            self.ready.clear()

    def is_quiet(self) -> bool:
        """Whether all was told and taken. For tests."""
        with self._lock:
            is_told = not self.books.num_changed and self._generation == self._told_in
            return is_told and self._is_recovered and not (self.recovered or self.ready)

    # ---- on the store's thread ---------------------------------------------------------

    def _found(self, headers: memoryview, header_bytes: int) -> None:
        """Recovery has entered records with these headers, most of them."""
        self.recovered += (n for n in chunk_names(headers, header_bytes) if not n.extra)

    def tick(self, is_recovered: bool) -> bool:
        """Make some events. Whether there is more to do before long.

        What fails here ends the events, and nothing else: the caller is the store's thread.
        """
        try:
            if is_recovered and not self._is_recovered:
                self._end_recovery()
            return self._tell() | (is_recovered and self._name_recovered())
        except Exception:
            logger.exception(
                "AttnStore publishes no KV events any more: routers do not see its tiers as they "
                "are until this server starts again"
            )
            with self._lock:
                self._context.residency.watch = self._context.found = None
                self._context.announce = None
                self.recovered.clear()
            return False

    def _tell(self) -> bool:
        with self._lock:
            generation = self._generation
            if generation != self._told_in:
                self._told_in = generation
                self.books.forget_told()
            room = (READY_MAX - len(self.ready)) // 2  # a change is an event a tier at most
            changes = self.books.take_changes(min(CHANGES_A_TURN, room))
            has_more = self.books.num_changed > 0 and room > CHANGES_A_TURN
        told = [self._teller.event(what) for change in changes for what in self.books.tell(change)]
        with self._lock:
            if generation == self._generation:  # else it is all told again
                self.ready.extend(told)
        return has_more

    def _end_recovery(self) -> None:
        """Tails that recovery superseded were removed in the index, without a word."""
        self._is_recovered = True
        self.recovered.sort(key=lambda name: -name.position)
        with self._lock:
            find = self._context.residency.index.entries.find
            for key in self.books.keys() if self.recovered else ():
                if find(key) < 0:
                    self.books.gone(key)

    def _name_recovered(self) -> bool:
        """Name some of what recovery has found. A chunk whose parent has no name gets none: a hit
        would need that too."""
        root = self._teller.root() if self.recovered else None
        if root is None:
            return False
        now = self._context.clock()
        for _ in range(NAMED_A_TURN):
            if not self.recovered or not self._budget.take(now, 1):
                break
            self._name(self.recovered.pop(), root)
        return bool(self.recovered)

    def _name(self, name: ChunkName, root: Key) -> None:
        parent = None
        if name.parent != root:
            with self._lock:
                before = self.books.named(name.parent)
            if before is None or before.like is not None:
                return
            parent = before.last
        blocks = self._teller.blocks(parent, name.tokens)
        if not blocks.names:
            return
        with self._lock:
            chunk = self._context.residency.index.get(name.key)
            if chunk is not None and media_of(chunk) and self.books.named(name.key) is None:
                self.books.name(name.key, blocks)
                self.books.at(chunk)
