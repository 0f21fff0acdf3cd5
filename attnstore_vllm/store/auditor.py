# SPDX-License-Identifier: Apache-2.0
"""The audit of stored KV: chunks beside what vLLM has computed in their place.

It is long since each end of a comparison says what goes, what is told, and what is kept.

    begin()     the stored chunk is held, and a spare slot of DRAM is given to the copy
    copied()    the workers have filled it
    tick()      on the store's thread, some layers at a time: are they equal?
                no: the chunk leaves all tiers, and by distance what of the hit is behind it;
                its bytes are kept aside, and it is told
    trial       what a tier brings up is not served before some of it has agreed (trial.py);
                it differs: nothing of the tier is served
    stop_after  hits that disagreed: all is forgotten, and nothing is served any more

A copy is found by none: no look-up, no tier and no sibling. Of each rank its own part is compared.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.kv_causes import cause_of
from attnstore_vllm.policy.kv_compare import BOUND, Blocks, Comparison, Difference
from attnstore_vllm.policy.visits import unknown_run
from attnstore_vllm.store.audited_bounds import AuditedBounds
from attnstore_vllm.store.audited_hits import AuditedHits
from attnstore_vllm.store.trial import TierTrial
from attnstore_vllm.tiers.context import Context
from attnstore_vllm.tiers.nvme.aside import Aside
from attnstore_vllm.tiers.tier import source_of
from attnstore_vllm.tiers.tier_io import TierIo
from attnstore_vllm.types import Event

logger = logging.getLogger(__name__)

COPIES_MAX, COPIES_PART = 64, 8
"""Copies at a time: so many, and one slot of DRAM in so many, at most."""
SHARE = 2
"""While a tier is tried, one copy in so many may be for other hits. Of these one in so many may be
for hits that clients ask to have compared: they may ask for any number, and take all places."""
SLICE_S = 0.002
"""The store's thread goes back to its tiers after so long, or a layer that takes longer."""


@dataclass(slots=True, eq=False)
class _Pair:
    hit: int
    stored: Chunk
    copy: Chunk
    group: int
    blocks: Blocks
    is_tried: bool
    """For the trial of its tier."""
    is_asked: bool
    """A client asks for it. Clients may ask for any number, alone on the server and of what they
    choose: what differs goes, but none of it teaches a bound, nor counts for a stop."""
    is_void: bool = False
    """The copy has other bytes than were to be computed, or none."""
    is_known: bool = False
    """Another comparison has shown since that it is wrong, or that all of its tier is."""


