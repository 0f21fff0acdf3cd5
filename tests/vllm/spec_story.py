# SPDX-License-Identifier: Apache-2.0
"""One random story: a drawn model (drawn_models.py) on vLLM's real scheduler and managers with both
our real sides, and requests that come, share prefixes, are preempted, aborted and computed again,
over several starts on one store. Each forward pass looks at every byte that it reads.
"""

from __future__ import annotations

import gc
import importlib.metadata
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SinkFullAttentionManager,
)
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig, MambaSpec

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.connector import support
from attnstore_vllm.connector.build import geometry_of
from attnstore_vllm.connector.pipeline import PipelineStage
from attnstore_vllm.connector.specs import layer_specs
from attnstore_vllm.connector.support import reason_of_layers, reason_to_idle
from attnstore_vllm.identity import namespace, vllm_settings
from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.engine import CopyEngine
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from attnstore_vllm.transfer.pool import SLOTS_AT
from tests.cuda_world import draw_read_size, draw_rules, installed
from tests.fake_gpu import FakeGpu
from tests.helpers import capacity_for
from tests.vllm.context_ranks import with_ranks
from tests.vllm.drawn_models import Drawn, draw
from tests.vllm.drawn_worker import DrawnWorker, kind_of
from tests.vllm.planning import get_kv_cache_configs
from tests.vllm.scripted import Limits
from tests.vllm.scripted_worker import VOCAB
from tests.vllm.spec_faults import Fault
from tests.vllm.staged import StagedEngine
from tests.vllm.test_async_scheduling import wait_until_quiet

MODEL_LEN = 256
LEFT_S = 60.0


@dataclass(frozen=True)
class Start:
    """How an engine is started: what is drawn anew at each restart."""

    depth: int
    num_blocks: int
    slots: int
    batched_tokens: int
    prepares_first: bool
    writes_first: bool
    on_gpu: bool
    seed: int


def draw_start(random: Random, drawn: Drawn, num_blocks: int) -> Start:
    stages = len(drawn.stages)
    return Start(
        depth=stages + random.choice((0, 0, 1, 2)) if stages > 1 else random.choice((1, 1, 2, 3)),
        num_blocks=num_blocks,
        slots=random.choice((6, 12, 40, 40)),
        batched_tokens=random.choice((48, 96, 160)),
        prepares_first=random.random() < 0.4,
        writes_first=random.random() < 0.4,
        on_gpu=random.random() < 0.4,
        seed=random.randrange(1 << 30),
    )


class VllmFailsError(Exception):
    """vLLM 0.32 itself cannot start it: of a group of several layers' specs a stage has none, and
    is given another stage's layers to make tensors of."""


