# SPDX-License-Identifier: Apache-2.0
"""Reads the facts of vLLM that the store and the scheduler side go by."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from attnstore_vllm.connector.groups import needs_of
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.identity.drafts import drafts_of, tokens_ahead
from attnstore_vllm.identity.rank import RankDescription
from attnstore_vllm.transfer.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


def facts_of(
    vllm_config: VllmConfig,
    geometry: Geometry,
    ranks: Sequence[RankDescription],
    info: tuple[str, ...],
    *,
    zeroes: bool,
) -> EngineFacts:
    """The facts of this engine.

    Args:
        ranks: what each has said of itself.
        info: see EngineFacts.
        zeroes: vLLM writes zeros to blocks that change hands, before any hook of ours.
    """
    rows = [rank.rows for rank in ranks]
    are_alone = all(rank.is_alone for rank in ranks)
    scheduler = vllm_config.scheduler_config
    return EngineFacts(
        needs=needs_of(geometry),
        ahead=tokens_ahead(vllm_config),
        hit_tokens=geometry.hit_tokens,
        why_not_moved=next(filter(None, [rank.why_not_moved for rank in ranks]), None),
        step_tokens=scheduler.max_num_batched_tokens,
        replays=_replays(vllm_config),
        in_lockstep=_is_in_lockstep(vllm_config),
        by_priority=scheduler.policy == "priority",
        overcounts_drafts=_overcounts_drafts(vllm_config),
        rows=None if None in rows else min(row for row in rows if row is not None),
        # Beside us others may write to blocks as soon as they are theirs, on streams of their own.
        gives_blocks_away=not zeroes and (None in rows or are_alone),
        loads_in_parts=_computes_again(vllm_config) and are_alone,
        has_prefix_cache=bool(vllm_config.cache_config.enable_prefix_caching),
        serves_adapters=_serves_adapters(vllm_config, geometry),
        info=info,
    )


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
