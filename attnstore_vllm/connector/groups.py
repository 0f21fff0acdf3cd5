# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups, as the store knows them: the spine first, then those that need less. What
each is, its spec says (specs.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from attnstore_vllm.connector.specs import (
    check_group,
    has_states_of_several,
    is_scratch,
    keeps_prompts_only,
    one_spec,
    reach_of,
)
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.index.prefix import GRAIN_TOKENS
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.transfer.geometry import Geometry, Group

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def groups_of(kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    """All groups that are stored. With one that has all tokens it is as it always was. Raises
    UnsupportedError."""
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        check_group(group)
    stored = [(n, g) for n, g in enumerate(groups) if not is_scratch(one_spec(g))]
    found = [_group_of(n, group) for n, group in stored]
    if not found:
        raise UnsupportedError("vLLM itself finds nothing again of its KV (prefix_cacheable)")
    if len(groups) == 1 and found[0].reach == Reach.FULL.value:
        return (Group(found[0].block_tokens, found[0].layers),)
    spine = next((group for group in found if group.reach == Reach.FULL.value), None)
    if spine is None:
        windows = [group for group in found if group.reach == Reach.WINDOW.value]
        if not windows:
            raise UnsupportedError("no group of its layers keeps KV of all tokens, or of a window")
        spine = max(windows, key=lambda group: group.reach_tokens)
    return (spine, *(group for group in found if group is not spine))


def check_chunks(spine: Group, chunk_tokens: int) -> None:
    """Raise UnsupportedError for a spine that loses tokens of a chunk before it is computed."""
    if spine.reach == Reach.WINDOW.value and spine.reach_tokens < chunk_tokens:
        raise UnsupportedError(
            f"all its layers have windows, the longest of {spine.reach_tokens} tokens, which is "
            f"less than a chunk of {chunk_tokens}; set chunk_tokens to that or less"
        )


def regions_of(kv_cache_config: KVCacheConfig, groups: Sequence[Group]) -> tuple[int, ...]:
    """The bytes of a page in each region of several groups. Raises UnsupportedError.

    All groups have pages of one size, which vLLM pads to it: a block may be any group's. Or pages
    lie side by side, and the block is the one region.

    Args:
        groups: those that are stored.
    """
    packed = packed_bytes(kv_cache_config)
    if packed:
        return (packed,)
    specs: list[Any] = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = {int(spec.page_size_bytes) for spec in specs}
    if len(sizes) != 1:
        raise UnsupportedError(f"pages of its groups have {sorted(sizes)} bytes; one size is known")
    (page_bytes,) = sizes
    return max(len(group.layers) for group in groups) * (page_bytes,)


def packed_bytes(kv_cache_config: KVCacheConfig) -> int:
    """The bytes of a physical block in which pages of several sizes lie side by side, of several
    groups; 0: they do not. Both sides come to the same: where the tensors are is in both copies.
    """
    tensors, num_blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    placed = all(hasattr(tensor, "layer_stride") for tensor in tensors)
    if len(kv_cache_config.kv_cache_groups) < 2 or not placed:
        return 0
    strides = {tensor.block_stride for tensor in tensors}
    if len(strides) != 1 or len({tensor.layer_stride for tensor in tensors}) == 1:
        return 0
    (block_bytes,) = strides
    are_inside = all(
        tensor.size == num_blocks * block_bytes
        and tensor.offset + len(tensor.layers) * tensor.layer_stride <= block_bytes
        for tensor in tensors
    )
    return block_bytes if are_inside else 0


def hit_tokens_of(kv_cache_config: KVCacheConfig) -> int:
    """Geometry.hit_tokens: the multiples where vLLM's own hits end, if only there a hit has all.

    So it is where scratch is left out, which is empty there or computed again from there; and where
    a state is of several tokens. Of packed blocks the scheduler side is shown one layer of several
    kinds: they are taken to have such.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [one_spec(group) for group in groups]
    has_scratch = any(is_scratch(spec) for spec in specs)
    is_compressed = any(has_states_of_several(spec) for spec in specs)
    if not (has_scratch or is_compressed or packed_bytes(kv_cache_config)):
        return 0
    return math.lcm(GRAIN_TOKENS, *(spec.block_size for spec in specs))


def prompts_only(kv_cache_config: KVCacheConfig) -> bool:
    """Geometry.prompts_only."""
    return any(keeps_prompts_only(one_spec(group)) for group in kv_cache_config.kv_cache_groups)


def is_bfloat16(kv_cache_config: KVCacheConfig) -> bool:
    """Whether all KV is, by the groups' first layers: both sides come to the same."""
    specs = [one_spec(group) for group in kv_cache_config.kv_cache_groups]
    return all(getattr(spec, "dtype", None) == torch.bfloat16 for spec in specs)


def needs_of(geometry: Geometry) -> tuple[Need, ...]:
    """The needs of the groups beside the spine; of the spine too, if it needs less than all."""
    return tuple(
        Need(
            place,
            Reach(group.reach),
            group.reach_tokens,
            group.block_tokens,
            room=geometry.room(place),
        )
        for place, group in enumerate(geometry.groups)
        if place > 0 or group.reach != Reach.FULL.value
    )


def _group_of(number: int, group: Any) -> Group:
    spec = one_spec(group)
    reach, reach_tokens = reach_of(spec)
    return Group(
        spec.block_size, tuple(group.layer_names), number, reach.value, reach_tokens, repr(spec)
    )
