# SPDX-License-Identifier: Apache-2.0
"""The cause that made stored KV wrong, as far as the two copies tell it. Pure.

One layer that differs is looked at in other ways: is it what another rank, another layer, the block
beside it or the other side has computed? Then which layers and sides differ at all. A guess for
people: nothing is decided by it.
"""

from __future__ import annotations

import numpy as np

from attnstore_vllm.policy.kv_compare import (
    BOUND,
    KEY,
    VALUE,
    Blocks,
    Bytes,
    Comparison,
    Difference,
)

ALL_DIFFER = "every rank and layer differs: other tokens, another adapter, or other weights"


def cause_of(
    comparison: Comparison,
    stored: memoryview,
    computed: memoryview,
    blocks: Blocks,
    bound: float = BOUND,
) -> str:
    """In words. "" where the two do not differ. Cost: as much as a comparison of all layers, twice.

    Args:
        stored, computed, blocks, bound: see Comparison.look().
    """
    found = list(comparison.look(stored, computed, blocks, bound))
    at = next((place for place, one in enumerate(found) if one is not None), None)
    if at is None:
        return ""
    unit = comparison.units[at]
    ours = comparison.pages(stored, unit, blocks)
    for other in comparison.units:
        if other == unit or other.page_bytes != unit.page_bytes:
            continue
        if comparison.differ(unit, ours, comparison.pages(computed, other, blocks), bound) is None:
            return (
                f"rank {unit.rank}, layer {unit.layer} has what rank {other.rank}, layer "
                f"{other.layer} computes: a layout, or the order of ranks or layers"
            )
    theirs = comparison.pages(computed, unit, blocks)
    for by in (1, -1):
        moved, kept = (ours[by:], theirs[:-by]) if by > 0 else (ours[:by], theirs[-by:])
        if len(kept) and comparison.differ(unit, moved, kept, bound) is None:
            return "blocks stand beside their place: a layout"
    if _are_swapped(comparison, ours, theirs, bound):
        return "K has what V computes: a layout"
    return _spread(comparison, found)


def _are_swapped(comparison: Comparison, ours: Bytes, theirs: Bytes, bound: float) -> bool:
    """Whether K stands in V's place, and V in K's."""
    sides = comparison.sides or ()
    places = {side.name: side.places for side in sides}
    if places.keys() != {KEY, VALUE} or places[KEY].shape != places[VALUE].shape:
        return False
    key, value = sides
    item = ours.view(np.uint16 if key.dtype != "float32" else np.uint32)
    swapped = item.copy()
    swapped[:, key.places], swapped[:, value.places] = item[:, value.places], item[:, key.places]
    raw = swapped.view(np.uint8)
    return comparison.differ(comparison.units[0], raw, theirs, bound) is None


def _spread(comparison: Comparison, found: list[Difference | None]) -> str:
    """Which ranks, layers and sides differ."""
    wrong = [one for one in found if one is not None]
    units = comparison.units
    ranks, layers = {unit.rank for unit in units}, {unit.layer for unit in units}
    bad_ranks, bad_layers = {one.rank for one in wrong}, {one.layer for one in wrong}
    if len(ranks) > 1 and bad_ranks < ranks:
        return f"ranks {_numbers(bad_ranks)} differ, of {len(ranks)}: a rank, or its part of a slot"
    if len(layers) > 1 and bad_layers < layers:
        return f"layers {_numbers(bad_layers)} differ, of {len(layers)}: a layout, or an adapter"
    if {one.side for one in wrong} == {KEY}:
        return "K differs more than V, in every layer: positions (rotary settings), or an adapter"
    return ALL_DIFFER


def _numbers(some: set[int]) -> str:
    shown = sorted(some)[:8]
    return ", ".join(map(str, shown)) + (", ..." if len(some) > len(shown) else "")
