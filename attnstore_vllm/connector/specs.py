# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache specs, read by property and never by type: what a hit needs of a group, whether
its pages may be copied, and which groups hold nothing that a hit needs.

What a hit needs is what the manager does that vLLM registers for the spec: it finds hits as one of
four managers does, and gives and takes blocks as that one. A field that is not known here, a way
that is none of the four, and a page that is not all of a layer's KV are reasons to be idle, by
their names. What a page holds is not asked: its bytes are copied, and the spec is in their name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.index.sections import Reach

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

FIELDS = frozenset(
    (
        *("block_size", "dtype", "num_kv_heads", "head_size", "head_size_v", "num_head_slots"),
        *("num_heads", "state_content_bytes", "page_size_padded", "kv_quant_mode", "alignment"),
        *("cache_dtype_str", "block_stride_alignment", "tokens_per_state", "kv_cache_specs"),
        *("dcp_sharded", "max_tp_shards", "tp_replicated"),
        *("sliding_window", "extra_retained_tokens", "attention_chunk_size", "rswa_window"),
        *("sink_len", "non_causal", "non_causal_multi_token_decode", "bounded_replay"),
        *("model_version", "cache_role", "is_index_group_leader", "topk_buffer_width"),
        *("shapes", "dtypes", "mamba_type", "mamba_cache_mode", "num_speculative_blocks"),
        *("num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment", "is_draft"),
    )
)
"""Fields of specs whose meaning is known. Any other has to have its default value."""
GROUP_FIELDS = frozenset(
    (
        *("layer_names", "kv_cache_spec", "is_eagle_group"),
        *("host_resident", "role", "enable_kv_transfer"),
    )
)
"""The same of groups."""
_BLOCKS = (
    "find_longest_cache_hit",
    "get_num_skipped_tokens",
    "allocate_new_blocks",
    "allocate_external_computed_blocks",
    "add_local_computed_blocks",
    "remove_skipped_blocks",
    "pop_blocks_for_free",
)
"""Methods of managers that say which blocks a request has, and what is in them."""
_BOTH_WAYS = ("non_causal", "non_causal_multi_token_decode")
_TOLD = (
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
)


def layer_specs(group: Any) -> Mapping[str, Any]:
    """The spec of each layer of a group, as this side has them: the scheduler's has of several
    kinds the first one's for all."""
    spec = group.kv_cache_spec
    layers = getattr(spec, "kv_cache_specs", None)
    return dict.fromkeys(group.layer_names, spec) if layers is None else dict(layers)


def one_spec(group: Any) -> Any:
    """A group's spec as the scheduler side has it: of one layer, where they differ."""
    layers = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if layers is None else next(iter(layers.values()))


def is_scratch(spec: Any) -> bool:
    """Whether vLLM's own hits need nothing of such a group: a ring of the tokens that are not yet
    compressed, a window that is computed again behind each hit. It is left out of what is stored.
    """
    return not getattr(spec, "prefix_cacheable", True)


def check_group(group: Any) -> None:
    """Raise UnsupportedError for a group that no connector may copy, that has another place, or
    that says more than is known here."""
    if getattr(group, "host_resident", False):
        raise UnsupportedError("one of its KV cache groups lies in the host's memory")
    role = getattr(group, "role", "default")
    if getattr(role, "value", role) != "default":
        raise UnsupportedError(f"one of its KV cache groups has the role {role}, which is unknown")
    if not getattr(group, "enable_kv_transfer", True):
        raise UnsupportedError("vLLM keeps one of its KV cache groups from connectors")
    if not getattr(one_spec(group), "has_layer_views", True):
        raise UnsupportedError(
            f"its KV cache is {_name(one_spec(group))}, of which vLLM makes no tensors by layer "
            "(has_layer_views)"
        )
    for name, found in _unknown(group, GROUP_FIELDS):
        raise UnsupportedError(
            f"one of its KV cache groups has the {name} {found!r}: this property is not known"
        )


def check_spec(spec: Any) -> None:
    """Raise UnsupportedError for one whose tokens' KV is not what a prefix's is, or that says more
    than is known here."""
    for name, found in _unknown(spec, FIELDS):
        raise UnsupportedError(
            f"its KV cache is {_name(spec)}, whose {name} is {found!r}: this property is not known"
        )
    if getattr(spec, "prefix_replay_tokens", 0) and not is_scratch(spec):
        raise UnsupportedError(
            f"its KV cache is {_name(spec)}, kept and computed again (prefix_replay_tokens)"
        )
    if any(getattr(spec, name, False) for name in _BOTH_WAYS):
        raise UnsupportedError("it attends in both directions")
    tokens = getattr(spec, "tokens_per_state", 1)
    if isinstance(tokens, Fraction) and tokens.denominator != 1 and tokens.numerator != 1:
        raise UnsupportedError(
            f"its KV cache is {_name(spec)}, whose tokens_per_state is {tokens}: states do not end "
            "where tokens do"
        )


