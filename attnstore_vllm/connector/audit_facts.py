# SPDX-License-Identifier: Apache-2.0
"""How stored KV of this engine is compared with what it computes once more, as far as that can be
said: of each KV cache group by itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import vllm.envs

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.rank import GroupPages, PageSide, RankDescription
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.policy.kv_compare import (
    BOUND,
    NUMBER_BYTES,
    STATE_BOUND,
    Comparison,
    Side,
    Unit,
)
from attnstore_vllm.tiers.nvme.aside import is_stopped, stopped_path
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.page_content import ContentSide

logger = logging.getLogger(__name__)

STATE = Reach.STATE.value
NOTHING = "AttnStore audits nothing of this model (audit), since %s"


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


def comparisons_of(
    config: AuditConfig | None,
    geometry: Geometry,
    ranks: Sequence[RankDescription],
    ahead: int,
) -> tuple[Comparison | None, ...]:
    """Those of each group, the spine's first; None: it is not compared. Empty: nothing is audited.
    Says so where it was to be; by default it is to be where it can be, so that is no warning.

    Args:
        ahead: see EngineFacts.
    """
    if config is None:
        return ()
    level = logging.INFO if config.by_default else logging.WARNING
    try:
        if not all(rank.is_alone for rank in ranks):
            raise UnsupportedError(
                "another connector may bring KV in place of what is to be computed"
            )
        if any(len(rank.groups) < len(geometry.groups) for rank in ranks):
            raise UnsupportedError("a rank had no room to tell of its pages")
        _check(geometry, ahead)
    except UnsupportedError as error:
        logger.log(level, NOTHING, error)
        return ()
    bits = computes_alike(ranks[0].kv.device)
    found: list[Comparison | None] = []
    for place, group in enumerate(geometry.groups):
        try:
            # A state is summed up in another order where steps end elsewhere.
            found.append(_comparison(place, geometry, ranks, bits and group.reach != STATE))
        except UnsupportedError as error:
            logger.log(
                level,
                "AttnStore audits no KV of cache group %d (%s), since %s",
                place, group.reach, error,
            )  # fmt: skip
            found.append(None)
    compared = [one.in_words for one in found if one is not None]
    if not compared:
        logger.log(level, NOTHING, "no group is told")
        return ()
    logger.info(
        "AttnStore audits one hit in %.0f, up to %.0f tokens a second: KV is compared %s",
        1 / config.rate,
        config.tokens_per_s,
        "; ".join(dict.fromkeys(compared)),
    )
    return tuple(found)


def _check(geometry: Geometry, ahead: int) -> None:
    """Raises UnsupportedError."""
    if geometry.is_packed:
        raise UnsupportedError("pages of its layers lie side by side in a block")
    if ahead:
        raise UnsupportedError("its drafts decide KV of tokens before them")


def _comparison(
    place: int, geometry: Geometry, ranks: Sequence[RankDescription], bits: bool
) -> Comparison:
    """Raises UnsupportedError."""
    told = [rank.groups[place] for rank in ranks]
    units = units_of(geometry, told)
    why = next((pages.why_none for pages in told if pages.why_none), None)
    kinds = {pages.sides for pages in told if pages.num_layers}
    is_told = why is None and len(kinds) == 1 and any(kinds)
    if bits and len(geometry.groups) == 1:  # then pages are not padded
        return Comparison(units, None)
    if not is_told:
        raise UnsupportedError(why or "its ranks differ in where K and V are")
    sides = next(iter(kinds))
    size = content_bytes(sides, units)
    most = STATE_BOUND if geometry.groups[place].reach == STATE else BOUND
    return Comparison(units, None if bits else [side_of(one) for one in sides], size, most)


def content_bytes(sides: Sequence[PageSide], units: Sequence[Unit]) -> int:
    """Bytes of a page with these sides. Raises UnsupportedError where pages have no room."""
    found = max((int(side_of(one).places.max()) + 1) * NUMBER_BYTES[one.dtype] for one in sides)
    total = sum(side_of(one).places.size * NUMBER_BYTES[one.dtype] for one in sides)
    sizes = {unit.page_bytes for unit in units}
    if found != total or any(found > size for size in sizes) or len(sizes) > 1:
        raise UnsupportedError(
            f"its pages of {sorted(sizes)} bytes have more, or other numbers, than are known"
        )
    return found


def units_of(geometry: Geometry, told: Sequence[GroupPages]) -> list[Unit]:
    """Each layer's pages of one group in a slot, of each rank that has a part of its own.

    Args:
        told: by each rank.
    """
    stages = geometry.stages or (geometry.regions,)
    of_a_stage = geometry.num_ranks // len(stages)
    units = []
    for rank in range(0, geometry.num_ranks, geometry.replicas):
        regions = stages[rank // of_a_stage]
        at = geometry.part_at(rank)
        for layer in range(told[rank].num_layers):
            units.append(Unit(rank, layer, at, regions[layer]))
            at += geometry.blocks_per_chunk * regions[layer]
    return units


def side_of(told: PageSide) -> Side:
    return Side(told.name, told.dtype, ContentSide(*told.content).places(*told.shape))
