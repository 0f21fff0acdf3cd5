# SPDX-License-Identifier: Apache-2.0
"""What the worker side says of steps, and which forward passes it trusts to call their hooks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector import worker as worker_module
from attnstore_vllm.connector.worker import Worker
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.messages import StepPlan
from attnstore_vllm.scheduler.open_plans import KEPT_S
from attnstore_vllm.transfer.engine import Rotation
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.layout import describe
from attnstore_vllm.transfer.plan import ChunkCopy, LoadPlan, TransferPlan
from attnstore_vllm.types import Flow
from tests.helpers import mapped_bytes
from tests.vllm.scripted import ScriptedEngine
from tests.vllm.scripted_worker import BLOCK, LAYERS, TOKEN_KV
from tests.vllm.stepped import SteppedEngine, prompt
from tests.vllm.test_async_scheduling import wait_until_quiet
from tests.vllm_objects import Clock

PROMPT = prompt("a", 100)


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(model, tmp_path / "store", num_blocks=60, depth=1, seed=1)
    yield engine
    engine.close()


def stats_of(engine: ScriptedEngine, max_tokens: int) -> StepStats:
    """The worker's, when PROMPT was answered with so many tokens and all is saved."""
    (worker,) = engine.workers
    engine.add("first", PROMPT, max_tokens)
    engine.drain()
    wait_until_quiet(engine.ours)
    stats: StepStats = worker.side.take_stats()
    return stats


def ask_again(engine: ScriptedEngine, name: str) -> None:
    """What is stored, once nothing of it is in HBM."""
    assert engine.scheduler.reset_prefix_cache()
    engine.add(name, PROMPT, 2)
    engine.drain()


def test_only_steps_that_load_say_what_loads_took(engine: ScriptedEngine) -> None:
    (worker,) = engine.workers
    assert stats_of(engine, 4).data["observed"] == {}
    engine.add("other", prompt("b", 20), 1)
    engine.step()
    engine.step()
    assert worker.side.take_stats().data["observed"] == {}
    ask_again(engine, "again")
    stats = worker.side.take_stats()
    assert {name: len(seen) for name, seen in stats.data["observed"].items()} == {
        "load_seconds": 1,
        "load_wait_seconds": 1,
    }


