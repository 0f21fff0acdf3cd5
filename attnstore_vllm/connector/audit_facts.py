# SPDX-License-Identifier: Apache-2.0
"""How stored KV of this engine is compared with what it computes once more, if that can be said."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import vllm.envs

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.rank import KvPage, RankDescription
from attnstore_vllm.policy.kv_compare import NUMBER_BYTES, Comparison, Numbers, Unit
from attnstore_vllm.tiers.nvme.aside import is_stopped, stopped_path
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.page_content import ContentSide

logger = logging.getLogger(__name__)


def computes_alike(device: str) -> bool:
    """Whether a prompt's KV has the same bits, in any batch, wherever a step
    ends. vLLM says it of GPUs alone: on the CPU the setting changes nothing.

    Args:
        device: the type of the device that KV is on.
    """
    return bool(getattr(vllm.envs, "VLLM_BATCH_INVARIANT", False)) and device.startswith("cuda")


def check_not_stopped(directory: Path, namespace: bytes) -> None:
    """Raise UnsupportedError where an audit has ended the serving of this namespace."""
    if is_stopped(directory, namespace):
        raise UnsupportedError(
            f"{stopped_path(directory, namespace)} is there: an audit found KV that is not what "
            "the model computes. docs/audit.md says how to find the cause; remove the file to "
            "serve again"
        )


def comparison_of(
    config: AuditConfig | None,
    geometry: Geometry,
    ranks: Sequence[RankDescription],
    ahead: int,
) -> Comparison | None:
    """None: nothing is audited. Says so where it was to be.

    Args:
        ahead: see EngineFacts.
    """
    if config is None:
        return None
    try:
        found = _comparison(geometry, ranks, ahead)
    except UnsupportedError as error:
        logger.warning("AttnStore audits nothing of this model (audit), since %s", error)
        return None
    logger.info(
        "AttnStore audits one hit in %.0f, up to %.0f tokens a second: KV is compared %s",
        1 / config.rate,
        config.tokens_per_s,
        found.in_words,
    )
    return found


def _comparison(geometry: Geometry, ranks: Sequence[RankDescription], ahead: int) -> Comparison:
    """Raises UnsupportedError."""
    if len(geometry.groups) > 1 or geometry.has_window_alone:
        raise UnsupportedError("it has KV cache groups beside one of all tokens")
    if geometry.stages:
        raise UnsupportedError("its layers are spread over pipeline stages")
    if ahead:
        raise UnsupportedError("its drafts decide KV of tokens before them")
    if not all(rank.is_alone for rank in ranks):
        raise UnsupportedError("another connector may bring KV in place of what is to be computed")
    if computes_alike(ranks[0].kv.device):
        return Comparison(units_of(geometry), None)
    why = next(filter(None, [rank.why_no_page for rank in ranks]), None)
    page = ranks[0].page
    if why is not None or page is None or any(rank.page != page for rank in ranks):
        raise UnsupportedError(why or "its ranks differ in where K and V are")
    return Comparison(units_of(geometry), _numbers(page, geometry))


def units_of(geometry: Geometry) -> list[Unit]:
    """Each layer's pages in a slot, of each rank that has a part of its own."""
    return [
        Unit(
            rank,
            layer,
            geometry.part_at(rank) + geometry.region_at(layer),
            geometry.regions[layer],
        )
        for rank in range(0, geometry.num_ranks, geometry.replicas)
        for layer in geometry.layers_of(0)
    ]


def _numbers(page: KvPage, geometry: Geometry) -> Numbers:
    shape = page.block_tokens, page.num_heads, page.head_dim
    size = 2 * shape[0] * shape[1] * shape[2] * NUMBER_BYTES.get(page.dtype, 0)
    if page.block_tokens != geometry.block_tokens or set(geometry.regions) != {size}:
        raise UnsupportedError(f"its pages have more, or other numbers, than K and V of {page}")
    key, value = (ContentSide(*side).places(*shape) for side in (page.key, page.value))
    return Numbers(page.dtype, key, value)
