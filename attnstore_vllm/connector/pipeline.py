# SPDX-License-Identifier: Apache-2.0
"""The stages of a pipeline-parallel engine: what KV each keeps, told to all others.

A worker's copy of vLLM's cache configuration has the layers of its own stage, and the copy of the
scheduler side those of the first. A slot has the parts of all stages. So the workers tell each
other before they open the pool, and the scheduler side reads it on the first rank's page there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage, as its workers see it."""

    reason: str | None
    """Why its layers cannot be served from the store."""
    regions: tuple[int, ...] = ()
    """See Geometry."""
    replicas: int = 1
    groups: tuple[tuple[int, str, int], ...] = ()
    """The KV cache groups, each with the tokens of its blocks and how far back it looks."""

    @classmethod
    def of(cls, geometry: Geometry) -> PipelineStage:
        groups = tuple((g.block_tokens, g.reach, g.reach_tokens) for g in geometry.groups)
        return cls(None, geometry.regions, geometry.replicas, groups)


def num_stages(vllm_config: VllmConfig) -> int:
    return int(vllm_config.parallel_config.pipeline_parallel_size)


def rank_in_engine(vllm_config: VllmConfig) -> int:
    """This worker's number in its engine, stage by stage, as vLLM counts them."""
    rank = get_tensor_model_parallel_rank()
    if num_stages(vllm_config) == 1:
        return rank
    ranks_of_a_stage = int(vllm_config.parallel_config.tensor_parallel_size)
    return int(get_pp_group().rank_in_group) * ranks_of_a_stage + rank


def tell_all(own: PipelineStage) -> list[PipelineStage]:
    """The stages as each tells of itself, the first one first.

    All workers of an engine call it, also those that cannot be served: it waits for all of them,
    as long as vLLM's own group of processes does.
    """
    group = get_pp_group()
    told: list[PipelineStage] = [own] * group.world_size
    torch.distributed.all_gather_object(told, own, group=group.cpu_group)
    return told


def with_all(geometry: Geometry, stages: Sequence[PipelineStage]) -> Geometry:
    """The shapes of a stage, with room for all of them. Raises UnsupportedError."""
    for number, stage in enumerate(stages):
        if stage.reason is not None:
            raise UnsupportedError(f"of its pipeline stage {number}: {stage.reason}")
    if len({stage.groups for stage in stages}) > 1:
        raise UnsupportedError("its pipeline stages differ in how far back their layers look")
    # Who stores KV of its own where another rank has the same is right, too.
    replicas = {stage.replicas for stage in stages}
    return replace(
        geometry,
        stages=tuple(stage.regions for stage in stages),
        replicas=replicas.pop() if len(replicas) == 1 else 1,
    )
