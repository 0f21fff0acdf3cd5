# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings that K can be rotated with by a difference of positions.

RoPE turns pair i of a head's dims by position * theta[i], theta being the model's, and multiplies
by one constant (YaRN's scale). Where a model's own table says just that, K of one position becomes
K of another by one more turn. Tables that change with the length of the sequence do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnstore_vllm.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A model's rotation.

    theta: [rotary_dim / 2], float64: radians a position, pair by pair.
    rotary_dim: how many dims of a head turn, its first ones; even. The others have no position.
    is_neox: the pairs are (i, i + rotary_dim / 2); else (2 i, 2 i + 1), as in GPT-J.
    """

    theta: Floats
    rotary_dim: int
    is_neox: bool

    def __post_init__(self) -> None:
        assert self.theta.dtype == np.float64
        assert self.theta.shape == (self.rotary_dim // 2,)
        assert self.rotary_dim % 2 == 0
        assert bool(np.isfinite(self.theta).all())


NO_ROPE = Rope(np.empty(0, np.float64), 0, True)
"""The rotation of layers whose K has no position: K is copied."""


def check_table(
    theta: Floats, rows: torch.Tensor, positions: Sequence[int] | npt.NDArray[np.int64]
) -> float:
    """That a model's table of cosines and sines is m cos(p theta), m sin(p theta); returns m.

    Within the roundings that it cannot be without: the angle's to float32, and that of what is
    stored to the table's dtype.

    Args:
        theta: [pairs], float64: what the table should be made of. The model's own frequencies, as
            rounded as they are there: at position 100,000 the last bit of a float32 is seen.
        rows: [positions, 2 * pairs], any float dtype: rows of the table, cosines first.
        positions: of the rows. Should have small ones, and the largest.
    Raises: UnsupportedError, with the reason, if it is not.
    """
    import torch  # noqa: PLC0415

    at = np.asarray(positions, np.float64)
    pairs = len(theta)
    if tuple(rows.shape) != (len(at), 2 * pairs) or not rows.is_floating_point():
        raise UnsupportedError(
            f"the model's table has rows of shape {tuple(rows.shape)}, {rows.dtype}; "
            f"{(len(at), 2 * pairs)} floats were expected"
        )
    table: Floats = rows.to(device="cpu", dtype=torch.float64).numpy()
    if not bool(np.isfinite(table).all()):
        raise UnsupportedError("the model's table has numbers that are not finite")
    info = torch.finfo(rows.dtype)
    angles = at[:, None] * theta[None, :]
    unit = np.concatenate([np.cos(angles), np.sin(angles)], 1)
    scale = float((table * unit).sum() / (unit * unit).sum())
    wanted = scale * unit
    # Half a unit of what is stored, and half of one for the scale, which comes of such numbers:
    # most are the cosines of small angles, rounded alike.
    off_stored = info.eps * np.abs(wanted) + info.tiny
    off_angle = np.tile(np.abs(angles) * 2.0**-23 + 2.0**-22, 2) * abs(scale)
    excess = np.abs(table - wanted) - off_stored - off_angle
    if scale <= 0 or bool((excess > 0).any()):
        row, column = (int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
        name = "cosine" if column < pairs else "sine"
        raise UnsupportedError(
            f"the model's table has {table[row, column]:.6g} as the {name} of pair "
            f"{column % pairs} at position {int(at[row])}, where {scale:.6g} times that of "
            f"position times theta is {wanted[row, column]:.6g}: its angles are not static, or not "
            "those that its settings say, so K cannot be moved to another position"
        )
    return scale
