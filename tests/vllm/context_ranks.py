# SPDX-License-Identifier: Apache-2.0
"""The scripted engine (scripted.py) under context parallelism: each rank's worker writes and reads
the tokens that vLLM's own slot mapping gives it (kernel_text.py), in blocks of vLLM's own managers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig

from attnstore_vllm.connector.context_parallel import over_ranks
from attnstore_vllm.identity.rank import part_text
from attnstore_vllm.transfer.geometry import Geometry, Group
from tests.vllm.grouped import PAGE_BYTES, GroupedEngine, GroupedWorker, Kind
from tests.vllm.kernel_text import PAD, V1, V2, Slots, slots_of
from tests.vllm.scripted import Limits, ScriptedEngine
from tests.vllm.scripted_worker import BLOCK, LAYERS, TOKEN_KV, Kv, ScriptedWorker, _Run, in_layer
from tests.vllm.staged import StagedEngine

CHUNK = 128
SLOTS = 40


@dataclass(frozen=True)
class Ranks:
    """How an engine is spread."""

    tensor: int
    decode: int
    prefill: int = 1
    interleave: int = 1

    @property
    def count(self) -> int:
        return self.tensor * self.prefill

    def decode_rank(self, rank: int) -> int:
        """As vLLM makes its groups (parallel_state.py): along prefill ranks, then tensor ranks.
        Those of each pipeline stage are alike."""
        along = np.arange(self.count).reshape(self.prefill, self.tensor).T.reshape(-1, self.decode)
        (found,) = np.argwhere(along == rank % self.count)
        return int(found[1])

    def part(self, rank: int) -> str:
        """As its worker says it."""
        decode = self.decode_rank(rank), self.decode
        prefill = rank % self.count // self.tensor, self.prefill
        return part_text(decode, prefill, self.interleave)


def settle(engine: ScriptedEngine) -> None:
    """Step until all requests have ended. The disk has its time: a request that waits for it takes
    what it has."""
    deadline = time.monotonic() + 60
    while engine.scheduler.has_requests() or engine.in_flight:
        assert time.monotonic() < deadline, "requests are left"
        engine.step()
        if not engine.scheduler.running:
            time.sleep(0.001)


def with_ranks(parallel: ParallelConfig, ranks: Ranks) -> ParallelConfig:
    parallel.tensor_parallel_size = ranks.tensor
    parallel.decode_context_parallel_size = ranks.decode
    parallel.prefill_context_parallel_size = ranks.prefill
    parallel.cp_kv_cache_interleave_size = ranks.interleave
    return parallel


class ContextWorker(ScriptedWorker):
    ranks: Ranks
    settings: Ranks
    """As vLLM's settings have it."""
    hides = False
    """Its name has nothing but the settings."""
    swapped = False
    """A fault: ranks write and read each other's tokens."""

    def __init__(self, *arguments: Any) -> None:
        rank = arguments[5]
        self._decode_rank = self.ranks.decode_rank(rank)
        if self.swapped:
            self._decode_rank = self.ranks.decode - 1 - self._decode_rank
        self.block = BLOCK * self.ranks.decode
        super().__init__(*arguments)

    def _part(self, rank: int) -> str:
        if self.hides:
            return self.settings.part(rank)
        if self.ranks.decode == self.ranks.prefill == 1:
            return ""
        decode, prefill = (self._decode_rank, self.ranks.decode), self.ranks.prefill
        number = rank % self.ranks.count // self.ranks.tensor
        return part_text(decode, (number, prefill), self.ranks.interleave)

    def _slots(self, block_ids: list[int], count: int) -> Slots:
        # Model Runner V2 alone has prefill ranks.
        which = V2 if self.ranks.prefill > 1 else V1
        return slots_of(
            block_ids, np.arange(count), block=BLOCK, ranks=self.ranks.decode,
            rank=self._decode_rank, interleave=self.ranks.interleave, which=which,
        )  # fmt: skip

    def _compute(self, layer: int, runs: list[_Run], *, replays: bool) -> None:
        self.between()
        places, named = self.hbm[layer].reshape(-1, TOKEN_KV), self.first_layer + layer
        all_slots = [self._slots(r.row.block_ids, r.start + len(r.written)) for r in runs]
        for run, slots in zip(runs, all_slots, strict=True):
            new = slots[run.start :]
            places[new[new != PAD]] = in_layer(run.written, named)[new != PAD]
        self.between()
        if not replays:
            self.side.wait_for_layer(self.names[layer])
        for run, slots in zip(runs, all_slots, strict=True):
            mine = np.flatnonzero(slots != PAD)
            wanted = in_layer(run.kv + run.written, named)[mine]
            wrong = (places[slots[mine]] != wanted).any(axis=1)
            assert run.row.refused_from is not None or not wrong.any(), (
                f"wrong KV of token {int(mine[wrong.argmax()])} of {run.start} computed ones on "
                f"rank {self.side.rank}, layer {layer}"
            )
        self.between()
        if not replays:
            self.side.layer_computed(self.names[layer])


