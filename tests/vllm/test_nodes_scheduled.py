# SPDX-License-Identifier: Apache-2.0
"""An engine over several nodes: each has a pool and a disk of its own, and the first one decides.

Goal: no forward pass on any node attends to KV that is not that of its tokens, over DRAM and NVMe,
and what one node lost, or never wrote, or has of another time, is found by none.
Method: vLLM's scheduler and its own aggregation of reports, over scripted workers (noded.py), with
real pools and real files. Engines in two processes are in test_nodes.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector.nodes import fewer_replicas
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.tiers.nvme.node_disk import FILE_NAME, NodeFailure, NodeResult
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.types import Event
from tests.vllm.noded import NodedEngine
from tests.vllm.scripted import CHUNK, Limits
from tests.vllm.scripted_worker import BLOCK
from tests.vllm.test_async_scheduling import check_stored, drive, wait_until_quiet
from tests.vllm.test_pipeline_scheduled import PROMPT, Case, tokens

CASES = [
    (Case("two stages", (3, 3), depth=2), 2),
    (Case("stages differ", (1, 4), depth=3), 2),
    (Case("two ranks each", (2, 1), depth=3, ranks_of_a_stage=2), 2),
    (Case("three nodes", (1, 2, 1), depth=4), 3),
    (Case("little DRAM", (2, 1), depth=2, dram_slots=6), 2),
    (Case("ranks of a stage", (3,), depth=2, ranks_of_a_stage=2, dram_slots=6), 2),
]
SMALL, OTHERS = Case("small", (2, 1), depth=2, dram_slots=6), 6 * CHUNK + 1
FOUND = PROMPT // BLOCK * BLOCK
Start = Callable[..., NodedEngine]


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    engines: list[NodedEngine] = []

    def begin(case: Case, num_nodes: int = 2, seed: int = 0, nvme: str = "4MiB") -> NodedEngine:
        engines.append(
            NodedEngine(
                model, tmp_path / "store", num_nodes=num_nodes, stages=case.stages,
                depth=case.depth, ranks_of_a_stage=case.ranks_of_a_stage,
                num_blocks=case.num_blocks, seed=seed, load_deadline_ms=60_000,
                limits=Limits(dram_slots=case.dram_slots, nvme=nvme),
            )
        )  # fmt: skip
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def ask(engine: NodedEngine, name: str, prompt: list[int]) -> int:
    """Returns how many tokens were loaded for it, by the first rank."""
    settle(engine)
    assert engine.scheduler.reset_prefix_cache()
    before = engine.worker.loaded_tokens
    engine.add(name, prompt, 2)
    engine.drain()
    settle(engine)
    return engine.worker.loaded_tokens - before


def settle(engine: NodedEngine) -> None:
    """Step until nothing is on its way to any disk."""
    deadline = time.monotonic() + 20
    while engine.scheduler.has_requests() or not engine.ours.store.is_idle():
        assert time.monotonic() < deadline, "the nodes do not come to rest"
        engine.drain()
        engine.ours.store.wait_for_any((), 0.005)
    wait_until_quiet(engine.ours)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
@pytest.mark.parametrize(("case", "nodes"), CASES, ids=[case.name for case, _ in CASES])
def test_only_right_kv_is_used_and_stored(case: Case, nodes: int, seed: int, start: Start) -> None:
    """Each rank checks all KV that it attends to, and each part of each record is looked at."""
    engine = start(case, nodes, seed)
    drive(engine, seed)
    settle(engine)
    assert check_stored(engine) >= min(5, case.dram_slots // 3)
    loaded = {worker.loaded_tokens for worker in engine.workers}
    assert len(loaded) == 1, "all load the same"
    assert loaded.pop() > BLOCK, "the store was hardly used"


@pytest.mark.parametrize(("case", "nodes"), CASES, ids=[case.name for case, _ in CASES])
def test_a_restart_finds_what_all_nodes_have(case: Case, nodes: int, start: Start) -> None:
    engine = start(case, nodes)
    assert ask(engine, "first", tokens(0)) == 0
    engine.close()
    again = start(case, nodes)
    assert ask(again, "again", tokens(0)) == FOUND
    assert check_stored(again) >= PROMPT // CHUNK
    assert again.ours.store.residency.counts[Event.GONE] == 0


def emptied(engine: NodedEngine) -> None:
    """DRAM has none of the first prompt."""
    ask(engine, "other", tokens(1, OTHERS))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def record_of(engine: NodedEngine, number: int) -> int:
    """Of the first prompt's chunk."""
    namespace = engine.ours.names.namespace
    assert namespace is not None
    key = SequenceKeys(root_key(namespace, None, b""), tokens(0), CHUNK).key(number)
    (found,) = (c for c in engine.ours.store.residency.index if c.name.key == key)
    return int(found.at("nvme").slot)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("where", ["stamp", "payload"])
