# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: a record has the parts of all stages, and is a hit as a whole or not.

Goal: with layers spread over stages of different sizes, some steps apart from each other, no
forward pass of any stage attends to KV that is not that of its tokens, and what one stage has not
stored is found by none.
Method: vLLM's scheduler and its own aggregation of reports, over a scripted worker for each rank.
Engines are in test_pipeline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector.pipeline import PipelineStage, with_all
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.transfer.geometry import Geometry
from tests.vllm.scripted import CHUNK, Limits
from tests.vllm.scripted_worker import BLOCK, VOCAB, ScriptedWorker, extend_kv, in_layer
from tests.vllm.staged import StagedEngine
from tests.vllm.test_async_scheduling import check_stored, drive, wait_until_quiet

CHUNKS = 5
PROMPT = CHUNKS * CHUNK + 9


@dataclass(frozen=True)
class Case:
    name: str
    stages: tuple[int, ...]
    depth: int
    """As vLLM has with so many stages; one more with asynchronous scheduling."""
    ranks_of_a_stage: int = 1
    num_blocks: int = 200
    dram_slots: int = 64


CASES = [
    Case("equal stages", (3, 3), depth=2),
    Case("the first is larger", (3, 2), depth=3),
    Case("the first is smaller", (1, 4), depth=2),
    Case("three stages", (1, 2, 1), depth=4),
    Case("two ranks each", (2, 1), depth=3, ranks_of_a_stage=2),
    Case("preemption", (2, 3), depth=3, num_blocks=40),
    Case("little DRAM", (2, 1), depth=2, dram_slots=6),
]
Start = Callable[..., StagedEngine]


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    engines: list[StagedEngine] = []

    def begin(case: Case, seed: int = 0) -> StagedEngine:
        engines.append(
            StagedEngine(
                model, tmp_path / f"store {len(engines)}", stages=case.stages, depth=case.depth,
                ranks_of_a_stage=case.ranks_of_a_stage, num_blocks=case.num_blocks, seed=seed,
                limits=Limits(dram_slots=case.dram_slots), load_deadline_ms=60_000,
            )
        )  # fmt: skip
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def tokens(seed: int, length: int = PROMPT) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(length)]


