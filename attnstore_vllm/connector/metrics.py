# SPDX-License-Identifier: Apache-2.0
"""The figures that /metrics shows. Counters travel as differences, gauges as values, once a step.

Everything is `vllm:attnstore_<name>`, with vLLM's own labels (model, engine) and at most one of
ours. A gauge or a write-back that changes while the engine sleeps is seen with the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from attnstore_vllm.index.sections import Reach
from attnstore_vllm.scheduler.messages import StepStats, add_stats
from attnstore_vllm.types import Flow

COUNTERS = {
    "wanted_tokens": (
        "tier",
        "Tokens whose KV was stored, and not in HBM, when vLLM first had a place for the request, "
        "by the tier it was in then: look-ahead is to bring all of it to DRAM before.",
    ),
    "offered_tokens": ("tier", "Tokens whose KV the store offered, by the tier it was in."),
    "loaded_tokens": ("tier", "Tokens whose KV was loaded into HBM, by the tier it was in."),
    "moved_tokens": ("tier", "Tokens among those whose KV was moved to another position."),
    "chunks": ("event", "What happened to chunks."),
    "bytes": ("direction", "Bytes moved between the tiers."),
    "first_written_bytes": (
        "tier",
        "Bytes of KV of tokens that were not on NVMe before. The bytes written "
        "(bytes, dram_to_nvme) over these are the write amplification.",
    ),
    "recomputations": (
        "cause",
        "Requests that computed KV which the store had when they came: it did not come up from "
        "NVMe in time (deadline), computing was expected to be sooner (slower), or it was evicted, "
        "unreadable or corrupt by then (lost), or the device failed to copy it (copy_failed).",
    ),
    "hints": (
        "outcome",
        "Hints of requests (kv_transfer_params.attnstore), each key one: applied, or ignored "
        "because it makes no sense here.",
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
        "while there is room, and are written to NVMe if somebody uses them.",
    ),
    "sections_dropped": (
        "kind",
        "Sections and states that went because their conversation has gone on beyond them.",
    ),
    "prefetches": ("outcome", "Prefetches asked for over HTTP: hit or miss, on each engine."),
    "prefetch_tokens": ("tier", "Tokens that those found, by the tier their KV was in."),
}
CHUNK_EVENTS = (
    "saved", "saved_again", "dropped", "refused", "evicted_dram", "evicted_nvme", "given_up",
    "lost", "superseded", "written",
    "write_failed", "read_failed", "read_late", "corrupt", "recovered", "scrubbed",
    "device_late", "device_out", "unsaved", "expired", "pinned", "pin_refused",
    "does_not_fit",
)  # fmt: skip
"""`saved_again`: computed though NVMe has it, and kept in DRAM. `dropped`: not saved for want of
room. `refused`: not written, since a full NVMe has nothing that is worth less. `given_up`: left
DRAM though a request far back in the queue wants it. `lost`: evicted from its last tier.
`read_late`: not waited for any longer. `device_late`, `device_out`: the disk did not answer in
time, or failed again and again, and was left alone for a while. `expired`: looked for after its
ttl, and dropped. `pinned`, `pin_refused`: a slot was pinned, or not, since its tenant or all have
their share. `does_not_fit`: encoded it takes more than its place on NVMe has, and stays in DRAM.
`unsaved`: its copy from HBM was given up for want of room in the write buffer, or failed."""
GAUGES = {
    "held_bytes": ("tier", "Bytes of slots in use."),
    "nvme_in_use": ("direction", "1, or 0 while the disk is left alone after failures."),
    "recovery": ("figure", "Of the last start: seconds, records read, chunks found."),
}
_TIERS = ("dram", "nvme")
_KINDS = tuple(reach.value for reach in Reach)
LABELS: dict[str, tuple[str, ...]] = {
    "chunks": CHUNK_EVENTS,
    "wanted_tokens": _TIERS,
    "offered_tokens": _TIERS,
    "loaded_tokens": _TIERS,
    "moved_tokens": ("dram",),
    "prefetch_tokens": _TIERS,
    "held_bytes": _TIERS,
    "first_written_bytes": ("nvme",),
    "bytes": tuple(flow.value for flow in Flow),
    "recomputations": ("deadline", "slower", "lost", "copy_failed"),
    "hints": ("applied", "ignored"),
    "group_saved_bytes": _KINDS,
    "group_loaded_bytes": _KINDS,
    "shortened_hits": _KINDS,
    "sections_passed": _KINDS,
    "sections_dropped": _KINDS,
    "prefetches": ("hit", "miss"),
    "nvme_in_use": ("reads", "writes"),
    "recovery": ("seconds", "records", "chunks"),
}
"""All that there are."""
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
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
    "wait_over_forecast": ("That time over its forecast.", _RATIOS),
    "step_over_forecast": (
        "Length of a step that computed prompts over its forecast.",
        _RATIOS,
    ),
}


class AttnStoreStats(KVConnectorStats):
    """vLLM's envelope of StepStats: `data` is theirs."""

    def reset(self) -> None:
        self.data: dict[str, Any] = StepStats().data

    def aggregate(self, other: KVConnectorStats) -> AttnStoreStats:
        add_stats(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of vLLM's periodic log."""
        line: dict[str, int | float] = dict(sorted(self.data["counters"].items()))
        line.update(self.data["gauges"])
        for name, values in self.data["observed"].items():
            line[f"{name}_median"] = round(sorted(values)[len(values) // 2], 5)
        return line

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
        for name, (label, text) in COUNTERS.items():
            self._metrics[name] = metric_types[Counter](
                name=f"vllm:attnstore_{name}", documentation=text, labelnames=[*labelnames, label]
            )
        for name, (label, text) in GAUGES.items():
            self._metrics[name] = metric_types[Gauge](
                name=f"vllm:attnstore_{name}",
                documentation=text,
                labelnames=[*labelnames, label],
                multiprocess_mode="mostrecent",
            )
        for name, (text, buckets) in HISTOGRAMS.items():
            self._metrics[name] = metric_types[Histogram](
                name=f"vllm:attnstore_{name}",
                documentation=text,
                labelnames=labelnames,
                buckets=buckets,
            )
        for engine in per_engine_labelvalues:  # so that every series is there from the start
            for name, labels in LABELS.items():
                for label in labels:
                    self._child(name, engine, label)
            for name in HISTOGRAMS:
                self._child(name, engine)

    def _child(self, name: str, engine: int, *label: str) -> Any:
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine], *label)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, amount in transfer_stats_data["counters"].items():
            name, label = key.split(":")
            self._child(name, engine_idx, label).inc(amount)
        for key, value in transfer_stats_data["gauges"].items():
            name, label = key.split(":")
            self._child(name, engine_idx, label).set(value)
        for name, values in transfer_stats_data["observed"].items():
            for value in values:
                self._child(name, engine_idx).observe(value)
