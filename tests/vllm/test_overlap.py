# SPDX-License-Identifier: Apache-2.0
"""A real vLLM whose copies run beside the model and take their time: its answers are the same.

What a load fills holds garbage from its beginning on (poison), and there are few blocks, so that
they change hands at once. Loads are for the step that needs them (0 layers ahead), or ahead of it
by so many layers; slow, or stopped until somebody waits for them.

Where the split is the same as without the store answers are compared to the last bit; else with a
vLLM without a connector, within what rounding does to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from attnstore_lab.testing.memory_engine import SteppedStream
from attnstore_lab.testing.tiny_model import TINY
from attnstore_vllm.transfer import worker_copies
from benchmarks.rounding import beyond, bound, drift
from tests.vllm import splits
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import BLOCK, Answer, Engine, EngineSpec, store_settings
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.slow_copies import copies, transfer
from tests.vllm.splits import Pair, different, inside_blocks, whole_blocks

LAYERS = 4
SHAPE = replace(TINY, layers=LAYERS, max_position=2048)
NUM_BLOCKS = 24
BYTES_PER_S = 20e6
"""A block of 128 KiB takes 7 ms, and a step not much more."""
VERY_SLOW = 1.5e6
"""Many steps are over before a load is."""
BLOCKS, SPLITS = (1, 4, 15), (32, 208, 240, 304, 1296)
CROWD = (630, 631, 632, 633, 374, 250)
"""The first five fill HBM, and each needs one block more for its answer."""
CROWD_ANSWER = 40
LONG = 10 * BLOCK
OTHER = 15 * BLOCK + 50
ANSWER = 8


def crowd() -> list[list[int]]:
    return [random_tokens(("crowd", length), length) for length in CROWD]


def prompts() -> dict[str, list[int]]:
    """Each is asked for on its own as well."""
    shared = random_tokens("shared", LONG)
    return {
        "first": [*shared, *random_tokens("first", 30)],
        "second": [*shared, *random_tokens("second", 45)],
        "third": [*shared, *random_tokens("third", 45)],
        "told": random_tokens("told", LONG + 1),
        "waiting": random_tokens("waiting", LONG + 1),
        "other": random_tokens("other", OTHER),
    }


@dataclass(frozen=True, slots=True)
class Plain:
    """What vLLM says without a connector, to each on its own."""

    crowd: list[Answer]
    answers: dict[str, Answer]
    rounding: float


def ask_plainly(engine: Engine) -> Plain:
    usual, found = engine.scheduler.max_num_scheduled_tokens, []
    for budget in (usual, 77):
        engine.scheduler.max_num_scheduled_tokens = budget
        engine.forget_hbm()
        found.append([engine.ask(prompt, max_tokens=CROWD_ANSWER) for prompt in crowd()])
    engine.scheduler.max_num_scheduled_tokens = usual
    answers = {}
    for name, prompt in prompts().items():
        engine.forget_hbm()
        answers[name] = engine.ask(prompt, max_tokens=ANSWER)
    assert not any(answer.cached_tokens for answer in answers.values())
    alone, split = found
    return Plain(alone, answers, bound(drift(a, b) for a, b in zip(alone, split, strict=True)))


@pytest.fixture(scope="module")
def own_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape is another one than that of the other tests, under the same name."""
    return tmp_path_factory.mktemp("four layers")


@pytest.fixture(scope="module")
def plain(start_engine: StartEngine, own_models: Path) -> Plain:
    host = start_engine(store=None, models=own_models, shape=SHAPE, blocks=NUM_BLOCKS)
    return host.call(ask_plainly)


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, own_models: Path, plain: Plain) -> EngineHost:
    spec = EngineSpec(store=own_models / "store", models=own_models, shape=SHAPE, blocks=NUM_BLOCKS)
    return start_engine(
        store=spec.store,
        models=own_models,
        shape=SHAPE,
        blocks=NUM_BLOCKS,
        transfer=transfer(store_settings(spec)),
    )


@contextmanager
def loading(
    engine: Engine, ahead: int, bytes_per_s: float = BYTES_PER_S, fault: str | None = None
) -> Iterator[Any]:
    """Each load has so many layers ahead of the step that needs it, and is so fast. Yields what
    counts the questions after layers."""
    with ExitStack() as stack:
        if fault is not None:
            stack.enter_context(FAULTS[fault]())
        stack.enter_context(mock.patch.object(copies().engine, "_poison", True))
        asked = mock.patch.object(engine.side.costs, "layers_before", return_value=ahead)
        copies().loads.bytes_per_s = bytes_per_s
        yield stack.enter_context(asked)


