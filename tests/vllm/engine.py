# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine with the store, whole in one process, so that a test can look anywhere.

It lives in a child of the test (tests/vllm/host.py): vLLM has one engine a process in mind.

It is long since all that a test may do with an engine is in one place.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnstore_lab.testing.tiny_model import TINY, ModelShape, make_model
from attnstore_vllm.identity.weight_files import Digest
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.store.store import Store
from benchmarks.rounding import CANDIDATES, LogProbs
from tests.vllm.queues import check_queue
from tests.vllm.stand_ins import let_vllm_pass_numba, stand_in_for_torchvision

DEADLINE_S = 240.0
BLOCK = 128
"""Tokens in a block of the CPU build."""
CHUNK = 256

Tokens = Sequence[int]
GARBAGE = {torch.uint8: 0x7A, torch.int8: 0x5A, torch.float16: 6e4}
"""Of fp8, whichever; of the bytes of recurrent states; and of float16. It is large in each."""
DUMMY = 0.2
"""The largest of random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is started with."""

    store: Path | None
    """The store's directory; None for an engine without it."""
    models: Path
    """Where models are made; they are kept from test to test."""
    shape: ModelShape = TINY
    dram: str = "64MiB"
    nvme: str = "256MiB"
    codec: str = "none"
    scrub: str = "off"
    """Reads that no request asked for would be among those that a test counts and holds up."""
    eager: bool = True
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    blocks: int = 96
    """Blocks of HBM."""
    transfer: Mapping[str, Any] | None = None
    """A whole KVTransferConfig in place of the one that `store` means."""
    needs_images: bool = False
    """vLLM imports for this model what only pictures need."""
    needs_numba: bool = False
    """The connector imports it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More settings of the store."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vllm.LLM."""
    before: Callable[[], object] | None = None
    """Called in the engine's process before it starts."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to. Compared with ==: floats and all."""

    tokens: tuple[int, ...]
    logprobs: tuple[LogProbs, ...]
    cached_tokens: int
    """Tokens of the prompt that were not computed, from HBM and from the store."""
    finish: str | None = None

    @property
    def content(self) -> tuple[tuple[int, ...], tuple[LogProbs, ...]]:
        return self.tokens, self.logprobs