def test_a_record_that_is_damaged_on_another_node(number: int, where: str, start: Start) -> None:
    """What is before it is loaded by all nodes, and the rest is computed by all."""
    engine = start(SMALL)
    ask(engine, "first", tokens(0))
    emptied(engine)
    record_bytes = 4096 + engine.workers[-1].side.pool.slot_bytes
    at = record_of(engine, number) * record_bytes
    flip(engine.directories[1] / FILE_NAME, at + (20 if where == "stamp" else 4096 + 7))
    assert ask(engine, "again", tokens(0)) == number * CHUNK
    event = Event.GONE if where == "stamp" else Event.CORRUPT
    assert engine.ours.store.residency.counts[event] == 1
    assert check_stored(engine)
    emptied(engine)
    assert ask(engine, "once more", tokens(0)) == FOUND, "it is stored again"


def test_a_node_that_begins_with_another_disk(start: Start) -> None:
    """Every read is a miss, and what is computed is stored on it."""
    engine = start(SMALL)
    ask(engine, "first", tokens(0))
    emptied(engine)
    engine.close()
    (engine.directories[1] / FILE_NAME).unlink()
    again = start(SMALL)
    assert ask(again, "again", tokens(0)) == 0
    assert again.ours.store.residency.counts[Event.GONE] >= 1
    emptied(again)
    assert ask(again, "once more", tokens(0)) == FOUND
    assert check_stored(again)


def test_machines_that_change_places(start: Start) -> None:
    """All but the first: they have the same names, and the same orders."""
    alike = Case("three alike", (1, 1, 1), depth=4)
    engine = start(alike, 3)
    ask(engine, "first", tokens(0))
    emptied(engine)
    engine.close()
    one, two = engine.directories[1:]
    aside = one.with_name("aside")
    for old, new in ((one, aside), (two, one), (aside, two)):
        old.rename(new)
    again = start(alike, 3)
    assert ask(again, "again", tokens(0)) == 0, "each has the other's layers"
    emptied(again)
    assert ask(again, "once more", tokens(0)) == FOUND
    assert check_stored(again)


def fill(engine: NodedEngine, first: int) -> None:
    """Prompts that NVMe takes in the place of others: all come again."""
    for number in range(first, first + 30):
        for again in range(2):
            ask(engine, f"{number} {again}", tokens(number))


def test_records_of_a_former_use_of_the_disk(start: Start) -> None:
    """The other node's file is that of an older moment: the same places, other chunks."""
    engine = start(SMALL, nvme="1MiB")
    fill(engine, 0)
    engine.close()
    file = engine.directories[1] / FILE_NAME
    older = file.read_bytes()
    again = start(SMALL, nvme="1MiB")
    fill(again, 100)
    again.close()
    newer = file.read_bytes()
    num_changed = sum(a not in (0, b) for a, b in zip(older, newer, strict=True))
    assert num_changed > 5_000, "records were written over"
    file.write_bytes(older)
    third = start(SMALL, nvme="1MiB")
    for number in reversed(range(100, 130)):
        ask(third, str(number), tokens(number))
    assert third.ours.store.residency.counts[Event.GONE] >= 3
    assert third.ours.store.residency.counts[Event.CORRUPT] == 0


def answer(engine: NodedEngine, change: Callable[[NodeResult], NodeResult | None]) -> None:
    """The other node's results are what this makes of them; None: it never comes."""
    disk = engine.disks[0]
    take = disk.take_results

    def results() -> list[NodeResult]:
        changed = [change(result) if result.number else result for result in take()]
        return [result for result in changed if result is not None]

    disk.take_results = results  # type: ignore[method-assign]


