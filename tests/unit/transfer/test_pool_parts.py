# SPDX-License-Identifier: Apache-2.0
"""Ranks whose parts of the slots lie apart: each maps and page-locks its own part alone."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnstore_vllm.connector import build
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.preflight import SHM_DIR
from attnstore_vllm.transfer import pool_files, pool_memory
from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.engine import CpuEngine
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.layout import LayerLayout
from attnstore_vllm.transfer.plan import ChunkCopy, pages
from attnstore_vllm.transfer.pool import SLOTS_AT, SharedPool
from attnstore_vllm.transfer.pool_files import parts_of
from tests.fake_gpu import FakeGpu

Bytes = npt.NDArray[np.uint8]
PAGE = mmap.PAGESIZE
NUM_SLOTS, BLOCKS, LAYERS, HBM_BLOCKS = 5, 2, 3, 7
ALL = range(LAYERS)
SHAPES = [(2, 1), (4, 1), (4, 2), (4, 4)]
"""Ranks, and how many of them hold the same."""
TABLE = pages([ChunkCopy(3, 0, (6, 1)), ChunkCopy(0, 1, (5,))])


@pytest.fixture(autouse=True, params=[1 << 30, PAGE], ids=["a file a part", "several"])
def file_min_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_files, "FILE_MIN_BYTES", request.param)


def shape(num_ranks: int, replicas: int = 1, page_bytes: int = PAGE) -> Geometry:
    one = Geometry.uniform(num_ranks, LAYERS, 16, page_bytes, BLOCKS * 16)
    return Geometry(num_ranks, one.regions, one.groups, one.chunk_tokens, replicas)


@contextmanager
def members(geometry: Geometry, near: Sequence[int] = ()) -> Iterator[list[SharedPool]]:
    """The ranks, and the scheduler side behind them."""
    name = f"attnstore-test-{secrets.token_hex(8)}"
    num_parts, why_one = parts_of(geometry, NUM_SLOTS)
    assert num_parts == geometry.num_ranks // geometry.replicas and not why_one
    with ExitStack() as undo:
        pools = []
        for member in range(geometry.num_ranks + 1):
            pool = SharedPool(
                name,
                NUM_SLOTS,
                geometry.slot_bytes,
                num_ranks=geometry.num_ranks,
                member=member,
                near=near,
                num_parts=num_parts,
            )
            undo.callback(pool.close)
            pools.append(pool)
        yield pools
    assert not list(SHM_DIR.glob(f"{name}*"))


def kv_of(rank: int) -> tuple[Bytes, list[LayerLayout]]:
    """[layers, blocks, page bytes] of random numbers, and where they are."""
    kv = np.random.default_rng(rank).integers(0, 256, (LAYERS, HBM_BLOCKS, PAGE), np.uint8)
    return kv, [LayerLayout(layer.ctypes.data, HBM_BLOCKS, PAGE, (0,), PAGE) for layer in kv]


@pytest.mark.parametrize(("num_ranks", "replicas"), SHAPES)
def test_a_slot_is_the_ranks_parts_one_behind_the_other(num_ranks: int, replicas: int) -> None:
    geometry = shape(num_ranks, replicas)
    num_parts = num_ranks // replicas
    with members(geometry) as (*ranks, scheduler):
        size = (NUM_SLOTS, num_parts, geometry.rank_bytes)
        expected = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        for rank, pool in enumerate(ranks):
            assert pool.slot_bytes == geometry.rank_bytes
            for slot in range(NUM_SLOTS):
                pool.slot(slot)[:] = expected[slot, rank // replicas].tobytes()
        for slot in range(NUM_SLOTS):
            assert bytes(scheduler.slot(slot)) == expected[slot].tobytes()
            scheduler.slot(slot)[:] = expected[slot, ::-1].tobytes()
            for rank, pool in enumerate(ranks):
                mirrored = expected[slot, num_parts - 1 - rank // replicas]
                assert bytes(pool.slot(slot)) == mirrored.tobytes()


@pytest.mark.parametrize(("num_ranks", "replicas"), SHAPES)
def test_nvme_gets_the_bytes_that_whole_slots_have(num_ranks: int, replicas: int) -> None:
    geometry = shape(num_ranks, replicas)
    whole = np.zeros((NUM_SLOTS, geometry.slot_bytes), np.uint8)
    with members(geometry) as (*ranks, scheduler):
        for rank in range(0, num_ranks, replicas):
            kv, layouts = kv_of(rank)
            address = ranks[rank].address
            CpuEngine(whole.ctypes.data, NUM_SLOTS, rank, geometry, layouts).save(TABLE, ALL)
            CpuEngine(address, NUM_SLOTS, 0, geometry.of_a_part(), layouts).save(TABLE, ALL)
        assert whole.any()
        assert all(bytes(scheduler.slot(i)) == whole[i].tobytes() for i in range(NUM_SLOTS))
        for rank, pool in enumerate(ranks):
            (kv, layouts), (saved, _) = kv_of(rank), kv_of(rank // replicas * replicas)
            kv[:] = 0
            CpuEngine(pool.address, NUM_SLOTS, 0, geometry.of_a_part(), layouts).load(TABLE, ALL)
            assert np.array_equal(kv[:, [6, 1, 5]], saved[:, [6, 1, 5]])


def test_parts_of_unequal_stages_lie_apart_too() -> None:
    """Two ranks of a pipeline: each maps its own part, which has room for the larger stage."""
    one = Geometry.uniform(2, LAYERS, 16, PAGE, BLOCKS * 16)
    stages = (one.regions, one.regions[:1])
    geometry = Geometry(2, one.regions, one.groups, one.chunk_tokens, 1, stages)
    smaller = Geometry(2, stages[1], (Group(16, ("l3",)),), one.chunk_tokens, 1, stages)
    whole = np.zeros((NUM_SLOTS, geometry.slot_bytes), np.uint8)
    with members(geometry) as (*ranks, scheduler):
        for rank, g in enumerate((geometry, smaller)):
            kv, layouts = kv_of(rank)
            layouts, layers = layouts[: g.num_layers], range(g.num_layers)
            CpuEngine(whole.ctypes.data, NUM_SLOTS, rank, g, layouts).save(TABLE, layers)
            place = (ranks[rank].address, NUM_SLOTS, 0, g.of_a_part(), layouts)
            CpuEngine(*place).save(TABLE, layers)
            saved = kv.copy()
            kv[:] = 0
            CpuEngine(*place).load(TABLE, layers)
            some = kv[: g.num_layers, [6, 1, 5]]
            assert np.array_equal(some, saved[: g.num_layers, [6, 1, 5]])
        assert whole.any()
        assert all(bytes(scheduler.slot(i)) == whole[i].tobytes() for i in range(NUM_SLOTS))


def mapped_bytes(pool: SharedPool) -> int:
    """Bytes from the pool's first address on that are mapped from its files, side by side."""
    end = first = pool.address - SLOTS_AT
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(x, 16) for x in line.split()[0].split("-"))
        if start == end and "attnstore-test" in line:
            end = stop
    return end - first


