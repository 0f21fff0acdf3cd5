# SPDX-License-Identifier: Apache-2.0
"""What two copies that differ tell of the cause."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attnstore_vllm.policy.kv_causes import ALL_DIFFER, cause_of
from tests.unit.policy.test_kv_compare import (
    ALL,
    Kv,
    a_block_too_far,
    another_tenants,
    comparison,
    heads_of_the_other_rank,
    kv,
    layer_too_far,
    raw,
    rotary_table_off,
    rounded,
    sides_swapped,
)


def one_rank(one: Kv) -> Kv:
    found = one.copy()
    found[1] = kv(99)[1]
    return found


def one_layer(one: Kv) -> Kv:
    found = one.copy()
    found[:, 2] = kv(99)[:, 2]
    return found


CAUSES: list[tuple[Callable[[Kv], Kv], str]] = [
    (heads_of_the_other_rank, "rank 0, layer 0 has what rank 1, layer 0 computes"),
    (layer_too_far, "rank 0, layer 0 has what rank 0, layer 2 computes"),
    (a_block_too_far, "blocks stand beside their place"),
    (sides_swapped, "K has what V computes"),
    (rotary_table_off, "K differs more than V"),
    (one_rank, "ranks 1 differ, of 2"),
    (one_layer, "layers 2 differ, of 3"),
    (another_tenants, ALL_DIFFER),
]


@pytest.mark.parametrize(("fault", "told"), CAUSES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_cause_is_told_beside_rounding(fault: Callable[[Kv], Kv], told: str) -> None:
    for seed in range(3):
        right = kv(seed)
        stored = raw(fault(right), "bfloat16")
        computed = raw(rounded(right, seed + 1000, 0.02), "bfloat16")
        assert told in cause_of(comparison(2, "bfloat16"), stored, computed, ALL)


def test_what_is_equal_has_no_cause() -> None:
    same = raw(kv(1), "bfloat16")
    assert cause_of(comparison(2), same, same, ALL) == ""


def test_bits_tell_where_but_not_which_side() -> None:
    right = kv(1)
    stored, computed = raw(np.roll(right, 1, axis=2), "bfloat16"), raw(right, "bfloat16")
    assert "beside their place" in cause_of(comparison(2), stored, computed, ALL)
    flipped = bytearray(computed)
    flipped[-1] ^= 1
    told = cause_of(comparison(2), memoryview(flipped), computed, ALL)
    assert told.startswith("ranks 1 differ")