class DrawnEngine(StagedEngine):
    """See the module.

    Args:
        gpu: where CudaEngine copies; None: CpuEngine does.
        fault: what is planted.
    """

    def __init__(
        self, model: Path, store: Path, drawn: Drawn, start: Start, gpu: FakeGpu | None,
        fault: Fault | None,
    ) -> None:  # fmt: skip
        class OfThisModel(DrawnWorker):
            pass

        self.drawn, self._store_path = drawn, store
        self._start, self._gpu, self._fault = start, gpu, fault
        self._random = Random(start.seed)
        OfThisModel.drawn, OfThisModel.gpu = drawn, gpu
        OfThisModel.writes_first = start.writes_first
        self.worker_type: Any = OfThisModel
        make = self._make_gpu_engine if gpu is not None else None
        if gpu is None and fault is not None:
            make = self._make_faulty
        limits = Limits(
            chunk_tokens=drawn.chunk_tokens, model_len=MODEL_LEN, dram_slots=start.slots,
            batched_tokens=start.batched_tokens, sequences=4,
        )  # fmt: skip
        super().__init__(
            model, store, stages=(1,) * len(drawn.stages), ranks_of_a_stage=drawn.ranks.count,
            limits=limits, num_blocks=start.num_blocks, depth=start.depth, seed=start.seed,
            make_engine=make, load_deadline_ms=60_000,
        )  # fmt: skip
        for worker in self.workers:
            worker.prepares_first = start.prepares_first

    # ---- shapes ------------------------------------------------------------------------

    def _spread(self, config: VllmConfig) -> None:
        with_ranks(config.parallel_config, self.drawn.ranks)

    def _set(self, config: VllmConfig) -> None:
        config.parallel_config.pipeline_parallel_size = len(self.drawn.stages)
        cache = config.cache_config
        cache.kv_cache_layout = self.drawn.layout
        cache.num_gpu_blocks_override = self._start.num_blocks
        cache.block_size = self.drawn.block_tokens
        cache.cache_dtype = self.drawn.kv_type
        if any(isinstance(spec, MambaSpec) for spec in self.drawn.specs.values()):
            cache.mamba_cache_mode = "align"

    def _shapes(
        self, num_blocks: int, limits: Limits, num_ranks: int
    ) -> tuple[KVCacheConfig, Geometry]:
        count = self.drawn.ranks.count
        of_ranks = [dict(stage) for stage in self.drawn.stages for _ in range(count)]
        ahead = self.drawn.retained_tokens + 1
        with mock.patch.object(VllmConfig, "num_prefill_lookahead_tokens", ahead):
            caches = get_kv_cache_configs(self.config, of_ranks, [1 << 40] * num_ranks)
        of_all = [group for cache in caches for group in cache.kv_cache_groups]
        if any(not g.layer_names and hasattr(g.kv_cache_spec, "kv_cache_specs") for g in of_all):
            raise VllmFailsError
        self.worker_type.caches = caches
        self.worker_type.kinds = tuple(
            kind_of(next(iter(layer_specs(group).values()))) for group in caches[0].kv_cache_groups
        )
        cache = generate_scheduler_kv_cache_config(caches)
        self._geometries = self._geometries_of(caches, cache)
        first = self._geometries[0]
        transfer = self.config.kv_transfer_config
        assert transfer is not None
        settings = transfer.kv_connector_extra_config
        settings["dram"] = SLOTS_AT + limits.dram_slots * first.slot_bytes
        settings["nvme"]["capacity"] = capacity_for(80, first.slot_bytes + 16384)
        return cache, first

    def _geometries_of(self, caches: list[KVCacheConfig], cache: KVCacheConfig) -> list[Geometry]:
        """Of each rank. The store serves all that is drawn."""
        settings = {
            "dram": "1GiB",
            "nvme": {"path": str(self._store_path), "capacity": "1GiB"},
            "chunk_tokens": self.drawn.chunk_tokens,
        }
        config = StoreConfig.parse(settings)
        for side in (cache, *caches):
            why = reason_to_idle(self.config, side)
            assert why is None, why
        of_stages = [
            PipelineStage.of(geometry_of(self.config, caches[i * self.drawn.ranks.count], config))
            for i in range(len(self.drawn.stages))
        ]
        stages = of_stages if len(of_stages) > 1 else ()
        found = [geometry_of(self.config, one, config, stages) for one in caches]
        for one, geometry in zip(caches, found, strict=True):
            why = reason_of_layers(one, geometry.hit_tokens)
            assert why is None, why
        return found

    def _shapes_of(self, rank: int, geometry: Geometry) -> tuple[Geometry, int]:
        return self._geometries[rank], 0

    def _block_sizes(self, cache: KVCacheConfig, config: VllmConfig) -> tuple[int, int]:
        return resolve_kv_cache_block_sizes(cache, config)

    # ---- copies ------------------------------------------------------------------------

    def _make_gpu_engine(
        self, place: tuple[int, int, int, Geometry], layouts: list[LayerLayout]
    ) -> CopyEngine:
        shape, random = place[3], self._random
        return CudaEngine(
            *place, layouts, torch.device("cuda", 0), num_rows=random.randint(0, 24),
            rules=draw_rules(random), read_size=draw_read_size(random, list(shape.regions)),
        )  # fmt: skip

    def _make_faulty(
        self, place: tuple[int, int, int, Geometry], layouts: list[LayerLayout]
    ) -> CopyEngine:
        assert self._fault is not None
        # The worker is being made: it is given to the engine when there is one.
        return self._fault.engine(place, layouts, lambda rank: self.workers[rank])


