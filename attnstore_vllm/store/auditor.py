# SPDX-License-Identifier: Apache-2.0
"""The audit of stored KV: chunks beside what vLLM has computed in their place.

    begin()     the stored chunk is held, and a spare slot of DRAM is given to the copy
    copied()    the workers have filled it
    tick()      on the store's thread, some layers at a time: are they equal?
                no: the chunk leaves all tiers, its bytes are kept aside, and it is told
    stop_after  hits that disagreed: all is forgotten, and nothing is served any more

A copy is found by none: no look-up, no tier and no sibling. Of each rank its own part is compared.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.policy.kv_compare import Comparison, Difference
from attnstore_vllm.policy.visits import unknown_run
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.nvme.aside import Aside
from attnstore_vllm.tiers.tier_io import TierIo
from attnstore_vllm.types import Event

logger = logging.getLogger(__name__)

COPIES_MAX, COPIES_PART = 64, 8
"""Copies at a time: so many, and one slot of DRAM in so many, at most."""
SLICE_S = 0.002
"""The store's thread goes back to its tiers after so long, or a layer that takes longer."""


@dataclass(slots=True, eq=False)
class _Pair:
    hit: int
    stored: Chunk
    copy: Chunk
    blocks: range
    is_void: bool = False
    """The copy has other bytes than were to be computed, or none."""


