# SPDX-License-Identifier: Apache-2.0
"""Saves beside the model, with every interleaving of their pieces and of what becomes of a request.

Goal: what is stored is the KV of its tokens, byte for byte, and nothing stays held: when the
request finishes, is aborted, is preempted or reset, or its copies fail, while its saves wait for
rows of the write buffer, or are on their way; and others compute in its blocks at once.
Method: that of test_copy_races.py. The write buffer has room for two chunks; the pieces of saves
are carried out at the end of two steps, in all ways, and the rest when others use the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.errors import CopyError
from attnstore_vllm.scheduler import open_plans
from attnstore_vllm.transfer import worker_copies
from tests.vllm.scripted_worker import LAYERS
from tests.vllm.stepped import SteppedEngine, prompt
from tests.vllm.test_async_scheduling import check_stored, wait_until_quiet
from tests.vllm.test_copy_races import NOT_STORED, When

ROWS = 4
LENGTH = 116
"""Tokens of the request's prompt: three chunks in its first step, and a tail."""
CHUNKS = 4
Places = tuple[tuple[int, int], ...]
"""How many pieces, on each rank, are over when the first and the second step after the begin end:
a layer each of the first two chunks, then what has waited for their rows."""
PLACES = [(places,) for places in combinations_with_replacement(range(LAYERS + 3), 2)]
Start = Callable[..., SteppedEngine]
steps_in_flight = pytest.mark.parametrize("depth", [1, 2, 3])


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(depth, options of SteppedEngine): one with room for one request, if nobody asks."""
    monkeypatch.setattr(worker_copies, "LAYERS_A_SAVE", 1)  # of so few all would leave together
    started: list[SteppedEngine] = []

    def start(depth: int, **options: Any) -> SteppedEngine:
        options = {"num_blocks": 1 + 8, "rows": ROWS, "seed": 0, **options}
        started.append(SteppedEngine(model, tmp_path / f"{len(started)}", depth=depth, **options))
        return started[-1]

    yield start
    for engine in started:
        if not engine.is_broken:
            wait_until_quiet(engine.ours)
        engine.close()


def begin(engine: SteppedEngine, name: str, max_tokens: int = 1) -> None:
    """Nothing is stored. A request computes its first three chunks, and another waits."""
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.begin_case()
    engine.add(name, prompt(name, LENGTH), max_tokens)
    engine.add("other", prompt(f"beside {name}", LENGTH - 4), 8, params=NOT_STORED)
    engine.step()
    assert engine.ours.plans.any_open()


def play(
    engine: SteppedEngine,
    places: Places,
    when: When | None = None,
    event: Callable[[], None] | None = None,
    steps: int = 4,
) -> int:
    """The steps in which pieces are carried out and the event comes; then others use the blocks
    while what is left is carried out. Returns how many chunks are in DRAM."""
    events = [event] if event is not None else []

    def happen() -> None:
        while events:
            events.pop()()

    for step in range(1, 1 + steps):
        if step <= 2:
            for saves, worker, over in zip(engine.saves, engine.workers, places, strict=True):
                worker.at_end = partial(saves.go_on_to, over[step - 1])
        if when == (step, False):
            happen()
        elif when == (step, True):
            engine.before_update = happen
        engine.step()
        for worker in engine.workers:
            worker.at_end = lambda: None
    engine.before_update = lambda: None
    assert not events
    for _ in range(3):
        for saves in engine.saves:
            saves.go_on(1)
        engine.step()
    engine.settle()
    return check_stored(engine)


@steps_in_flight
def test_it_finishes(start: Start, depth: int) -> None:
    engine = start(depth)
    kept = 0
    for number, (places, max_tokens) in enumerate(product(PLACES, (1, 4))):
        begin(engine, f"{number}", max_tokens)
        assert play(engine, places) == CHUNKS
        kept += engine.num_freed
        assert engine.count("chunks:unsaved") == 0
    assert 0 < kept < 2 * len(PLACES), "blocks are never kept, or always"


@steps_in_flight
@pytest.mark.parametrize("what", ["abort", "reset", "reset, abort", "reset, all tiers"])
def test_what_becomes_of_it(start: Start, depth: int, what: str) -> None:
    """A reset takes the blocks of what runs, and tells with the next step."""
    engine = start(depth)

    def happen(name: str) -> None:
        if "reset" in what:
            while engine.in_flight:
                engine.before_update = lambda: None
                engine.finish_oldest()
            engine.reset_running(reset_connector="all" in what)
        if "abort" in what:
            engine.abort(name)

    in_step = (False, True) if what == "abort" else (False,)
    whens = [When(step, is_run) for step in (1, 2, 3) for is_run in in_step]
    places_tried = PLACES if what == "abort" else PLACES[::2]
    for number, (places, when) in enumerate(product(places_tried, whens)):
        begin(engine, f"{number}")
        play(engine, places, when, partial(happen, f"{number}"))


@steps_in_flight
def test_graphs_that_call_no_hook(start: Start, depth: int) -> None:
    """All layers are gathered after the forward pass."""
    engine = start(depth)
    engine.replays = lambda: True
    for number, places in enumerate(PLACES):
        begin(engine, f"{number}")
        assert play(engine, places) == CHUNKS


@steps_in_flight
def test_it_is_preempted(start: Start, depth: int) -> None:
    """Three older requests, which run all the time, need a block each in the same step."""
    engine = start(depth, num_blocks=1 + 3 + 7)
    unsaved = 0.0
    for number, (places, older) in enumerate(product(PLACES[::2], range(12, 16))):
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.begin_case()
        for i in range(3):
            engine.add(f"older {i}", prompt(f"{number}, {i}", older), 8, params=NOT_STORED)
        engine.add("preempted", prompt(f"{number}", 100), 12)
        request = engine.scheduler.requests["preempted"]
        play(engine, places, steps=8)
        assert request.num_preemptions > 0
        unsaved += engine.count("chunks:unsaved")
    assert unsaved > 0, "nobody was preempted while its saves were queued"


@steps_in_flight
def test_blocks_that_come_free_spare_a_preemption(start: Start, depth: int) -> None:
    """One that has ended leaves more saves than rows, and another needs a block meanwhile: vLLM
    waits for those of the former, since we say that they come free; else it preempts."""
    engine = start(depth, num_blocks=1 + 1 + 8)
    preempted: dict[bool, list[bool]] = {True: [], False: []}
    for says_so, length in product((True, False), range(8, 15)):
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.begin_case()
        engine.add("older", prompt(f"older {length}", length), 14, params=NOT_STORED)
        engine.add("leaves", prompt(f"{says_so}, {length}", LENGTH), 1)
        older = engine.scheduler.requests["older"]
        with ExitStack() as stack:
            # However slow this machine is.
            stack.enter_context(mock.patch.object(open_plans, "KEPT_S", 1e9))
            if not says_so:
                connector = engine.scheduler.connector
                stack.enter_context(
                    mock.patch.object(connector, "has_pending_block_frees", return_value=False)
                )
            for step in range(14):
                engine.saves[0].go_on(step % 2)
                engine.step()
            engine.settle()
        assert check_stored(engine) == CHUNKS
        assert engine.num_freed == 1, "its blocks were not kept"
        preempted[says_so].append(older.num_preemptions > 0)
    assert not any(preempted[True])
    assert any(preempted[False]), "there was a block for everybody"


@steps_in_flight
def test_it_is_reset_and_aborted_while_it_loads_again(start: Start, depth: int) -> None:
    """With saves that are open since before: its blocks are free when its load says so."""
    engine = start(depth, num_blocks=1 + 9, rows=2)
    whens = [When(step, is_run) for step in (1, 2, 3) for is_run in (False, True)]
    for number, (saved, loaded, when) in enumerate(product((0, 1), (0, 2, 4), whens)):
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.begin_case()
        engine.add("history", prompt("history", 56), 1)
        engine.settle()
        name = f"{number}"
        engine.layers_before = 0
        engine.add(name, [*prompt("history", 56), *prompt(name, 74)], 6)
        engine.step()
        engine.step()
        while engine.in_flight:
            engine.finish_oldest()
        engine.saves[0].go_on(saved)
        engine.layers_before = 1
        engine.reset_running()
        engine.loads[0].mark()
        engine.add("other", prompt(f"beside {name}", LENGTH - 4), 8, params=NOT_STORED)
        engine.step()
        assert engine.load_state(name) == "loading"
        for step in (1, 2, 3):
            if step == 1:
                engine.worker.at_end = partial(engine.loads[0].go_on_to, loaded)
            if when == (step, False):
                engine.abort(name)
            elif when == (step, True):
                engine.before_update = partial(engine.abort, name)
            engine.step()
            engine.worker.at_end = engine.before_update = lambda: None
        engine.settle()
        check_stored(engine)


@steps_in_flight
@pytest.mark.parametrize("failing", range(2 * LAYERS - 1))
def test_pieces_that_fail(start: Start, depth: int, failing: int) -> None:
    """Their chunks are dropped and counted, and the engine goes on."""
    engine = start(depth)
    for number, max_tokens in enumerate((1, 4)):
        begin(engine, f"{number}", max_tokens)
        engine.saves[0].go_on_to(failing)
        engine.saves[0].fail_next(CopyError("injected"))
        stored = play(engine, ((failing, failing + 1),))
        assert engine.count("chunks:unsaved") == CHUNKS - stored > 0
    begin(engine, "after that")
    assert play(engine, PLACES[0]) == CHUNKS


@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_that_are_not_as_quick(start: Start, depth: int) -> None:
    """A chunk is stored when all have saved it; blocks are free when none reads them."""
    engine = start(depth, num_ranks=2)
    quick = [(0, 0), (0, LAYERS), (LAYERS, LAYERS + 2), (LAYERS + 2, LAYERS + 2)]
    for number, (places, max_tokens) in enumerate(product(product(quick, repeat=2), (1, 4))):
        begin(engine, f"{number}", max_tokens)
        assert play(engine, places) == CHUNKS
    for failing in range(LAYERS):
        begin(engine, f"failing {failing}")
        engine.saves[1].go_on_to(failing)
        engine.saves[1].fail_next(CopyError("injected"))
        stored = play(engine, ((0, LAYERS), (failing, failing + 1)))
        assert engine.count("chunks:unsaved") == CHUNKS - stored == 2