def num_blocks_for(random: Random, drawn: Drawn) -> int:
    """For one request at least: then others are preempted."""
    blocks = sum(
        (1 + -(-MODEL_LEN // spec.block_size))
        * (12 if isinstance(spec, HiddenStateCacheSpec) else 1)
        for spec in drawn.specs.values()  # more than there are groups; hidden states are wide
    )
    return 2 + int(blocks * random.choice((1.0, 1.4, 3.0)))


# ---- a story ---------------------------------------------------------------------------


class Story:
    def __init__(self, random: Random, counts: Counter[str]) -> None:
        self.random, self.counts = random, counts
        self.histories = [self.tokens(random.randrange(40, 160)) for _ in range(2)]
        self.number = 0

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def live(self, engine: DrawnEngine, requests: int) -> None:
        """From a start to the next."""
        random = self.random
        for _ in range(requests):
            self.add(engine)
            act = random.choice((self.go_on, self.go_on, self.abort, self.forget, self.preempt))
            act(engine)
            self.counts[act.__name__] += 1
        self.settle(engine)
        self.forget(engine)
        self.add(engine)
        self.settle(engine)
        self.histories += [list(tokens) for tokens in engine.worker.sequences]
        self.counts["loaded tokens"] += engine.worker.loaded_tokens
        for worker in engine.workers:
            assert isinstance(worker, DrawnWorker)
            self.counts["bytes checked"] += worker.bytes_checked
            self.counts["retained states"] += worker.retained_seen

    def add(self, engine: DrawnEngine) -> None:
        """A prompt that begins as an earlier request, or all of it."""
        known = self.random.choice([*self.histories, *engine.worker.sequences])
        shared = known[: self.random.choice((len(known), self.random.randrange(1, 250)))]
        prompt = [*shared[: MODEL_LEN - 70], *self.tokens(self.random.randrange(1, 40))]
        self.number += 1
        engine.add(str(self.number), prompt, self.random.choice((1, 2, 6, 20)))
        self.counts["requests"] += 1
        for _ in range(self.random.randrange(6)):
            engine.step()

    def go_on(self, engine: DrawnEngine) -> None:
        for _ in range(self.random.randrange(12)):
            engine.step()

    def abort(self, engine: DrawnEngine) -> None:
        alive = list(engine.scheduler.requests)
        if alive:
            engine.abort(self.random.choice(alive))

    def preempt(self, engine: DrawnEngine) -> None:
        """What runs loses its blocks. vLLM cannot where a copy holds some."""
        with suppress(RuntimeError):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def forget(self, engine: DrawnEngine) -> None:
        """HBM has nothing any more, so that hits come from the store."""
        self.settle(engine)
        assert engine.scheduler.reset_prefix_cache(), "blocks are held"

    def settle(self, engine: DrawnEngine) -> None:
        deadline = time.monotonic() + LEFT_S
        while engine.scheduler.has_requests() or engine.in_flight:
            assert time.monotonic() < deadline, "requests are left"
            engine.step()
            if not engine.scheduler.running:
                time.sleep(0.0002)
        wait_until_quiet(engine.ours)


def tell(
    seed: int, model: Path, fault: Fault | None = None, *, on_gpu: bool | None = None
) -> Counter[str]:
    """One story. Returns how often each thing happened; "not served" where nothing did.

    Args:
        model: a directory that vLLM can read: what its model keeps is never looked at.
        on_gpu: copies are CudaEngine's, over the fake driver; None: it is drawn.
    Raises: WrongBytesError.
    """
    random, counts = Random(seed), Counter[str]()
    drawn = draw(random)
    if fault is not None and not fault.suits(drawn):
        return Counter({"not suited": 1})
    story = Story(random, counts)
    with TemporaryDirectory() as folder, prepared(fault):
        for life in range(random.choice((1, 2)) if fault is None else 2):
            other = drawn.of_other_type() if life else None
            is_other = fault.other_type if fault is not None else random.random() < 0.3
            if other is not None and is_other:
                drawn = other
                counts["other types"] += 1
            start = draw_start(random, drawn, num_blocks_for(random, drawn))
            is_on_gpu = start.on_gpu if on_gpu is None else on_gpu
            start = replace(start, on_gpu=is_on_gpu and fault is None)
            try:
                with started(model, Path(folder) / "store", drawn, start, fault) as engine:
                    story.live(engine, random.randint(1, 3))
            except VllmFailsError:
                counts["vLLM fails"] += 1
                break
            counts["starts"] += 1
            counts["on a GPU"] += start.on_gpu
    shape = {
        "family": drawn.family, "KV type": drawn.kv_type, "layout": drawn.layout,
        "stages": len(drawn.stages), "ranks": drawn.ranks.count,
    }  # fmt: skip
    counts.update(["stories", *(f"{name}: {value}" for name, value in shape.items())])
    counts["share tokens"] += drawn.ranks.decode > 1
    counts["prefill ranks"] += drawn.ranks.prefill > 1
    if counts["loaded tokens"]:
        counts.update(["with loads", f"with loads: {drawn.family}"])
    return counts


@contextmanager
def prepared(fault: Fault | None) -> Iterator[None]:
    """All types of KV are known, and what all stories share is looked up once."""
    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(support, "_is_cpu", return_value=False))
        undo.enter_context(mock.patch.object(namespace, "plugins", _plugins))
        undo.enter_context(mock.patch.object(importlib.metadata, "version", _version))
        # vLLM 0.32 gives this class an argument that it does not take, and its parent does.
        init = FullAttentionManager.__init__
        undo.enter_context(mock.patch.object(SinkFullAttentionManager, "__init__", init))
        if fault is not None:
            undo.enter_context(fault.planted())
        yield


_plugins = cache(vllm_settings.plugins)
_version = cache(importlib.metadata.version)


@contextmanager
def started(
    model: Path, store: Path, drawn: Drawn, start: Start, fault: Fault | None
) -> Iterator[DrawnEngine]:
    with ExitStack() as undo:
        gpu = None
        if start.on_gpu:
            # The fake calls Python and holds its lock meanwhile. A thread of the store that
            # collects garbage would wait for that lock, with the interpreter's.
            gc.disable()
            undo.callback(gc.enable)
            gpu = FakeGpu(start.seed)
            undo.enter_context(installed(gpu))
            for rank in range(len(drawn.stages) * drawn.ranks.count):
                gpu.use(rank)
                gpu.set(driver_version=13000, busy=Random(start.seed).choice((0, 10, 60)))
        engine = DrawnEngine(model, store, drawn, start, gpu, fault)
        undo.callback(engine.close)
        yield engine
