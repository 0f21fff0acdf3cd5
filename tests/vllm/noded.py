# SPDX-License-Identifier: Apache-2.0
"""A scripted engine of several stages (staged.py) whose ranks are on several nodes.

Each node has a pool and a directory of its own, and shares no memory with the others. What crosses
is pickled: the plans and reports of steps, and once what each rank says of its KV.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig

from attnstore_vllm.connector.nodes import publish
from attnstore_vllm.tiers.nvme.node_disk import NodeDisk
from attnstore_vllm.tiers.nvme.spread_io import SpreadIo
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.pool import SharedPool, pool_name
from tests.vllm.staged import StagedEngine

CAPACITY_BYTES = 4 << 20


@dataclass
class Node:
    """As connector/nodes.py: NodeStore."""

    name: str
    capacity_bytes: int
    disk: NodeDisk

    def told(self) -> tuple[str, int, str]:
        return self.name, self.capacity_bytes, b"digest".hex()

    def close(self) -> None:
        self.disk.close()


class NodedEngine(StagedEngine):
    """See the module.

    Args:
        num_nodes: the ranks are spread over them evenly.
        options: of StagedEngine.
    """

    def __init__(self, model: Path, store: Path, *, num_nodes: int, **options: Any) -> None:
        self.num_nodes = num_nodes
        self.directories = [store, *(Path(f"{store} {n}") for n in range(1, num_nodes))]
        self.disks: list[NodeDisk] = []
        self._is_closed = False
        self._wholes: list[SharedPool] = []
        """Of the other nodes, with the parts of all their ranks."""
        super().__init__(model, store, **options)
        pools = [self.workers[0].side.pool, *self._wholes]
        here = self._here(self.workers[0].side.geometry)
        used = here.num_ranks * here.rank_bytes
        self.pool = _Joined(pools, used)  # type: ignore[assignment]

    def _spread(self, config: VllmConfig) -> None:
        config.parallel_config.nnodes = self.num_nodes

    def _here(self, geometry: Geometry) -> Geometry:
        return geometry.of_a_node(geometry.num_ranks // self.num_nodes)

    def _pool_of(
        self, rank: int, geometry: Geometry, num_slots: int, engine_id: str, store: Path
    ) -> SharedPool:
        here = self._here(geometry)
        node, member = divmod(rank, here.num_ranks)
        name = pool_name(engine_id, self.directories[node])
        sizes = (name, num_slots, here.slot_bytes)
        self._new: NodeDisk | None = None
        if node and member == 0:
            whole = SharedPool(*sizes, num_ranks=here.num_ranks, member=here.num_ranks)
            self.directories[node].mkdir(exist_ok=True)
            self._new = NodeDisk(
                whole, self.directories[node], CAPACITY_BYTES, "auto", 5.0, node, lambda: b"digest"
            )
            self._wholes.append(whole)
            self.disks.append(self._new)
        self._node_ranks = here.num_ranks
        return SharedPool(*sizes, num_ranks=here.num_ranks, member=member)

    def _node_of(self, rank: int) -> dict[str, Any]:
        node = None
        if self._new is not None:
            node = Node(f"node {rank // self._node_ranks}", CAPACITY_BYTES, self._new)
        return {"node_ranks": self._node_ranks, "node_store": node}

    def _tell_first(self) -> None:
        said = [(worker.side.rank, worker.side.description) for worker in self.workers]
        publish(self.workers[0].side, pickle.loads(pickle.dumps(said)))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            super().close()

    @property
    def io(self) -> SpreadIo:
        found = self.ours.store.thread.tiers[0]
        assert isinstance(found, SpreadIo)
        return found

    def drain(self, steps_max: int = 50_000) -> None:
        """Steps without requests take no time here, and disks do."""
        for _ in range(steps_max):
            if not (self.scheduler.has_requests() or self.in_flight):
                return
            self.step()
            if not self.scheduler.requests:
                time.sleep(0.0005)
        raise AssertionError(f"requests are left after {steps_max} steps")


class _Joined:
    """The slots of all nodes, for reading."""

    def __init__(self, pools: list[SharedPool], used: int) -> None:
        self._pools, self._used = pools, used

    def slot(self, slot: int) -> bytes:
        return b"".join(bytes(pool.slot(slot)[: self._used]) for pool in self._pools)
