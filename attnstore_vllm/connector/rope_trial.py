# SPDX-License-Identifier: Apache-2.0
"""Whether K that a model caches turns with its position as its rotary embedding says, by numbers.

That a layer has a rotary embedding beside it does not say that it uses it (some leave it out in
some layers), nor that nothing comes between (some multiply K by a norm's weights after it). Either
would make moved K wrong. So the module that has both computes K of the same few tokens at other
positions, as far as what its attention is handed, and K of one is turned to the other and compared.

What depends on more than tokens and positions, as the length of a step, is not seen. KV is neither
read nor written. Some models normalize K over all ranks, and so a trial may wait for the others':
each rank asks each layer as often, by no answer of the questions before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.rope import NO_ROPE, Rope

TOKENS = 8
SHIFTS = (1, 37, 700)
"""Positions that the tokens are moved by; and half of the table. Not to its end: who looks beyond
it on a GPU would end the process."""
POSITIONS = frozenset({"positions", "position_ids"})
HIDDEN = "hidden_states"
UNITS = 4.0
"""Units in the last place of its pair's norm that K may be off by: tables and both K are rounded.
Models of vLLM's CPU build are off by up to 1.6; a layer that does not turn K, by hundreds."""


class _Handed(BaseException):
    """K as the attention was handed it. Models may catch exceptions; this is not theirs."""

    def __init__(self, key: torch.Tensor) -> None:
        super().__init__()
        self.key = key


def turns(
    holder: torch.nn.Module,
    layer: torch.nn.Module,
    rope: Rope,
    head_dim: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether K of `layer` at one position, turned by `rope`, is K at another; False: it is the
    same there without a turn.

    Args:
        holder: has the layer and its rotary embedding as members.
        length: of the rotary embedding's table.
        dtype, device: of the model's activations.
    Raises: UnsupportedError, with the reason, if it is neither, or cannot be tried.
    Cost: five projections of TOKENS tokens.
    """
    name = type(holder).__name__
    shifts = sorted({s for s in (*SHIFTS, length // 2) if 0 < s <= length - TOKENS})
    try:
        with _without_adapters(holder), torch.inference_mode():
            given = _arguments(holder, dtype, device)
            keys = [_key(holder, layer, given, first) for first in (0, *shifts)]
    except UnsupportedError:
        raise
    except Exception as error:  # of the model's code, of any kind: the server must start
        first_line = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"{name}.forward could not be tried: {type(error).__name__}: {first_line}"
        ) from error
    first, *others = (_heads(key, head_dim, rope) for key in keys)
    if not bool(first.abs().max() > 0):
        raise UnsupportedError(f"{name} computes a K of zeros, so it is not seen how it turns")
    if all(_units_off(key, first, NO_ROPE, dtype, 0) <= UNITS for key in others):
        return False
    for shift, found in zip(shifts, others, strict=True):
        off = _units_off(found, turned(first, shift, rope), rope, dtype, shift)
        if not off <= UNITS:
            raise UnsupportedError(
                f"{name} does not cache K as its rotary embedding turns it: {shift} positions "
                f"farther it is off by {off:.3g} units in the last place, at most {UNITS:g} were "
                "expected"
            )
    return True


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


def _units_off(
    found: torch.Tensor, wanted: torch.Tensor, rope: Rope, dtype: torch.dtype, shift: int
) -> float:
    """The largest difference, in units in the last place of a pair's norm, or of the dim itself
    where it has no pair."""
    info = torch.finfo(dtype)
    unit = wanted.abs() * info.eps
    first, second = _pairs(wanted, rope)
    # The tables' angles are in float32.
    angle = torch.from_numpy(rope.theta) * (shift + TOKENS) * 2.0**-23
    for part in _pairs(unit, rope):
        part.copy_(torch.hypot(first, second) * (info.eps + angle))
    return float(((found - wanted).abs() / (unit + info.tiny)).max())


def _heads(key: torch.Tensor, head_dim: int, rope: Rope) -> torch.Tensor:
    """[tokens, heads, head_dim], float64."""
    if key.numel() % (TOKENS * head_dim) or head_dim < rope.rotary_dim:
        raise UnsupportedError(
            f"its attention is handed K of shape {tuple(key.shape)}; {TOKENS} tokens of heads of "
            f"{head_dim} dims were expected"
        )
    return key.detach().cpu().double().reshape(TOKENS, -1, head_dim)


def _arguments(
    holder: torch.nn.Module, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Arguments of its forward pass, for tokens at position 0. Raises: UnsupportedError."""
    name = type(holder).__name__
    width = next(
        (m.input_size for m in holder._modules.values() if hasattr(m, "input_size")), None
    )  # the projections come before the output's
    if not isinstance(width, int):
        raise UnsupportedError(f"{name} has no projection whose input's size is known")
    needed = [
        parameter.name
        for parameter in inspect.signature(holder.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    unknown = [n for n in needed if n not in POSITIONS and n != HIDDEN]
    if unknown or HIDDEN not in needed or not POSITIONS & set(needed):
        raise UnsupportedError(
            f"{name}.forward takes {needed}, and not positions and hidden states"
        )
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, width, generator=random).to(device, dtype)
    positions = torch.arange(TOKENS, device=device)
    return {n: positions if n in POSITIONS else hidden for n in needed}


def _key(
    holder: torch.nn.Module, layer: torch.nn.Module, given: dict[str, torch.Tensor], first: int
) -> torch.Tensor:
    """K that the layer is handed of the tokens from position `first` on."""
    own = {n: x + first if n in POSITIONS else x.clone() for n, x in given.items()}
    try:
        with _handing(layer):
            holder.forward(**own)
    except _Handed as handed:
        return handed.key
    name = type(holder).__name__
    raise UnsupportedError(f"{name}.forward did not hand K to its attention when it was tried")


@contextmanager
def _handing(layer: torch.nn.Module) -> Iterator[None]:
    """The layer hands K to us and computes nothing."""

    def forward(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> None:
        raise _Handed(key.clone())

    before = layer.__dict__.get("forward")
    layer.__dict__["forward"] = forward  # comes before the class's own
    try:
        yield
    finally:
        if before is None:
            del layer.__dict__["forward"]
        else:
            layer.__dict__["forward"] = before


@contextmanager
def _without_adapters(holder: torch.nn.Module) -> Iterator[None]:
    """The holder's projections are the model's own.

    Those of LoRA look up each token's adapter in a table that only a step fills; before, it has
    whether or not anything was in that memory. What an adapter adds to K turns with it.
    """
    wrapped = {n: m for n, m in holder._modules.items() if isinstance(m, BaseLayerWithLoRA)}
    holder._modules.update({n: m.base_layer for n, m in wrapped.items()})
    try:
        yield
    finally:
        holder._modules.update(wrapped)
