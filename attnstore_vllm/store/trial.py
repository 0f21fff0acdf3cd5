# SPDX-License-Identifier: Apache-2.0
"""The trial of KV that an earlier process or another one wrote, before any of it is served.

Until some chunks of a tier have agreed with what was computed in their place, a hit on what it
brought up is offered as none: so the first client's own prompt is the trial's. After that the tier
is believed, and hits on it are drawn as all are. One that differs ends it: nothing of the tier is
served (auditor.py).

What this process has written and reads back is no part of it: that it agrees says nothing of the
rest. It has a limit: what cannot be compared in PUT_OFF_MAX requests, and PUT_OFF_S after the last
of these, is served uncompared, and told. Requests of which copies found no place are none of these:
with them it takes NO_PLACE_S.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.types import Key

TRIED_CHUNKS = 4
"""Chunks of each tier and KV cache group: 1,024 tokens, where they have the usual size. Of a hit
that has fewer, all."""
PUT_OFF_MAX = 64
PUT_OFF_S = 60.0
"""A burst has as many requests before the first of them is computed, and could be compared. So has
one that comes long after a request that could not be."""
NO_PLACE_S = 600.0
"""Other copies may have all places for a time, as those of requests that never compute."""


@dataclass(slots=True)
class _Tried:
    """One tier."""

    needed: dict[int, int] = field(default_factory=dict)
    """By group: chunks that are to agree, once a hit has had some."""
    agreed: dict[int, set[Key]] = field(default_factory=dict)
    """By group: chunks that have, TRIED_CHUNKS at most. Many requests may have one of them compared
    at once, which says nothing of the others."""
    put_off: int = 0
    no_place: int = 0
    """Requests of these for whose copies there was no place, and the hit of the last of them."""
    no_place_for: int = -1
    full_at: float = 0.0
    """When the last of PUT_OFF_MAX requests was put off for which there was ..."""
    all_full_at: float = 0.0
    """... and the last of so many, be there a place or not."""

    def is_over(self, now: float) -> bool:
        """One more request is put off. Whether that was the last."""
        self.put_off += 1
        counted = self.put_off - self.no_place
        if counted == PUT_OFF_MAX:
            self.full_at = now
        if self.put_off == PUT_OFF_MAX:
            self.all_full_at = now
        is_full = counted >= PUT_OFF_MAX and now >= self.full_at + PUT_OFF_S
        return is_full or (self.put_off >= PUT_OFF_MAX and now >= self.all_full_at + NO_PLACE_S)

    @property
    def waits(self) -> bool:
        """Whether requests were put off, and what they had has not agreed."""
        has_agreed = bool(self.needed) and all(map(self.has_passed, self.needed))
        return self.put_off > 0 and not has_agreed

    def has_passed(self, group: int) -> bool:
        agreed = self.agreed.get(group, ())
        return group in self.needed and len(agreed) >= self.needed[group]


class TierTrial:
    """All methods are called with the store's lock held, but awaits().

    Args:
        tiers: names of those behind DRAM.
        groups: KV cache groups that are compared.
        source_of: see tiers/tier.py.
        tries_all: nothing that a hit may have is served untried: no group, and no approximate KV.
    """

    def __init__(
        self,
        tiers: Iterable[str],
        groups: Iterable[int],
        source_of: Callable[[Chunk], str],
        *,
        tries_all: bool = True,
    ) -> None:
        self._source_of = source_of
        self._groups = frozenset(groups)
        self._tries_all = tries_all
        self._open = {name: _Tried() for name in tiers}
        self._failed = frozenset[str]()

    def is_open(self, tier: str) -> bool:
        """Whether it is not known yet if this tier is to be believed."""
        return tier in self._open

    def has_served(self, tier: str) -> bool:
        """Whether requests may have loaded what this tier has brought up. One group may have passed
        while another has not: a hit may need nothing of that."""
        tried = self._open.get(tier)
        return tried is None or not self._tries_all or any(map(tried.has_passed, tried.needed))

    def awaits(self, pieces: Sequence[Piece]) -> bool:
        """Whether some of these are not to be served: not yet, or no more, as they were held before
        their tier failed. Needs no lock: it may say so a moment too long. Cost: a look at
        each while a trial is open or one has failed, else none."""
        tiers = self._open  # before the failed ones: fail() notes them first
        failed = self._failed
        if failed and any(self._source_of(piece.chunk) in failed for piece in pieces):
            return True
        return bool(tiers) and any(self._is_untried(tiers, piece) for piece in pieces)

    def _is_untried(self, tiers: dict[str, _Tried], piece: Piece) -> bool:
        if piece.group not in self._groups:
            return False
        tried = tiers.get(self._source_of(piece.chunk))
        return tried is not None and not tried.has_passed(piece.group)

    def begin(self, pieces: Sequence[Piece]) -> None:
        """These are computed, to be compared."""
        found = Counter(
            (self._source_of(p.chunk), p.group) for p in pieces if p.group in self._groups
        )
        for (tier, group), count in found.items():
            if tier in self._open:
                self._open[tier].needed.setdefault(group, min(count, TRIED_CHUNKS))

    def put_off(self, pieces: Sequence[Piece], now: float) -> list[str]:
        """A request is computed for it. Returns tiers that are served uncompared from now on."""
        over, tiers = [], self._open
        for tier in {self._source_of(p.chunk) for p in pieces if self._is_untried(tiers, p)}:
            if self._open[tier].is_over(now):
                over.append(tier)
                self.close(tier)
        return over

    @property
    def is_held(self) -> bool:
        """Whether requests are put off for some tier, and wait for what they had to agree."""
        return any(tried.waits for tried in self._open.values())

    def is_for(self, tier: str, group: int) -> bool:
        """Whether it is for the trial that KV of this tier and group is compared."""
        tried = self._open.get(tier)
        return tried is not None and not tried.has_passed(group)

    def had_no_place(self, tier: str, hit: int) -> None:
        """A copy of this hit found none, for which a request was put off. The others of it are not
        asked about: what has a place brings the trial on."""
        tried = self._open.get(tier)
        if tried is not None and tried.no_place_for != hit and tried.no_place < tried.put_off:
            tried.no_place, tried.no_place_for = tried.no_place + 1, hit

    def has_agreed(self, tier: str, group: int, key: Key) -> bool:
        """Whether this chunk has, while the tier waits for others: they are to be compared, also
        where there is room for few copies."""
        tried = self._open.get(tier)
        return tried is not None and key in tried.agreed.get(group, ())

    def agreed(self, tier: str, group: int, key: Key) -> None:
        """A chunk that this tier brought up is what was computed."""
        tried = self._open.get(tier)
        if tried is None:
            return
        agreed = tried.agreed.setdefault(group, set())
        if len(agreed) < TRIED_CHUNKS:
            agreed.add(key)
        if all(tried.has_passed(group) for group in self._groups):
            self.close(tier)

    def fail(self, tier: str) -> None:
        """None of what it has brought up is served, also of what is held by now."""
        self._failed |= {tier}
        self.close(tier)

    def close(self, tier: str) -> None:
        """It is believed, or has failed."""
        self._open = {name: tried for name, tried in self._open.items() if name != tier}
