# SPDX-License-Identifier: Apache-2.0
"""Hits that are audited: which of their chunks go when one of them differs. Not thread-safe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from attnstore_vllm.index.chunk import Chunk

HITS_MAX = 64
"""So many hits are remembered, and as many more that differed: what agrees drives none of them
out."""


@dataclass(slots=True)
class _Hit:
    agreed: list[Chunk] = field(default_factory=list)
    wrong_from: float = math.inf
    """The position of its first chunk that differed."""

    @property
    def differs(self) -> bool:
        return self.wrong_from < math.inf


class AuditedHits:
    """Hits that are compared by distance, with what of each has agreed.

    What is behind a chunk that differs was computed of the same wrong KV, or is of another prompt
    as well, and a bound that is wide may let it pass. So it goes too.
    """

    def __init__(self) -> None:
        self._hits: dict[int, _Hit] = {}

    def doubted(self, hit: int, chunk: Chunk, *, differs: bool) -> list[Chunk]:
        """Chunks that are to go, now that this one of the hit was compared. Notes nothing: it may
        be asked again."""
        known, at = self._hits.get(hit, _Hit()), chunk.name.position
        first = min(known.wrong_from, at if differs else math.inf)
        behind = [one for one in known.agreed if one.name.position >= first and not one.dropped]
        return [*behind, chunk] if at >= first else behind

    def note(self, hit: int, chunk: Chunk, *, differs: bool) -> None:
        """It was compared: what of its hit comes later is judged by it, too."""
        known = self._hits.pop(hit, None) or _Hit()
        self._hits[hit] = known  # the last that leaves
        if differs:
            known.wrong_from = min(known.wrong_from, chunk.name.position)
        else:
            known.agreed.append(chunk)
        alike = [one for one, of in self._hits.items() if of.differs == known.differs]
        if len(alike) > HITS_MAX:
            del self._hits[alike[0]]