class Engine:
    """See the module."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM

        if spec.before is not None:
            spec.before()
        name = "-".join(str(x) for x in (spec.shape.hidden, spec.shape.heads, spec.shape.kv_heads))
        model = make_model(spec.models / f"model-{name}", spec.shape)
        arguments: dict[str, Any] = {
            "model": str(model), "dtype": "bfloat16", "max_model_len": spec.shape.max_position,
            "enforce_eager": spec.eager, "tensor_parallel_size": spec.tensor_parallel,
            "pipeline_parallel_size": spec.pipeline_parallel,
            "num_gpu_blocks_override": spec.blocks, "disable_log_stats": False,
            "kv_transfer_config": kv_transfer(spec), **spec.vllm,
        }  # fmt: skip
        self.spec = spec
        if arguments.get("load_format") == "dummy":
            larger_dummies()
        if spec.needs_images:
            stand_in_for_torchvision(spec.models / "stand_ins")
        if spec.needs_numba:
            let_vllm_pass_numba()
        self.llm = LLM(**arguments)
        if spec.pipeline_parallel > 1:
            self.llm.collective_rpc(make_room_for_hidden_states)
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.done: set[str] = set()
        self.holding: set[str] = set()
        """Requests that were seen to wait and to have blocks."""
        self._heard: dict[str, dict[int, tuple[Any, Any]]] = {}
        self._numbers = itertools.count()
        self._loaded_before = {"dram": 0, "nvme": 0}
        self._know_weights()

    def _know_weights(self) -> None:
        """Wait until it is known whose KV there is: before, requests find and leave nothing. On a
        busy machine a start does not wait long enough for it."""
        for side in self._sides():
            digest = getattr(side.names, "_digest", None)
            assert not isinstance(digest, Digest) or digest.wait(DEADLINE_S)

    @property
    def scheduler(self) -> Any:
        """vLLM's."""
        return self.core.scheduler

    @property
    def side(self) -> Scheduler:
        """The scheduler side of our connector."""
        sides = self._sides()
        assert sides, "the connector is idle"
        return sides[0]

    def _sides(self) -> list[Scheduler]:
        connector = self.scheduler.connector
        children = getattr(connector, "sub_connectors", [connector])
        sides = (getattr(child, "scheduler", None) for child in children)
        return [side for side in sides if side is not None]

    @property
    def store(self) -> Store:
        return self.side.store

    @property
    def device(self) -> Any:
        """The disk of its store."""
        nvme: Any = self.store.thread.tiers[0]
        return nvme.device

    # ---- requests ----------------------------------------------------------------------

    def submit(
        self,
        prompt: Tokens | Mapping[str, Any],
        *,
        salt: str | None = None,
        priority: int = 0,
        lora: Any = None,
        **sampling: Any,
    ) -> str:
        """Queue a request: greedy, to its full length, with log-probabilities, unless told."""
        from vllm import SamplingParams

        what: dict[str, Any] = (
            dict(prompt) if isinstance(prompt, Mapping) else {"prompt_token_ids": list(prompt)}
        )
        if salt is not None:
            what["cache_salt"] = salt
        defaults = {"temperature": 0.0, "max_tokens": 1, "logprobs": CANDIDATES, "ignore_eos": True}
        params = SamplingParams(**{**defaults, **sampling})
        number = str(next(self._numbers))
        self.llm.llm_engine.add_request(number, what, params, priority=priority, lora_request=lora)
        return number

    def step(self) -> list[str]:
        """One step of vLLM. Returns the requests that have said something."""
        outputs: list[Any] = self.llm.llm_engine.step()
        if self.spec.store is not None:
            self.holding |= check_queue(self.scheduler, self.side)
        for output in outputs:
            # Each of n answers comes in outputs of its own.
            parts = self._heard.setdefault(output.request_id, {})
            parts.update({part.index: (part, output) for part in output.outputs})
            if output.finished:
                self.done.add(output.request_id)
        return [output.request_id for output in outputs]

    def answers(self, number: str) -> list[Answer]:
        """What a request has answered so far: n answers, or those that have begun."""
        return [_answer(*part) for _, part in sorted(self._heard.get(number, {}).items())]

    def prompt_logprobs(self, number: str) -> list[Any]:
        """vLLM's candidates for each token of the prompt, None for the first."""
        ((_, output),) = self._heard[number].values()
        return list(output.prompt_logprobs)

    def forget(self, number: str) -> None:
        """Drop what is kept of a request that has ended."""
        self.done.discard(number)
        self._heard.pop(number, None)

    def request(self, number: str) -> Any:
        """vLLM's Request, while it is not finished. vLLM adds a suffix to the ids it is given."""
        found = [r for name, r in self.scheduler.requests.items() if name.startswith(f"{number}-")]
        assert len(found) == 1, (number, list(self.scheduler.requests))
        return found[0]

    def abort(self, number: str) -> None:
        self.llm.llm_engine.abort_request([number])

    def finish(self, *numbers: str) -> list[Answer]:
        """Step until these requests are answered; the first answer of each."""
        self.wait_for(lambda: all(number in self.done for number in numbers), self.step)
        found = [self.answers(number)[0] for number in numbers]
        for number in numbers:
            self.forget(number)
        return found

    def ask(self, prompt: Tokens | Mapping[str, Any], **how: Any) -> Answer:
        """One request on its own, to its end; then nothing is in flight."""
        (answer,) = self.finish(self.submit(prompt, **how))
        self.drain()
        return answer

    # ---- state -------------------------------------------------------------------------

    def drain(self) -> None:
        """Step until vLLM has nothing to do: the blocks that saves held are free again."""
        self.wait_for(
            lambda: not (self.scheduler.has_requests() or self.core.batch_queue), self.step
        )

    def settle(self) -> None:
        """drain(), and wait until everything is written back."""
        self.drain()
        self.wait_for(self.store.is_idle)

    def forget_hbm(self) -> None:
        """Empty vLLM's own prefix cache, and overwrite all KV in HBM with garbage."""
        self.drain()
        assert self.llm.reset_prefix_cache()
        self.llm.collective_rpc(poison)

    def evict_dram(self) -> None:
        """Every chunk leaves DRAM, as if others had needed its room: it is on NVMe only.

        A disk that is out of use keeps none of them, and store.is_idle() does not wait for it.
        """
        residency, disk = self.store.residency, self.store.thread.tiers[0].health
        self.drain()
        self.wait_for(lambda: disk.reads.in_use and disk.writes.in_use and self.store.is_idle())
        with self.store.queue():
            for chunk in list(residency.dram.owned.values()):
                residency.counts["evicted_dram"] += 1
                residency.leave_dram(chunk)
        assert self.store.residency.dram.num_used == 0

    def loaded(self) -> dict[str, int]:
        """Tokens loaded since the last call, by the tier they were in."""
        now = {tier: int(self.metric("loaded_tokens", tier)) for tier in ("dram", "nvme")}
        new = {tier: now[tier] - self._loaded_before[tier] for tier in now}
        self._loaded_before = now
        return new

    def metric(self, name: str, label: str) -> float:
        for metric in self.llm.get_metrics():
            if metric.name == f"vllm:attnstore_{name}" and label in metric.labels.values():
                value: float = metric.value
                return value
        return 0.0

    def check_quiet(self) -> None:
        """Assert that nothing is held anywhere, in vLLM neither."""
        self.settle()
        self.side.check_quiet()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is the null block
        assert not self.scheduler.requests
        assert not self.side.requests

    def wait_for(self, ready: Callable[[], bool], step: Callable[[], object] | None = None) -> None:
        """Poll until `ready`, and step, or sleep a little, in between. There is a deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            assert time.monotonic() < deadline, f"not ready within {DEADLINE_S} s"
            if step is not None:
                step()
            else:
                time.sleep(0.002)

    # ---- HBM ---------------------------------------------------------------------------

    def block_ids(self, number: str) -> list[int]:
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(self.request(number).request_id)
        return list(ids)

    def kv(self, block_ids: Sequence[int]) -> list[list[list[bytes]]]:
        """The bytes in HBM, by rank, layer and block."""
        ranks: list[list[list[bytes]]] = self.llm.collective_rpc(read_kv, args=(list(block_ids),))
        return ranks

    def close(self) -> None:
        names = {name for name in self.llm.collective_rpc(ranks_memory) if name}
        self.llm.llm_engine.engine_core.shutdown()
        for name in names:  # vLLM's own, which two ranks leave behind
            for path in Path("/dev/shm").glob(f"{name}-*"):
                path.unlink(missing_ok=True)


def _answer(part: Any, output: Any) -> Answer:
    return Answer(
        tuple(part.token_ids),
        tuple(map(candidates, part.logprobs or ())),
        output.num_cached_tokens or 0,
        part.finish_reason,
    )


def candidates(position: Mapping[int, Any]) -> LogProbs:
    """vLLM's candidates for one position."""
    return tuple(sorted(((t, p.logprob) for t, p in position.items()), key=_best_first))


