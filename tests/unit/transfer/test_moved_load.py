# SPDX-License-Identifier: Apache-2.0
"""Tokens moved to other positions, against float64: all layouts, types, pairings and shifts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnstore_vllm.transfer.plan import MovedRun, moved_table
from tests.native_shapes import rotator
from tests.unit.transfer.moved_memory import (
    BLOCKS,
    CHUNK_BLOCKS,
    LAYERS,
    LAYOUTS,
    SLOTS,
    MovedMemory,
    ulp,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHIFTS = (-1, 1, 7, -16, -128, 1000, -4001, 131_071)


def theta_of(pairs: int, base: float = 10_000.0) -> list[float]:
    return [base ** (-i / pairs) for i in range(pairs)]


def layouts_and_types() -> list[tuple[str, torch.dtype]]:
    return [
        (name, dtype)
        for name in LAYOUTS
        for dtype in (BF16, FP16, FP32)
        if not (name == "AMX" and dtype == FP32)
    ]


@pytest.mark.parametrize("is_neox", [True, False], ids=["NeoX", "GPT-J"])
@pytest.mark.parametrize(("name", "dtype"), layouts_and_types(), ids=str)
def test_random_moves(name: str, dtype: torch.dtype, is_neox: bool) -> None:
    for number, (block_tokens, heads, dim, pairs) in enumerate(
        ((16, 2, 32, 16), (16, 3, 64, 16), (128, 1, 64, 32), (32, 2, 96, 7), (16, 1, 128, 64))
    ):
        memory = MovedMemory(
            LAYOUTS[name],
            dtype,
            theta=theta_of(pairs),
            is_neox=is_neox,
            block_tokens=block_tokens,
            heads=heads,
            dim=dim,
            seed=number,
        )
        rng = np.random.default_rng(number)
        for _ in range(6):
            shifts = rng.choice(np.array((0, *SHIFTS)), int(rng.integers(1, 4)))
            memory.check(memory.some_runs(rng, list(shifts)))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ("AMX", "vec") else pytest.mark.long) for n in LAYOUTS],
)
def test_every_offset_between_source_and_target(name: str) -> None:
    """One long run, from each token of a block to each."""
    memory = MovedMemory(LAYOUTS[name], BF16, theta=theta_of(8), block_tokens=16, heads=1, dim=32)
    for first in range(17):
        for within in range(16):
            head = 16 - within
            runs = [MovedRun(1, first, head, 2, within, 5)]
            if 16 - head > 0:
                runs.append(MovedRun(1, first + head, 16 - head, 0, 0, 5))
            memory.check(runs, range(1, 2))


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize(("name", "dtype"), layouts_and_types(), ids=str)
def test_what_does_not_turn_is_copied_bit_by_bit(name: str, dtype: torch.dtype, shift: int) -> None:
    """All bit patterns: V, dims beyond the rotary ones, and K that stays where it was."""
    memory = MovedMemory(LAYOUTS[name], dtype, theta=theta_of(8 if shift else 16))
    bits = torch.int32 if dtype == FP32 else torch.int16
    stored = torch.from_numpy(memory.slots).view(bits)
    random = torch.randint(-(2**15), 2**15, stored.shape, generator=memory.generator)
    stored.copy_(random << 16 | random if dtype == FP32 else random)
    tokens = np.arange(3, 14)
    runs = [MovedRun(2, 6, 11, 4, 3, shift)]
    memory.native.load(moved_table(runs), 0, LAYERS)
    sides = ("key", "value")
    page = int(memory.arguments["page_bytes"])
    for layer in range(LAYERS):
        found = memory.plain(memory.kv.view(bits), layer)
        for name_of_side, side in zip(sides, found, strict=True):
            numbers = memory.arguments[name_of_side]
            places = _places(numbers)
            for token in tokens:
                source = token + 3
                at = (layer * CHUNK_BLOCKS + source // 16) * page
                raw = stored[2, at // bits.itemsize :][: page // bits.itemsize]
                first = 16 if shift and name_of_side == "key" else 0
                for head in range(2):
                    for dim in range(first, 32):
                        wanted = raw[places(source % 16, head, dim)]
                        assert int(side[4, token, head, dim]) == int(wanted)


def _places(numbers: tuple[int, ...]):  # type: ignore[no-untyped-def]  # noqa: ANN202
    base, head_step, group, outer, inner, dim_group, dim_outer, dim_inner = numbers

    def place(token: int, head: int, dim: int) -> int:
        in_token = token // group * outer + token % group * inner
        return (
            base
            + head * head_step
            + in_token
            + dim // dim_group * dim_outer
            + (dim % dim_group * dim_inner)
        )

    return place


@pytest.mark.parametrize("shift", [-3000, -130, -1, 2, 5000])
@pytest.mark.parametrize("is_neox", [True, False])
def test_against_k_computed_at_the_new_position(shift: int, is_neox: bool) -> None:
    """What is stored was rounded once, and is rounded again: two units at the pair's norm."""
    pairs, dim, tokens = 32, 64, 128
    memory = MovedMemory(
        LAYOUTS["vec"],
        BF16,
        theta=theta_of(pairs),
        is_neox=is_neox,
        block_tokens=tokens,
        heads=2,
        dim=dim,
    )
    raw = torch.randn(LAYERS, SLOTS * CHUNK_BLOCKS, tokens, 2, dim, dtype=torch.float64).numpy()
    source = 4000 + np.arange(CHUNK_BLOCKS * tokens)
    at_source = _rope(memory, raw[:, :2].reshape(LAYERS, -1, 2, dim), source)
    at_target = _rope(memory, raw[:, :2].reshape(LAYERS, -1, 2, dim), source + shift)
    for layer in range(LAYERS):
        for block in range(CHUNK_BLOCKS):
            key, _ = memory.layout.view(memory.stored[layer, block], dim)
            plain = torch.from_numpy(at_source[layer, block * tokens : (block + 1) * tokens])
            key.copy_(plain.transpose(0, 1).reshape(key.shape))
    memory.slots[:] = memory._fill_slots(int(memory.arguments["page_bytes"]))
    memory.native.load(moved_table([MovedRun(0, 37, 100, 3, 20, shift)]), 0, LAYERS)
    for layer in range(LAYERS):
        found = memory.plain(memory.kv, layer)[0][3, 20:120].to(torch.float64).numpy()
        wanted = at_target[layer, 37:137]
        one, two = np.split(wanted, 2, -1) if is_neox else (wanted[..., ::2], wanted[..., 1::2])
        norm = np.hypot(one, two)
        units = ulp(norm, BF16)
        both = np.concatenate([units] * 2, -1) if is_neox else np.repeat(units, 2, -1)
        assert (np.abs(found - wanted) <= 2 * both).all()