@contextmanager
def stopped(engine: Engine, fault: str | None = None) -> Iterator[SteppedStream]:
    """Each load has one layer ahead. Nothing comes before the test says so, or the model waits."""
    stream = SteppedStream()
    with loading(engine, 1, fault=fault), mock.patch.object(copies().engine, "_loads", stream):
        yield stream
        stream.step(stream.pending)
        engine.drain()


# ---- the same bits ---------------------------------------------------------------------------

Found = tuple[list[Pair], dict[str, int]]


def both_splits(
    engine: Engine, ahead: int, bytes_per_s: float = BYTES_PER_S, fault: str | None = None
) -> tuple[Found, Found]:
    with (
        mock.patch.multiple(splits, BLOCKS=BLOCKS, SPLITS=SPLITS, ANSWER=3),
        loading(engine, ahead, bytes_per_s, fault),
    ):
        seed = f"{ahead} {fault}"
        return whole_blocks(engine, "dram", seed), inside_blocks(engine, "dram", seed)


def nobody_waits() -> Any:
    return mock.patch.object(worker_copies.Loads, "wait_layer", return_value=None)


def last_block_by_layer() -> Any:
    return mock.patch.object(worker_copies, "_split", lambda table, plans: (table[:0], table))


def blocks_given_away() -> Any:
    """A load whose request is gone is not waited for before its blocks are others'."""
    begin_step = worker_copies.Loads.begin_step

    def faulty(self: worker_copies.Loads, ended: Collection[int], *, whole: bool) -> None:
        begin_step(self, (), whole=whole)

    return mock.patch.object(worker_copies.Loads, "begin_step", faulty)


FAULTS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (nobody_waits, last_block_by_layer, blocks_given_away)
}


@pytest.mark.parametrize("ahead", range(LAYERS + 1))
def test_answers_are_equal_to_the_last_bit(engine: EngineHost, ahead: int) -> None:
    (whole, whole_loaded), (inside, inside_loaded) = engine.call(both_splits, ahead)
    assert whole_loaded == {"dram": sum(BLOCKS) * BLOCK, "nvme": 0}
    assert inside_loaded == {"dram": sum(SPLITS), "nvme": 0}
    assert different(whole) == []
    assert different(inside) == []


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_layer_that_nobody_waits_for_is_seen(engine: EngineHost, ahead: int) -> None:
    (whole, _), (inside, _) = engine.call(both_splits, ahead, VERY_SLOW, "nobody_waits")
    assert different(whole) != []
    assert different(inside) != []


def test_new_tokens_that_a_load_overwrites_are_seen(engine: EngineHost) -> None:
    (whole, _), (inside, _) = engine.call(both_splits, 0, VERY_SLOW, "last_block_by_layer")
    assert different(whole) == []
    assert different(inside) == list(SPLITS)


# ---- blocks that change hands ----------------------------------------------------------------


def store_all(engine: Engine, wanted: list[list[int]]) -> None:
    for prompt in wanted:
        engine.ask(prompt)
    engine.forget_hbm()
    engine.loaded()


def crowd_at_once(engine: Engine, ahead: int) -> tuple[list[Answer], int, int, int]:
    """Answers, preemptions, loads, and tokens loaded."""
    store_all(engine, crowd())
    before = counted(engine, "num_preemptions")
    with loading(engine, ahead) as asked:
        numbers = [engine.submit(prompt, max_tokens=CROWD_ANSWER) for prompt in crowd()]
        answers = engine.finish(*numbers)
        engine.check_quiet()
    preemptions = counted(engine, "num_preemptions") - before
    return answers, preemptions, asked.call_count, engine.loaded()["dram"]


def counted(engine: Engine, name: str) -> int:
    return sum(int(m.value) for m in engine.llm.get_metrics() if m.name == f"vllm:{name}")


@pytest.mark.parametrize("ahead", [0, 2])
def test_preempted_requests(engine: EngineHost, plain: Plain, ahead: int) -> None:
    answers, preemptions, num_loads, loaded = engine.call(crowd_at_once, ahead)
    assert preemptions > 0
    assert num_loads >= len(CROWD)
    assert loaded > sum(length - BLOCK for length in CROWD)
    assert beyond(list(zip(plain.crowd, answers, strict=True)), plain.rounding) == []


def submit_and_open(engine: Engine, stream: SteppedStream, name: str, *, told: bool) -> str:
    """A request whose load is open; told: one layer is there, and vLLM takes it for complete."""
    number = engine.submit(prompts()[name], max_tokens=ANSWER)
    engine.wait_for(lambda: stream.pending >= LAYERS, engine.step)
    if told:
        stream.step(stream.pending - LAYERS + 1)
        engine.step()
    internal = engine.request(number).request_id
    assert (internal in engine.scheduler.finished_recving_kv_req_ids) == told
    assert len(copies().worker.loads._open) == 1
    return number


