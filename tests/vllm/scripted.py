# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler and our real scheduler side, over a scripted worker.

The CPU build forces asynchronous scheduling off, so no model runs here. "KV" of a token is a
digest of all tokens up to it, which is what causal KV depends on; so the worker can tell of
every byte it attends to whether it is the right one. It keeps its own record of tokens, as a
worker does, which is ahead of the scheduler's where steps are in flight.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
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
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from attnstore_vllm.connector.messages import StepPlan, StepReport
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import TransferPlan, pages
from attnstore_vllm.transfer.pool import SharedPool, pool_name

BLOCK = 16
CHUNK = 32
TOKEN_KV = 16
"""Bytes of KV a token has here."""
VOCAB = 50
Kv = npt.NDArray[np.uint8]


def extend_kv(kv: list[bytes], tokens: list[int]) -> None:
    """Append the KV of the tokens that `kv` lacks: each digests the one before it."""
    for token in tokens[len(kv) :]:
        before = kv[-1] if kv else b""
        kv.append(blake3(before + token.to_bytes(4, "little")).digest(length=TOKEN_KV))


@dataclass
class _Row:
    """A request as the worker knows it."""

    tokens: list[int]
    block_ids: list[int]
    kv: list[bytes] = field(default_factory=list)


class ScriptedWorker:
    """Executes steps: loads, a forward pass that checks what it attends to, saves."""

    def __init__(self, pool: SharedPool, geometry: Geometry, num_blocks: int, seed: int) -> None:
        self.hbm: Kv = np.zeros((num_blocks, BLOCK, TOKEN_KV), dtype=np.uint8)
        self.loaded_tokens = 0
        self.rejected_tokens = 0
        self.sequences: list[list[int]] = []
        """The true tokens of every request that ever ran."""
        self._pool = pool
        self._geometry = geometry
        self._rows: dict[str, _Row] = {}
        self._random = Random(seed)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        plan = output.kv_connector_metadata
        assert isinstance(plan, StepPlan)
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        if output.has_sync_kv_loads:
            self._load(plan)
        sampled = self._forward(output)
        if not output.has_sync_kv_loads:
            self._load(plan)
        for save in plan.saves:
            for page, block_id in self._pages(save):
                page[:] = self.hbm[block_id]
        ids = list(sampled)
        report = StepReport(plan.number, (p.plan_id for p in (*plan.loads, *plan.saves)))
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=KVConnectorOutput(
                finished_sending=set(plan.finished_saving), kv_connector_worker_meta=report
            ),
        )

    def draft(self) -> int:
        return self._random.randrange(VOCAB)

    def _load(self, plan: StepPlan) -> None:
        for load in plan.loads:
            self.loaded_tokens += BLOCK * load.num_blocks
            for page, block_id in self._pages(load):
                self.hbm[block_id] = page

    def _pages(self, plan: TransferPlan) -> list[tuple[Kv, int]]:
        found = []
        for slot, block, block_id in pages(plan.copies).tolist():
            at = block * self._geometry.page_bytes
            raw = self._pool.slot(slot)[at : at + self._geometry.page_bytes]
            page = np.frombuffer(raw, dtype=np.uint8).reshape(BLOCK, TOKEN_KV)
            found.append((page, block_id))
        return found

    def _forward(self, output: SchedulerOutput) -> dict[str, list[int]]:
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            (block_ids,) = new.block_ids
            row = _Row(list(new.prompt_token_ids), list(block_ids))
            self._rows[new.req_id] = row
            self.sequences.append(row.tokens)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            row = self._rows[request_id]
            new_blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                row.block_ids = list(new_blocks[0])
            elif new_blocks is not None:
                row.block_ids += new_blocks[0]
            starts[request_id] = cached.num_computed_tokens[i]
        sampled: dict[str, list[int]] = {}
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            row, start = self._rows[request_id], starts[request_id]
            if drafts:  # the scheduler counted drafts that were rejected since
                start = len(row.tokens) - 1
            sampled[request_id] = self._run(row, start, num_scheduled - len(drafts), drafts)
        return sampled

    def _run(self, row: _Row, start: int, num_tokens: int, drafts: list[int]) -> list[int]:
        """Compute `num_tokens` and the drafts; returns what was accepted, and one token more.

        A draft of -1 is one that the worker made itself, as with steps in flight.
        """
        stop = start + num_tokens
        assert stop <= len(row.tokens), "the scheduler runs a token that was not sampled yet"
        extend_kv(row.kv, row.tokens)
        found = self.hbm[np.array(row.block_ids)].reshape(-1, TOKEN_KV)
        for position in range(start):
            assert found[position].tobytes() == row.kv[position], (
                f"wrong KV at position {position} of {start} computed tokens"
            )
        for position in range(start, stop):
            self._write(row, position, row.kv[position])
        if stop < len(row.tokens):
            return []
        accepted = self._random.randrange(len(drafts) + 1)
        new = [d if d >= 0 else self._random.randrange(VOCAB) for d in drafts[:accepted]]
        new.append(self._random.randrange(VOCAB))
        row.tokens += new
        extend_kv(row.kv, row.tokens)
        for i in range(len(drafts)):
            right = row.kv[stop + i] if i < accepted else b"rejected".ljust(TOKEN_KV)
            self._write(row, stop + i, right)
        self.rejected_tokens += len(drafts) - accepted
        return new

    def _write(self, row: _Row, position: int, kv: bytes) -> None:
        block_id = row.block_ids[position // BLOCK]
        self.hbm[block_id, position % BLOCK] = np.frombuffer(kv, dtype=np.uint8)


@dataclass(frozen=True)
class Limits:
    """Of an engine."""

    chunk_tokens: int = CHUNK
    model_len: int = 512
    batched_tokens: int = 96
    sequences: int = 6
    dram_slots: int = 64
    nvme: str = "4MiB"


class ScriptedEngine:
    """The engine core's loop, with `depth` steps in flight."""

    def __init__(
        self, model: Path, store: Path, *, num_blocks: int, depth: int, seed: int,
        drafts: int = 0, policy: str = "fcfs", limits: Limits = Limits(), **settings: Any,
    ) -> None:  # fmt: skip
        config = _vllm_config(model, store, depth, drafts, policy, limits, settings)
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=TOKEN_KV // 2, dtype=torch.uint8
        )
        page_bytes = spec.page_size_bytes
        assert page_bytes == BLOCK * TOKEN_KV
        tensor = KVCacheTensor(num_blocks * page_bytes, ["layer"], 0, page_bytes)
        cache = KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(["layer"], spec)])
        geometry = Geometry(1, 1, BLOCK, page_bytes, limits.chunk_tokens)
        config.cache_config.num_gpu_blocks = num_blocks
        transfer = config.kv_transfer_config
        assert transfer is not None
        self.pool = SharedPool(
            pool_name(str(transfer.engine_id), store), limits.dram_slots, geometry.slot_bytes,
            num_ranks=1, member=0,
        )  # fmt: skip
        self.pool.publish(0, {"kernel": "scripted"})
        kind = AsyncScheduler if depth > 1 else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.worker = ScriptedWorker(self.pool, geometry, num_blocks, seed)
        init_none_hash(_digest)
        self._hasher = get_request_block_hasher(BLOCK, _digest)
        self._depth = depth
        self._drafts = drafts
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    @property
    def ours(self) -> Any:
        """The connector's scheduler side."""
        return self.scheduler.connector._scheduler

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int, priority: int = 0,
        params: Any = None,
    ) -> None:  # fmt: skip
        """Args: params: kv_transfer_params."""
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )  # fmt: skip
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            priority=priority,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.check_queue()
            self._in_flight.append((output, self.worker.execute(output)))
        if len(self._in_flight) >= self._depth or not self.scheduler.has_requests():
            self._finish_oldest()

    def check_queue(self) -> None:
        """Our view of the waiting queue is vLLM's own."""
        ours = list(self.ours.store.residency.look_ahead)
        assert ours == [request.request_id for request in self.scheduler.waiting]

    def drain(self, steps_max: int = 5000) -> None:
        for _ in range(steps_max):
            if not (self.scheduler.has_requests() or self._in_flight):
                return
            self.step()
        raise AssertionError(f"requests are left after {steps_max} steps")

    def _finish_oldest(self) -> None:
        if not self._in_flight:
            return
        output, result = self._in_flight.popleft()
        self.scheduler.update_from_output(output, result)
        if self._drafts and self._depth == 1:
            drafts = [[self.worker.draft() for _ in range(self._drafts)] for _ in result.req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(result.req_ids, drafts))

    def close(self) -> None:
        self.scheduler.shutdown()
        self.pool.close()


def _digest(value: Any) -> bytes:
    return blake3(repr(value).encode()).digest()


def _vllm_config(
    model: Path, store: Path, depth: int, drafts: int, policy: str, limits: Limits,
    settings: dict[str, Any],
) -> VllmConfig:  # fmt: skip
    slot_bytes = 4096
    transfer = KVTransferConfig(
        kv_connector="AttnStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "dram": (1 << 20) + limits.dram_slots * slot_bytes,
            "nvme": {"path": str(store), "capacity": limits.nvme},
            "chunk_tokens": limits.chunk_tokens,
            **settings,
        },
    )
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = EngineArgs(
        model=str(model), load_format="dummy", max_model_len=limits.model_len,
        max_num_batched_tokens=limits.batched_tokens, max_num_seqs=limits.sequences,
        block_size=BLOCK, kv_transfer_config=transfer, scheduling_policy=policy,
        speculative_config=speculative if drafts else None, enable_chunked_prefill=True,
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = depth > 1
    return config