def _rope(memory: MovedMemory, plain, position):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """[layers, tokens, heads, dim] turned by its position."""
    out = plain.copy()
    pairs = len(memory.theta)
    for pair, theta in enumerate(memory.theta):
        one, two = (pair, pair + pairs) if memory.is_neox else (2 * pair, 2 * pair + 1)
        turn = np.exp(1j * position * theta)[None, :, None]
        y = (plain[..., one] + 1j * plain[..., two]) * turn
        out[..., one], out[..., two] = y.real, y.imag
    return out


def test_nothing_to_move() -> None:
    memory = MovedMemory(LAYOUTS["vec"], BF16, theta=theta_of(16))
    memory.check([])
    memory.check([MovedRun(0, 0, 3, 1, 2, 9)], range(1, 1))
    memory.check([MovedRun(0, 0, 3, 1, 2, 9)], range(1, 2))


@pytest.mark.parametrize(
    "change",
    [
        {"slot": SLOTS}, {"slot": -1}, {"first": -1}, {"first": 2 * 16 - 2}, {"num_tokens": 0},
        {"num_tokens": -1}, {"num_tokens": 17}, {"block_id": BLOCKS}, {"block_id": -1},
        {"within": -1}, {"within": 14}, {"shift": 1 << 40}, {"shift": -(1 << 31)},
        {"first": 2**63 - 1}, {"within": 2**63 - 1}, {"num_tokens": 2**63 - 1},
    ],
    ids=str,
)  # fmt: skip
def test_places_that_do_not_exist_are_refused(change: dict[str, int]) -> None:
    memory = MovedMemory(LAYOUTS["vec"], BF16, theta=theta_of(16))
    before = memory.kv.clone()
    good = MovedRun(0, 0, 3, 1, 2, 9)
    table = moved_table([good, MovedRun(1, 1, 3, 3, 2, 9)._replace(**change)])
    with pytest.raises(IndexError, match="does not exist"):
        memory.native.load(table, 0, LAYERS)
    assert torch.equal(memory.kv, before)


def test_layers_and_shapes_that_do_not_exist_are_refused() -> None:
    memory = MovedMemory(LAYOUTS["vec"], BF16, theta=theta_of(16))
    table = moved_table([MovedRun(0, 0, 3, 1, 2, 9)])
    for first, stop in ((-1, 1), (0, LAYERS + 1), (2, 1)):
        with pytest.raises(IndexError, match="does not exist"):
            memory.native.load(table, first, stop)
    with pytest.raises(ValueError, match=r"must be \[n, 6\]"):
        memory.native.load(table[:, :5], 0, 1)
    twice = [MovedRun(0, 0, 3, 1, 2, 9), MovedRun(1, 0, 3, 1, 4, 9)]
    with pytest.raises(IndexError, match="named twice"):
        memory.native.load(moved_table(twice), 0, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_heads": 3}, "not a page"), ({"head_dim": 33}, "not a page"),
        ({"block_tokens": 8}, "not a page"), ({"num_heads": 0}, "no heads"),
        ({"num_heads": 2**62}, "not a page"), ({"block_tokens": 2**62}, "not a page"),
        ({"theta": [1.0] * 17}, "more dims turn"), ({"dtype": "float8_e4m3fn"}, "cannot be rot"),
        ({"key": (0, 1024, 0, 0, 1, 32, 0, 16)}, "a group has no"),
        ({"key": (0, 1024, 16, 0, 1, 32, 0, 15)}, "at one place"),
        ({"key": (-1, 1024, 16, 0, 1, 32, 0, 16)}, "not within"),
        ({"value": (513, 1024, 16, 0, 32, 32, 0, 1)}, "not within|at one place"),
        ({"run_bytes": 64}, "do not add up"),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_that_contradict_themselves_are_refused(change: dict[str, object], why: str) -> None:
    memory = MovedMemory(LAYOUTS["vec"], BF16, theta=theta_of(16))
    rotator(memory.arguments)
    with pytest.raises(ValueError, match=why):
        rotator(memory.arguments | change)
