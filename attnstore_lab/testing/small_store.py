# SPDX-License-Identifier: Apache-2.0
"""Stores and scheduler sides in few words: settings and facts by the names of their fields, the
rest as a plain one has them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from attnstore_vllm.config.settings import NvmeConfig, StoreConfig
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.io.device import Device
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.scheduler.sides import Names
from attnstore_vllm.store.store import Store
from attnstore_vllm.tiers.context import Harness, Pool
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.transfer.geometry import Geometry

SMALL: Final = StoreConfig(
    dram_bytes=1 << 30,
    nvme=NvmeConfig(path=Path("memory"), capacity_bytes=1 << 30, scrub_bytes_per_s=None),
    truncation=None,
    audit=None,
)
"""The sizes and the path count for nothing: pool and slab have their own. No hit is drawn to be
computed: tests count hits."""


def config_from(given: dict[str, Any]) -> StoreConfig:
    """The settings among `given`, those of `nvme` too; takes them out of it."""
    nvme = replace(SMALL.nvme, **_take(given, NvmeConfig))
    return replace(SMALL, nvme=nvme, **_take(given, StoreConfig))


def facts_from(given: dict[str, Any]) -> EngineFacts:
    return EngineFacts(**_take(given, EngineFacts))


def harness_from(given: dict[str, Any]) -> Harness:
    return Harness(**_take(given, Harness))


def _take(given: dict[str, Any], kind: Any) -> dict[str, Any]:
    names = [field.name for field in fields(kind)]
    return {name: given.pop(name) for name in names if name in given}


def open_store(pool: Pool, slab: Slab, device: Device, **given: Any) -> Store:
    """Args: given: settings, facts, parts of the harness, and other arguments of Store."""
    config, engine, harness = config_from(given), facts_from(given), harness_from(given)
    return Store(pool, slab, device, config, engine, harness=harness, **given)


def open_scheduler(store: Store, geometry: Geometry, names: Names, **given: Any) -> Scheduler:
    """Args: given: settings, facts, and other arguments of Scheduler."""
    config, engine = config_from(given), facts_from(given)
    return Scheduler(store, geometry, names, config, engine, **given)