def test_a_rank_maps_no_more_than_its_part() -> None:
    geometry = shape(4)
    with members(geometry) as (*ranks, scheduler):
        assert mapped_bytes(scheduler) == SLOTS_AT + NUM_SLOTS * geometry.slot_bytes
        for pool in ranks:
            assert mapped_bytes(pool) == SLOTS_AT + NUM_SLOTS * geometry.rank_bytes


def test_a_rank_page_locks_no_more_than_its_part(fake: FakeGpu) -> None:
    geometry = shape(4)
    fake.set(register_total=NUM_SLOTS * geometry.rank_bytes)
    with members(geometry) as (*ranks, _):
        kv = torch.zeros((LAYERS, HBM_BLOCKS, PAGE), dtype=torch.uint8)
        fake.hold(kv)
        layouts = [LayerLayout(x.data_ptr(), HBM_BLOCKS, PAGE, (0,), PAGE) for x in kv]
        pool = ranks[2]
        place = (pool.address, NUM_SLOTS, 0, geometry.of_a_part(), layouts)
        engine = CudaEngine(*place, torch.device("cuda", 0), 0, borders=pool.borders())
        assert engine.num_slots == NUM_SLOTS
        assert fake.registered == len(pool.borders()) + 1
        kv[:, 5] = 9
        engine.wait(engine.save(TABLE, ALL))
        assert bytes(pool.slot(0)).count(9) == LAYERS * PAGE
        engine.close()
        assert not fake.registered


