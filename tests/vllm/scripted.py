# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler and both our real sides, over a scripted model (scripted_worker.py).

The CPU build forces asynchronous scheduling off, so no model runs here.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from attnstore_vllm import engine_start
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.pool import SharedPool, pool_name
from attnstore_vllm.transfer.pool_files import parts_of
from tests.vllm.queues import check_queue
from tests.vllm.scripted_worker import (
    BLOCK,
    LAYERS,
    TOKEN_KV,
    MakeEngine,
    Picture,
    ScriptedWorker,
)

CHUNK = 32


@dataclass(frozen=True)
class Limits:
    """Of an engine."""

    chunk_tokens: int = CHUNK
    model_len: int = 512
    batched_tokens: int = 96
    sequences: int = 6
    dram_slots: int = 64
    nvme: str = "4MiB"
    layers: int = LAYERS


class ScriptedEngine:
    """The engine core's loop, with `depth` steps in flight.

    Args:
        num_ranks: workers, whose reports go through vLLM's own aggregator.
    """

    def __init__(
        self, model: Path, store: Path, *, num_blocks: int, depth: int, seed: int,
        drafts: int = 0, policy: str = "fcfs", limits: Limits = Limits(),
        make_engine: MakeEngine | None = None, num_ranks: int = 1, **settings: Any,
    ) -> None:  # fmt: skip
        config = _vllm_config(model, store, depth, drafts, policy, limits, num_ranks, settings)
        self.config = config
        self._set(config)
        self._spread(config)
        cache, geometry = self._shapes(num_blocks, limits, num_ranks)
        config.cache_config.num_gpu_blocks = num_blocks
        transfer = config.kv_transfer_config
        assert transfer is not None
        self.workers = []
        for rank in range(num_ranks):
            of_rank, first_layer = self._shapes_of(rank, geometry)
            pool = self._pool_of(rank, geometry, limits.dram_slots, str(transfer.engine_id), store)
            worker = self.worker_type(
                pool, of_rank, num_blocks, seed, make_engine, rank, first_layer, self._node_of(rank)
            )
            self.workers.append(worker)
        self.pool, self.worker = pool, self.workers[0]
        self._tell_first()
        self._aggregator = KVOutputAggregator(num_ranks)
        block_size, hash_block_size = self._block_sizes(cache, config)
        kind = AsyncScheduler if depth > 1 else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        # The model takes no pictures, so vLLM plans no room for what an encoder makes of them.
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)
        self.scheduler.max_num_encoder_input_tokens = 1 << 20
        init_none_hash(_digest)
        self._hasher = get_request_block_hasher(hash_block_size, _digest)
        self._depth = depth
        self._drafts = drafts
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.before_update: Callable[[], object] = lambda: None
        """Called when a step has run and the scheduler does not know of it yet."""
        self.holding: set[str] = set()
        """Requests that were seen to wait and to have blocks."""

    worker_type: type[ScriptedWorker] = ScriptedWorker

    def _shapes(
        self, num_blocks: int, limits: Limits, num_ranks: int
    ) -> tuple[KVCacheConfig, Geometry]:
        """Those of vLLM's cache and of ours."""
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=TOKEN_KV // 2, dtype=torch.uint8
        )
        page_bytes = spec.page_size_bytes
        assert page_bytes == BLOCK * TOKEN_KV
        names = [f"layer {i}" for i in range(limits.layers)]
        tensors = [KVCacheTensor(num_blocks * page_bytes, [n], 0, page_bytes) for n in names]
        cache = KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec(names, spec)])
        geometry = Geometry.uniform(
            num_ranks, limits.layers, BLOCK, page_bytes, limits.chunk_tokens
        )
        return cache, geometry

    def _shapes_of(self, rank: int, geometry: Geometry) -> tuple[Geometry, int]:
        """The shapes to a rank, and the number of its first layer among those of all ranks."""
        return geometry, rank * geometry.num_layers

    def _pool_of(
        self, rank: int, geometry: Geometry, num_slots: int, engine_id: str, store: Path
    ) -> SharedPool:
        """The rank's mapping."""
        return SharedPool(
            pool_name(engine_id, store),
            num_slots,
            geometry.slot_bytes,
            num_ranks=geometry.num_ranks,
            member=rank,
            num_parts=parts_of(geometry, num_slots)[0],
        )

    def _node_of(self, rank: int) -> dict[str, Any]:
        """What Worker is told of the rank's node."""
        return {}

    def _tell_first(self) -> None:
        """All ranks have said what their KV looks like."""

    def _set(self, config: VllmConfig) -> None:
        """What the model would have set."""

    def _spread(self, config: VllmConfig) -> None:
        """What the command line would have said of ranks."""

    def _block_sizes(self, cache: KVCacheConfig, config: VllmConfig) -> tuple[int, int]:
        """Tokens of the scheduler's blocks, and of those that are named."""
        blocks = (group.kv_cache_spec.block_size for group in cache.kv_cache_groups)
        return math.lcm(*blocks), _hash_block(cache)

    @property
    def ours(self) -> Any:
        """The connector's scheduler side."""
        return self.scheduler.connector.scheduler

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int, priority: int = 0,
        params: Any = None, *, resumable: bool = False, pictures: Sequence[Picture] = (),
        named: Callable[[str], str] = str, salt: str | None = None, lora: LoRARequest | None = None,
        **sampling: Any,
    ) -> None:  # fmt: skip
        """A request; or, if there is one of this name, the next input of a streaming session, and
        one that is not resumable ends it.

        Args:
            params: kv_transfer_params.
            named: what vLLM calls a picture of this content.
            sampling: more sampling parameters.
        """
        self.scheduler.add_request(
            self.make_request(
                request_id, prompt, max_tokens, priority, params, resumable=resumable,
                pictures=pictures, named=named, salt=salt, lora=lora, **sampling,
            )
        )  # fmt: skip

    def make_request(
        self, request_id: str, prompt: list[int], max_tokens: int, priority: int = 0,
        params: Any = None, *, resumable: bool = False, pictures: Sequence[Picture] = (),
        named: Callable[[str], str] = str, salt: str | None = None, lora: LoRARequest | None = None,
        **sampling: Any,
    ) -> Request:  # fmt: skip
        """See add()."""
        how = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0,
            extra_args={"kv_transfer_params": params} if params is not None else None,
            **sampling,
        )
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=how,
            pooling_params=None,
            mm_features=[feature_of(p, named(p.content)) for p in pictures],
            lora_request=lora,
            cache_salt=salt,
            priority=priority,
            block_hasher=self._hasher,
            resumable=resumable,
        )

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.check_queue()
            self.in_flight.append((output, self._execute(output)))
        if len(self.in_flight) >= self._depth or not self.scheduler.has_requests():
            self.finish_oldest()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        results = [worker.execute(output) for worker in self.workers]
        if len(results) == 1:
            return results[0]
        assert all(result.sampled_token_ids == results[0].sampled_token_ids for result in results)
        result = self._aggregator.aggregate(results)
        assert result is not None
        return result

    def check_queue(self) -> None:
        """Our view of the queues is vLLM's own."""
        self.holding |= check_queue(self.scheduler, self.ours)

    def drain(self, steps_max: int = 5000) -> None:
        for _ in range(steps_max):
            if not (self.scheduler.has_requests() or self.in_flight):
                return
            self.step()
        raise AssertionError(f"requests are left after {steps_max} steps")

    def finish_oldest(self) -> None:
        if not self.in_flight:
            return
        self.before_update()
        output, result = self.in_flight.popleft()
        self.scheduler.update_from_output(output, result)
        if self._drafts and self._depth == 1:
            drafts = [[self.worker.draft() for _ in range(self._drafts)] for _ in result.req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(result.req_ids, drafts))

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.close()