class ContextEngine(ScriptedEngine):
    """See the module.

    Args:
        settings, hides, swapped: see ContextWorker.
    """

    def __init__(
        self, model: Path, store: Path, ranks: Ranks, *, seed: int, settings: Ranks | None = None,
        hides: bool = False, swapped: bool = False, depth: int = 1, num_blocks: int = 40,
    ) -> None:  # fmt: skip
        class OfTheseRanks(ContextWorker):
            pass

        OfTheseRanks.ranks, OfTheseRanks.settings = ranks, settings or ranks
        OfTheseRanks.hides, OfTheseRanks.swapped = hides, swapped
        self.worker_type = OfTheseRanks
        self.ranks, self.settings = ranks, settings or ranks
        limits = Limits(chunk_tokens=CHUNK, dram_slots=SLOTS, nvme="8MiB")
        _, geometry = self._shapes(num_blocks, limits, ranks.count)
        super().__init__(
            model, store, num_blocks=num_blocks, depth=depth, seed=seed, limits=limits,
            num_ranks=ranks.count, dram=(1 << 20) + SLOTS * geometry.slot_bytes,
            load_deadline_ms=60_000,
        )  # fmt: skip

    def _shapes(
        self, num_blocks: int, limits: Limits, num_ranks: int
    ) -> tuple[KVCacheConfig, Geometry]:
        cache, _ = super()._shapes(num_blocks, limits, num_ranks)
        tokens, page_bytes = BLOCK * self.ranks.decode, BLOCK * TOKEN_KV
        return cache, Geometry.uniform(num_ranks, LAYERS, tokens, page_bytes, CHUNK)

    def _spread(self, config: VllmConfig) -> None:
        with_ranks(config.parallel_config, self.settings)

    def _block_sizes(self, cache: KVCacheConfig, config: VllmConfig) -> tuple[int, int]:
        return resolve_kv_cache_block_sizes(cache, config)

    @property
    def loaded(self) -> list[int]:
        """Tokens of the blocks that each rank has loaded."""
        return [worker.loaded_tokens for worker in self.workers]


