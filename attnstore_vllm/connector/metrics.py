# SPDX-License-Identifier: Apache-2.0
"""The figures that /metrics shows. Counters travel as differences, gauges with the time of a look.

Everything is `vllm:attnstore_<name>`, with vLLM's own labels (model, engine) and at most one of
ours; `info` has several. Counts come with each step and gauges once a second; while the engine
sleeps, both by a board (transfer/board.py), which is read once a second.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from attnstore_vllm.index.sections import Reach
from attnstore_vllm.policy.hit_curve import CURVE_TIMES
from attnstore_vllm.scheduler.figures import StepStats, in_words
from attnstore_vllm.scheduler.holds import HoldEvent
from attnstore_vllm.transfer.board import PERIOD_S, BoardReader
from attnstore_vllm.types import (
    AUDITS,
    CHUNK_EVENTS,
    ERRORS,
    PUT_OFF,
    RECOMPUTED,
    Cause,
    Event,
    Flow,
)

logger = logging.getLogger(__name__)

COUNTERS = {
    "wanted_tokens": (
        "tier",
        "Tokens whose KV was stored, and not in HBM, when vLLM first had a place for the request, "
        "by the tier it was in then: look-ahead is to bring all of it to DRAM before.",
    ),
    "prompt_tokens": (
        "source",
        "Prompt tokens of requests when vLLM was first told what the store has of them: in HBM "
        "already (hbm), offered from a tier, or to be computed.",
    ),
    "loaded_tokens": (
        "tier",
        "Tokens whose KV was loaded into HBM, by the tier it was in when the request came.",
    ),
    "moved_tokens": ("tier", "Tokens among those whose KV was moved to another position."),
    "prefill_seconds_saved": (
        "tier",
        "Seconds that computing the loaded tokens would have taken, as measured on this server's "
        "own steps, by the tier their KV was in.",
    ),
    "chunks": ("event", "What happened to chunks."),
    "errors": ("kind", "What failed: each costs a prefill at most."),
    "audits": (
        "outcome",
        "Chunks that were computed though they are stored, to be compared (audit): they agreed, "
        "they differed, or the stored bytes or room for a copy were not there when they were "
        "computed (not_compared).",
    ),
    "bytes": ("direction", "Bytes moved between the tiers."),
    "first_written_bytes": (
        "tier",
        "Bytes of KV of tokens that were not on NVMe before. The bytes written "
        "(bytes, dram_to_nvme) over these are the write amplification.",
    ),
    "recomputations": (
        "cause",
        "Requests that computed KV which the store had when they came: it did not come up from "
        "NVMe in time (deadline), or DRAM had no room for it till then (dram_full), computing was "
        "expected to be sooner (slower), or it was evicted, "
        "unreadable or corrupt by then (lost), or DRAM had no room for all of it at once "
        "(dram_too_small), or the device failed to copy it (copy_failed), or it was drawn to be "
        "compared with what is computed (audit).",
    ),
    "skipped": (
        "cause",
        "Requests that have ended of whose prompt something was computed, or of whose KV something "
        "is not stored, by cause; one that has two causes counts under both. And prefetches that "
        "looked for nothing.",
    ),
    "hints": (
        "outcome",
        "Hints of requests (kv_transfer_params.attnstore), each key one: applied, or ignored "
        "because it makes no sense here.",
    ),
    "put_off": (
        "work",
        "Work on the engine's own thread that was beyond a step's budget (step_budget). Done in a "
        "later step: look-ups of requests (lookup), prefetches (prefetch), chunks of requests that "
        "go on, once for each step they wait (save), the books of requests that were aborted "
        "while they waited (leave), and what sessions have left that are over (end). Not done: "
        "look-ups of more requests than a step lets wait (lookup_dropped), prefetches beyond the "
        "line (prefetch_dropped), runs of ended sessions beyond it (end_dropped), which leave as "
        "any other, and chunks of requests that ended (save_dropped), which cost a prefill.",
    ),
    "group_saved_bytes": (
        "kind",
        "Bytes that were to be copied from HBM, by kind of KV cache group. This and the other "
        "figures by kind are of models with several groups alone.",
    ),
    "group_loaded_bytes": (
        "kind",
        "Bytes that were to be copied into HBM, by kind of KV cache group.",
    ),
    "shortened_hits": (
        "kind",
        "Requests for which full attention had more than such a group: what a window or a local "
        "chunk needs, or a state, was not stored where it ends.",
    ),
    "sections_passed": (
        "kind",
        "Sections and states between the places where hits are likely to end: they stay in DRAM "
        "while there is room, and are written to NVMe if they are used.",
    ),
    "sections_dropped": (
        "kind",
        "Sections and states that went because their conversation has gone on beyond them.",
    ),
    "holds": (
        "event",
        "Holds of HBM for conversations that are away (holding), made and let go; and requests "
        "that were deferred, once each.",
    ),
    "prefetches": ("outcome", "Prefetches asked for over HTTP: hit or miss, on each engine."),
    "prefetch_tokens": ("tier", "Tokens that those found, by the tier their KV was in."),
}
GAUGES = {
    "held_bytes": ("tier", "Bytes of slots in use."),
    "capacity_bytes": ("tier", "Bytes of all slots that there can be."),
    "dirty_bytes": ("tier", "Bytes in DRAM that wait to be written to this tier."),
    "tenant_held_bytes": (
        "tenant tier",
        "Bytes of slots in use by a tenant with a quota, or that this server has put into the "
        "shared tier for it. Only of tiers that it has a quota of.",
    ),
    "tenant_quota_bytes": ("tenant tier", "Bytes that such a tenant may hold."),
    "nvme_in_use": ("direction", "1, or 0 while the disk is left alone after failures."),
    "shared_in_use": (
        "direction",
        "1, or 0 while the shared tier is left alone, or not joined. Without one there is none.",
    ),
    "siblings": ("state", "Engines of this host that are asked for KV: ready, or all of them."),
    "recovery_seconds": ("", "Time that the last start took to find what earlier runs left."),
    "recovery_records": ("", "Records that it read for that."),
    "recovered_chunks": ("", "Chunks that it found."),
    "dram_curve_ratio": (
        "times",
        "Share of prompt tokens that DRAM of so many times its size would have had, by a sample "
        "of chunks, if the least recently used left first.",
    ),
    "held_hbm_tokens": ("", "Tokens whose HBM is held while their conversation is away."),
    "info": ("version vllm io eviction", "1. The labels say what serves."),
}
"""By name: labels of ours, and the text."""
_TIERS = ("dram", "nvme")
_SOURCES = (*_TIERS, "peers", "shared")
_NO_LABEL = ("",)
_KINDS = tuple(reach.value for reach in Reach)
LABELS: dict[str, tuple[str, ...]] = {
    "chunks": CHUNK_EVENTS,
    "wanted_tokens": _SOURCES,
    "prompt_tokens": ("hbm", *_SOURCES, "computed"),
    "ttft_seconds": ("hbm", *_SOURCES, "computed"),
    "prefill_seconds_saved": _SOURCES,
    "errors": ERRORS,
    "audits": AUDITS,
    "loaded_tokens": _SOURCES,
    "moved_tokens": ("dram",),
    "prefetch_tokens": _SOURCES,
    "held_bytes": _TIERS,
    "first_written_bytes": ("nvme",),
    "bytes": tuple(flow.value for flow in Flow),
    "recomputations": RECOMPUTED,
    "skipped": tuple(Cause),
    "hints": (Event.APPLIED, Event.IGNORED),
    "put_off": PUT_OFF,
    "group_saved_bytes": _KINDS,
    "group_loaded_bytes": _KINDS,
    "shortened_hits": _KINDS,
    "sections_passed": _KINDS,
    "sections_dropped": _KINDS,
    "prefetches": (Event.HIT, Event.MISS),
    "holds": tuple(HoldEvent),
    "held_hbm_tokens": _NO_LABEL,
    "nvme_in_use": ("reads", "writes"),
    "siblings": ("ready", "all"),
    "capacity_bytes": _TIERS,
    "dirty_bytes": ("nvme",),
    "dram_curve_ratio": tuple(f"{times:g}" for times in CURVE_TIMES),
    "recovery_seconds": _NO_LABEL,
    "recovery_records": _NO_LABEL,
    "recovered_chunks": _NO_LABEL,
}
"""All that there are; of `info` the engine says them."""
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_DISK_SECONDS = (0.0001, 0.0002, 0.0005, *_SECONDS[1:])
_TTFT_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_RATIOS = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.6, 2.5, 5.0, 10.0)
# No bucket below zero: prometheus_client leaves the sum of such a histogram out, and then vLLM's
# LLM.get_metrics() fails.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "load_seconds": (
        "Time of copies into HBM, of those that were over in a step.",
        _SECONDS,
    ),
    "load_wait_seconds": ("Time that a forward pass waited for them, all layers.", _SECONDS),
    "wait_seconds": ("Time that a request waited for its KV to come up from NVMe.", _SECONDS),
    "ttft_seconds": (
        "Time to the first token, from when the engine had the request, by where its KV came from: "
        "the furthest tier that its load came from, HBM alone (hbm), or none (computed).",
        _TTFT_SECONDS,
    ),
    "wait_forecast_ratio": ("That time over its forecast.", _RATIOS),
    "nvme_read_seconds": ("Time of one read of a record, from its submission on.", _DISK_SECONDS),
    "nvme_write_seconds": ("Time of one write of a record, from its submission on.", _DISK_SECONDS),
    "step_forecast_ratio": (
        "Length of a step that computed prompts over its forecast.",
        _RATIOS,
    ),
}
HISTOGRAM_LABELS = {"ttft_seconds": "source"}


class AttnStoreStats(KVConnectorStats):
    """vLLM's envelope of StepStats: `data` is theirs."""

    def reset(self) -> None:
        self.data: dict[str, Any] = StepStats().data

    def aggregate(self, other: KVConnectorStats) -> AttnStoreStats:
        counters = self.data["counters"]
        for key, amount in other.data["counters"].items():
            counters[key] = counters.get(key, 0) + amount
        self.data["gauges"].update(other.data["gauges"])
        for name, values in other.data["observed"].items():
            self.data["observed"].setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, Any]:
        """One line of vLLM's periodic log, which writes `name=value`."""
        return {"AttnStore": in_words(self.data)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class AttnStorePromMetrics(KVConnectorPromMetrics):
    """Registers the metrics and feeds them, one set an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._set_at: dict[tuple[int, str], float] = {}
        """When the engine looked at each gauge that is shown."""
        self._left_out: set[str] = set()
        """Figures of which the log has said that they are not shown."""
        self._lock = threading.Lock()
        for name, (label, text) in COUNTERS.items():
            self._metrics[name] = metric_types[Counter](
                name=f"vllm:attnstore_{name}",
                documentation=text,
                labelnames=[*labelnames, *label.split()],
            )
        for name, (label, text) in GAUGES.items():
            self._metrics[name] = metric_types[Gauge](
                name=f"vllm:attnstore_{name}",
                documentation=text,
                labelnames=[*labelnames, *label.split()],
                multiprocess_mode="mostrecent",
            )
        for name, (text, buckets) in HISTOGRAMS.items():
            self._metrics[name] = metric_types[Histogram](
                name=f"vllm:attnstore_{name}",
                documentation=text,
                labelnames=[*labelnames, *HISTOGRAM_LABELS.get(name, "").split()],
                buckets=buckets,
            )
        for engine in per_engine_labelvalues:  # so that every series is there from the start
            for name, labels in LABELS.items():
                for label in labels:
                    self._child(self._metrics[name], engine, label)
            for name in HISTOGRAMS.keys() - LABELS.keys():
                self._child(self._metrics[name], engine)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.engine_id:
            readers = {
                engine: BoardReader(names_of_engine(transfer.engine_id, engine))
                for engine in per_engine_labelvalues
            }
            threading.Thread(
                target=_read_boards,
                args=(weakref.ref(self), readers),
                name="attnstore-boards",
                daemon=True,
            ).start()

    def _child(self, metric: Any, engine: int, label: str = "") -> Any:
        """Args: label: several are apart by "|"; "": it has none."""
        own = label.split("|") if label else ()
        return metric.labels(*self.per_engine_labelvalues[engine], *own)

    def _found(self, kind: Collection[str], key: str, engine: int) -> Any:
        """The series of a figure, or None if there is none, which the log then says once.

        A tier that is added may report what has no metric yet. That must not end the server.
        """
        name, _, label = key.partition(":")
        is_known = name in kind
        if is_known:
            try:
                return self._child(self._metrics[name], engine, label)
            except ValueError:  # other labels than the metric has
                pass
        if name in self._left_out:
            return None
        self._left_out.add(name)
        if is_known:
            labels = {other: label for other, (label, _) in (COUNTERS | GAUGES).items()}
            wanted = (labels | HISTOGRAM_LABELS).get(name, "")
            logger.warning(
                "%s came with label values (%s), its metric in AttnStore wants (%s): /metrics does "
                "not show it",
                name,
                label.replace("|", ", "),
                wanted.replace(" ", ", "),
            )
        else:
            logger.warning("%s has no metric in AttnStore: /metrics does not show it", name)
        return None

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """From vLLM's thread, and from the one that reads boards."""
        with self._lock:
            for key, amount in transfer_stats_data["counters"].items():
                if (counter := self._found(COUNTERS, key, engine_idx)) is not None:
                    counter.inc(amount)
            for key, (when, value) in transfer_stats_data["gauges"].items():
                if when < self._set_at.get((engine_idx, key), -math.inf):
                    continue  # a step and the board crossed: this is the older
                self._set_at[engine_idx, key] = when
                if (gauge := self._found(GAUGES, key, engine_idx)) is not None:
                    gauge.set(value)
            for name, values in transfer_stats_data["observed"].items():
                if (histogram := self._found(HISTOGRAMS, name, engine_idx)) is not None:
                    for value in values:
                        histogram.observe(value)


def names_of_engine(engine_id: str, number: int) -> tuple[str, ...]:
    """Names that vLLM may have given the engine: under data parallelism each has a suffix."""
    return f"{engine_id}_dp{number}", engine_id


def _read_boards(
    metrics: weakref.ref[AttnStorePromMetrics], readers: Mapping[int, BoardReader]
) -> None:
    """The thread that shows what changes while engines sleep. It ends with its metrics.

    It looks at once: until the first look a board has a name, which a kill would leave behind.
    """
    while (shown := metrics()) is not None:
        for engine, reader in readers.items():
            data = reader.take()
            if data is not None:
                shown.observe(data, engine)
        del shown
        time.sleep(PERIOD_S)
    for reader in readers.values():
        reader.close()