def test_a_disk_that_refuses(start: Start) -> None:
    """Another node's writes fail: the chunks stay in DRAM, and NVMe goes out of use for a while."""
    engine = start(SMALL)
    answer(engine, lambda result: result._replace(failed=NodeFailure.DEVICE, text="EIO", errno=5))
    ask(engine, "first", tokens(0))
    store = engine.ours.store
    assert store.residency.counts[Event.WRITE_FAILED] >= 1
    assert store.residency.counts[Event.DEVICE_OUT] >= 1
    assert ask(engine, "again", tokens(0)) == FOUND, "of DRAM"
    assert check_stored(engine)


def test_a_node_that_does_not_answer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request computes after the deadline. What is late may come, and is not used."""
    engine = start(SMALL)
    ask(engine, "first", tokens(0))
    emptied(engine)
    engine.io.deadline_s = 0.2
    kept: list[NodeResult] = []
    answer(engine, kept.append)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("again", tokens(0), 2)
    deadline = time.monotonic() + 20
    while "again" in engine.scheduler.requests:
        engine.step()
        assert time.monotonic() < deadline, "it waits for ever"
    assert engine.worker.loaded_tokens == 0
    store = engine.ours.store
    assert store.residency.counts[Event.READ_LATE] >= 1
    assert not store.thread.tiers[0].health.reads.in_use
    monkeypatch.setattr("attnstore_vllm.tiers.nvme.spread_io.KEPT_S", 0.0)
    while engine.in_flight:
        engine.step()
    assert not engine.scheduler.has_requests(), "the engine would step for ever"
    assert not store.is_idle(), "slots that the node may write to are held"
    engine.io.on_results(kept, 0)  # slots are free again
    del engine.disks[0].take_results
    settle(engine)
    assert check_stored(engine)


def test_orders_wait_for_steps_and_the_engine_steps_for_them(start: Start) -> None:
    """What the last request has left is on all disks, though no request comes any more."""
    engine = start(SMALL)
    engine.add("only", tokens(0), 2)
    while "only" in engine.scheduler.requests:
        engine.step()
    assert engine.scheduler.has_requests(), "saves or orders are open"
    engine.drain()
    assert not engine.io.tier.waiting
    assert all(chunk.at("nvme").slot >= 0 for chunk in engine.ours.store.residency.index)


def test_a_wrong_part_of_another_node_is_noticed(start: Start) -> None:
    """The checks of this file see what they are for."""
    engine = start(SMALL)
    ask(engine, "first", tokens(0))
    chunk = next(c for c in engine.ours.store.residency.index if c.name.position == CHUNK)
    engine.workers[-1].side.pool.slot(chunk.dram.slot)[0] ^= 1
    with pytest.raises(AssertionError):
        check_stored(engine)
    with pytest.raises(AssertionError, match=f"wrong KV at position {CHUNK} "):
        ask(engine, "again", tokens(0))


def test_a_stamp_that_is_not_looked_at_gives_wrong_kv(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: test_records_of_a_former_use_of_the_disk sees it."""
    monkeypatch.setattr("attnstore_vllm.tiers.nvme.spread_io.SpreadIo._stamp", lambda *_: bytes(32))
    with pytest.raises(AssertionError, match="wrong KV"):
        test_records_of_a_former_use_of_the_disk(start)


def test_nodes_that_have_not_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose node says nothing is idle: it never serves what one node has."""
    monkeypatch.setattr(NodedEngine, "_node_of", lambda self, _: {"node_ranks": self._node_ranks})
    engine = start(SMALL)
    assert engine.scheduler.connector is not None
    assert engine.ours is None


@pytest.mark.parametrize(("num_ranks", "replicas", "kept"), [(4, 4, 2), (4, 2, 2), (6, 2, 1)])
def test_ranks_share_a_part_on_one_node_alone(num_ranks: int, replicas: int, kept: int) -> None:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(nnodes=2, nnodes_within_dp=2))
    geometry = replace(Geometry.uniform(num_ranks, 3, 16, 4096, 64), replicas=replicas)
    found = fewer_replicas(config, geometry)
    assert found.replicas == kept
    here = found.of_a_node(num_ranks // 2)
    assert here.slot_bytes == num_ranks // 2 // kept * here.rank_bytes
