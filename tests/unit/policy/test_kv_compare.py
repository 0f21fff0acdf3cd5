# SPDX-License-Identifier: Apache-2.0
"""What tells wrong KV from rounding: planted faults are found, and rounding alone never is one.

KV as models have it: K has channels far from zero that all tokens share, heads differ in size, and
one has next to no weight. A chunk has as many blocks as it usually has on a GPU: one of them is a
sixteenth of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attnstore_vllm.policy.kv_compare import (
    BOUND,
    KEY,
    STATE_BOUND,
    VALUE,
    Blocks,
    Comparison,
    Difference,
    Side,
    Unit,
    distances_of,
    floats_of,
)

RANKS, LAYERS, BLOCKS, TOKENS, HEADS, DIM = 2, 3, 16, 16, 4, 8
SHAPE = (RANKS, LAYERS, BLOCKS, 2, HEADS, TOKENS, DIM)
"""Of a slot: a page has K of all heads, then V."""
Kv = npt.NDArray[np.float32]
PLACES = np.arange(2 * HEADS * TOKENS * DIM).reshape(2, HEADS, TOKENS, DIM).transpose(0, 2, 1, 3)
ALL = (range(BLOCKS),)


def comparison(item: int, dtype: str | None = None) -> Comparison:
    page = 2 * HEADS * TOKENS * DIM * item
    units = [
        Unit(rank, layer, (rank * LAYERS + layer) * BLOCKS * page, page)
        for rank in range(RANKS)
        for layer in range(LAYERS)
    ]
    if dtype is None:
        return Comparison(units, None)
    return Comparison(units, [Side(KEY, dtype, PLACES[0]), Side(VALUE, dtype, PLACES[1])])


def kv(seed: int) -> Kv:
    """Of one prompt. The model is the same for all."""
    model, chance = np.random.default_rng(0), np.random.default_rng(seed)
    far = model.standard_normal((RANKS, LAYERS, 1, 1, HEADS, 1, DIM)) * 5
    sizes = np.array([1.0, 0.2, 4.0, 1e-4])[:, None, None]
    found = chance.standard_normal(SHAPE) * sizes
    found[:, :, :, :1] += far
    return found.astype(np.float32)


def rounded(one: Kv, seed: int, part: float) -> Kv:
    """As another batch computes it: off by a part of what each layer's numbers have in the mean."""
    size = np.sqrt(np.square(one).mean(axis=(2, 4, 5, 6), keepdims=True))
    noise = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
    return (one + noise * part * np.minimum(np.abs(one) + 0.01 * size, size)).astype(np.float32)


