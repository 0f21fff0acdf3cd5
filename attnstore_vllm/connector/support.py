# SPDX-License-Identifier: Apache-2.0
"""Checks of what the store can serve: which version, which interface, which models and shapes.

A model that the store cannot serve runs as without it, with one warning: the model is what the
user came for. Settings that cannot be met (as a codec over several machines) are refused: they are
the user's to change.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from attnstore_vllm.connector.context_parallel import check_context, sizes_of
from attnstore_vllm.connector.groups import groups_of, regions_of
from attnstore_vllm.connector.nodes import check_nodes
from attnstore_vllm.connector.specs import (
    has_states_of_several,
    is_scratch,
    keeps_prompts_only,
    layer_specs,
    may_keep_all,
    one_spec,
    reach_of,
)
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.drafts import drafts_of, reason_of_drafts
from attnstore_vllm.preflight import TESTED_VLLM

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

NEEDED_HOOKS = (
    "bind_kv_cache_manager",
    "build_connector_worker_meta",
    "get_finished",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "on_new_request",
    "register_kv_caches",
    "request_finished",
    "reset_cache",
    "shutdown",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
)


TRANSFERS = (
    "MoRIIOConnector",
    "MooncakeConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
)
"""vLLM's connectors between a server that prefills and one that decodes."""

CPU_KV_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of --kv-cache-dtype that vLLM's CPU build knows. It takes others without a word, and its
kernels write past the pages of such types: there answers change after a load. On other platforms a
page is bytes, of any type."""


def check_interface(base: type) -> None:
    """Raise UnsupportedError if vLLM's connector base lacks a hook that the store lives by."""
    missing = [name for name in NEEDED_HOOKS if not hasattr(base, name)]
    if missing:
        raise UnsupportedError(
            f"this vLLM's KV connector interface lacks {', '.join(missing)}; AttnStore was made "
            f"for vLLM {', '.join(TESTED_VLLM)}"
        )


def warn_if_untested(version: str) -> None:
    if version.split("+", maxsplit=1)[0] not in TESTED_VLLM:
        logger.warning(
            "AttnStore was tested with vLLM %s, this is %s; please report what you see",
            ", ".join(TESTED_VLLM),
            version,
        )