def seen(content: str) -> MultiModalKwargsItem:
    """What a processor makes of it."""
    pixels = torch.tensor(list(content.encode()), dtype=torch.bfloat16)
    return MultiModalKwargsItem(
        {"pixels": MultiModalFieldElem(pixels, MultiModalSharedField(batch_size=1))}
    )


def feature_of(picture: Picture, name: str) -> MultiModalFeatureSpec:
    """As it comes to the scheduler."""
    place = PlaceholderRange(picture.offset, picture.length)
    return MultiModalFeatureSpec(seen(picture.content), "image", name, place, picture.content)


def _hash_block(cache: KVCacheConfig) -> int:
    """Tokens of vLLM's names of blocks: a block's, where there is one group."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    blocks = [spec.block_size for spec in specs if spec.prefix_cacheable]
    return blocks[0] if len(specs) == 1 else math.gcd(BLOCK, *blocks)


def _digest(value: Any) -> bytes:
    return blake3(repr(value).encode()).digest()


def _vllm_config(
    model: Path,
    store: Path,
    depth: int,
    drafts: int,
    policy: str,
    limits: Limits,
    num_ranks: int,
    settings: dict[str, Any],
) -> VllmConfig:
    slot_bytes = -(-num_ranks * limits.layers * limits.chunk_tokens * TOKEN_KV // 4096) * 4096
    transfer = KVTransferConfig(
        kv_connector="AttnStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "dram": (1 << 20) + limits.dram_slots * slot_bytes,
            "nvme": {"path": str(store), "capacity": limits.nvme},
            "chunk_tokens": limits.chunk_tokens,
            "compute_if_sooner": False,  # a scripted model computes in no time
            "audit": "off",  # tests count hits, and its KV is no model's
            **settings,
        },
    )
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    engine_start.end_start()
    engine_start.note_start(holds=True)  # as the process of a server that is started now
    config = EngineArgs(
        model=str(model), load_format="dummy", max_model_len=limits.model_len,
        max_num_batched_tokens=limits.batched_tokens, max_num_seqs=limits.sequences,
        block_size=BLOCK, kv_transfer_config=transfer, scheduling_policy=policy,
        speculative_config=speculative if drafts else None, enable_chunked_prefill=True,
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = depth > 1
    config.parallel_config.tensor_parallel_size = num_ranks
    return config
