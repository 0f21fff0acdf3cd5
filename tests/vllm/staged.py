# SPDX-License-Identifier: Apache-2.0
"""A scripted engine (scripted.py) whose layers are spread over the stages of a pipeline.

As vLLM's workers do, each stage takes the steps in their order, and a later one may be as many
steps behind the first as there are stages between them.
"""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from attnstore_vllm.transfer.geometry import Geometry
from tests.vllm.scripted import Limits, ScriptedEngine

NOT_YET = ModelRunnerOutput([], {})
LIMITS = Limits()


class StagedEngine(ScriptedEngine):
    """See the module.

    Args:
        stages: how many layers each stage has.
        ranks_of_a_stage: tensor-parallel ones.
        options: of ScriptedEngine.
    """

    def __init__(
        self, model: Path, store: Path, *, stages: tuple[int, ...], ranks_of_a_stage: int = 1,
        limits: Limits = LIMITS, **options: Any,
    ) -> None:  # fmt: skip
        self.stages = stages
        self.ranks_of_a_stage = ranks_of_a_stage
        limits = replace(limits, layers=max(stages))
        super().__init__(
            model, store, limits=limits, num_ranks=len(stages) * ranks_of_a_stage, **options
        )
        self._todo: list[deque[bytes]] = [deque() for _ in self.workers]
        self._done: list[deque[ModelRunnerOutput]] = [deque() for _ in self.workers]

    def _shapes(
        self, num_blocks: int, limits: Limits, num_ranks: int
    ) -> tuple[KVCacheConfig, Geometry]:
        """As the scheduler side's: the cache has the layers of the first stage."""
        first = replace(limits, layers=self.stages[0])
        cache, geometry = super()._shapes(num_blocks, first, num_ranks)
        stages = tuple(count * (geometry.page_bytes,) for count in self.stages)
        return cache, replace(geometry, stages=stages)

    def _shapes_of(self, rank: int, geometry: Geometry) -> tuple[Geometry, int]:
        stage = rank // self.ranks_of_a_stage
        before, count = sum(self.stages[:stage]), self.stages[stage]
        names = tuple(f"layer {before + i}" for i in range(count))
        group = replace(geometry.groups[0], layers=names)
        of_rank = replace(geometry, regions=geometry.stages[stage], groups=(group,))
        first_layer = self.ranks_of_a_stage * before + rank % self.ranks_of_a_stage * count
        return of_rank, first_layer

    def _set(self, config: VllmConfig) -> None:
        config.parallel_config.pipeline_parallel_size = len(self.stages)
        config.parallel_config.tensor_parallel_size = self.ranks_of_a_stage

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        sent = pickle.dumps(output)  # a later stage sees what was sent, and not what it has become
        for rank, todo in enumerate(self._todo):
            todo.append(sent)
            while len(todo) > rank // self.ranks_of_a_stage:
                self._take_step(rank)
        return NOT_YET

    def finish_oldest(self) -> None:
        if self.in_flight:
            for rank, done in enumerate(self._done):
                if not done:
                    self._take_step(rank)
            results = [done.popleft() for done in self._done]
            first_of_last_stage = len(self.workers) - self.ranks_of_a_stage
            result = self._aggregator.aggregate(results, first_of_last_stage)
            assert result is not None
            self.in_flight[0] = self.in_flight[0][0], result
        super().finish_oldest()

    def _take_step(self, rank: int) -> None:
        output = pickle.loads(self._todo[rank].popleft())
        self._done[rank].append(self.workers[rank].execute(output))
