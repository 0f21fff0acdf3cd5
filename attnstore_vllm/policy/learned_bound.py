# SPDX-License-Identifier: Apache-2.0
"""The distance up to which stored KV may differ from what is computed, learned from rounding. Pure.

Rounding is what pairs show of which one process computed both. How large it is depends on the
model, its types and the batches that come, so it is not known before. Until enough pairs were seen
the bound is that of a model which is not known (kv_compare.BOUND), and it never is wider.

Wrong KV that passes as rounding must not widen it, since that lets more of it pass. Rounding comes
in most hits, and wrong KV in few: so the farthest pair counts for no more than twice the third of
them, and these three are of other hits and other chunks. A bound is wider only when three hits have
shown it, be it the first ones or later.

What is remembered keeps the names of its hits and chunks over restarts. Without them a wrong chunk
would count once more at each start, and three starts would widen the bound by it.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from attnstore_vllm.policy.kv_compare import BOUND
from attnstore_vllm.types import KEY_BYTES

VERSION: Final = 5
"""The form that as_json() writes. In the first a distance was another one, and bounds of the second
may have been widened by pairs that were never seen, and of the third clients may have taught. The
fourth had no names, so that a chunk counted again at each start."""
HIT_BITS: Final = 64
"""The size of a hit's name."""
PAIRS: Final = 32
"""Chunks that are to be seen first ..."""
HITS: Final = 8
"""... in so many hits. The farthest chunk of each of so many is remembered."""
SHOWN: Final = 3
"""So many hits are to show a distance."""
TIMES: Final = 2
"""The farthest one counts for so much of that at most."""
FACTOR: Final = 8
"""The bound over the largest distance that counts. Another start may compile the model otherwise,
and a crowd that has not come yet may round more."""
LEAST: Final = 0.1
"""No bound is smaller. bfloat16 rounds by 0.004, many times on the way through a model."""
STEP: Final = 0.05
"""Bounds differ by so much, so that few are ever new."""


class Far(NamedTuple):
    """A pair that is far apart, for rounding."""

    distance: float
    hit: int
    """Its name, 0 to 2**HIT_BITS - 1: no other hit has it, nor one of another process."""
    key: bytes
    """The name of the stored chunk."""

    def is_of(self, hit: int, key: bytes) -> bool:
        return self.hit == hit or self.key == key


class LearnedBound(NamedTuple):
    """The bound of one KV cache group."""

    seen: frozenset[bytes] = frozenset()
    """Keys of chunks that were compared, PAIRS at most."""
    farthest: tuple[Far, ...] = ()
    """Farthest first, HITS at most, of other hits and chunks each."""

    @property
    def rounding(self) -> float:
        """The distance that rounding is taken to make."""
        if len(self.farthest) < SHOWN:
            return 0.0
        return min(self.farthest[0].distance, TIMES * self.farthest[SHOWN - 1].distance)

    @property
    def value(self) -> float:
        if len(self.seen) < PAIRS or len(self.farthest) < HITS:
            return BOUND
        steps = math.ceil(FACTOR * self.rounding / STEP - 1e-9)
        return min(BOUND, max(LEAST, round(steps * STEP, 9)))

    def and_one(self, distance: float, hit: int, key: bytes) -> LearnedBound:
        """With one more pair, that agreed.

        Args:
            hit: the name of what it is of. A hit has many chunks, which may be wrong together.
            key: of the stored chunk. Many hits may have it, as one behind a system prompt.
        """
        seen, known = self.seen, self.farthest
        if len(seen) < PAIRS:  # of one and the same they would say nothing of others
            seen |= {key}
        alike = [one for one in known if one.is_of(hit, key)]
        if not alike and len(known) == HITS:  # in place of the nearest
            alike = [known[-1]]
        if not alike or distance > alike[0].distance:
            kept = [one for one in known if all(one is not gone for gone in alike)]
            if len(alike) == 2:  # its hit is of one, its key of the other
                by_hit, by_key = sorted(alike, key=lambda one: one.hit != hit)
                kept.append(Far(0.0, by_key.hit, by_hit.key))  # taken, but no pair has shown more
            kept.append(Far(distance, hit, key))
            kept.sort(key=lambda one: -one.distance)
            found = LearnedBound(seen, tuple(kept))
            if found.rounding >= self.rounding:  # else two that were seen show more than one
                known = found.farthest
        return LearnedBound(seen, known)


def bounds_from(found: object, num_groups: int) -> list[LearnedBound]:
    """Bounds that as_json() wrote. Of anything else nothing is known."""
    match found:
        case {"version": version, "groups": [*groups]} if (
            version == VERSION and len(groups) == num_groups
        ):
            bounds = [_bound_from(one) for one in groups]
        case _:
            bounds = []
    known = [one for one in bounds if one is not None]
    return known if len(known) == num_groups else [LearnedBound()] * num_groups


def _bound_from(said: object) -> LearnedBound | None:
    match said:
        case [list(keys), list(pairs)]:
            seen = [key for key in map(_key_from, keys) if key is not None]
            known = [far for far in map(_far_from, pairs) if far is not None]
        case _:
            return None
    is_whole = len(seen) == len(keys) <= PAIRS and len(known) == len(pairs) <= HITS
    num_hits, num_keys = len({far.hit for far in known}), len({far.key for far in known})
    if not is_whole or min(num_hits, num_keys) < len(known):
        return None
    return LearnedBound(frozenset(seen), tuple(sorted(known, key=lambda far: -far.distance)))


def _far_from(said: object) -> Far | None:
    match said:
        case [int() | float() as distance, int(hit), str(text)] if (
            0 <= distance <= BOUND and 0 <= hit < 1 << HIT_BITS
        ):
            key = _key_from(text)
            return None if key is None else Far(float(distance), hit, key)
    return None


def _key_from(said: object) -> bytes | None:
    try:
        key = bytes.fromhex(said) if isinstance(said, str) else b""
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None


def as_json(bounds: list[LearnedBound]) -> dict[str, Any]:
    """A value for bounds_from(): PAIRS keys and HITS distances a group, 3 KiB, at most. It has no
    tokens."""
    groups = [
        [
            sorted(key.hex() for key in one.seen),
            [[far.distance, far.hit, far.key.hex()] for far in one.farthest],
        ]
        for one in bounds
    ]
    return {"version": VERSION, "groups": groups}
