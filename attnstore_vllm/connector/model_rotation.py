# SPDX-License-Identifier: Apache-2.0
"""Facts that the worker needs of the model to move KV: how it rotates K, and where its attention
kernels put each number of a page. What is not understood is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import (
    YaRNScalingRotaryEmbedding,
)

from attnstore_vllm.connector.rope_trial import turns
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.rank import KvPage
from attnstore_vllm.transfer.engine import Rotation
from attnstore_vllm.transfer.page_content import ContentMap, Write, probe
from attnstore_vllm.transfer.rope import NO_ROPE, Rope, check_table

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

_STATIC = (
    RotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


def ropes_of(
    model: torch.nn.Module,
    groups: Sequence[Mapping[str, Attention]],
    dtype: torch.dtype | None = None,
) -> list[Rope]:
    """The rotation that the layers of each group give their K.

    A layer's rotation is the one module of its kind that stands beside it in the module that has
    both; that K turns by it is tried (rope_trial.py). In a group whose layers all leave K as it is
    K is copied (NO_ROPE), if another group's layers rotate: a model in which none does has its
    positions elsewhere. Raises UnsupportedError if that is so, if layers of a group differ, if a
    rotation is not static, or if a layer's K turns otherwise.

    Args:
        model: has the layers.
        dtype: of its activations; None: that of the rotary embedding's table.
    Cost: a look at all modules, and a trial for each layer.
    """
    beside = _beside(model, [layer for layers in groups for layer in layers.values()])
    found = [_rotary_of(layers, beside) for layers in groups]
    ropes = [NO_ROPE if rotary is None else _static(rotary) for rotary in found]
    table = next((rotary.cos_sin_cache for rotary in found if rotary is not None), None)
    if table is None:
        raise UnsupportedError(_none_beside(next(iter(groups[0])), 0))
    how = (len(table), dtype or table.dtype, table.device)
    wrong: list[str] = []
    stand: list[list[str]] = []
    for layers, rope in zip(groups, ropes, strict=True):
        stand.append([])
        num_tried = 0
        for name, layer in layers.items():
            for holder in beside.get(id(layer), []):
                num_tried += 1
                try:
                    if not turns(holder, layer, rope, layer.head_size, *how):
                        stand[-1].append(f"layer {name}: {_stands(holder)}")
                except UnsupportedError as error:  # others are tried all the same (rope_trial.py)
                    wrong.append(f"layer {name}: {error}")
        if len(stand[-1]) < num_tried:
            wrong += stand[-1]
    if all(stand):
        wrong += stand[0]
    if wrong:
        raise UnsupportedError(wrong[0])
    return [NO_ROPE if some else rope for some, rope in zip(stand, ropes, strict=True)]


def _beside(
    model: torch.nn.Module, layers: Sequence[Attention]
) -> dict[int, list[torch.nn.Module]]:
    """The modules that have each layer as a member, by its id."""
    wanted = {id(layer) for layer in layers}
    holders: dict[int, list[torch.nn.Module]] = {}
    for holder in model.modules():
        for member in holder._modules.values():
            if id(member) in wanted:
                holders.setdefault(id(member), []).append(holder)
    return holders


def _rotary_of(
    layers: Mapping[str, Attention], holders: Mapping[int, Sequence[torch.nn.Module]]
) -> RotaryEmbeddingBase | None:
    """The one rotary embedding beside the layers of a group, None if none of them has one."""
    found: list[RotaryEmbeddingBase] = []
    without = None
    for name, layer in layers.items():
        beside = holders.get(id(layer), [])
        members = [member for holder in beside for member in holder._modules.values()]
        ropes = list({id(m): m for m in members if isinstance(m, RotaryEmbeddingBase)}.values())
        if len(ropes) > 1 or not beside:  # what is in no module that was seen cannot be tried
            raise UnsupportedError(_none_beside(name, len(ropes)))
        without = without or (name if not ropes else None)
        found += ropes
    if not found:
        return None
    if without is not None:
        raise UnsupportedError(_none_beside(without, 0))
    first = found[0]
    ropes_differ = any(
        type(rope) is not type(first)
        or rope.rotary_dim != first.rotary_dim
        or rope.is_neox_style != first.is_neox_style
        or not torch.equal(rope.cos_sin_cache, first.cos_sin_cache)
        for rope in {id(rope): rope for rope in found}.values()
    )
    if ropes_differ:
        raise UnsupportedError("its layers do not all rotate K alike")
    return first


def _none_beside(name: str, count: int) -> str:
    return (
        f"layer {name} has {count} rotary embeddings beside it; K can be moved where there is one "
        "(not with ALiBi, learned positions or none)"
    )


def _stands(holder: torch.nn.Module) -> str:
    return (
        f"{type(holder).__name__} does not cache K as its rotary embedding turns it: its K has no "
        "position, and others' have one"
    )


def _static(rope: RotaryEmbeddingBase) -> Rope:
    if type(rope) not in _STATIC:
        raise UnsupportedError(
            f"its rotary embedding is {type(rope).__name__}, which is not known to turn K by the "
            "position times a constant"
        )
    assert isinstance(rope, RotaryEmbedding)
    # Where the table was made: the last bits of a power are not the same on every device.
    with rope.cos_sin_cache.device:
        if isinstance(rope, YaRNScalingRotaryEmbedding):
            theta = rope._compute_inv_freq(rope.scaling_factor)
        else:
            theta = rope._compute_inv_freq(rope.base)
    if isinstance(rope, LinearScalingRotaryEmbedding):
        if len(rope.scaling_factors) != 1:
            raise UnsupportedError("it scales positions by several factors")
        theta = theta / rope.scaling_factors[0]
    table = rope.cos_sin_cache
    positions = sorted({p for k in range(16) for p in (2**k - 1, 2**k) if p < len(table)})
    theta64 = theta.double().cpu().numpy()
    check_table(theta64, table[positions], positions)
    return Rope(theta64, rope.rotary_dim, rope.is_neox_style)


def rotations_of(
    find: Callable[[], torch.nn.Module],
    groups: Sequence[Mapping[str, Attention]],
    dtype: torch.dtype,
    blocks: Sequence[torch.Tensor],
) -> list[Rotation]:
    """How the KV of each group's layers is moved. Raises UnsupportedError.

    Args:
        find: finds the model that has them.
        dtype: of the model's activations.
        blocks: of each group one block of one layer's tensor, [kernel blocks, heads, tokens,
            2 * head_dim]: the kernels may see a block of the scheduler as several of their own.
    """
    contents = [
        content_of(next(iter(layers.values())), block)
        for layers, block in zip(groups, blocks, strict=True)
    ]
    ropes = ropes_of(find(), groups, dtype)
    return [
        Rotation(rope, content, block.shape[1], block.shape[3] // 2, _name_of(block.dtype))
        for rope, content, block in zip(ropes, contents, blocks, strict=True)
    ]


def page_of_kv(layers: Mapping[str, Attention], block: torch.Tensor) -> KvPage:
    """Where K and V are in a page of these layers. Raises UnsupportedError.

    Args:
        block: see rotations_of().
    """
    layer = next(iter(layers.values()))
    content = content_of(layer, block)
    kernel_blocks, num_heads, tokens, _ = block.shape
    sides = content.key.numbers(), content.value.numbers()
    return KvPage(_name_of(block.dtype), kernel_blocks * tokens, num_heads, layer.head_size, *sides)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def content_of(layer: Attention, block: torch.Tensor) -> ContentMap:
    """Where the layer's kernels put K and V within a block. Raises UnsupportedError.

    Args:
        block: see rotations_of(). Not written to.
    """
    head_dim = layer.head_size
    if block.dim() != 4 or block.shape[3] != 2 * head_dim:
        raise UnsupportedError(
            f"a block of its KV has shape {tuple(block.shape)}, and not K and V of {head_dim} dims "
            "for each head and token"
        )
    kernel_blocks, num_heads, tokens, _ = block.shape
    return probe(
        _writer(layer),
        torch.zeros_like(block),
        1,
        block_tokens=kernel_blocks * tokens,
        num_heads=num_heads,
        head_dim=head_dim,
    )


def _writer(layer: Attention) -> Write:
    """As vLLM writes new tokens' K and V of this layer. Raises UnsupportedError."""
    impl = layer.impl
    is_apart = not layer.attn_backend.forward_includes_kv_cache_update
    if not (is_apart and hasattr(impl, "do_kv_cache_update")):
        raise UnsupportedError(
            f"{type(impl).__name__} writes K and V as a part of the attention, so where it puts "
            "them cannot be found out"
        )

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        slots = torch.arange(len(key), dtype=torch.int64, device=cache.device)
        try:
            impl.do_kv_cache_update(layer, key, value, cache, slots)
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedError(
                f"{type(impl).__name__} does not write K and V outside of a step: {error}"
            ) from error

    return write
