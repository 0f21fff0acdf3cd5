# SPDX-License-Identifier: Apache-2.0
"""Checks of what the store can serve: which version, which interface, which models and shapes.

A model that the store cannot serve runs as without it, with one warning: the model is what the
user came for. A way of starting vLLM that it cannot serve (pipeline parallelism and such) is
refused: that is the user's to change.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from attnstore_vllm.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.30.0", "0.31.0", "0.32.0")
NEEDED_HOOKS = (
    "bind_kv_cache_manager", "build_connector_worker_meta", "get_finished",
    "get_kv_connector_stats", "get_num_new_matched_tokens", "on_new_request",
    "register_kv_caches", "request_finished", "reset_cache", "shutdown",
    "update_connector_output", "update_state_after_alloc", "wait_for_layer_load",
)  # fmt: skip


KV_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Of --kv-cache-dtype. Others carry scales beside the tokens, or are taken by builds of vLLM that
do not know them; there answers change after a load."""


def check_interface(base: type) -> None:
    """Raise UnsupportedError if vLLM's connector base lacks a hook that the store lives by."""
    missing = [name for name in NEEDED_HOOKS if not hasattr(base, name)]
    if missing:
        raise UnsupportedError(
            f"this vLLM's KV connector interface lacks {', '.join(missing)}; AttnStore was made "
            f"for vLLM {', '.join(TESTED_VERSIONS)}"
        )


def warn_if_untested(version: str) -> None:
    if version.split("+", maxsplit=1)[0] not in TESTED_VERSIONS:
        logger.warning(
            "AttnStore was tested with vLLM %s, this is %s; please report what you see",
            ", ".join(TESTED_VERSIONS),
            version,
        )


def check_start(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError for a way of starting vLLM that the store cannot serve."""
    parallel = vllm_config.parallel_config
    for name, size in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", getattr(parallel, "prefill_context_parallel_size", 1)),
        ("--nnodes", getattr(parallel, "nnodes", 1)),
    ):
        if size > 1:
            raise UnsupportedError(
                f"{name} is {size}; AttnStore supports 1. Use --tensor-parallel-size on one "
                "machine, or start vLLM without --kv-transfer-config"
            )
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_role != "kv_both":
        raise UnsupportedError(
            f"kv_role is {transfer.kv_role!r}; AttnStore is a cache and needs kv_both"
        )
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        # Every load of ours comes from verified bytes in DRAM and cannot fail; another
        # connector beside us, or a later version, may need it. Inside MultiConnector the
        # outer setting is not visible here.
        logger.warning(
            "kv_load_failure_policy is %r; set it to 'recompute', so that a failed load costs a "
            "prefill and not the request",
            transfer.kv_load_failure_policy,
        )


def reason_to_idle(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why this model cannot be served from the store, or None if it can.

    Both sides ask, each with a configuration of its own: the scheduler's has only one layer's spec
    where layers differ. So what decides is in both, as the sizes of the tensors are.
    """
    return _reason_of_settings(vllm_config) or _reason_of_groups(kv_cache_config)


def _reason_of_groups(kv_cache_config: KVCacheConfig) -> str | None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415

    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "it keeps no KV"
    if len(groups) != 1:
        return f"it has {len(groups)} KV cache groups; one is supported{_help(kv_cache_config)}"
    spec: Any = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        name = type(spec).__name__
        return f"its KV cache is {name}; FullAttentionSpec is supported{_help(kv_cache_config)}"
    expected = kv_cache_config.num_blocks * spec.page_size_bytes * len(groups[0].layer_names)
    found = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    if found != expected:
        return (
            f"its KV tensors have {found} bytes, where layers of one kind would have {expected}; "
            "layers of several kinds are not supported"
        )
    if spec.page_size_bytes != spec.unpadded_page_size_bytes:
        return "its KV pages are padded"
    if spec.non_causal:
        return "it attends in both directions"
    if kv_cache_config.needs_kv_cache_zeroing:
        return "vLLM writes zeros to its new blocks, in an order of its own"
    return None


def _help(kv_cache_config: KVCacheConfig) -> str:
    """A flag with which such a model is served at once, where something does."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: PLC0415

    specs: list[Any] = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    are_windows = all(type(spec) in (FullAttentionSpec, SlidingWindowSpec) for spec in specs)
    if not are_windows or len({(spec.block_size, spec.page_size_bytes) for spec in specs}) != 1:
        return ""
    return (
        ". With --disable-hybrid-kv-cache-manager it is served, at the price of KV for all tokens "
        "in layers with a window"
    )


def _reason_of_settings(vllm_config: VllmConfig) -> str | None:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if cache.cache_dtype not in KV_TYPES:
        return (
            f"KV of type {cache.cache_dtype!r} (--kv-cache-dtype) is not known to be right after "
            f"a load; {', '.join(KV_TYPES)} are"
        )
    if getattr(cache, "calculate_kv_scales", False):
        return "its KV scales are calculated anew at each start (--calculate-kv-scales)"
    if getattr(model, "use_mla", False):
        return "its attention keeps latents (MLA), which are not supported"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        return f"the draft model of {speculative.method!r} has a KV cache of its own"
    for owner, name, what in (
        (model, "enable_return_routed_experts", "tokens that are loaded have no routed experts"),
        (getattr(vllm_config, "aux_output_config", None), "enable_return_routed_experts",
         "tokens that are loaded have no routed experts"),
        (vllm_config, "diffusion_config", "a diffusion model computes KV again and again"),
        (vllm_config, "engram_config", "engram memories are not supported"),
    ):  # fmt: skip
        if getattr(owner, name, None):
            return f"{name} is set: {what}"
    return None