def abort_while_loading(
    engine: Engine, name: str, fault: str | None = None
) -> tuple[Answer, Answer, int]:
    """Another request gets the blocks; then the first one is asked again.

    Returns both answers, and how many tokens were loaded for the first one then.
    """
    asked = prompts()
    store_all(engine, [asked[name]])
    with stopped(engine, fault) as stream:
        number = submit_and_open(engine, stream, name, told=name == "told")
        engine.abort(number)
        # Under a salt, so that it computes all of its prompt.
        other = engine.submit(asked["other"], max_tokens=ANSWER, salt=f"{name} {fault}")
        if name == "waiting":  # there is not room for both before the load is over
            for _ in range(3):
                engine.step()
            assert engine.request(other).num_computed_tokens == 0
            stream.step(stream.pending)
        (beside,) = engine.finish(other)
    engine.check_quiet()
    engine.forget_hbm()
    engine.loaded()
    again = engine.ask(asked[name], max_tokens=ANSWER)
    return beside, again, engine.loaded()["dram"]


@pytest.mark.parametrize("name", ["waiting", "told"])
def test_aborted_while_loading(engine: EngineHost, plain: Plain, name: str) -> None:
    beside, again, loaded = engine.call(abort_while_loading, name)
    assert beside.cached_tokens == 0
    assert loaded == LONG
    pairs = [(plain.answers["other"], beside), (plain.answers[name], again)]
    assert beyond(pairs, plain.rounding) == []


def test_blocks_that_are_given_away_too_early_are_seen(engine: EngineHost, plain: Plain) -> None:
    beside, *_ = engine.call(abort_while_loading, "told", "blocks_given_away")
    assert beyond([(plain.answers["other"], beside)], plain.rounding) == [0]


def share_an_open_load(
    engine: Engine, other: str, fault: str | None = None
) -> tuple[list[Answer], int, int]:
    """The other request finds blocks of the first one in HBM, in the step that begins both.

    Returns their answers, tokens loaded, and the copies that the model has waited for.
    """
    asked = prompts()
    store_all(engine, [asked["first"]])
    with stopped(engine, fault) as stream:
        first = submit_and_open(engine, stream, "first", told=True)
        second = engine.submit(asked[other], max_tokens=ANSWER)
        answers = engine.finish(first, second)
        forced = stream.forced
    engine.check_quiet()
    return answers, engine.loaded()["dram"], forced


def test_shared_blocks_whose_load_is_open(engine: EngineHost, plain: Plain) -> None:
    answers, loaded, forced = engine.call(share_an_open_load, "second")
    assert forced == LAYERS - 1
    assert LONG <= loaded < LONG + BLOCK, "only the first one loads"
    assert answers[1].cached_tokens >= LONG
    pairs = list(zip((plain.answers["first"], plain.answers["second"]), answers, strict=True))
    assert beyond(pairs, plain.rounding) == []


def test_shared_blocks_that_nobody_waits_for_are_seen(engine: EngineHost, plain: Plain) -> None:
    """Of both answers, though the other request has not loaded anything itself."""
    answers, *_ = engine.call(share_an_open_load, "third", "nobody_waits")
    pairs = list(zip((plain.answers["first"], plain.answers["third"]), answers, strict=True))
    assert beyond(pairs, plain.rounding) == [0, 1]


# ---- what it says of itself ------------------------------------------------------------------


def measured_load(engine: Engine, ahead: int, seed: str) -> dict[str, float]:
    """What the metrics say of one slow load."""
    prompt = random_tokens(("measured", seed), LONG + 1)
    store_all(engine, [prompt])
    names = ("load_seconds", "load_wait_seconds")
    before = {name: seconds(engine, name) for name in names}
    num_bytes = engine.metric("bytes", "dram_to_hbm")
    with loading(engine, ahead, VERY_SLOW):
        engine.ask(prompt)
    found = {name: seconds(engine, name) - before[name] for name in names}
    return {"bytes": engine.metric("bytes", "dram_to_hbm") - num_bytes, **found}


def seconds(engine: Engine, name: str) -> float:
    (found,) = (m for m in engine.llm.get_metrics() if m.name == f"vllm:attnstore_{name}")
    total: float = found.sum
    return total


def test_metrics(engine: EngineHost) -> None:
    """A load that takes far longer than its step is waited for, or was over before."""
    num_bytes = LONG * SHAPE.kv_bytes_per_token
    takes_s = num_bytes / VERY_SLOW
    for ahead in (0, LAYERS):
        found = engine.call(measured_load, ahead, f"{ahead} layers")
        assert found["bytes"] == num_bytes
        assert takes_s * 0.9 < found["load_seconds"] < takes_s * 2
        if ahead:
            assert found["load_wait_seconds"] < takes_s * 0.1
        else:
            assert takes_s * 0.2 < found["load_wait_seconds"] < takes_s * 2


def test_nothing_is_held_afterwards(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)