def test_all_of_the_pool_is_mapped_ahead(engine: ScriptedEngine) -> None:
    """Else the first save to a slot, and the first load, would wait for it page by page."""
    (worker,) = engine.workers
    pool = worker.side.pool
    deadline = time.monotonic() + 10.0
    while mapped_bytes(pool.address) < pool.num_slots * pool.slot_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_bytes_of_saves_are_counted_once(engine: ScriptedEngine) -> None:
    """A prompt's whole chunks as they are computed, and the rest when its request has ended."""
    blocks = -(-(len(PROMPT) + 19) // BLOCK)  # the last token's KV is never computed
    counted = stats_of(engine, 20).data["counters"][f"bytes:{Flow.SAVE.value}"]
    assert counted == blocks * BLOCK * TOKEN_KV * LAYERS


def test_a_model_that_calls_no_hooks(model: Path, tmp_path: Path) -> None:
    """All of a load comes before the forward pass, as long as none has called its hooks."""
    engine = SteppedEngine(model, tmp_path / "store", depth=1, rows=64, num_blocks=60, seed=1)
    (worker,) = engine.workers
    with mock.patch.multiple(
        worker.side, wait_for_layer=lambda _: None, layer_computed=lambda _: None
    ):
        engine.add("first", PROMPT, 4)
        engine.settle()
        wait_until_quiet(engine.ours)
        ask_again(engine, "again")
    assert worker.loaded_tokens > 0
    engine.close()


def test_blocks_are_not_waited_for_without_end(model: Path, tmp_path: Path) -> None:
    """A copy that is stuck keeps a finished request's blocks, but not others from going on."""
    engine = SteppedEngine(model, tmp_path / "store", depth=1, rows=4, num_blocks=60, seed=1)
    engine.add("first", PROMPT, 4)
    with mock.patch.object(engine.ours.plans, "_clock", Clock(0.0)) as clock:
        while not engine.ours.plans.keeps_blocks():
            engine.step()
        clock.now = KEPT_S + 0.01
        assert not engine.ours.plans.keeps_blocks()
        assert engine.ours.plans.any_open()
    engine.settle()
    assert not engine.ours.plans.keeps_blocks()
    engine.close()


def test_a_model_that_cannot_be_looked_at_is_not_moved() -> None:
    """Whatever its code does when it is: the server starts, and computes truncated prompts."""
    worker = object.__new__(Worker)
    worker._num_blocks = 2
    worker.geometry = Geometry.uniform(1, 1, 16, 64, 16)
    kv = torch.zeros(2, 1, 16, 1)

    def fail(_: Sequence[torch.Tensor]) -> list[Rotation]:
        raise error

    worker._read_rotations = fail
    for error in (AssertionError("a lambda"), RuntimeError("a tensor has no truth"), KeyError(1)):
        turns, why = worker._find_rotations({"l0": kv}, [describe("l0", kv, 2)])
        assert turns == []
        assert why is not None and type(error).__name__ in why


class Heard:
    """Loads or Saves that do nothing but say what they were asked for."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def begin_step(self, *_: object, **__: object) -> None:
        self.calls.append(f"{self.name} begin the step")

    def mark(self) -> None:
        self.calls.append(f"{self.name} mark")

    def complete(self) -> None:
        self.calls.append(f"{self.name} complete")


class NoPool:
    """A pool of which nothing is copied."""

    address, num_slots, num_parts = 0, 2, 1
    buffer = memoryview(b"")

    def publish(self, rank: int, text: str) -> None:
        """Nobody reads it."""


@pytest.mark.parametrize("reach", ["full", "state"])
@pytest.mark.parametrize("layers_before", [0, 1])
def test_loads_ahead_come_after_what_is_gathered_for_others(
    monkeypatch: pytest.MonkeyPatch, reach: str, layers_before: int
) -> None:
    """Recurrent states are copied by vLLM itself when the step has begun; loads wait for that."""
    groups = (Group(16, ("l0",)), Group(16, ("l0",), 1, reach))
    calls: list[str] = []
    for name in ("Loads", "Saves"):
        heard = Heard(name.lower(), calls)
        monkeypatch.setattr(worker_module, name, lambda *_, heard=heard, **__: heard)
    pool: Any = NoPool()
    worker = Worker(pool, 0, Geometry(1, (512,), groups, 16), 2, write_buffer_bytes=lambda _: 0)
    worker.register_kv_caches({"l0": torch.zeros(2, 1, 16, 8)}, "a kernel")
    plan = LoadPlan(1, "a", (ChunkCopy(0, 0, (1,)),), layers_before=layers_before)
    gone = TransferPlan(2, "b", (ChunkCopy(1, 0, (1,)),))
    worker.begin_step(StepPlan(loads=[plan], saves_before=[gone]))
    marks = ["loads mark"] if layers_before and reach == "full" else []
    assert calls == ["loads begin the step", "saves begin the step", *marks]


def test_a_sleep_waits_for_copies_and_looks_at_addresses_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM unmaps its KV, and maps it where it was. Where it is elsewhere nothing is copied."""
    calls: list[str] = []
    for name in ("Loads", "Saves"):
        heard = Heard(name.lower(), calls)
        monkeypatch.setattr(worker_module, name, lambda *_, heard=heard, **__: heard)
    pool: Any = NoPool()
    groups = (Group(16, ("l0",)),)
    worker = Worker(pool, 0, Geometry(1, (512,), groups, 16), 2, write_buffer_bytes=lambda _: 0)
    worker.release_kv()
    worker.restore_kv()
    assert calls == [], "it has no KV yet"
    kv, elsewhere = torch.zeros(2, 1, 16, 8), torch.zeros(2, 1, 16, 8)
    worker.register_kv_caches({"l0": kv}, "a kernel")
    worker.release_kv()
    assert calls == ["loads complete", "saves complete"]
    worker.restore_kv()
    kv.data = elsewhere
    with pytest.raises(UnsupportedError, match=r"layer l0: its KV was at .* server again"):
        worker.restore_kv()


@pytest.mark.parametrize(("groups", "page_bytes", "why"), [
    ((Group(16, ("l0",)), Group(16, ("l1",), 1, "window", 32)), 512, None),
    ((Group(16, ("l0",)), Group(16, ("l1",), 1, "window", 32)), 1024, "512 bytes in pages of 1024"),
    ((Group(16, ("l0",)), Group(16, ("l1",), 1, "state", 0)), 512, "recurrent states"),
    ((Group(16, ("l0", "l2")),), 512, "KV of 2 kinds"),
])  # fmt: skip
def test_groups_that_are_not_moved(
    groups: tuple[Group, ...], page_bytes: int, why: str | None
) -> None:
    """Each group's own block is asked for; what is not understood has a reason."""
    num_regions = max(len(group.layers) for group in groups)
    worker = object.__new__(Worker)
    worker._num_blocks = 2
    worker.geometry = Geometry(1, num_regions * (page_bytes,), groups, 16)
    kv = {
        "l0": torch.zeros(2, 1, 16, 8),
        "l1": torch.zeros(4, 2, 8, 4),
        "l2": torch.zeros(2, 2, 16, 4),
    }
    layouts = [describe(name, kv[name], 2) for name in groups[0].layers]
    asked: list[list[tuple[int, ...]]] = []

    def look(blocks: Sequence[torch.Tensor]) -> list[Rotation]:
        asked.append([tuple(block.shape) for block in blocks])
        return []

    worker._read_rotations = look
    _, reason = worker._find_rotations(kv, layouts)
    if why is None:
        assert (reason, asked) == (None, [[(1, 1, 16, 8), (2, 2, 8, 4)]])
    else:
        assert reason is not None and why in reason
        assert not asked
