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
    """All groups. With one that has all tokens it is as it always was. Raises UnsupportedError."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1 and not has_window(groups[0]):
        return (Group(groups[0].kv_cache_spec.block_size, tuple(groups[0].layer_names)),)
    if len(groups) == 1:
        found = [_group_of(0, groups[0], one_spec(groups[0]))]
    else:
        found = [_group_of(n, group, group.kv_cache_spec) for n, group in enumerate(groups)]
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


def regions_of(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """The bytes of a page in each region of several groups. Raises UnsupportedError.

    All groups have pages of one size, which vLLM pads to it: a block may be any group's.
    """
    groups = kv_cache_config.kv_cache_groups
    specs: list[Any] = [group.kv_cache_spec for group in groups]
    sizes = {int(spec.page_size_bytes) for spec in specs}
    if len(sizes) != 1:
        raise UnsupportedError(f"pages of its groups have {sorted(sizes)} bytes; one size is known")
    (page_bytes,) = sizes
    return max(len(group.layer_names) for group in groups) * (page_bytes,)


def needs_of(geometry: Geometry) -> tuple[Need, ...]:
    """The needs of the groups beside the spine; of the spine too, if it needs less than all."""
    return tuple(
        Need(place, Reach(group.reach), group.reach_tokens, group.block_tokens)
        for place, group in enumerate(geometry.groups)
        if place > 0 or group.reach != Reach.FULL.value
    )


def has_window(group: Any) -> bool:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec  # noqa: PLC0415

    return type(one_spec(group)) is SlidingWindowSpec


def one_spec(group: Any) -> Any:
    """A group's spec as the scheduler side has it: of one layer, where they differ."""
    spec = group.kv_cache_spec
    layers = getattr(spec, "kv_cache_specs", None)
    return spec if layers is None else next(iter(layers.values()))


def _group_of(number: int, group: Any, spec: Any) -> Group:
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

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
    if getattr(group, "host_resident", False):
        raise UnsupportedError("one of its KV cache groups lies in the host's memory")
    if not getattr(group, "enable_kv_transfer", True):
        raise UnsupportedError("vLLM keeps one of its KV cache groups from connectors")
    if getattr(spec, "non_causal", False):
        raise UnsupportedError("it attends in both directions")
    if reach is not Reach.STATE and getattr(spec, "tokens_per_state", 1) != 1:
        raise UnsupportedError("it keeps one state for several tokens")
    return Group(
        spec.block_size, tuple(group.layer_names), number, reach.value, reach_tokens, repr(spec)
    )
