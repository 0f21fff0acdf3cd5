# SPDX-License-Identifier: Apache-2.0
"""Reads the facts of vLLM that the store and the scheduler side go by."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import vllm

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.connector.audit_facts import comparisons_of
from attnstore_vllm.connector.groups import needs_of
from attnstore_vllm.connector.own_pass import why_no_passes
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.identity.drafts import drafts_of, tokens_ahead
from attnstore_vllm.identity.rank import RankDescription
from attnstore_vllm.preflight import TESTED_VLLM
from attnstore_vllm.transfer.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


READ_VLLM = (*map(_minor, TESTED_VLLM), "0.33")
"""Minor versions of which it is known what their schedulers do with an offer."""


def facts_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    geometry: Geometry,
    ranks: Sequence[RankDescription],
    audit: AuditConfig | None,
    info: tuple[str, ...],
) -> EngineFacts:
    """The facts of this engine.

    Args:
        ranks: what each has said of itself.
        audit: the setting; None: off.
        info: see EngineFacts.
    """
    rows = [rank.rows for rank in ranks]
    are_alone = all(rank.is_alone for rank in ranks)
    needs = needs_of(geometry)
    # vLLM writes zeros to blocks that change hands, before any hook of ours.
    zeroes = bool(kv_cache_config.needs_kv_cache_zeroing)
    cuts = may_cut_hits(kv_cache_config)
    ahead = tokens_ahead(vllm_config)
    why_not_cut = "vLLM may take a part of what is moved" if cuts else None
    scheduler = vllm_config.scheduler_config
    in_parts = _computes_again(vllm_config) and are_alone
    why_not = why_no_passes(vllm_config, len(geometry.groups))
    if not in_parts:  # where a pass fails, vLLM must compute the request and not end it
        why_not = why_not or "vLLM ends requests whose loads fail, or another connector is beside"
    return EngineFacts(
        needs=needs,
        ahead=ahead,
        hit_tokens=geometry.hit_tokens,
        why_not_moved=next(filter(None, [rank.why_not_moved for rank in ranks]), why_not_cut),
        why_no_passes=why_not,
        pass_tokens=scheduler.max_num_batched_tokens,
        pass_rows=scheduler.max_num_seqs,
        step_tokens=scheduler.max_num_batched_tokens,
        replays=_replays(vllm_config),
        # A state has the tokens that it has: to ask for one less would lose it.
        leaves=1 if None in rows or needs else _leaves(vllm_config),
        in_lockstep=_is_in_lockstep(vllm_config),
        by_priority=scheduler.policy == "priority",
        overcounts_drafts=_overcounts_drafts(vllm_config),
        cuts_hits=cuts,
        rows=None if None in rows else min(row for row in rows if row is not None),
        # Beside us others may write to blocks as soon as they are theirs, on streams of their own.
        gives_blocks_away=not zeroes and (None in rows or are_alone),
        loads_in_parts=in_parts,
        has_prefix_cache=bool(vllm_config.cache_config.enable_prefix_caching),
        why_no_holds=reason_for_no_holds(vllm_config),
        serves_adapters=_serves_adapters(vllm_config, geometry),
        comparisons=comparisons_of(audit, geometry, ranks, ahead),
        info=info,
    )


def reason_for_no_holds(vllm_config: VllmConfig) -> str | None:
    """vLLM takes a block with as many users as there are requests for one that all of them have
    (KVCacheManager.get_num_common_prefix_blocks): cascade attention would use it for others too."""
    if vllm_config.model_config.disable_cascade_attn:
        return None
    return "cascade attention is on (disable_cascade_attn: false)"


def may_cut_hits(kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM may take less than it is offered, and more than nothing.

    Of all that Scheduler.schedule() does with an offer, in 0.30 to 0.33, one thing is such: where a
    group's last window is computed again behind each hit, it lets hits end with whole blocks. Else
    it takes all or nothing: nothing of requests that skip caches, of an offer within the block that
    it has a part of, and, in 0.33, where routed experts are missing. And 0.33 takes offers late, if
    they are loaded ahead of the step. What other versions do is not known.
    """
    if _minor(vllm.__version__) not in READ_VLLM:
        return True
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return any(getattr(spec, "prefix_replay_tokens", 0) > 0 for spec in specs)


def _computes_again(vllm_config: VllmConfig) -> bool:
    """Whether vLLM computes what a load did not bring; else the request fails."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_load_failure_policy == "recompute"


def _serves_adapters(vllm_config: VllmConfig, geometry: Geometry) -> bool:
    """Whether requests with a LoRA adapter are served.

    Which adapter one computes with is certain only once its first step has begun. If it is another
    by then, the step is taken back: vLLM lets a worker say so by block ids, before it uses what was
    sampled. With several groups it takes none. With windows alone it would go on from a block whose
    window is not there.
    """
    serves = len(geometry.groups) == 1 and not geometry.has_window_alone
    if vllm_config.lora_config is not None and not serves:
        logger.warning(
            "AttnStore serves requests without a LoRA adapter only, others are computed: "
            "some layers of this model keep no KV of all tokens, and vLLM cannot take back a load "
            "of such a model when an adapter was replaced meanwhile"
        )
    return serves


def _is_in_lockstep(vllm_config: VllmConfig) -> bool:
    """Whether the steps of data-parallel engines wait for each other: experts are spread over
    them."""
    return vllm_config.parallel_config.data_parallel_size > 1 and vllm_config.model_config.is_moe


def _overcounts_drafts(vllm_config: VllmConfig) -> bool:
    """Whether vLLM may count drafts beyond a session's stop as computed (hidden_blocks.py)."""
    speculates = vllm_config.speculative_config is not None
    return speculates and not vllm_config.scheduler_config.async_scheduling


def _replays(vllm_config: VllmConfig) -> Callable[[Collection[int]], bool]:
    """Says, by the tokens of each of a step's requests: may the step be a CUDA graph of the whole
    forward pass, which calls no hook?"""
    if drafts_of(vllm_config) is not None:
        return lambda _: True  # their passes may be graphs of their own
    mode = vllm_config.compilation_config.cudagraph_mode
    if not mode.has_full_cudagraphs():
        return lambda _: False
    if not mode.separate_routine():
        return lambda _: True
    decoding = 1 + vllm_config.num_speculative_tokens  # only steps that prefill nothing
    return lambda counts: max(counts, default=0) <= decoding


def _leaves(vllm_config: VllmConfig) -> int:
    """Tokens that a long load leaves to compute, at least.

    One alone runs as a decode does, in a graph of the whole pass, which calls no hook and so waits
    for all layers. Two do not, where only decodes have such graphs, and no drafts: then each layer
    is waited for by itself.
    """
    replays = _replays(vllm_config)
    return 2 if replays([1]) and not replays([2]) else 1
