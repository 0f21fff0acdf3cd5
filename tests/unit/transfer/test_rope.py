# SPDX-License-Identifier: Apache-2.0
"""Tables of models, made as models make them, against the frequencies that they should have."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.rope import Rope, check_table

POSITIONS = [0, 1, 2, 63, 1000, 4095, 8191, 65_537, 131_071]
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def frequencies(pairs: int, base: float = 10_000.0) -> torch.Tensor:
    """float32, as models have them."""
    return 1.0 / (base ** (torch.arange(0, 2 * pairs, 2, dtype=torch.float) / (2 * pairs)))


def llama3(theta: torch.Tensor) -> torch.Tensor:
    wave = 2 * math.pi / theta
    smooth = (8192 / wave - 1) / 3
    between = (1 - smooth) * theta / 8 + smooth * theta
    return torch.where(wave > 8192, theta / 8, torch.where(wave < 2048, theta, between))


def table(theta: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    angles = torch.einsum("i,j->ij", torch.tensor(POSITIONS, dtype=torch.float), theta)
    return torch.cat([angles.cos() * scale, angles.sin() * scale], -1).to(dtype)


def wide(theta: torch.Tensor) -> npt.NDArray[np.float64]:
    return theta.to(torch.float64).numpy()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("pairs", [1, 10, 32, 64])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("scale", [1.0, 1.2079, 0.1])
def test_static_tables(dtype: torch.dtype, pairs: int, base: float, scale: float) -> None:
    plain = frequencies(pairs, base)
    for theta in (plain, plain / 4, llama3(plain)):
        found = check_table(wide(theta), table(theta, dtype, scale), POSITIONS)
        assert found == pytest.approx(scale, rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_other_frequencies_are_refused(dtype: torch.dtype) -> None:
    theta = frequencies(32)
    wrong = table(theta, dtype)
    one_off = theta.clone()
    one_off[17] *= 1.001
    for other in (theta * 1.001, theta / 2, one_off, llama3(theta), frequencies(32, 10_100.0)):
        with pytest.raises(UnsupportedError, match=r"position \d+.*not static"):
            check_table(wide(other), wrong, POSITIONS)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_dynamic_tables_are_refused(dtype: torch.dtype) -> None:
    """Other frequencies, or another scale, from some position on."""
    theta = frequencies(32)
    rows = table(theta, dtype)
    longer = rows.clone()
    longer[6:] = table(frequencies(32, 40_000.0), dtype)[6:]
    scaled = rows.clone()
    scaled[6:] = table(theta, dtype, 1.19)[6:]
    swapped = torch.cat([rows[:, 32:], rows[:, :32]], -1)
    for other in (longer, scaled, swapped, torch.zeros_like(rows), -rows):
        with pytest.raises(UnsupportedError, match="not static"):
            check_table(wide(theta), other, POSITIONS)


def test_what_is_no_table_is_refused() -> None:
    theta = frequencies(32)
    rows = table(theta, torch.float32)
    for other in (rows[:, :32], rows[1:], rows.to(torch.int32)):
        with pytest.raises(UnsupportedError, match="were expected"):
            check_table(wide(theta), other, POSITIONS)
    rows[3, 3] = math.nan
    with pytest.raises(UnsupportedError, match="not finite"):
        check_table(wide(theta), rows, POSITIONS)


def test_a_rope_is_as_long_as_its_dims() -> None:
    theta = wide(frequencies(8))
    assert Rope(theta, 16, is_neox=True).rotary_dim == 16
    for dims in (8, 15, 17, 18):
        with pytest.raises(AssertionError):
            Rope(theta, dims, is_neox=False)