@pytest.mark.parametrize(
    ("near", "expected"), [((0, 1, 1, 0), [(0, 1), (1, 0)]), ((1, 1, 0, 0), [(1, 1), (0, 0)])]
)
def test_each_part_is_near_its_own_ranks(
    near: tuple[int, ...], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the four ranks share a part."""
    asked: list[tuple[int, ...]] = []

    def note(_: Sequence[int], gpu_nodes: Sequence[int]) -> None:
        asked.append(tuple(gpu_nodes))

    monkeypatch.setattr(pool_memory, "numa_policy", note)
    with members(shape(4, 2), near):
        assert list(dict.fromkeys(sorted(asked, key=expected.index))) == expected


def test_parts_of_which_the_kernel_has_no_pages_stay_together() -> None:
    geometry = shape(4, page_bytes=PAGE // 16)
    num_parts, why_one = parts_of(geometry, NUM_SLOTS)
    assert num_parts == 1 and f"{geometry.rank_bytes} bytes, is not whole pages" in why_one
    assert parts_of(shape(1, page_bytes=PAGE // 16), NUM_SLOTS) == (1, "")


def test_a_process_has_so_many_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max_map_count").write_text(f"{pool_files.MAPPINGS_SPARE + 400}\n")
    monkeypatch.setattr(pool_files, "MAX_MAP_COUNT", tmp_path / "max_map_count")
    assert parts_of(shape(4), 100) == (4, "")
    num_parts, why_one = parts_of(shape(4), 101)
    assert num_parts == 1 and "sysctl -w vm.max_map_count=" in why_one
    asked = int(why_one.partition("max_map_count=")[2].split()[0])
    (tmp_path / "max_map_count").write_text(f"{asked}\n")
    assert parts_of(shape(4), 101) == (4, ""), "what it asks for is enough"
    assert parts_of(shape(4, 4), 1_000_000) == (1, ""), "one part is one mapping a file"


def test_members_that_disagree_about_the_parts() -> None:
    name = f"attnstore-test-{secrets.token_hex(8)}"
    pool = SharedPool(name, 4, 2 * PAGE, num_ranks=2, member=0, num_parts=2)
    with pytest.raises(ConfigError, match="this process expects"):
        SharedPool(name, 4, 2 * PAGE, num_ranks=2, member=1)
    pool.close()


@pytest.mark.parametrize(
    ("device", "rank", "expected"), [(0, 0, [7, 8]), (3, 1, [9, 10]), (0, 1, []), (3, 0, [])]
)
def test_ranks_have_gpus_in_their_order(
    device: int, rank: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four, with a node each."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 4)
    monkeypatch.setattr(cuda, "current_device", lambda: device)
    places = [
        type("Properties", (), {"pci_domain_id": 0, "pci_bus_id": i, "pci_device_id": 0})
        for i in range(4)
    ]
    monkeypatch.setattr(cuda, "get_device_properties", places.__getitem__)
    monkeypatch.setattr(build, "gpu_numa_node", lambda name: 7 + int(name.split(":")[1], 16))
    assert build.gpu_nodes(rank, 2) == expected
