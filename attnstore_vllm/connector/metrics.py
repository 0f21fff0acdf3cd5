# SPDX-License-Identifier: Apache-2.0
"""What /metrics shows. Counters travel as differences, gauges as values, once a step.

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

from attnstore_vllm.types import Flow

COUNTERS = {
    "offered_tokens": ("tier", "Tokens whose KV the store offered, by the tier it was in."),
    "loaded_tokens": ("tier", "Tokens whose KV was loaded into HBM, by the tier it was in."),
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
        "NVMe in time (deadline), or was evicted, unreadable or corrupt by then (lost).",
    ),
    "hints": (
        "outcome",
        "Hints of requests (kv_transfer_params.attnstore), each key one: applied, or ignored "
        "because it makes no sense here.",
    ),
    "prefetches": ("outcome", "Prefetches asked for over HTTP: hit or miss, on each engine."),
    "prefetch_tokens": ("tier", "Tokens that those found, by the tier their KV was in."),
}
CHUNK_EVENTS = (
    "saved", "dropped", "evicted_dram", "evicted_nvme", "given_up", "lost", "superseded", "written",
    "write_failed", "read_failed", "read_late", "corrupt", "recovered", "scrubbed",
    "device_late", "device_out", "expired", "pinned", "pin_refused",
)  # fmt: skip
"""`dropped`: not saved for want of room. `given_up`: left DRAM though a request far back in the
queue wants it. `lost`: evicted from its last tier. `read_late`: not
waited for any longer. `device_late`, `device_out`: the disk did not answer in time, or failed
again and again, and was left alone for a while. `expired`: looked for after its ttl, and dropped.
`pinned`, `pin_refused`: a slot was pinned, or not, since its tenant or all have their share."""
GAUGES = {
    "held_bytes": ("tier", "Bytes of slots in use."),
    "nvme_in_use": ("direction", "1, or 0 while the disk is left alone after failures."),
    "recovery": ("figure", "Of the last start: seconds, records read, chunks found."),
}
LOAD_SECONDS = "load_seconds"
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class AttnStoreStats(KVConnectorStats):
    """`data`: {"counters": {"name:label": n}, "gauges": {"name:label": n}, "load_seconds": [..]}.

    A plain dict of strings and numbers, because it crosses processes.
    """

    @classmethod
    def empty(cls) -> AttnStoreStats:
        return cls(data={"counters": {}, "gauges": {}, LOAD_SECONDS: []})

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "gauges": {}, LOAD_SECONDS: []}

    def add(self, name: str, label: str, amount: float) -> None:
        if amount:
            counters = self.data["counters"]
            counters[f"{name}:{label}"] = counters.get(f"{name}:{label}", 0) + amount

    def set(self, name: str, label: str, value: float) -> None:
        self.data["gauges"][f"{name}:{label}"] = value

    def observe_load(self, seconds: float) -> None:
        self.data[LOAD_SECONDS].append(seconds)

    def aggregate(self, other: KVConnectorStats) -> AttnStoreStats:
        for key, amount in other.data["counters"].items():
            name, label = key.split(":")
            self.add(name, label, amount)
        self.data["gauges"].update(other.data["gauges"])
        self.data[LOAD_SECONDS] += other.data[LOAD_SECONDS]
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of vLLM's periodic log."""
        line: dict[str, int | float] = dict(sorted(self.data["counters"].items()))
        line.update(self.data["gauges"])
        if seconds := sorted(self.data[LOAD_SECONDS]):
            line["load_ms_median"] = round(1000 * seconds[len(seconds) // 2], 2)
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
        self._metrics[LOAD_SECONDS] = metric_types[Histogram](
            name=f"vllm:attnstore_{LOAD_SECONDS}",
            documentation="Time from the start of a step's loads until they were complete.",
            labelnames=labelnames,
            buckets=_BUCKETS,
        )
        for engine in per_engine_labelvalues:  # so that every series is there from the start
            for event in CHUNK_EVENTS:
                self._child("chunks", engine, event)
            for tier in ("dram", "nvme"):
                for name in ("offered_tokens", "loaded_tokens", "held_bytes", "prefetch_tokens"):
                    self._child(name, engine, tier)
            for direction in ("reads", "writes"):
                self._child("nvme_in_use", engine, direction)
            for figure in ("seconds", "records", "chunks"):
                self._child("recovery", engine, figure)
            self._child("first_written_bytes", engine, "nvme")
            for cause in ("deadline", "lost"):
                self._child("recomputations", engine, cause)
            for outcome in ("applied", "ignored"):
                self._child("hints", engine, outcome)
            for outcome in ("hit", "miss"):
                self._child("prefetches", engine, outcome)
            for flow in Flow:
                self._child("bytes", engine, flow.value)

    def _child(self, name: str, engine: int, *label: str) -> Any:
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine], *label)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, amount in transfer_stats_data["counters"].items():
            name, label = key.split(":")
            self._child(name, engine_idx, label).inc(amount)
        for key, value in transfer_stats_data["gauges"].items():
            name, label = key.split(":")
            self._child(name, engine_idx, label).set(value)
        for seconds in transfer_stats_data[LOAD_SECONDS]:
            self._child(LOAD_SECONDS, engine_idx).observe(seconds)
