# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups, as the store knows them: the spine first, then those that need less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.transfer.geometry import Geometry, Group

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def groups_of(kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    """All groups. With one it is as it always was: the spine. Raises UnsupportedError."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return (Group(groups[0].kv_cache_spec.block_size, tuple(groups[0].layer_names)),)
    found = [_group_of(number, group) for number, group in enumerate(groups)]
    spine = next((group for group in found if group.reach == Reach.FULL.value), None)
    if spine is None:
        raise UnsupportedError("no group of its layers keeps KV of all tokens")
    return (spine, *(group for group in found if group is not spine))


def regions_of(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """The bytes of a page in each region of several groups. Raises UnsupportedError.

    All groups have pages of one size, which vLLM pads to it: a block is anybody's.
    """
    groups = kv_cache_config.kv_cache_groups
    specs: list[Any] = [group.kv_cache_spec for group in groups]
    sizes = {int(spec.page_size_bytes) for spec in specs}
    if len(sizes) != 1:
        raise UnsupportedError(f"pages of its groups have {sorted(sizes)} bytes; one size is known")
    (page_bytes,) = sizes
    return max(len(group.layer_names) for group in groups) * (page_bytes,)


def needs_of(geometry: Geometry) -> tuple[Need, ...]:
    """The needs of the groups beside the spine."""
    return tuple(
        Need(place, Reach(group.reach), group.reach_tokens, group.block_tokens)
        for place, group in enumerate(geometry.groups)
        if place > 0
    )


def _group_of(number: int, group: Any) -> Group:
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    spec = group.kv_cache_spec
    kind = type(spec)
    reach, reach_tokens = Reach.FULL, 0
    if kind is SlidingWindowSpec:
        reach = Reach.WINDOW
        reach_tokens = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    elif kind is ChunkedLocalAttentionSpec:
        reach, reach_tokens = Reach.LOCAL, spec.attention_chunk_size
        if reach_tokens % spec.block_size:
            raise UnsupportedError(
                f"its local chunks of {reach_tokens} tokens do not end where blocks of "
                f"{spec.block_size} do"
            )
    elif kind is MambaSpec:
        reach = Reach.STATE
        if spec.mamba_cache_mode != "align" or spec.num_speculative_blocks:
            raise UnsupportedError(
                f"vLLM keeps its recurrent states in the mode {spec.mamba_cache_mode!r} with "
                f"{spec.num_speculative_blocks} blocks for drafts; align and none are supported"
            )
    elif kind is not FullAttentionSpec:
        raise UnsupportedError(f"one of its KV cache groups is {kind.__name__}")
    for name, what in (
        ("is_eagle_group", "is a draft model's"),
        ("host_resident", "lies in the host's memory"),
    ):
        if getattr(group, name, False):
            raise UnsupportedError(f"one of its KV cache groups {what}")
    if not getattr(group, "enable_kv_transfer", True):
        raise UnsupportedError("vLLM keeps one of its KV cache groups from connectors")
    if getattr(spec, "non_causal", False):
        raise UnsupportedError("it attends in both directions")
    if reach is not Reach.STATE and getattr(spec, "tokens_per_state", 1) != 1:
        raise UnsupportedError("it keeps one state for several tokens")
    return Group(
        spec.block_size, tuple(group.layer_names), number, reach.value, reach_tokens, repr(spec)
    )