class StagedContextEngine(StagedEngine):
    """As ContextEngine, its layers spread over the stages of a pipeline.

    Args:
        swapped: the ranks of the last stage write and read each other's tokens.
    """

    def __init__(
        self, model: Path, store: Path, ranks: Ranks, stages: tuple[int, ...], *, seed: int,
        depth: int, swapped: bool = False,
    ) -> None:  # fmt: skip
        last = (len(stages) - 1) * ranks.count

        class OfTheseRanks(ContextWorker):
            def __init__(self, *arguments: Any) -> None:
                self.swapped = swapped and arguments[5] >= last
                super().__init__(*arguments)

        OfTheseRanks.ranks = OfTheseRanks.settings = ranks
        OfTheseRanks.hides = True
        self.worker_type = OfTheseRanks
        self.ranks, self.stages = ranks, stages
        limits = Limits(chunk_tokens=CHUNK, dram_slots=SLOTS, nvme="8MiB")
        _, geometry = self._shapes(60, limits, len(stages) * ranks.count)
        super().__init__(
            model, store, stages=stages, ranks_of_a_stage=ranks.count, depth=depth, seed=seed,
            limits=limits, num_blocks=60, dram=(1 << 20) + SLOTS * geometry.slot_bytes,
            load_deadline_ms=60_000,
        )  # fmt: skip

    def _shapes(
        self, num_blocks: int, limits: Limits, num_ranks: int
    ) -> tuple[KVCacheConfig, Geometry]:
        cache, geometry = super()._shapes(num_blocks, limits, num_ranks)
        (group,) = geometry.groups
        spread = replace(group, block_tokens=group.block_tokens * self.ranks.decode)
        return cache, replace(geometry, groups=(spread,))

    def _spread(self, config: VllmConfig) -> None:
        with_ranks(config.parallel_config, self.ranks)

    def _block_sizes(self, cache: KVCacheConfig, config: VllmConfig) -> tuple[int, int]:
        return resolve_kv_cache_block_sizes(cache, config)


class GroupedContextWorker(GroupedWorker):
    """Of layers that keep all tokens, each rank has some; it has every state."""

    ranks: Ranks

    def _part(self, rank: int) -> str:
        return self.ranks.part(rank)

    def _see_tokens(self, run: _Run, kind: Kind, table: list[int], hbm: Kv, layer: int) -> None:
        assert kind.reach == "full"
        width = PAGE_BYTES // kind.block
        places = hbm.reshape(-1, width)
        wanted = in_layer(run.kv + run.written, layer)[:, :width]
        slots = slots_of(
            table, np.arange(len(wanted)), block=kind.block, ranks=self.ranks.decode,
            rank=self.ranks.decode_rank(self.side.rank), interleave=self.ranks.interleave,
        )  # fmt: skip
        mine = slots != PAD
        new = mine & (np.arange(len(wanted)) >= run.start)
        places[slots[new]] = wanted[new]
        assert (places[slots[mine]] == wanted[mine]).all(), (
            f"wrong KV of {run.start} computed tokens on rank {self.side.rank}, layer {layer}"
        )


class GroupedContextEngine(GroupedEngine):
    """As ContextEngine, with several KV cache groups."""

    base = GroupedContextWorker

    def __init__(
        self, model: Path, store: Path, ranks: Ranks, kinds: tuple[Kind, ...], *, seed: int
    ) -> None:
        self.ranks = ranks

        class OfTheseRanks(GroupedContextWorker):
            pass

        OfTheseRanks.ranks = ranks
        self.base = OfTheseRanks
        self._config = with_ranks(ParallelConfig(), ranks)
        limits = Limits(chunk_tokens=CHUNK, dram_slots=60, nvme="8MiB")
        self.kinds = kinds
        _, geometry = self._shapes(60, limits, ranks.count)
        super().__init__(
            model, store, kinds=kinds, num_blocks=60, depth=1, seed=seed, limits=limits,
            num_ranks=ranks.count, dram=(1 << 20) + 60 * geometry.slot_bytes,
            load_deadline_ms=60_000,
        )  # fmt: skip

    def _our_groups(self, cache: KVCacheConfig) -> tuple[Group, ...]:
        config: Any = SimpleNamespace(parallel_config=self._config)
        return over_ranks(super()._our_groups(cache), cache, config)

    def _spread(self, config: VllmConfig) -> None:
        with_ranks(config.parallel_config, self.ranks)

    def _block_sizes(self, cache: KVCacheConfig, config: VllmConfig) -> tuple[int, int]:
        return resolve_kv_cache_block_sizes(cache, config)
