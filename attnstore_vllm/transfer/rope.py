# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings that K can be rotated with by a difference of positions.

RoPE turns pair i of a head's dims by position * theta[i], theta being the model's, and multiplies by
one constant (YaRN's scale). Where a model's own table says just that, K of one position becomes K of
another by one more turn. Tables that change with the length of the sequence do not.
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


def check_table(
    theta: Floats, rows: torch.Tensor, positions: Sequence[int] | npt.NDArray[np.int64]
) -> float:
    """That a model's table of cosines and sines is m cos(p theta), m sin(p theta); returns m.

    Within the roundings that it cannot be without: half a unit of the table's dtype, and the angle
    having been computed in float32 (position, theta and their product rounded once each).

    Args:
        theta: [pairs], float64: what the table should be made of.
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
    cosines, sines = table[:, :pairs], table[:, pairs:]
    lengths = np.hypot(cosines, sines)
    scale = float(np.median(lengths))
    if not scale > 0:
        raise UnsupportedError("the model's table is all zeros")
    angles = at[:, None] * theta[None, :]
    # float32 rounds theta, the angle, and what was before theta (a power, a division or two).
    slack = np.abs(angles) * 4 * 2.0**-24 + 4 * 2.0**-24
    for name, found, wanted in (
        ("cosine", cosines, scale * np.cos(angles)),
        ("sine", sines, scale * np.sin(angles)),
    ):
        allowed = scale * (slack + info.eps) + info.tiny
        off = np.abs(found - wanted)
        if bool((off > allowed).any()):
            row, pair = (int(i) for i in np.unravel_index(np.argmax(off - allowed), off.shape))
            raise UnsupportedError(
                f"the model's table has {found[row, pair]:.6g} as the {name} of pair {pair} at "
                f"position {int(at[row])}, where {scale:.6g} times that of position times theta is "
                f"{wanted[row, pair]:.6g}: its angles are not static, or not those that its settings "
                "say, so K cannot be moved to another position"
            )
    return scale