def _unknown(said: Any, known: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Fields that are not known and have another value than their default, with that."""
    if not dataclasses.is_dataclass(said):  # a test's own
        return
    for field in dataclasses.fields(said):
        if field.name in known:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found = getattr(said, field.name)
        if found != default:
            yield field.name, found


def reach_of(spec: Any) -> tuple[Reach, int]:
    """How far back a group looks, and over how many tokens (index/sections.py).

    Raises: UnsupportedError for what is not known, by the name of the property.
    """
    check_spec(spec)
    manager = _manager_of(spec)
    reach = _way_of(spec, manager)
    if reach is Reach.FULL:
        return reach, 0
    if reach is Reach.WINDOW:
        tokens = _number(spec, "sliding_window") + getattr(spec, "extra_retained_tokens", 0)
        return reach, tokens
    if reach is Reach.LOCAL:
        tokens = _number(spec, "attention_chunk_size")
        if tokens % spec.block_size:
            raise UnsupportedError(
                f"its local chunks of {tokens} tokens do not end where blocks of "
                f"{spec.block_size} do"
            )
        return reach, tokens
    if spec.mamba_cache_mode != "align" or spec.num_speculative_blocks:
        raise UnsupportedError(
            f"vLLM keeps its recurrent states in the mode {spec.mamba_cache_mode!r} with "
            f"{spec.num_speculative_blocks} blocks for drafts; align and none are supported"
        )
    return reach, 0


def keeps_prompts_only(spec: Any) -> bool:
    """Whether vLLM takes back blocks of generated tokens while the request runs."""
    return getattr(spec, "rswa_window", None) is not None


def may_keep_all(specs: Sequence[Any]) -> bool:
    """Whether vLLM could keep all tokens in all of these, in blocks and pages of one size."""
    try:
        reaches = {reach_of(spec)[0] for spec in specs}
    except UnsupportedError:
        return False
    sizes = {(spec.block_size, spec.page_size_bytes) for spec in specs}
    return reaches <= {Reach.FULL, Reach.WINDOW} and len(sizes) == 1


def has_states_of_several(spec: Any) -> bool:
    """Whether a page has one state for several tokens."""
    tokens = getattr(spec, "tokens_per_state", 1)
    return bool(tokens > 1)


def told(kv_cache_config: KVCacheConfig) -> str:
    """Digest of all layers' specs, for the namespace; "" where all else that is in it tells them,
    so that stores of before are found."""
    layers = [
        (name, spec)
        for group in kv_cache_config.kv_cache_groups
        for name, spec in layer_specs(group).items()
    ]
    if all(_is_told(spec) for _, spec in layers):
        return ""
    hasher = blake3()
    for name, spec in sorted(layers, key=lambda one: one[0]):
        hasher.update(f"{name}\0{spec!r}\0".encode())
    return hasher.hexdigest()


def _is_told(spec: Any) -> bool:
    """Whether it is one of those that were served before specs were in a namespace."""
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    is_plain = mode in ("NONE", "FP8_PER_TENSOR")
    return _name(spec) in _TOLD and is_plain and not has_states_of_several(spec)


def fill_scales(layers: Mapping[str, Any], kv_caches: Mapping[str, Any]) -> None:
    """Let kernels write the first scales of tokens now, which they do when they are first used:
    over what a load has brought by then."""
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        fill = getattr(impl, "_ensure_scale_caches", None)
        mode = getattr(impl, "_kv_quant_mode", None)
        if fill is not None and getattr(mode, "is_per_token_head", False):
            fill(kv_caches[name])


def _name(spec: Any) -> str:
    return type(spec).__name__


def _number(spec: Any, name: str) -> int:
    found = getattr(spec, name, None)
    if not isinstance(found, int) or found <= 0:
        raise UnsupportedError(f"its KV cache is {_name(spec)}, whose {name} is {found!r}")
    return found


def _manager_of(spec: Any) -> type:
    """The class that manages blocks of such a spec, as vLLM has registered it."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry  # noqa: PLC0415

    found = KVCacheSpecRegistry.get_manager_class(spec)
    if found is None:
        raise UnsupportedError(f"its KV cache is {_name(spec)}, for which vLLM has no manager")
    return found


def _ways() -> Sequence[tuple[Reach, type]]:
    from vllm.v1.core.single_type_kv_cache_manager import (  # noqa: PLC0415
        ChunkedLocalAttentionManager,
        FullAttentionManager,
        MambaManager,
        SlidingWindowManager,
    )

    return (
        (Reach.FULL, FullAttentionManager),
        (Reach.WINDOW, SlidingWindowManager),
        (Reach.LOCAL, ChunkedLocalAttentionManager),
        (Reach.STATE, MambaManager),
    )


def _way_of(spec: Any, manager: type) -> Reach:
    """As which of the known managers this one gives and finds blocks."""
    for reach, known in _ways():
        if _body(manager, _BLOCKS[0]) is not _body(known, _BLOCKS[0]):
            continue
        for name in _differs(manager, known):
            # R-SWA takes back generated tokens alone; what is stored are prompts then.
            if name == "remove_skipped_blocks" and keeps_prompts_only(spec):
                continue
            raise UnsupportedError(
                f"its KV cache is {_name(spec)}, whose {manager.__name__} has a {name} of its own"
            )
        return reach
    raise UnsupportedError(
        f"its KV cache is {_name(spec)}, whose {manager.__name__} finds hits in a way that is not "
        f"known ({_BLOCKS[0]})"
    )


def _differs(manager: type, known: type) -> Iterator[str]:
    return (name for name in _BLOCKS if _body(manager, name) is not _body(known, name))


def _body(manager: type, name: str) -> Any:
    """The attribute of this name, the class's own or inherited."""
    return next((vars(base)[name] for base in manager.__mro__ if name in vars(base)), None)