def check_start(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError for a way of starting vLLM that the store cannot serve."""
    check_nodes(vllm_config)
    check_context(vllm_config)
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        # Adapters that changed and another connector beside us need it. Loads in parts do, too:
        # there are none without it. Inside MultiConnector the outer setting is not visible here.
        logger.warning(
            "kv_load_failure_policy is %r; set it to 'recompute', so that a failed load costs a "
            "prefill and not the request",
            transfer.kv_load_failure_policy,
        )


def warn_of_order(transfer: KVTransferConfig | None) -> None:
    """Warn if a connector that transfers KV between servers comes after ours in MultiConnector.

    vLLM takes the first that offers anything. So a beginning in our tiers, however short, would
    make a decoding server compute what the prefilling one has.

    Args:
        transfer: the outer one.
    """
    if transfer is None or transfer.kv_connector != "MultiConnector":
        return
    children = transfer.kv_connector_extra_config.get("connectors") or []
    names = [str(child.get("kv_connector")) for child in children]
    ours = names.index("AttnStoreConnector") if "AttnStoreConnector" in names else len(names)
    behind = [name for name in names[ours:] if name in TRANSFERS]
    if behind:
        logger.warning(
            "list %s before AttnStoreConnector in MultiConnector: vLLM takes the first connector "
            "that offers anything, so a beginning in AttnStore's tiers makes this server compute "
            "the rest of a prompt that another server has prefilled",
            " and ".join(behind),
        )


def reason_to_idle(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why this model cannot be served from the store, or None if it can.

    Both sides ask, each with a configuration of its own: the scheduler's has only one layer's spec
    where layers differ. So what decides is in both, as the sizes of the tensors are.
    """
    return (
        _reason_of_settings(vllm_config)
        or reason_of_drafts(vllm_config)
        or _reason_of_groups(kv_cache_config)
    )


def _reason_of_groups(kv_cache_config: KVCacheConfig) -> str | None:
    groups = kv_cache_config.kv_cache_groups
    if not any(group.layer_names for group in groups):
        return "it keeps no KV"
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:  # from 0.33 on
        return "hisparse_host_num_blocks is set: vLLM itself keeps and copies KV in host memory"
    is_one = len(groups) == 1
    try:
        found = groups_of(kv_cache_config)
        page_bytes_of(kv_cache_config) if is_one else regions_of(kv_cache_config, found)
    except UnsupportedError as error:
        return f"{error}{'' if is_one else _help(kv_cache_config)}"
    if kv_cache_config.needs_kv_cache_zeroing and not _spares_loaded_blocks():
        return "vLLM writes zeros to its new blocks, also to those that are loaded ahead"
    return None


def reason_of_layers(kv_cache_config: KVCacheConfig, hit_tokens: int) -> str | None:
    """As reason_to_idle(), of what only a worker can say: it has the specs of all layers.

    Args:
        hit_tokens: of the geometry.
    """
    try:
        for group in kv_cache_config.kv_cache_groups:
            _check_layers(group, hit_tokens)
    except UnsupportedError as error:
        return str(error)
    return None


def _check_layers(group: Any, hit_tokens: int) -> None:
    """Raise UnsupportedError unless the group's first layer, which is all that the scheduler side
    has of it, stands for the others."""
    first = one_spec(group)
    for name, spec in layer_specs(group).items():
        if is_scratch(spec) and is_scratch(first):
            continue
        if _needs(spec) != _needs(first):
            raise UnsupportedError(f"layer {name} needs other tokens than those of its group")
        if has_states_of_several(spec) and (not hit_tokens or hit_tokens % spec.tokens_per_state):
            raise UnsupportedError(
                f"layer {name} keeps a state for {spec.tokens_per_state} tokens, and the first "
                "layer of its group does not say so (tokens_per_state)"
            )


def _needs(spec: Any) -> tuple[Any, ...]:
    return is_scratch(spec), keeps_prompts_only(spec), *reach_of(spec)


def page_bytes_of(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """The bytes of a page, padding and all, in each layer of the one group, in their order.

    Both sides come to the same: the scheduler's copy of the configuration has one layer's spec for
    all, but where the layers' tensors are is in both. Raises UnsupportedError.
    """
    (group,) = kv_cache_config.kv_cache_groups
    spec: Any = group.kv_cache_spec
    tensors: list[Any] = list(kv_cache_config.kv_cache_tensors)
    names, num_blocks = list(group.layer_names), kv_cache_config.num_blocks
    page = int(spec.page_size_bytes)
    # One allocation for layers of one kind, or each layer has its own: then sizes say it all.
    # A spec of several kinds has the bytes of all its layers, and is no layer's.
    is_mixed = hasattr(spec, "kv_cache_specs")
    if (
        not is_mixed
        and sum(t.size for t in tensors) == num_blocks * page * len(names)
        and (len(tensors) == 1 or all(tensor.size == num_blocks * page for tensor in tensors))
    ):
        return len(names) * (page,)
    if not all(hasattr(tensor, "layer_stride") for tensor in tensors):
        raise UnsupportedError("its layers are of several kinds, and this vLLM does not say so")
    pages: dict[str, int] = {}
    for tensor in tensors:
        # A layer's blocks follow each other, or the layers of a block do.
        is_by_layer = tensor.layer_stride >= num_blocks * tensor.block_stride
        page = tensor.layer_stride // num_blocks if is_by_layer else tensor.layer_stride
        pages.update(dict.fromkeys(tensor.layers, page))
    if sorted(pages) != sorted(names) or not all(page > 0 for page in pages.values()):
        raise UnsupportedError("its KV tensors are not those of its layers")
    # Of a block there may be more, which has no owner, behind its layers' pages.
    if {tensor.size for tensor in tensors} != {tensors[0].size} or (
        num_blocks * sum(pages.values()) > tensors[0].size
    ):
        raise UnsupportedError(
            f"its KV tensors have {tensors[0].size} bytes, where its layers would have "
            f"{num_blocks * sum(pages.values())}"
        )
    return tuple(pages[name] for name in names)


def replicas_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many consecutive ranks hold the same KV.

    vLLM says it of latents, and not where there are more ranks than KV heads: then it is taken to
    be so, and each worker looks whether it is (live_facts.py: check_replicas). Both sides come to
    the same. Of several groups one may be so and another not: each rank stores its own.
    """
    if len(kv_cache_config.kv_cache_groups) > 1:
        return 1
    stated = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    ranks = vllm_config.parallel_config.tensor_parallel_size
    is_uniform = len(set(page_bytes_of(kv_cache_config))) == 1
    is_whole = sizes_of(vllm_config)[0] == 1  # else ranks with the same heads have other tokens
    if stated > 1 or ranks == 1 or not is_uniform or not is_whole:
        return stated
    if getattr(vllm_config.model_config, "use_mla", False):
        return stated
    heads = int(vllm_config.model_config.get_total_num_kv_heads())
    return ranks // heads if 0 < heads < ranks and ranks % heads == 0 else 1


def _spares_loaded_blocks() -> bool:
    """Whether blocks that are loaded ahead are not among those that vLLM zeroes."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: PLC0415

    return hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")


def _help(kv_cache_config: KVCacheConfig) -> str:
    """A flag with which such a model is served at once, where something does."""
    groups = kv_cache_config.kv_cache_groups
    if not may_keep_all([spec for group in groups for spec in layer_specs(group).values()]):
        return ""
    return (
        ". With --disable-hybrid-kv-cache-manager it is served, at the price of KV for all tokens "
        "in layers with a window"
    )


def _is_cpu() -> bool:
    from vllm.platforms import current_platform  # noqa: PLC0415

    return bool(current_platform.is_cpu())


def _reason_of_settings(vllm_config: VllmConfig) -> str | None:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    of_drafts = getattr(drafts_of(vllm_config), "kv_cache_dtype", None)
    for kind in (cache.cache_dtype, of_drafts or "auto"):
        if kind not in CPU_KV_TYPES and _is_cpu():
            return (
                f"vLLM's CPU build does not know KV of type {kind!r} (--kv-cache-dtype), and its "
                f"kernels write past such pages; {', '.join(CPU_KV_TYPES)} are known there"
            )
    if getattr(cache, "calculate_kv_scales", False):
        return "its KV scales are calculated anew at each start (--calculate-kv-scales)"
    if getattr(model, "use_mla", False) and not cache.enable_prefix_caching:
        return (
            "its attention keeps latents (MLA), and prefix caching is off, which vLLM does by "
            "itself where attention does not read what was computed before"
        )
    for owner, name, what in (
        (model, "enable_return_routed_experts", "tokens that are loaded have no routed experts"),
        (
            getattr(vllm_config, "aux_output_config", None),
            "enable_return_routed_experts",
            "tokens that are loaded have no routed experts",
        ),
        (cache, "use_replayssm", "part of a recurrent state lies beside its block"),
        (vllm_config, "diffusion_config", "a diffusion model computes KV again and again"),
        (vllm_config, "engram_config", "engram memories are not supported"),
    ):
        if getattr(owner, name, None):
            return f"{name} is set: {what}"
    return None
