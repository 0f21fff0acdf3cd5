# SPDX-License-Identifier: Apache-2.0
"""The nodes of an engine whose ranks vLLM spreads over several machines (`--nnodes`).

Each node has its own pool, and its own directory. The first has the scheduler's side. What ranks
say of themselves goes to it once, over vLLM's own group of processes, since they share no memory.
From then on plans and reports of the steps are all that is sent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import vllm

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.connector.worker import Worker
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.namespace import fingerprint
from attnstore_vllm.identity.rank import RankDescription
from attnstore_vllm.identity.weight_files import Digest
from attnstore_vllm.identity.weights import identify
from attnstore_vllm.parent_watch import parent_pid
from attnstore_vllm.plugin import over_nodes
from attnstore_vllm.preflight import (
    SLAB_NAME,
    lock_directory,
    machine_errors,
    remove_file_of_other_part,
)
from attnstore_vllm.tiers.nvme.node_disk import NodeDisk
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.pool import REFUSAL, SharedPool

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


def nodes_of_an_engine(parallel: ParallelConfig) -> int:
    """Machines over which vLLM spreads the ranks of one engine, as far as it says so: Ray does not.
    Data-parallel engines may each have another."""
    within: int | None = getattr(parallel, "nnodes_within_dp", None)
    return int(getattr(parallel, "nnodes", 1)) if within is None else within


def ranks_of_a_node(vllm_config: VllmConfig, num_ranks: int) -> int:
    """Args: num_ranks: the engine's."""
    return num_ranks // nodes_of_an_engine(vllm_config.parallel_config)


def check_nodes(vllm_config: VllmConfig) -> None:
    """Raise ConfigError for settings that engines over several nodes do not know."""
    transfer = vllm_config.kv_transfer_config
    if nodes_of_an_engine(vllm_config.parallel_config) > 1 and transfer is not None:
        over_nodes(StoreConfig.parse(transfer.kv_connector_extra_config))


def fewer_replicas(vllm_config: VllmConfig, geometry: Geometry) -> Geometry:
    """Ranks share a part of the slot on one node alone: each node has a copy of its own."""
    of_a_node = ranks_of_a_node(vllm_config, geometry.num_ranks)
    return replace(geometry, replicas=math.gcd(geometry.replicas, of_a_node))


class NodeStore:
    """A node's part of NVMe, in its first rank's process: of every node but the first.

    Args:
        pool: of the node, with the parts of all its ranks.
        own_files: the rank's (identity/rank.py).
    Raises: ConfigError, UnsupportedError.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: StoreConfig,
        geometry: Geometry,
        pool: SharedPool,
        own_files: str | None,
    ) -> None:
        nvme = config.nvme
        self._lock = lock_directory(nvme.path, parent_pid())
        with machine_errors(nvme.path):
            remove_file_of_other_part(nvme.path / SLAB_NAME)
        look, found = identify(vllm_config, [own_files], nvme.path)
        self._digest = found
        self.name = fingerprint(vllm_config, geometry, [], vllm.__version__, look).hex()
        """Names all that the bytes of its ranks depend on and the first node cannot see: files,
        versions and environment here."""
        self.capacity_bytes = nvme.capacity_bytes
        node = vllm_config.parallel_config.node_rank_within_dp
        deadline_s = nvme.io_deadline_ms / 1000
        self.disk = NodeDisk(
            pool, nvme.path, nvme.capacity_bytes, nvme.io, deadline_s, node, self._weights
        )

    def told(self) -> tuple[str, int, str]:
        """See RankDescription."""
        return self.name, self.capacity_bytes, (self._weights() or b"").hex()

    def _weights(self) -> bytes | None:
        return self._digest.value if isinstance(self._digest, Digest) else self._digest

    def close(self) -> None:
        self.disk.close()
        if isinstance(self._digest, Digest):
            self._digest.close()
        os.close(self._lock)


def tell_first(vllm_config: VllmConfig, worker: Worker | None, why_not: str) -> None:
    """The first node's scheduler side hears what ranks of other nodes say of themselves.

    All workers of an engine call it once, also those that cannot be served: it waits for all.

    Args:
        why_not: why there is no worker.
    """
    if nodes_of_an_engine(vllm_config.parallel_config) == 1:
        return
    from vllm.distributed.parallel_state import get_inner_dp_world_group  # noqa: PLC0415

    group = get_inner_dp_world_group()
    own = (-1, {REFUSAL: why_not}) if worker is None else (worker.rank, worker.description)
    told: list[tuple[int, dict[str, Any]]] = [own] * group.world_size
    torch.distributed.all_gather_object(told, own, group=group.cpu_group)
    if worker is not None and worker.rank == 0:
        publish(worker, told)


def publish(worker: Worker, told: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """On the first rank: leave these descriptions where the scheduler side looks for them.

    Args:
        told: rank and description of each.
    """
    refused = [f"a worker on another node: {said[REFUSAL]}" for rank, said in told if rank < 0]
    for rank, said in told:
        if rank >= worker.node_ranks:
            worker.pool.publish(rank, said)
    if refused:
        worker.refuse(refused[0])


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """The nodes of an engine beside the first, as they have told of themselves."""

    told: Sequence[tuple[str, int, str]]

    @classmethod
    def of(cls, ranks: Sequence[RankDescription], vllm_config: VllmConfig) -> OtherNodes:
        """Raises UnsupportedError if one is missing."""
        count = nodes_of_an_engine(vllm_config.parallel_config)
        found = [rank.node for rank in ranks if rank.node is not None]
        if len(found) != count - 1:
            raise UnsupportedError(f"of {count} nodes {1 + len(found)} have told of their NVMe")
        return cls(found)

    @property
    def names(self) -> str:
        return "".join(name for name, _, _ in self.told)

    def digests(self) -> dict[int, bytes]:
        """Digests of their weights, as far as they are known, by node."""
        pairs = enumerate(self.told, start=1)
        return {node: bytes.fromhex(digest) for node, (_, _, digest) in pairs if digest}

    def with_least(self, config: StoreConfig) -> StoreConfig:
        """NVMe has no more records than every node has room for."""
        least = min(config.nvme.capacity_bytes, *(capacity for _, capacity, _ in self.told))
        return replace(config, nvme=replace(config.nvme, capacity_bytes=least))