class Auditor:
    """Methods marked *locked* are called with the store's lock held.

    Args:
        tiers: those behind DRAM.
        namespace: of all that is compared.
    """

    def __init__(
        self,
        context: Context,
        tiers: Sequence[TierIo],
        comparison: Comparison,
        config: AuditConfig,
        aside: Aside,
        namespace: bytes,
    ) -> None:
        self.context = context
        self._tiers = tiers
        self.comparison = comparison
        self._stop_after = config.stop_after
        self._aside = aside
        self._namespace = namespace
        self._copying: dict[Chunk, _Pair] = {}
        """By the copy."""
        self._waiting: deque[_Pair] = deque()
        self._pair: _Pair | None = None
        """That is compared now. Of the store's thread alone, as the next two."""
        self._steps: Iterator[Difference | None] = iter(())
        self._found: Difference | None = None
        self._bad_hits: set[int] = set()
        self.is_stopped = False
        """Nothing of what is stored is to be served."""

    # ---- copies ------------------------------------------------------------------------

    def begin(self, hit: int, stored: Chunk, was: InTier, blocks: range) -> Chunk | None:
        """Locked. A chunk whose slot the workers fill with what was computed; None: it is not
        compared.

        Args:
            hit: its number; a hit has many chunks.
            was: where the hit found it. Other bytes may be there by now.
            blocks: of the slot, that are copied.
        """
        residency = self.context.residency
        most = min(COPIES_MAX, max(1, residency.dram.num_slots // COPIES_PART))
        copy: Chunk | None = None
        is_there = stored.dram is was and was.state is State.READY and not stored.dropped
        if is_there and len(self._copying) + len(self._waiting) < most and not self.is_stopped:
            copy = self._begin_copy(stored)
        if copy is None:
            residency.counts[Event.NOT_COMPARED] += 1
            return None
        self._copying[copy] = _Pair(hit, stored, copy, blocks)
        return copy

    def _begin_copy(self, stored: Chunk) -> Chunk | None:
        """Locked. None: there is no room. Both are held: the copy twice, by the workers and by us.
        No look-up finds it."""
        residency = self.context.residency
        residency.hold(stored)
        if not residency.has_room_for_copy(stored):
            residency.release(stored)
            return None
        copy = Chunk(stored.name, dropped=True, run=unknown_run(residency.now))
        residency.dram.give(copy, State.SAVING)
        copy.dram.uses += 1
        return copy

    def void(self, chunk: Chunk) -> None:
        """Locked. What is copied into this chunk is not what was to be computed, if it is one of
        ours. copied() follows."""
        pair = self._copying.get(chunk)
        if pair is not None:
            pair.is_void = True

    def void_all(self) -> None:
        """Locked. A reset: weights may have changed between what is stored and what is computed.
        A chunk that is dropped for another reason, as a tail that a longer one replaces, is still
        compared."""
        now = [] if self._pair is None else [self._pair]
        for pair in (*self._copying.values(), *self._waiting, *now):
            pair.is_void = True

    def copied(self, chunks: Sequence[Chunk]) -> None:
        """Locked. The workers have filled these, some of which may be ours."""
        for chunk in chunks if self._copying else ():
            pair = self._copying.pop(chunk, None)
            if pair is not None:
                self._waiting.append(pair)

    # ---- the store's thread ------------------------------------------------------------

    def tick(self) -> bool:
        """Compare for SLICE_S. Returns whether there is more to be compared now."""
        until = self.context.clock() + SLICE_S
        while self._next():
            if self._found is None:
                for found in self._steps:
                    self._found = found
                    if found is not None:
                        break
                    if self.context.clock() > until:
                        return True
            if not self._end():
                return False
            if self.context.clock() > until:
                return True
        return False

    def _next(self) -> bool:
        """Whether there is a pair to compare."""
        if self._pair is not None:
            return True
        with self.context.progress:
            if not self._waiting:
                return False
            pair = self._pair = self._waiting.popleft()
            pool = self.context.pool
            stored, computed = (pool.slot(c.dram.slot) for c in (pair.stored, pair.copy))
            is_void = pair.is_void
        self._found = None
        self._steps = iter(()) if is_void else self.comparison.look(stored, computed, pair.blocks)
        return True

    def _end(self) -> bool:
        """All of the pair was compared, or enough of it. False: it is to be ended later."""
        pair, found, context = self._pair, self._found, self.context
        assert pair is not None
        residency = context.residency
        with context.progress:
            # A write that is under way would leave its record to the next start.
            writes = [copy for copy in pair.stored.behind.values() if copy.state is State.WRITING]
            if found is not None and writes and not pair.is_void:
                return False
            is_void = pair.is_void
            if is_void:
                residency.counts[Event.NOT_COMPARED] += 1
            elif found is None:
                residency.counts[Event.AGREED] += 1
            else:
                residency.counts[Event.DIFFERED] += 1
                for tier in self._tiers:
                    tier.forget(pair.stored)
                residency.drop(pair.stored)
        if found is not None and not is_void:
            self._tell(pair, found)
        with context.progress:
            residency.release(pair.stored)
            residency.release(pair.copy)
            if self.is_stopped:
                residency.drop_all()
            context.progress.notify_all()
        for tier in self._tiers:
            tier.submit()
        self._pair, self._steps, self._found = None, iter(()), None
        return True

    def _tell(self, pair: _Pair, found: Difference) -> None:
        """Say it, keep the bytes, and count the hit. The slots are held."""
        name = pair.stored.name
        logger.error(
            "AttnStore's audit found KV that is not what the model computes: chunk %s, tokens %d "
            "to %d of a prompt, tenant %s, from %s; %s. It is removed. %s",
            name.key.hex()[:16],
            name.position,
            name.end,
            name.tenant.hex()[:16],
            pair.stored.origin or "this engine",
            found,
            self._keep(pair, found),
        )
        self._bad_hits.add(pair.hit)
        if len(self._bad_hits) < self._stop_after or self.is_stopped:
            return
        self.is_stopped = True
        with self.context.progress:  # what requests still save may continue what was wrong
            for tier in self._tiers:
                tier.leave()
        why = (
            f"{len(self._bad_hits)} hits had KV that is not what the model computes "
            f"(audit.stop_after: {self._stop_after})"
        )
        where = self._written(lambda: str(self._aside.stop(self._namespace, why)))
        logger.error(
            "AttnStore serves nothing of what is stored any more, since %s. What it has in memory "
            "is forgotten. docs/audit.md says how to find the cause; a start serves again when "
            "this file is removed: %s",
            why,
            where,
        )

    def _keep(self, pair: _Pair, found: Difference) -> str:
        """Where the bytes are, in words."""
        name, pool = pair.stored.name, self.context.pool
        head: dict[str, Any] = {
            "namespace": self._namespace.hex(),
            "key": name.key.hex(),
            "parent": name.parent.hex(),
            "tenant": name.tenant.hex(),
            "position": name.position,
            "num_tokens": name.num_tokens,
            "blocks": [pair.blocks.start, pair.blocks.stop],
            "units": [list(unit) for unit in self.comparison.units],
            "origin": pair.stored.origin,
            "found": str(found),
            "at": int(self.context.wall()),
        }
        slots = [pool.slot(chunk.dram.slot) for chunk in (pair.stored, pair.copy)]
        parts = [slot[unit.within(pair.blocks)] for slot in slots for unit in self.comparison.units]

        def keep() -> str:
            path = self._aside.keep(head, name.key, parts)
            return "Its bytes are not kept." if path is None else f"Its bytes are in {path}."

        return self._written(keep)

    def _written(self, write: Callable[[], str]) -> str:
        try:
            return write()
        except OSError as error:
            return f"Nothing could be written: {error}."


def auditor_of(
    context: Context,
    tiers: Sequence[TierIo],
    comparison: Comparison | None,
    config: StoreConfig,
    namespace: bytes,
) -> Auditor | None:
    """None: nothing is to be audited, or cannot be."""
    audit = config.audit
    if audit is None or comparison is None:
        return None
    aside = Aside(config.nvme.path, audit.keep_bytes)
    return Auditor(context, tiers, comparison, audit, aside, namespace)