def raw(one: Any, dtype: str) -> memoryview:
    if dtype == "bfloat16":
        return memoryview((one.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return memoryview(one.astype(dtype).tobytes())


def look(
    stored: Kv,
    computed: Kv,
    dtype: str = "bfloat16",
    blocks: Blocks = ALL,
    bits: bool = False,
    bound: float = BOUND,
) -> list[Difference]:
    item = 4 if dtype == "float32" else 2
    found = comparison(item, None if bits else dtype)
    given = found.look(raw(stored, dtype), raw(computed, dtype), blocks, bound)
    return [difference for difference in given if difference is not None]


def sides_swapped(one: Kv) -> Kv:
    return np.ascontiguousarray(one[:, :, :, ::-1])


def a_block_too_far(one: Kv) -> Kv:
    return np.roll(one, 1, axis=2)


def heads_of_the_other_rank(one: Kv) -> Kv:
    return np.ascontiguousarray(one[::-1])


def layer_too_far(one: Kv) -> Kv:
    return np.roll(one, 1, axis=1)


def another_tenants(one: Kv) -> Kv:
    return kv(99)


def rotary_table_off(one: Kv) -> Kv:
    """K is turned by other angles: halves of each head's dims belong together."""
    found = one.copy()
    angles = np.linspace(0.5, 2.5, DIM // 2).astype(np.float32)
    first, second = one[:, :, :, 0, ..., : DIM // 2], one[:, :, :, 0, ..., DIM // 2 :]
    found[:, :, :, 0, ..., : DIM // 2] = first * np.cos(angles) - second * np.sin(angles)
    found[:, :, :, 0, ..., DIM // 2 :] = first * np.sin(angles) + second * np.cos(angles)
    return found


def one_block_of_another(one: Kv) -> Kv:
    found = one.copy()
    found[:, :, 2] = kv(99)[:, :, 2]
    return found


def two_blocks_swapped(one: Kv) -> Kv:
    found = one.copy()
    found[:, :, 1], found[:, :, 2] = one[:, :, 2], one[:, :, 1]
    return found


def one_block_of_zeros(one: Kv) -> Kv:
    found = one.copy()
    found[0, 0, 2] = 0
    return found


def one_block_of_a_head_of_another(one: Kv) -> Kv:
    found = one.copy()
    found[1, 1, 5, 1, 1] = kv(99)[1, 1, 5, 1, 1]
    return found


def one_head_of_another(one: Kv) -> Kv:
    found = one.copy()
    found[1, 2, :, :, 1] = kv(99)[1, 2, :, :, 1]
    return found


def zeros(one: Kv) -> Kv:
    return np.zeros_like(one)


def one_head_of_zeros(one: Kv) -> Kv:
    found = one.copy()
    found[0, 1, :, 0, 0] = 0
    return found


def ten_times_too_large(one: Kv) -> Kv:
    return one * 10


def ten_times_too_small(one: Kv) -> Kv:
    return one * np.float32(0.1)


def not_a_number(one: Kv) -> Kv:
    found = one.copy()
    found[0, 0, 0, 0, 0, 0, 0] = math.nan
    return found


FAULTS: list[Callable[[Kv], Kv]] = [
    sides_swapped, a_block_too_far, heads_of_the_other_rank, layer_too_far, another_tenants,
    rotary_table_off, one_block_of_another, one_head_of_another, zeros, not_a_number,
    two_blocks_swapped, one_block_of_zeros, one_block_of_a_head_of_another, one_head_of_zeros,
    ten_times_too_large, ten_times_too_small,
]  # fmt: skip
FAR = [zeros, ten_times_too_large, ten_times_too_small, one_head_of_zeros, another_tenants]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_beside_rounding(fault: Callable[[Kv], Kv], dtype: str) -> None:
    for seed in range(6):
        right = kv(seed)
        assert look(fault(right), rounded(right, seed + 1000, 0.02), dtype), seed
        assert look(fault(right), right, dtype, bits=True)


@pytest.mark.parametrize("fault", FAR, ids=lambda fault: fault.__name__)
def test_it_is_found_of_a_state_too(fault: Callable[[Kv], Kv]) -> None:
    """Its bound is the widest there is, for all that a state adds up."""
    right = kv(1)
    for stored, computed in ((fault(right), right), (right, fault(right))):
        assert look(stored, computed, bound=STATE_BOUND)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_is_no_fault(dtype: str) -> None:
    """Ten times what bf16 rounds a number by, and more."""
    for seed in range(60):
        right = kv(seed)
        assert look(right, rounded(right, seed + 1000, 0.1), dtype) == []


@pytest.mark.parametrize("size", [0.0, 1e-6, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("axes", [(2,), (4,), (2, 4)], ids=["block", "head", "block of a head"])
def test_rounding_of_what_is_small_is_no_fault(size: float, axes: tuple[int, ...]) -> None:
    """V of tokens that all others look at is small. It rounds as what it is the difference of."""
    for seed in range(6):
        right = kv(seed)
        at = tuple(1 if axis in axes else slice(None) for axis in range(right.ndim))
        right[at] *= size
        noise = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
        mean = np.sqrt(np.square(right).mean(axis=(2, 5, 6), keepdims=True))
        assert look(right, right + 0.05 * noise * mean) == []


def test_one_bit_is_found_where_bits_are_compared() -> None:
    right = bytearray(raw(kv(1), "bfloat16"))
    page = 2 * HEADS * TOKENS * DIM * 2
    for at in (0, page * BLOCKS + 7, len(right) - 1):
        flipped = bytearray(right)
        flipped[at] ^= 1
        found = comparison(2).look(memoryview(flipped), memoryview(right), ALL)
        (difference,) = [each for each in found if each is not None]
        rank, layer = divmod(at // (page * BLOCKS), LAYERS)
        assert difference == Difference(rank, layer, "", -1, math.inf)
        assert str(difference) == f"rank {rank}, layer {layer}: other bits"


def test_only_the_blocks_that_are_compared_count() -> None:
    right, wrong = kv(1), kv(1)
    wrong[:, :, 0] = wrong[:, :, 3] = 7.0
    assert look(wrong, right, blocks=[range(1, 3)], bits=True) == []
    assert look(wrong, right, blocks=[range(1, 3)]) == []
    assert look(wrong, right, blocks=[range(2, 4)])


def test_a_difference_says_where_it_is_most() -> None:
    right, wrong = kv(1), kv(1)
    wrong[1, 2, :, 1, 2] *= -1
    (found,) = look(wrong, right)
    assert (found.rank, found.layer, found.side, found.head) == (1, 2, "V", 2)
    assert found.distance == pytest.approx(2.0)
    assert str(found) == "rank 1, layer 2, V of head 2: distance 2"


def test_distances() -> None:
    zero, one = np.zeros((1, 2)), np.ones((1, 2))
    assert distances_of(zero, zero, zero).tolist() == [[0, 0]], "plus and minus zero"
    assert distances_of(one, one, one).tolist() == [[1, 1]]
    assert distances_of(np.array([[math.nan, 1.0]]), one, one).tolist() == [[math.inf, 1]]
    small, large = np.array([[1e-8, 1.0]]), np.array([[1e-8, 100.0]])
    assert distances_of(small, large, large)[0, 0] < BOUND, "a head of next to no weight"
    found = distances_of(small.T, large.T, large.T)
    assert found[0, 0] < BOUND, "a block of next to no weight"
    assert distances_of(81 * one, one, 100 * one) == pytest.approx(9 / math.sqrt(10))


def test_a_head_of_zeros_is_none_of_little_weight() -> None:
    """It would count as one of FLOOR, and then as near; but not what may be nothing."""
    one = np.array([[0.001, 1.0], [0.001, 1.0]])
    lost = one * [0, 1]
    apart = one - lost
    for found in (distances_of(apart, one, lost), distances_of(apart, lost, one)):
        assert found.tolist() == [[math.inf, 0], [math.inf, 0]]
    one[:, 0] = 1e-5
    assert distances_of(one - lost, one, lost)[0, 0] < BOUND, "as of a number that underflows"
    lost = one * [[0], [1]]
    assert distances_of(one - lost, one, lost)[0, 0] < BOUND, "of one block alone"


def test_numbers_of_no_side_count_for_none() -> None:
    """Those between two sides, before the first and behind the last."""
    places = np.arange(5, 5 + 2 * 3 * 4).reshape(3, 2, 4)
    sides = [Side(KEY, "float32", places), Side(VALUE, "float32", places + 30)]
    numbers = 70
    found = Comparison([Unit(0, 0, 0, numbers * 4)], sides)
    inside = np.concatenate([side.places.ravel() for side in sides])
    chance = np.random.default_rng(1)
    right = chance.standard_normal((2, numbers)).astype(np.float32)
    other = chance.standard_normal((2, numbers)).astype(np.float32)
    other[:, inside] = right[:, inside]

    def compared() -> Difference | None:
        stored, computed = (memoryview(one.tobytes()) for one in (right, other))
        (difference,) = found.look(stored, computed, [range(2)])
        return difference

    assert compared() is None
    other[1, places[:, 1] + 30] *= -1
    difference = compared()
    assert difference is not None
    assert (difference.side, difference.head, difference.distance) == (VALUE, 1, 2.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_are_read_as_they_are_written(dtype: str) -> None:
    numbers: Any = np.array([0.0, -1.5, 2.0**-10, 384.0], np.float32)
    given = np.frombuffer(raw(numbers, dtype), np.uint8)
    assert floats_of(given, dtype).tolist() == numbers.tolist()


def test_blocks_that_begin_behind_a_slots_end_are_compared_in_their_order() -> None:
    right, wrong = kv(1), kv(1)
    wrong[:, :, 1] = 7.0
    around = [range(3, 4), range(0, 1)]
    assert look(wrong, right, blocks=around) == []
    wrong[:, :, 0] = 7.0
    for bits in (True, False):
        assert look(wrong, right, blocks=around, bits=bits)


def padded(content: bytes, page: int, size: int, fill: int) -> memoryview:
    """Pages of `content`, each followed by other bytes."""
    parts = [content[at : at + page] for at in range(0, len(content), page)]
    return memoryview(b"".join(part + bytes([fill]) * (size - page) for part in parts))


@pytest.mark.parametrize("bits", [False, True])
def test_what_is_behind_a_pages_content_may_be_anything(bits: bool) -> None:
    page, size = 2 * HEADS * TOKENS * DIM * 2, 2 * HEADS * TOKENS * DIM * 2 + 96
    units = [Unit(0, layer, layer * BLOCKS * size, size) for layer in range(LAYERS)]
    sides = [Side(KEY, "bfloat16", PLACES[0]), Side(VALUE, "bfloat16", PLACES[1])]
    found = Comparison(units, None if bits else sides, page)
    right = bytes(raw(kv(1)[0], "bfloat16"))
    other = bytes(raw(kv(2)[0], "bfloat16"))
    one, same, wrong = (
        padded(content, page, size, fill) for content, fill in ((right, 1), (right, 2), (other, 1))
    )
    assert list(found.look(one, same, ALL)) == [None] * LAYERS
    assert None not in list(found.look(one, wrong, ALL))


def test_states_of_two_types_are_compared_each_by_itself() -> None:
    """A convolution's in bfloat16, then a recurrent one in float32, in a page with room behind."""
    conv, ssm = 2 * 5, 3 * 4  # heads and dims of each
    page = conv * 2 + ssm * 4 + 10
    sides = [
        Side("state 0", "bfloat16", np.arange(conv).reshape(1, 2, 5)),
        Side("state 1", "float32", np.arange(conv // 2, conv // 2 + ssm).reshape(1, 3, 4)),
    ]
    found = Comparison([Unit(0, 0, 0, page)], sides, conv * 2 + ssm * 4)

    def state(first: float, second: float, fill: int) -> memoryview:
        one = np.full(conv, first, np.float32).view(np.uint32) >> 16
        other = np.full(ssm, second, np.float32)
        return memoryview(one.astype(np.uint16).tobytes() + other.tobytes() + bytes([fill]) * 10)

    def compared(other: memoryview) -> list[Difference | None]:
        return list(found.look(state(1.0, 2.0, 1), other, [range(1)]))

    assert compared(state(1.0, 2.0, 2)) == [None]
    assert compared(state(1.02, 2.1, 1)) == [None], "rounding"
    for first, second, name in ((-1.0, 2.0, "state 0"), (1.0, -2.0, "state 1")):
        (difference,) = compared(state(first, second, 1))
        assert difference is not None and difference.side == name


def test_what_the_model_computes_as_no_number_is_no_fault() -> None:
    """float16 overflows in some models, and clients find the prompts: they must not end the
    serving of all."""
    right = kv(1)
    stored, computed = not_a_number(right), not_a_number(rounded(right, 2, 0.02))
    assert not look(stored, computed, "float16")
    assert look(one_head_of_another(stored), computed, "float16"), "another head's fault"
    assert look(right, computed, "float16") and look(stored, rounded(right, 2, 0.02), "float16")
    large = right.copy()
    large[0, 0, 0, 0, 0, 0, 0] = 6e4
    assert not look(large * 2, rounded(large, 2, 0.02) * 2, "float16"), "infinite in both"
