# SPDX-License-Identifier: Apache-2.0
"""KV of drafts in a group of its own, under vLLM's real schedulers: it is made of the tokens behind
a token too, of one (EAGLE, an MTP layer) or of several (MTP layers one after the other).

vLLM's own cache is emptied before each request, so that all that is found is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector import facts
from attnstore_vllm.scheduler.saving import Saving
from tests.vllm.grouped import GroupedEngine, Kind
from tests.vllm.scripted import Limits
from tests.vllm.scripted_worker import VOCAB

CHUNK = 64
AHEAD = (1, 3)
FULL, WINDOW = Kind("full"), Kind("window", 40)
SHAPES = {
    "beside a window": (WINDOW, FULL),
    "the only full one": (WINDOW,),
    "windows alone": (Kind("window", 90),),
}


@pytest.fixture(params=AHEAD)
def ahead(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.long if number else ())
        for number, name in enumerate(SHAPES)
    ]
)
def shape(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[1, 2], ids=["synchronous", "two steps in flight"])
def engine(
    shape: str,
    ahead: int,
    request: pytest.FixtureRequest,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[GroupedEngine]:
    drafts = Kind("window", 90, ahead=ahead) if "alone" in shape else Kind("full", ahead=ahead)
    monkeypatch.setattr(facts, "tokens_ahead", lambda _: ahead)
    engine = GroupedEngine(
        make_model(models / "scripted", TINY, weights=False), tmp_path / "store",
        kinds=(*SHAPES[shape], drafts), num_blocks=400, depth=request.param, seed=0,
        limits=Limits(chunk_tokens=CHUNK, dram_slots=400, nvme="8MiB"),
    )  # fmt: skip
    yield engine
    engine.close()


def drive(engine: GroupedEngine, seed: int, num_requests: int = 30) -> None:
    """Requests that go on from earlier ones, or part from them, one after the other."""
    random = Random(seed)
    prefix = [random.randrange(VOCAB) for _ in range(250)]
    for number in range(num_requests):
        history = random.choice([prefix, *engine.worker.sequences])
        history = history[: random.choice([random.randrange(20, 250), 2 * CHUNK, len(history)])]
        prompt = [
            *history[:300],
            *(random.randrange(VOCAB) for _ in range(random.randrange(1, 60))),
        ]
        engine.add(str(number), prompt, random.randrange(1, 60))
        engine.drain()
        engine.scheduler.reset_prefix_cache()


def drive_on(engine: GroupedEngine) -> None:
    for seed in range(3):
        drive(engine, seed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_only_right_kv_of_drafts_is_used(engine: GroupedEngine, seed: int) -> None:
    drive(engine, seed)
    assert engine.worker.loaded_tokens > 10 * CHUNK, "the store was hardly used"


def test_a_last_token_that_is_offered_is_seen(engine: GroupedEngine) -> None:
    looks = engine.ours.store.strategy
    looks.ahead = 0
    looks.needs = tuple(replace(need, ahead=0) for need in looks.needs)
    with pytest.raises(AssertionError, match="wrong KV of drafts"):
        drive_on(engine)


@pytest.mark.parametrize("ahead", [3], indirect=True)
def test_guesses_that_are_saved_are_seen(
    engine: GroupedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is saved as soon as the model has computed it."""
    save = Saving.save_chunks

    def early(saving: Saving, *arguments: object) -> None:
        looks = saving._store.strategy
        ahead, looks.ahead = looks.ahead, 1
        save(saving, *arguments)  # type: ignore[arg-type]
        looks.ahead = ahead

    monkeypatch.setattr(Saving, "save_chunks", early)
    with pytest.raises(AssertionError, match="wrong KV of drafts"):
        drive_on(engine)