class Auditor:
    """Methods marked *locked* are called with the store's lock held.

    Args:
        tiers: those behind DRAM, nearest first.
        comparisons: of each KV cache group (EngineFacts).
        namespace: of all that is compared.
        tries_all: see TierTrial.
    """

    def __init__(
        self,
        context: Context,
        tiers: Sequence[TierIo],
        comparisons: Sequence[Comparison | None],
        config: AuditConfig,
        aside: Aside,
        namespace: bytes,
        *,
        tries_all: bool,
    ) -> None:
        self.context = context
        self._tiers = tiers
        self.comparisons = list(comparisons)
        groups = [group for group, one in enumerate(comparisons) if one is not None]
        behind = [tier.tier for tier in tiers]
        source = partial(source_of, behind=behind)
        names = (tier.name for tier in behind)
        self.trial = TierTrial(names, groups, source, tries_all=tries_all)
        context.residency.on_trial = self.trial.is_open
        self.reset: Callable[[], object] = lambda: None
        """Begins a reset of all tiers, of which the first is this engine's own. Set by the store's
        thread."""
        self.was_reset = False
        """It has, and workers have not been asked to look at the weights since."""
        self.has_removed = False
        """Chunks that requests may have loaded, and the scheduler's thread has not heard of it.
        Until it has, no save begins: those who have loaded them would save them again. Written with
        the lock held, but for take_removed()."""
        self._stop_after = config.stop_after
        self._is_by_default = config.by_default
        self._aside = aside
        self._namespace = namespace
        most = [BOUND if one is None else one.most for one in comparisons]
        self._bounds = AuditedBounds(aside, namespace, most)
        self._copying: dict[Chunk, _Pair] = {}
        """By the copy."""
        self._waiting: deque[_Pair] = deque()
        self._pair: _Pair | None = None
        """That is compared now. Of the store's thread alone, as the next two."""
        self._steps: Iterator[Difference | None] = iter(())
        self._found: Difference | None = None
        self._hits = AuditedHits()
        self._leaving: list[Chunk] = []
        """Locked. Wrong chunks, dropped and held, of which a write is under way."""
        self._bad_hits: set[int] = set()
        self._explained: int | None = None
        """The hit whose cause was looked for last. That costs as much as two comparisons."""
        self._removal: Iterator[int] | None = None
        """Locked. Of what was kept before a reset."""
        self.is_stopped = False
        """Nothing of what is stored is to be served."""

    # ---- copies ------------------------------------------------------------------------

    def compares(self, group: int) -> bool:
        """Whether KV of this group is compared."""
        return self.comparisons[group] is not None

    def put_off(self, pieces: Sequence[Piece], drawn: Sequence[Piece]) -> None:
        """A request is computed, since these are not served yet. Takes the lock.

        Args:
            drawn: those of them that are compared.
        """
        with self.context.progress:
            self.trial.begin(drawn)
            over = self.trial.put_off(pieces, self.context.clock())
        for tier in over:
            logger.warning(
                "AttnStore could not compare what it found in %s with what the model computes, and "
                "serves it uncompared (docs/audit.md)",
                tier,
            )

    def take_reset(self) -> bool:
        """Whether this has begun a reset since the last call. On the scheduler's thread."""
        if not self.was_reset:
            return False
        self.was_reset = False
        return True

    def take_removed(self) -> bool:
        """Whether this has removed chunks since the last call. On the scheduler's thread."""
        if not self.has_removed:
            return False
        self.has_removed = False
        return True

    def begin(
        self,
        hit: int,
        stored: Chunk,
        was: InTier,
        blocks: Blocks,
        group: int,
        *,
        is_asked: bool = False,
        leaves: int = 0,
    ) -> Chunk | None:
        """Locked. A chunk whose slot the workers fill with what was computed; None: it is not
        compared.

        Args:
            hit: its number; a hit has many chunks.
            was: where the hit found it. Other bytes may be there by now.
            blocks: of the slot, that are copied; none: they could not be had.
            group: that it is of.
            is_asked: a client asks for it.
            leaves: so many places, for others of its hit that are to come.
        """
        copy: Chunk | None = None
        tier = stored.brought_by
        is_there = stored.dram is was and was.state is State.READY and not stored.dropped
        is_tried = self.trial.is_for(tier, group)
        is_known = self.trial.has_agreed(tier, group, stored.name.key)
        if blocks and is_there and not (is_known or self.is_stopped):
            places = self._num_places(is_tried=is_tried, is_asked=is_asked)
            if places > leaves:
                copy = self._begin_copy(stored)
            if copy is None and not 0 < places <= leaves:
                self.trial.had_no_place(tier, hit)
        if copy is None:
            self.context.residency.counts[Event.NOT_COMPARED] += 1
            return None
        self._copying[copy] = _Pair(hit, stored, copy, group, blocks, is_tried, is_asked)
        return copy

    def _num_places(self, *, is_tried: bool, is_asked: bool) -> int:
        """Locked. How many more copies there may be. Cost: a look at each that there is."""
        slots = self.context.residency.dram.num_slots
        most = min(COPIES_MAX, max(1, slots // COPIES_PART))
        pairs = (*self._copying.values(), *self._waiting)
        free = most - len(pairs)
        if is_tried:
            return free
        others = [pair for pair in pairs if not pair.is_tried]
        of_others = most // SHARE if self.trial.is_held else most
        free = min(free, of_others - len(others))
        if is_asked:
            asked = sum(pair.is_asked for pair in others)
            free = min(free, max(1, of_others // SHARE) - asked)
        return free

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

    def remove_kept(self) -> None:
        """Locked. A reset is asked for: what was kept aside of the namespace goes, too."""
        self._removal = self._aside.removal(self._namespace)

    def copied(self, chunks: Sequence[Chunk]) -> None:
        """Locked. The workers have filled these, some of which may be ours."""
        for chunk in chunks if self._copying else ():
            pair = self._copying.pop(chunk, None)
            if pair is not None:
                self._waiting.append(pair)

    @property
    def is_busy(self) -> bool:
        """Locked. Something that the workers have copied is to be compared, or to be removed."""
        is_removing = bool(self._leaving) or self._removal is not None
        return is_removing or bool(self._waiting) or self._pair is not None

    # ---- the store's thread ------------------------------------------------------------

    def tick(self) -> bool:
        """Compare for SLICE_S. Returns whether there is more to be compared now."""
        self._end_removals()
        until = self.context.clock() + SLICE_S
        if self._remove_kept(until):
            return True
        while self._next():
            if self._found is None:
                for found in self._steps:
                    self._found = found
                    if found is not None:
                        break
                    if self.context.clock() > until:
                        return True
            self._end()
            if self.context.clock() > until:
                return True
        return False

    def _remove_kept(self, until: float) -> bool:
        """Whether there is more of it."""
        removal = self._removal
        if removal is None:
            return False
        try:
            for _ in removal:
                if self.context.clock() > until:
                    return True
        except OSError as error:
            logger.warning(
                "AttnStore's reset has removed not all that the audit has kept aside: %s", error
            )
        with self.context.progress:
            if self._removal is removal:  # else another reset has come meanwhile
                self._removal = None
            self.context.progress.notify_all()
        return False

    def _next(self) -> bool:
        """Whether there is a pair to compare."""
        if self._pair is not None:
            return True
        with self.context.progress:
            if not self._waiting:
                return False
            pair = self._pair = self._waiting.popleft()
            is_void = pair.is_void
        self._found = None
        look, bound = self._comparison(pair).look, self._bounds.of(pair.group)
        self._steps = iter(()) if is_void else look(*self._slots(pair), pair.blocks, bound)
        return True

    def _comparison(self, pair: _Pair) -> Comparison:
        found = self.comparisons[pair.group]
        assert found is not None
        return found

    def _slots(self, pair: _Pair) -> tuple[memoryview, memoryview]:
        """The stored bytes and the computed ones. They are held."""
        pool = self.context.pool
        return pool.slot(pair.stored.dram.slot), pool.slot(pair.copy.dram.slot)

    def _end(self) -> None:
        """All of the pair was compared, or enough of it."""
        pair, found, context = self._pair, self._found, self.context
        assert pair is not None
        residency, tier = context.residency, pair.stored.brought_by
        with context.progress:
            is_void, differs = pair.is_void, found is not None
            hits = None if self._comparison(pair).sides is None else self._hits
            doubted = self._doubted(pair, hits, differs=differs)
            if is_void:
                residency.counts[Event.NOT_COMPARED] += 1
            elif found is None:
                residency.counts[Event.AGREED] += 1
                self.trial.agreed(tier, pair.group, pair.stored.name.key)
            else:
                residency.counts[Event.DIFFERED] += 1
            if hits is not None and not is_void:
                hits.note(pair.hit, pair.stored, differs=differs)
            for chunk in doubted:
                self._remove(chunk)
            fails = found is not None and not is_void and self.trial.is_open(tier)
        if found is None:
            self._learn(pair)
        elif not is_void:
            self._tell(pair, found)
            if fails:
                self.fail(tier)
            elif not (pair.is_known or pair.is_asked):
                self._count(pair.hit)
        with context.progress:
            residency.release(pair.stored)
            residency.release(pair.copy)
            if self.is_stopped:
                residency.drop_all()
            context.progress.notify_all()
        for io in self._tiers:
            io.submit()
        self._pair, self._steps, self._found = None, iter(()), None

    def _remove(self, chunk: Chunk) -> None:
        """Locked. No request finds it from now on. A write that is under way would leave its record
        to the next start: it is held until that has ended, be it late."""
        if _is_written(chunk):
            chunk.dram.uses += 1
            self._leaving.append(chunk)
        self._forget(chunk)
        self.context.residency.drop(chunk)
        self._know(lambda stored: stored is chunk)
        self.has_removed |= self.trial.has_served(chunk.brought_by)

    def _know(self, is_wrong: Callable[[Chunk], bool]) -> None:
        """Locked. What others compare of these chunks tells nothing new."""
        for pair in (*self._copying.values(), *self._waiting):
            pair.is_known |= is_wrong(pair.stored)

    def _forget(self, chunk: Chunk) -> None:
        for io in self._tiers:
            io.forget(chunk, self.reset)

    def _end_removals(self) -> None:
        """Remove chunks that were being written when they were found to be wrong."""
        if not self._leaving:
            return
        with self.context.progress:
            for chunk in [chunk for chunk in self._leaving if not _is_written(chunk)]:
                self._leaving.remove(chunk)
                self._forget(chunk)
                self.context.residency.release(chunk)
        for io in self._tiers:
            io.submit()

    def _doubted(self, pair: _Pair, hits: AuditedHits | None, *, differs: bool) -> list[Chunk]:
        """Chunks that go. Where bits are compared (no `hits`) what agrees is right."""
        if hits is None or pair.is_void:
            return [pair.stored] if differs and not pair.is_void else []
        return hits.doubted(pair.hit, pair.stored, differs=differs)

    def _learn(self, pair: _Pair) -> None:
        """It agreed. What this process has computed twice tells how far rounding goes."""
        comparison = self._comparison(pair)
        is_of_others = pair.stored.brought_by or pair.stored.origin
        is_no_sample = pair.is_void or pair.is_asked or is_of_others
        if comparison.sides is not None and not is_no_sample:
            key = pair.stored.name.key
            self._bounds.note(pair.group, pair.hit, key, comparison.largest)

    def _tell(self, pair: _Pair, found: Difference) -> None:
        """Say it, and keep the bytes. The slots are held."""
        name = pair.stored.name
        said = str(found)
        if pair.hit != self._explained:
            self._explained = pair.hit
            bound = self._bounds.of(pair.group)
            cause = cause_of(self._comparison(pair), *self._slots(pair), pair.blocks, bound)
            said = f"{found} ({cause})"
        logger.error(
            "AttnStore's audit found KV that is not what the model computes: chunk %s, tokens %d "
            "to %d of a prompt, tenant %s, from %s; cache group %d, %s. It is removed. %s",
            name.key.hex()[:16],
            name.position,
            name.end,
            name.tenant.hex()[:16],
            pair.stored.origin or "this engine",
            pair.group,
            said,
            self._keep(pair, said),
        )

    def fail(self, tier: str) -> None:
        """The trial of this tier has failed: none of what it has is served. Takes the lock."""
        is_own = tier == self._tiers[0].tier.name
        logger.error(
            "AttnStore serves nothing of what it found in %s: it was compared before it was "
            "served, and is not what this server computes. %s docs/audit.md says how to find the "
            "cause",
            tier,
            "All tiers begin anew." if is_own else "That tier is out of use until the next start.",
        )
        residency = self.context.residency
        with self.context.progress:
            self.has_removed |= self.trial.has_served(tier)
            self.trial.fail(tier)
            for io in () if is_own else self._tiers:
                if io.tier.name == tier:
                    io.health.end()
                    residency.lose(io.tier)
            for chunk in residency.index.all_live():
                if chunk.brought_by == tier:
                    residency.drop(chunk)
            self._know(lambda stored: stored.brought_by == tier)
            if is_own:
                self.context.moved.clear()
        if is_own:
            self.reset()

    def _count(self, hit: int) -> None:
        """Stop after too many hits that differed."""
        self._bad_hits.add(hit)
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
        try:
            where = str(self._aside.stop(self._namespace, why))
        except OSError as error:  # no mark, so the next start is to find nothing
            where = f"Nothing could be written: {error}. NVMe begins anew"
            self.reset()
        logger.error(
            "AttnStore serves nothing of what is stored any more, since %s. What it has in memory "
            "is forgotten. docs/audit.md says how to find the cause; a start serves again when "
            "this file is removed: %s",
            why,
            where,
        )

    def _keep(self, pair: _Pair, found: str) -> str:
        """Where the bytes are, in words. What has a ttl would outlive it: then who runs the server
        has to ask for the audit."""
        if self._is_by_default and pair.stored.run.lease is not None:
            return "Its bytes are not kept, since they have a ttl."
        name, units = pair.stored.name, self._comparison(pair).units
        head: dict[str, Any] = {
            "namespace": self._namespace.hex(),
            "key": name.key.hex(),
            "parent": name.parent.hex(),
            "tenant": name.tenant.hex(),
            "position": name.position,
            "num_tokens": name.num_tokens,
            "group": pair.group,
            "blocks": list(chain.from_iterable((some.start, some.stop) for some in pair.blocks)),
            "units": [list(unit) for unit in units],
            "origin": pair.stored.origin,
            "found": found,
            "at": int(self.context.wall()),
        }
        parts = [
            slot[unit.within(some)]
            for slot in self._slots(pair)
            for unit in units
            for some in pair.blocks
        ]

        def keep() -> str:
            path = self._aside.keep(head, name.key, parts)
            return "Its bytes are not kept." if path is None else f"Its bytes are in {path}."

        return self._written(keep)

    def _written(self, write: Callable[[], str]) -> str:
        try:
            return write()
        except OSError as error:
            return f"Nothing could be written: {error}."


def _is_written(chunk: Chunk) -> bool:
    return any(copy.state is State.WRITING for copy in chunk.behind.values())


def auditor_of(
    context: Context,
    tiers: Sequence[TierIo],
    comparisons: Sequence[Comparison | None],
    config: StoreConfig,
    namespace: bytes,
) -> Auditor | None:
    """None: nothing is to be audited, or cannot be."""
    audit = config.audit
    if audit is None or not any(comparisons):
        return None
    aside = Aside(config.nvme.path, audit.keep_bytes)
    tries_all = all(comparisons) and config.nvme.changed_by is None
    return Auditor(context, tiers, comparisons, audit, aside, namespace, tries_all=tries_all)
