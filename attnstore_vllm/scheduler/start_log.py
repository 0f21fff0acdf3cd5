# SPDX-License-Identifier: Apache-2.0
"""The lines that a start writes to the log: tiers, sizes, disk I/O, and what is off."""

from __future__ import annotations

from collections.abc import Iterator

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.values import format_size
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.transfer.geometry import Geometry


def start_lines(
    version: str,
    config: StoreConfig,
    geometry: Geometry,
    dram_slots: int,
    slab: Slab,
    disk: str,
    *,
    asks_remote: bool = True,
) -> Iterator[str]:
    """At most six. With those of the pool, the copies and recovery a start has at most twelve.

    Args:
        disk: what serves the file.
        asks_remote: see Strategy (store/lookup.py).
    """
    size = geometry.chunk_tokens
    nvme_slots = slab.num_segments * slab.records_per_segment
    yield (
        f"AttnStore {version}: a token takes {format_size(round(geometry.token_bytes()))}, "
        f"a chunk has {size} tokens; eviction: {config.eviction}"
    )
    yield (
        f"  DRAM: {dram_slots * size:,} tokens in {format_size(dram_slots * geometry.slot_bytes)} "
        f"(dram: {format_size(config.dram_bytes)}{', encoded' if geometry.is_encoded else ''})"
    )
    yield (
        f"  NVMe: {nvme_slots * size:,} tokens in {format_size(nvme_slots * slab.record_bytes)} "
        f"(nvme.capacity: {format_size(config.nvme.capacity_bytes)}) in {config.nvme.path}; {disk}"
    )
    if config.shared is not None and asks_remote:
        yield f"  shared: {config.shared.where}; joined when the weights were looked at"
    if slab.foreign:
        yield (
            f"  NVMe: {len(slab.foreign)} of {slab.num_segments} parts are of other models or "
            "settings, and give way when room is needed"
        )
    if siblings := config.siblings():
        may = "may" if asks_remote else "cannot"  # a hit would need all groups of one place
        yield f"  peers: {len(siblings)} other engines of this host {may} be asked for KV"
    others = [group.reach for group in geometry.groups[1:]]
    if others:
        yield f"  KV cache groups beside the first: {', '.join(others)}"
    off = list(_off(config))
    if off:
        yield f"  off by settings: {', '.join(off)}"


def _off(config: StoreConfig) -> Iterator[str]:
    for name, is_on in (
        ("look_ahead", config.look_ahead),
        ("compute_if_sooner", config.compute_if_sooner),
        ("truncation", config.truncation is not None),
        ("pinning", config.pinning is not None),
        ("ttl", config.ttl_s is not None),
        ("audit", config.audit is not None),
        ("nvme.scrub", config.nvme.scrub_bytes_per_s is not None),
        ("nvme.daily_writes", config.nvme.daily_writes_bytes is not None),
    ):
        if not is_on:
            yield name
