# SPDX-License-Identifier: Apache-2.0
"""AttnStoreConnector: vLLM's hooks, each handed to the side it belongs to. Nothing is decided.

It is long since each of vLLM's hooks has its method here.

vLLM makes two of it: role WORKER in each worker, then role SCHEDULER in the engine core. For a
model that the store cannot serve both are *idle*: every hook answers as if there were no store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from attnstore_vllm.connector.build import (
    attention_layers,
    build_scheduler,
    build_worker,
    reason_of_chunks,
    stages_of,
)
from attnstore_vllm.connector.compat import hit_sources, is_of_a_pause
from attnstore_vllm.connector.envelopes import PlanEnvelope, ReportEnvelope
from attnstore_vllm.connector.metrics import AttnStorePromMetrics, AttnStoreStats
from attnstore_vllm.connector.nodes import nodes_of_an_engine, tell_first
from attnstore_vllm.connector.specs import fill_scales, told
from attnstore_vllm.connector.support import (
    check_interface,
    check_start,
    reason_of_layers,
    reason_to_idle,
    warn_if_untested,
)
from attnstore_vllm.connector.worker import KindOfLayer, Worker
from attnstore_vllm.errors import AttnStoreError, ConfigError, UnsupportedError
from attnstore_vllm.identity.live_facts import check_replicas, live_facts
from attnstore_vllm.identity.live_lora import LiveAdapters
from attnstore_vllm.identity.live_model import outermost
from attnstore_vllm.identity.rank import REASON_MAX
from attnstore_vllm.plugin import check_early, log_as_vllm
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.messages import StepPlan
from attnstore_vllm.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

check_interface(KVConnectorBase_V1)

_SOURCES = hit_sources()


S = TypeVar("S")

_SERVING: WeakValueDictionary[str, AttnStoreConnector] = WeakValueDictionary()
"""Scheduler sides at work, by engine: two in one MultiConnector would both answer for a request."""


_FAILED = "it failed while it began: "
"""Begins a reason that is no trait of the model."""


def _try(call: Callable[[], S]) -> tuple[S | None, str]:
    """Its result, or why it has failed, in one line: then we are idle.

    Raises: ConfigError. A wrong setting is the user's to change; for all else that fails before
        the first request a server that starts is worth more than the store.
    """
    try:
        return call(), ""
    except ConfigError:
        raise
    except Exception as error:
        logger.debug("what made AttnStore idle", exc_info=True)
        is_ours = isinstance(error, AttnStoreError)
        text = str(error) if is_ours else f"{_FAILED}{type(error).__name__}: {error}"
        return None, " ".join(text.split())[:REASON_MAX]


def _reason_to_idle(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Errors that a vLLM makes that we do not know are reasons too. Raises ConfigError."""
    reason, failed = _try(
        lambda: (
            reason_to_idle(vllm_config, kv_cache_config)
            or reason_of_chunks(vllm_config, kv_cache_config)
        )
    )
    return reason or failed or None


def _say_idle(reason: str) -> None:
    if _FAILED in reason:
        logger.warning("AttnStore is idle, the server runs as without it, since %s", reason)
        return
    logger.warning(
        "AttnStore is idle, the server runs as without it: this model cannot be served from "
        "the store, since %s",
        reason,
    )


def _kernel_of(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)  # an indexer's cache has none
    name = type(layer).__name__ if backend is None else backend.get_name()
    return f"{name}/{getattr(layer, 'isa', '')}"


class AttnStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. SupportsHMA, so that models we do not serve keep vLLM's hybrid manager."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        check_start(vllm_config)
        self.scheduler: Scheduler | None = None
        self.worker: Worker | None = None
        self._why_none = ""
        """Why there is no side, for other nodes."""
        if role is KVConnectorRole.SCHEDULER:
            warn_if_untested(vllm.__version__)
            self.scheduler = self._begin(build_scheduler, vllm_config, kv_cache_config)
            if self.scheduler is not None:
                _SERVING[self._engine_id()] = self
                if self.scheduler.events is not None:  # else a step calls no hook of ours for it
                    self.take_events = self.scheduler.events.take
            return
        reason = _reason_to_idle(vllm_config, kv_cache_config)
        stages = stages_of(vllm_config, kv_cache_config, reason)
        self._why_none = reason or ""
        if reason is None:
            build = partial(build_worker, stages=stages)
            try:
                self.worker = self._begin(build, vllm_config, kv_cache_config)
            except ConfigError as error:  # the workers of other nodes would wait for this one
                if nodes_of_an_engine(vllm_config.parallel_config) == 1:
                    raise
                self._why_none = str(error)
                _say_idle(f"{_FAILED}{error}")

    def _begin(
        self,
        build: Callable[[VllmConfig, KVCacheConfig], S],
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
    ) -> S | None:
        """A side of ours, or None: then this side is idle, and the server runs as without us."""
        reason = _reason_to_idle(vllm_config, kv_cache_config)
        if reason is None and self._engine_id() in _SERVING:
            reason = "another AttnStore connector serves this engine already; one is enough"
        if reason is None:
            side, reason = _try(lambda: build(vllm_config, kv_cache_config))
            if side is not None:
                return side
        self._why_none = reason
        _say_idle(reason)
        return None

    def _engine_id(self) -> str:
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        return str(transfer.engine_id)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: a dropped save is a later miss

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: a step that replays a FULL graph waits for all layers first.

        vLLM asks while it makes its configuration. No other hook comes before the model loads, so
        this is where settings that were not on the command line are checked.
        """
        check_early(extra_config)
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Yes; vLLM 0.33 asks. Before it, a sleep waits for the device, and so for our copies."""
        return True

    # ---- worker side -------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        worker = self.worker
        try:
            if worker is not None:
                _, failed = _try(partial(self._register, worker, kv_caches))
                if failed:  # the scheduler side reads it, is idle, and tells all by the first plan
                    worker.refuse(failed)
        finally:
            tell_first(self._vllm_config, worker, self._why_none)

    def _register(self, worker: Worker, kv_caches: dict[str, torch.Tensor]) -> None:
        reason = reason_of_layers(self._kv_cache_config, worker.geometry.hit_tokens)
        if reason is not None:
            raise UnsupportedError(reason)
        replicas = worker.geometry.replicas
        if replicas > getattr(self._kv_cache_config, "kv_tp_replicas", 1):
            check_replicas(self._layers(worker), replicas)
        fill_scales(self._layers(worker), kv_caches)
        worker.register_kv_caches(
            kv_caches,
            self._kernel_name(worker),
            str(getattr(self._kv_cache_config, "kv_cache_layout", None)),
            partial(self._live_facts, worker),
            LiveAdapters.of(outermost(self._layers(worker).values())),
        )

    def unregister_kv_caches(self) -> None:
        """vLLM is about to unmap its KV cache. Idempotent, as the next."""
        if self.worker is not None:
            self.worker.release_kv()

    def restore_kv_caches(self) -> None:
        """It is mapped again, with other content. Raises UnsupportedError if it is elsewhere."""
        if self.worker is not None:
            self.worker.restore_kv()

    def _layers(self, worker: Worker) -> dict[str, Any]:
        return attention_layers(self._vllm_config, worker.geometry)

    def _kernel_name(self, worker: Worker) -> str:
        return ", ".join(sorted({_kernel_of(layer) for layer in self._layers(worker).values()}))

    def _live_facts(self, worker: Worker, kinds: Sequence[KindOfLayer]) -> dict[str, str]:
        facts = live_facts(self._layers(worker), kinds, self._kv_cache_config.num_blocks)
        specs = told(self._kv_cache_config)
        return facts | {"specs": specs} if specs else facts

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The one hook that comes before every forward pass, and before vLLM binds the plan."""
        if self.worker is not None:
            assert isinstance(kv_connector_metadata, PlanEnvelope)
            if kv_connector_metadata.plan.is_idle:
                self.worker.close()
                self.worker = None
            else:
                self.worker.begin_step(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.start_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self.worker is not None:
            self.worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self.worker is not None:
            self.worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        found = self.get_transfer_results(finished_req_ids)
        return found.finished_sending or None, found.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker is None:
            return KVConnectorTransferResults()
        freed, received, failed = self.worker.take_finished()
        return KVConnectorTransferResults(freed, received | failed, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.failed_blocks() if self.worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker.take_report() if self.worker is not None else None
        return None if report is None else ReportEnvelope(report)

    # ---- scheduler side ----------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        scheduler = self.scheduler
        if scheduler is None:
            return
        _, failed = _try(lambda: scheduler.bind_kv_cache_manager(kv_cache_manager))
        if failed:  # a vLLM that we do not know; workers learn it by a plan
            _SERVING.pop(self._engine_id(), None)
            scheduler.close()
            self.scheduler = None
            _say_idle(failed)

    def on_new_request(self, request: Request) -> None:
        if self.scheduler is not None:
            self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.scheduler is None:
            return 0, False
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.scheduler is not None and num_external_tokens:
            block_ids = blocks.get_block_ids()
            self.scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        if self.scheduler is None:
            return {}
        sources = self.scheduler.sources(request, num_external_tokens)
        return {_SOURCES[t]: n for t, n in sources.items() if n and t in _SOURCES}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self.scheduler is None:
            return PlanEnvelope(StepPlan(is_idle=True))
        return PlanEnvelope(self.scheduler.build_step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.scheduler is None:
            return
        invalid = connector_output.invalid_block_ids
        if invalid and not self.scheduler.plans.are_missing(invalid):
            # Beside us in MultiConnector another's load has failed; ours names requests.
            self.scheduler.on_failed_load()
        if connector_output.failed_recving:
            self.scheduler.on_failed_requests(connector_output.failed_recving)
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            assert isinstance(report, ReportEnvelope)
            self.scheduler.on_report(report.report)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler is None:
            return False, None
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler is None:
            return False, None
        return self.scheduler.request_finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        return self.scheduler is not None and self.scheduler.plans.keeps_blocks()

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.any_open()

    def reset_cache(self) -> bool | None:
        if self.scheduler is None:
            logger.warning(
                "AttnStore is idle, so a reset drops nothing: what its directory holds stays. A "
                "start that serves finds it; reset once more then, or delete it"
            )
            return True
        return self.scheduler.pause() if is_of_a_pause() else self.scheduler.reset()

    # ---- both --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> AttnStoreStats | None:
        side = self.scheduler or self.worker
        if side is None:
            return None
        stats = AttnStoreStats(data=side.take_stats().data)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> AttnStoreStats | None:
        return AttnStoreStats(data=StepStats().data if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> AttnStorePromMetrics:
        return AttnStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.scheduler is not None:
            _SERVING.pop(self._engine_id(), None)
            self.scheduler.close()
        if self.worker is not None:
            self.worker.close()
