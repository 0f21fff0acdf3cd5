# SPDX-License-Identifier: Apache-2.0
"""Whether K that a model caches turns with its position as its rotary embedding says, by numbers.

That a layer has a rotary embedding beside it does not say that it uses it (some leave it out in
some layers), nor that nothing comes between (some multiply K by a norm's weights after it). Either
would make moved K wrong. So the module that has both computes K of the same few tokens at other
positions, as far as what its attention is handed, and K of one is turned to the other and compared.

What depends on more than tokens and positions, as the length of a step, is not seen. No other
memory of the model is touched, and no rank waits for another: it ends before the attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.rope import Rope

TOKENS = 8
SHIFTS = (1, 37, 700)
"""Positions that the tokens are moved by, of those that the table has."""
POSITIONS = frozenset({"positions", "position_ids"})
HIDDEN = "hidden_states"
UNITS = 8.0
"""K may be off by so many units in the last place of its pair's norm: both tables and both K are
rounded. A layer that does not turn K is off by hundreds."""


class _Handed(Exception):
    """K as the attention was handed it."""

    def __init__(self, key: torch.Tensor) -> None:
        super().__init__()
        self.key = key


def check_turns(
    holder: torch.nn.Module, layer: torch.nn.Module, rope: Rope, length: int, head_dim: int,
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    """That K of `layer` at one position, turned by `rope`, is K at another.

    Args:
        holder: has the layer and its rotary embedding as members.
        length: of the rotary embedding's table.
        dtype, device: of the model's activations.
    Raises: UnsupportedError, with the reason, if it is not, or cannot be tried.
    Cost: a few projections of TOKENS tokens.
    """
    ask = _question(holder, layer, dtype, device)
    shifts = [shift for shift in SHIFTS if shift + TOKENS <= length]
    first = _heads(ask(0), head_dim, rope)
    name = type(holder).__name__
    if not bool(first.abs().max() > 0):
        raise UnsupportedError(f"{name} computes a K of zeros, so it is not seen how it turns")
    for shift in shifts:
        found = _heads(ask(shift), head_dim, rope)
        wanted = turned(first, shift, rope)
        off = _units_off(found, wanted, rope, dtype)
        if not off <= UNITS:
            raise UnsupportedError(
                f"{name} does not cache K as its rotary embedding turns it: {shift} positions "
                f"farther it is off by {off:.3g} units in the last place, at most {UNITS:g} were "
                "expected"
            )


def turned(key: torch.Tensor, shift: int, rope: Rope) -> torch.Tensor:
    """K of so many positions farther.

    Args:
        key: [tokens, heads, head_dim], float64.
    """
    angle = torch.from_numpy(rope.theta) * shift
    cosine, sine = torch.cos(angle), torch.sin(angle)
    first, second = _pairs(key, rope)
    out = key.clone()
    out_first, out_second = _pairs(out, rope)
    out_first.copy_(first * cosine - second * sine)
    out_second.copy_(second * cosine + first * sine)
    return out


def _pairs(key: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the dims that turn, [tokens, heads, rotary_dim / 2]: first and second of a pair."""
    turning = key[..., : rope.rotary_dim]
    if rope.is_neox:
        half = rope.rotary_dim // 2
        return turning[..., :half], turning[..., half:]
    return turning[..., 0::2], turning[..., 1::2]


def _units_off(found: torch.Tensor, wanted: torch.Tensor, rope: Rope, dtype: torch.dtype) -> float:
    """The largest difference, in units in the last place of a pair's norm, or of the dim itself
    where it has no pair."""
    size = wanted.abs()
    first, second = _pairs(size, rope)
    norm = torch.sqrt(first**2 + second**2)
    first.copy_(norm)
    second.copy_(norm)
    info = torch.finfo(dtype)
    # Angles of tables are in float32; its roundings grow with the position.
    unit = info.eps * size + 2.0**-13 * size * (info.eps < 2.0**-20) + info.tiny
    return float(((found - wanted).abs() / unit).max())


def _heads(key: torch.Tensor, head_dim: int, rope: Rope) -> torch.Tensor:
    """[tokens, heads, head_dim], float64."""
    if key.numel() % (TOKENS * head_dim) or head_dim < rope.rotary_dim:
        raise UnsupportedError(f"its attention is handed K of shape {tuple(key.shape)}")
    return key.detach().cpu().double().reshape(TOKENS, -1, head_dim)


def _question(
    holder: torch.nn.Module, layer: torch.nn.Module, dtype: torch.dtype, device: torch.device
) -> Callable[[int], torch.Tensor]:
    """K of the same tokens from a position on. Raises: UnsupportedError."""
    name = type(holder).__name__
    width = next(
        (m.input_size for m in holder._modules.values() if hasattr(m, "input_size")), None
    )  # the projections come before the output's
    if not isinstance(width, int):
        raise UnsupportedError(f"{name} has no projection whose input's size is known")
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, width, generator=random).to(device, dtype)
    needed = [
        parameter.name for parameter in inspect.signature(holder.forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY
        )
    ]  # fmt: skip
    unknown = [n for n in needed if n not in POSITIONS and n != HIDDEN]
    if unknown or HIDDEN not in needed or not POSITIONS & set(needed):
        raise UnsupportedError(
            f"{name}.forward takes {needed}, and not positions and hidden states"
        )

    def ask(first: int) -> torch.Tensor:
        positions = torch.arange(first, first + TOKENS, device=device)
        given: dict[str, Any] = {n: positions for n in needed if n in POSITIONS}
        try:
            with torch.no_grad(), _Handing(layer):
                holder.forward(**given, hidden_states=hidden.clone())
        except _Handed as handed:
            return handed.key
        raise UnsupportedError(f"{name}.forward did not hand K to its attention when it was tried")

    return ask


class _Handing:
    """For as long as it is entered, the layer hands K to us and computes nothing."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        def forward(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> None:
            raise _Handed(key.clone())

        self._layer.__dict__["forward"] = forward  # before the class's own

    def __exit__(self, *error: object) -> None:
        del self._layer.__dict__["forward"]