def ask(engine: StagedEngine, name: str, prompt: list[int]) -> int:
    """Returns how many tokens were loaded for it, by the first rank."""
    assert engine.scheduler.reset_prefix_cache()
    before = engine.worker.loaded_tokens
    engine.add(name, prompt, 2)
    engine.drain()
    wait_until_quiet(engine.ours)
    return engine.worker.loaded_tokens - before


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_right_kv_is_used_and_stored(case: Case, seed: int, start: Start) -> None:
    """Each rank checks all KV that it attends to, and each part of each record is looked at."""
    engine = start(case, seed)
    drive(engine, seed)
    wait_until_quiet(engine.ours)
    assert check_stored(engine) >= min(5, case.dram_slots // 3)
    loaded = {worker.loaded_tokens for worker in engine.workers}
    assert len(loaded) == 1, "all load the same"
    assert loaded.pop() > BLOCK, "the store was hardly used"


@pytest.mark.parametrize("case", CASES[1:5], ids=lambda case: case.name)
def test_tokens_found_are_those_of_one_stage(case: Case, start: Start) -> None:
    engine = start(case)
    assert ask(engine, "first", tokens(0)) == 0
    assert ask(engine, "again", tokens(0)) == PROMPT // BLOCK * BLOCK


def hold_reports(worker: ScriptedWorker) -> Callable[[], None]:
    """What this rank has done is not told until the returned function is called."""
    side, take, held = worker.side, worker.side.take_report, list[StepReport]()

    def keep() -> StepReport:
        held.append(take())
        return StepReport(held[-1].number)

    def tell() -> StepReport:
        report = take()
        while held:
            report.aggregate(held.pop())
        return report

    def let_go() -> None:
        side.take_report = tell  # type: ignore[method-assign]

    side.take_report = keep  # type: ignore[method-assign]
    return let_go


@pytest.mark.parametrize("late", [0, 1, 2])
def test_what_one_stage_has_not_stored_is_found_by_none(late: int, start: Start) -> None:
    engine = start(Case("three", (2, 1, 1), depth=3))
    let_go = hold_reports(engine.workers[late])
    for name in ("first", "meanwhile"):
        assert engine.scheduler.reset_prefix_cache()
        engine.add(name, tokens(0), 2)
        while name in engine.scheduler.requests:
            engine.step()
        for _ in range(4):  # those that were in flight have its blocks
            engine.step()
        assert engine.worker.loaded_tokens == 0, "a part of it is not there"
    let_go()
    engine.drain()
    wait_until_quiet(engine.ours)
    assert check_stored(engine) >= CHUNKS
    assert ask(engine, "again", tokens(0)) == PROMPT // BLOCK * BLOCK


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("number", [0, 2])
def test_a_record_that_is_damaged_in_one_stages_part(stage: int, number: int, start: Start) -> None:
    """What is before it is loaded by all stages, and the rest is computed by all."""
    engine = start(Case("damaged", (2, 1), depth=2, dram_slots=6))
    ask(engine, "first", tokens(0))
    ask(engine, "other", tokens(1, 6 * CHUNK + 1))  # takes all of DRAM
    damage(engine, engine.workers[stage].first_layer, number)
    assert ask(engine, "again", tokens(0)) == number * CHUNK
    assert check_stored(engine)
    assert ask(engine, "once more", tokens(0)) == PROMPT // BLOCK * BLOCK, "it is stored again"


def damage(engine: StagedEngine, layer: int, number: int) -> None:
    """The record of the prompt's chunk of this number has other bytes in this layer."""
    kv: list[bytes] = []
    extend_kv(kv, tokens(0)[: (number + 1) * CHUNK])
    wanted = in_layer(kv[number * CHUNK :], layer).tobytes()
    transfer = engine.scheduler.vllm_config.kv_transfer_config
    assert transfer is not None
    path = Path(transfer.kv_connector_extra_config["nvme"]["path"]) / SLAB_NAME
    at = path.read_bytes().index(wanted)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(byte ^ 0xFF for byte in wanted[:64]))


def test_a_part_that_is_wrong_is_noticed(start: Start) -> None:
    """The checks of this file see what they are for."""
    engine = start(Case("wrong", (2, 1), depth=2))
    ask(engine, "first", tokens(0))
    last = engine.workers[-1].side
    chunk = next(c for c in engine.ours.store.residency.index if c.name.position == CHUNK)
    engine.pool.slot(chunk.dram.slot)[last.geometry.part_at(last.rank)] ^= 1
    with pytest.raises(AssertionError):
        check_stored(engine)
    with pytest.raises(AssertionError, match=f"wrong KV at position {CHUNK} "):
        ask(engine, "again", tokens(0))


def test_another_split_is_another_namespace(start: Start) -> None:
    """Also where as many layers and stages have as many bytes."""
    splits = [(2, 1), (1, 2), (1, 1, 1), (3,)]
    names = {start(Case("split", split, depth=1)).ours.names.namespace for split in splits}
    assert len(names) == len(splits)


def test_stages_that_cannot_be_served_together() -> None:
    shapes = Geometry.uniform(2, 3, 16, 4096, 64)
    stage = PipelineStage.of(shapes)
    other = replace(stage, regions=(4096,))
    assert with_all(shapes, [stage, other]).stages == ((4096,) * 3, (4096,))
    assert with_all(shapes, [replace(stage, replicas=2), replace(other, replicas=2)]).replicas == 2
    assert with_all(shapes, [replace(stage, replicas=2), other]).replicas == 1, "each its own"
    with pytest.raises(UnsupportedError, match="pipeline stage 1: it keeps no KV"):
        with_all(shapes, [stage, PipelineStage("it keeps no KV")])
    with pytest.raises(UnsupportedError, match="differ in how far back"):
        with_all(shapes, [stage, replace(other, groups=((16, "window", 256),))])
