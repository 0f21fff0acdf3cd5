# SPDX-License-Identifier: Apache-2.0
"""The native PageRotator, as far as it goes without a GPU: what it refuses, and its tables."""

from __future__ import annotations

import importlib
from typing import Any

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
)
from tests.unit.transfer.test_moved_load import BF16, FP16, FP32, theta_of

GOOD = MovedRun(0, 0, 3, 1, 2, 9)


@pytest.fixture
def native() -> Any:
    return importlib.import_module("attnstore_vllm._native_cuda")


def arguments(name: str = "LBNHC", dtype: torch.dtype = BF16, **options: Any) -> dict[str, Any]:
    """Addresses that are the host's; nothing is read there."""
    memory = MovedMemory(LAYOUTS[name], dtype, **{"theta": theta_of(16), **options})
    found = {"kernels": None, "arrays": 0, **memory.arguments}
    # Where an allocation begins is not ours to say.
    found["slots_base"] = 1 << 20
    found["layer_bases"] = [(2 + i) << 20 for i in range(LAYERS)]
    found["slot_bytes"] = int(found["slot_bytes"]) // 64 * 64
    return found


def test_a_table_is_tokens_and_then_angles(native: Any) -> None:
    pairs, block_tokens = 7, 16
    turns = rotator(arguments(theta=theta_of(pairs)), native)
    runs = [
        MovedRun(2, 13, 7, 5, 1, -4),
        MovedRun(0, 0, 2, 3, 14, 0),
        MovedRun(1, 31, 1, 0, 0, 9),
        MovedRun(1, 30, 1, 0, 1, -4),
    ]
    table = turns.table(moved_table(runs))
    assert table.num_tokens == 11
    words = table.words
    assert len(words) % 2 == 0
    tokens = words[: 3 * 11].view(np.uint32).reshape(-1, 6)
    turns = {-4: 0, 9: 1, 0: 2**32 - 1}
    wanted = [
        (run.slot, (run.first + i) // block_tokens, (run.first + i) % block_tokens, run.block_id,
         run.within + i, turns[run.shift])
        for run in runs
        for i in range(run.num_tokens)
    ]  # fmt: skip
    assert tokens.tolist() == [list(row) for row in wanted]
    angles = words[34:].view(np.float32).reshape(2, -1)
    assert angles.shape == (2, 16)
    for shift, row in zip((-4, 9), angles, strict=True):
        angle = shift * np.array(theta_of(pairs))
        both = np.concatenate((np.cos(angle), np.sin(angle))).astype(np.float32)
        assert np.array_equal(row[: 2 * pairs], both)


@pytest.mark.parametrize(
    ("name", "dtype", "options", "is_wide"),
    [
        ("LBNHC", BF16, {}, True), ("LBHNC", FP16, {}, True), ("LHBNC", FP32, {}, True),
        ("K and V apart", BF16, {}, True), ("vec", BF16, {}, False), ("AMX", BF16, {}, False),
        ("odd groups", BF16, {}, False), ("BLNHC", BF16, {"theta": theta_of(8)}, True),
        ("LBNHC", BF16, {"theta": theta_of(12)}, False),
        ("LBNHC", BF16, {"theta": theta_of(12), "is_neox": False}, True),
        ("LBNHC", FP32, {"theta": theta_of(12)}, True),
        ("LBNHC", BF16, {"theta": theta_of(7), "is_neox": False}, False),
        ("LBNHC", BF16, {"dim": 36, "theta": theta_of(8)}, False),
    ],
    ids=str,
)  # fmt: skip
def test_which_layouts_go_by_16_bytes(
    native: Any, name: str, dtype: torch.dtype, options: dict[str, Any], is_wide: bool
) -> None:
    given = arguments(name, dtype, **options)
    assert rotator(given, native).is_wide == is_wide
    for change in ({"slots_base": (1 << 20) + 8}, {"layer_bases": [1 << 20, (1 << 21) + 4]}):
        assert not rotator({**given, **change}, native).is_wide


@pytest.mark.parametrize(
    "change",
    [
        {"slot": SLOTS}, {"slot": -1}, {"first": -1}, {"first": CHUNK_BLOCKS * 16 - 2},
        {"num_tokens": 0}, {"num_tokens": 17}, {"block_id": BLOCKS}, {"block_id": -1},
        {"within": -1}, {"within": 14}, {"shift": 1 << 40}, {"first": 2**63 - 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_exist_is_refused_before_cuda_is_asked(
    native: Any, change: dict[str, int]
) -> None:
    turns = rotator(arguments(), native)
    moved = moved_table([GOOD, MovedRun(1, 1, 3, 3, 2, 9)._replace(**change)])
    with pytest.raises(IndexError, match="does not exist"):
        turns.check(moved, 0, LAYERS)
    with pytest.raises(IndexError, match="does not exist"):
        turns.table(moved)


def test_layers_and_shapes_that_do_not_exist_are_refused(native: Any) -> None:
    turns = rotator(arguments(), native)
    moved = moved_table([GOOD])
    table = turns.table(moved)
    for first, stop in ((-1, 1), (0, LAYERS + 1), (2, 1)):
        with pytest.raises(IndexError, match="does not exist"):
            turns.check(moved, first, stop)
        with pytest.raises(IndexError, match="does not exist"):
            turns.load(table, first, stop, 0, 0, 1, 0)
    with pytest.raises(ValueError, match=r"must be \[n, 6\]"):
        turns.check(moved[:, :5], 0, 1)
    with pytest.raises(IndexError, match="named twice"):
        turns.check(moved_table([GOOD, MovedRun(1, 0, 3, 1, 4, 9)]), 0, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_heads": 3}, "not a page"), ({"theta": [1.0] * 17}, "more dims turn"),
        ({"dtype": "float8_e4m3fn"}, "cannot be rot"), ({"run_bytes": 64}, "do not add up"),
        ({"num_blocks": 1 << 40}, "too many"),
        ({"key": (0, 0, 16, 0, 1, 32, 0, 16)}, "at one place"),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_that_contradict_themselves_are_refused(
    native: Any, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        rotator({**arguments(), **change}, native)


def test_without_a_gpu_it_fails_and_says_why(native: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    turns = rotator(arguments(), native)
    table = turns.table(moved_table([GOOD]))
    turns.load(table, 1, 1, 0, 0, 1, 0)  # of no layer there is nothing to do
    with pytest.raises(RuntimeError, match="driver"):
        turns.load(table, 0, 1, 16, 0, 1, 0)