def _best_first(candidate: tuple[int, float]) -> tuple[float, int]:
    return -candidate[1], candidate[0]


def larger_dummies() -> None:
    """vLLM's random weights are so small that an answer does not hang on its prompt. In this
    process they are larger from now on."""
    from vllm.model_executor.model_loader import dummy_loader

    plain = dummy_loader.initialize_single_dummy_weight
    if not isinstance(plain, partial):
        dummy_loader.initialize_single_dummy_weight = partial(plain, low=-DUMMY, high=DUMMY)


def kv_transfer(spec: EngineSpec) -> Any:
    from vllm.config import KVTransferConfig

    if spec.transfer is not None:
        return KVTransferConfig(**spec.transfer)
    if spec.store is None:
        return None
    return KVTransferConfig(
        kv_connector="AttnStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=store_settings(spec),
    )


def store_settings(spec: EngineSpec) -> dict[str, Any]:
    nvme = {
        "path": str(spec.store),
        "capacity": spec.nvme,
        "scrub": spec.scrub,
        "codec": spec.codec,
        "io_deadline": "60s",
    }
    # The default deadlines are for a machine that has nothing else to do.
    return {
        "dram": spec.dram, "nvme": nvme, "load_deadline": "60s",
        # Whether what is loaded is right is tested, not whether loading is sooner on this machine.
        "compute_if_sooner": False,
        # Tests count hits: none is drawn, and a start tries nothing before it serves.
        "audit": "off",
        # All requests of a test trust each other.
        "truncation": {"share": "everyone"}, **spec.settings,
    }  # fmt: skip


# ---- functions that run in the workers ------------------------------------------------------


def read_kv(worker: Any, block_ids: Sequence[int]) -> list[list[bytes]]:
    """The bytes of these blocks, by layer."""
    return [
        [kv[block].contiguous().view(torch.uint8).numpy().tobytes() for block in block_ids]
        for kv in worker.model_runner.kv_caches
    ]


def ranks_memory(worker: Any) -> str:
    """What the names of the memory begin with that the ranks share with each other."""
    return os.environ.get("VLLM_DIST_IDENT", "")


def make_room_for_hidden_states(worker: Any) -> None:
    """For what a stage gets from the one before. vLLM's CPU build makes that room when it warms up
    for its compiler: so its eager engines with several stages end at their first step."""
    from vllm.distributed.parallel_state import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


def poison(worker: Any) -> None:
    """Fill all KV with a value that ruins any computation that reads it.

    It is finite, since the CPU kernels multiply what is masked out by zero.
    """
    for kv in worker.model_runner.kv_caches:
        kv.fill_(GARBAGE.get(kv.dtype, 1e30))
