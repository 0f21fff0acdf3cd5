# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of each KV cache group are in a page, for an audit that compares them.

    K and V       found out by writing as the kernels write (transfer/page_content.py)
    a latent      the page has it token by token: what is compressed, then the part with positions
    a state       the page has its tensors one after the other, as its spec says

What is not understood is said with its reason, and that group is not compared by distance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from attnstore_vllm.connector.model_rotation import page_of_kv
from attnstore_vllm.connector.specs import layer_specs
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.rank import GroupPages, PageSide
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.policy.kv_compare import KEY, NUMBER_BYTES, VALUE
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.layout import describe, order_of_axes

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

JSON_MAX = 1500
"""Bytes of all groups: a rank has one page of memory to describe itself in."""
WHY_MAX = 120


def pages_of_groups(
    layers: Mapping[str, Any],
    geometry: Geometry,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
) -> tuple[GroupPages, ...]:
    """Those of each group, the spine's first. Cost: a few trial writes of one block a group.

    Args:
        layers: vLLM's attention layers, by name.
    """
    found = []
    for group in geometry.groups:
        specs = layer_specs(kv_cache_config.kv_cache_groups[group.number])
        try:
            sides = _sides(group, layers, specs, geometry, kv_cache_config.num_blocks, kv_caches)
            found.append(GroupPages(len(group.layers), sides))
        except UnsupportedError as error:
            found.append(_none(group, str(error)))
        except Exception as error:  # of the model's code, of any kind: the server must start
            found.append(
                _none(group, f"it could not be found out: {type(error).__name__}: {error}")
            )
    if len(json.dumps(found)) > JSON_MAX:
        return tuple(
            _none(group, "its groups are too many to be described") for group in geometry.groups
        )
    return tuple(found)


def _none(group: Group, why: str) -> GroupPages:
    return GroupPages(len(group.layers), (), why[:WHY_MAX])


def _sides(
    group: Group,
    layers: Mapping[str, Any],
    specs: Mapping[str, Any],
    geometry: Geometry,
    num_blocks: int,
    kv_caches: Mapping[str, torch.Tensor],
) -> tuple[PageSide, ...]:
    """Raises UnsupportedError."""
    if not group.layers:
        return ()
    tensors = [kv_caches[name] for name in group.layers]
    kinds = {(str(kv.dtype), tuple(kv.shape[1:]), order_of_axes(kv)) for kv in tensors}
    if len(kinds) > 1:
        raise UnsupportedError(f"layers of one group keep KV of {len(kinds)} kinds")
    name = group.layers[0]
    if group.reach == Reach.STATE.value:
        return state_sides(specs[name].shapes, specs[name].dtypes)
    layout = describe(name, tensors[0], num_blocks)
    is_padded = layout.page_bytes != geometry.regions[geometry.layer_names[name]]
    if is_padded and len(layout.run_offsets) > 1:
        raise UnsupportedError("its pages are padded, and cut into runs")
    block = tensors[0][: len(tensors[0]) // num_blocks]
    layer = layers[name]
    if hasattr(layer, "kv_lora_rank"):
        return latent_sides(block, int(layer.kv_lora_rank))
    page = page_of_kv({name: layer}, block)
    shape = page.block_tokens, page.num_heads, page.head_dim
    return (
        PageSide(KEY, page.dtype, shape, page.key),
        PageSide(VALUE, page.dtype, shape, page.value),
    )


def state_sides(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> tuple[PageSide, ...]:
    """Those of a state: a side for each of its tensors. Raises UnsupportedError."""
    sides, at = [], 0
    for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        name, item = _name_of(dtype), dtype.itemsize
        if at % item:
            raise UnsupportedError(f"tensor {number} of its states begins within a number")
        heads, dim = int(shape[0]), math.prod(shape[1:])
        sides.append(
            PageSide(f"state {number}", name, (1, heads, dim), _rows(at // item, heads, dim))
        )
        at += heads * dim * item
    return tuple(sides)


def latent_sides(block: torch.Tensor, rank: int) -> tuple[PageSide, ...]:
    """Those of a latent. Raises UnsupportedError.

    Args:
        block: [kernel blocks, 1, tokens, numbers of a token].
        rank: so many of a token's numbers are what is compressed; positions are in the others.
    """
    name, (kernel_blocks, heads, tokens, width) = _name_of(block.dtype), block.shape
    if heads != 1 or not block.is_contiguous() or rank > width:
        raise UnsupportedError(f"a block of its latents has shape {tuple(block.shape)}")
    count = kernel_blocks * tokens
    parts = (("latent", 0, rank), ("positions", rank, width - rank))
    return tuple(
        PageSide(side, name, (count, 1, dim), (at, 0, count, 0, width, dim, 0, 1))
        for side, at, dim in parts
        if dim
    )


def _rows(base: int, heads: int, dim: int) -> tuple[int, ...]:
    """The content (ContentSide) of heads that follow each other, of one token."""
    return (base, dim, 1, 0, 0, dim, 0, 1)


def _name_of(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in NUMBER_BYTES:
        raise UnsupportedError(f"KV of type {name} has no distance")
    return name
