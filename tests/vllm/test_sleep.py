# SPDX-License-Identifier: Apache-2.0
"""Sleep, pause and new weights on a real engine: every tier stays whose names hold.

The CPU build frees no memory when it sleeps; all else that vLLM does then it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Answer, Engine, poison
from tests.vllm.prompts import random_tokens
from tests.vllm.test_weights import scale

LENGTH = 2 * CHUNK + 1
ALL = LENGTH - 1
Story = Mapping[str, Any]


def ask(engine: Engine, salt: str | None = None) -> tuple[int, Answer]:
    """(tokens loaded, answer)"""
    engine.loaded()
    answer = engine.ask(random_tokens("prompt", LENGTH), max_tokens=5, salt=salt)
    engine.settle()
    return sum(engine.loaded().values()), answer


def sleep(engine: Engine, level: int, update: float | None = None) -> None:
    engine.llm.sleep(level)
    engine.llm.collective_rpc(poison)
    if update is not None:
        engine.llm.collective_rpc(scale, args=(update,))
    engine.llm.wake_up()


def wake_in_parts(engine: Engine, level: int, update: float | None = None) -> None:
    """As RL frameworks do: memory of the weights, the weights of one rank, and memory of KV."""
    engine.llm.sleep(level)
    engine.llm.collective_rpc(poison)
    assert not engine.llm.wake_up(tags=["weights"]), "KV is asleep"
    if update is not None:
        engine.llm.collective_rpc(scale_last, args=(update,))
    assert engine.llm.wake_up(tags=["kv_cache"])


def scale_last(worker: Any, factor: float) -> None:
    """The last rank's part alone."""
    if worker.rank == worker.parallel_config.world_size - 1:
        scale(worker, factor)


def at_once(engine: Engine) -> tuple[int, Answer, Answer]:
    """Asleep right behind an answer, whose end is not copied yet. (tokens loaded, answers)"""
    prompt = random_tokens("at once", 2 * CHUNK + 100)
    (before,) = engine.finish(engine.submit(prompt, max_tokens=5))
    sleep(engine, 1)
    engine.loaded()
    after = engine.ask(prompt, max_tokens=5)
    engine.settle()
    return sum(engine.loaded().values()), before, after


def pause(engine: Engine, mode: str, update: float | None = None) -> None:
    engine.core.pause_scheduler(mode=mode, clear_cache=True)
    if update is not None:
        engine.llm.collective_rpc(scale, args=(update,))
    engine.core.resume_scheduler()


def first(engine: Engine) -> Story:
    seen: dict[str, Any] = {"cold": ask(engine)}
    for level in (1, 2):
        sleep(engine, level)
        seen[f"sleep {level}"] = ask(engine)
    for mode in ("abort", "keep"):
        pause(engine, mode)
        seen[f"pause {mode}"] = ask(engine)
    seen["at once"] = at_once(engine)
    # Powers of two: what comes back has the bytes that it had. Nothing is asked meanwhile.
    sleep(engine, 1, 2.0)
    sleep(engine, 1, 0.5)
    seen["there and back"] = ask(engine)
    # Nothing was saved since that look: what there is has its name.
    sleep(engine, 1, 4.0)
    seen["others"] = ask(engine)
    seen["others, computed"] = ask(engine, "alone")
    sleep(engine, 1)
    seen["others, after a sleep"] = ask(engine)
    engine.llm.reset_prefix_cache(reset_connector=True)
    seen["reset on demand"] = ask(engine)
    return seen


def by_tags(engine: Engine) -> Story:
    seen: dict[str, Any] = {"cold": ask(engine), "hbm": ask(engine)}
    for level in (1, 2):
        wake_in_parts(engine, level)
        seen[f"level {level}"] = ask(engine)
    wake_in_parts(engine, 1, 4.0)
    seen["others"] = ask(engine)
    seen["others, computed"] = ask(engine, "alone")
    wake_in_parts(engine, 1)
    seen["others again"] = ask(engine)
    wake_in_parts(engine, 1, 0.25)
    seen["back"] = ask(engine)
    engine.check_quiet()
    return seen


def drop_all(engine: Engine) -> None:
    assert engine.llm.reset_prefix_cache(reset_connector=True)


def check_tags(seen: Story) -> None:
    """What each weights have computed, they find, and others do not."""
    for name in ("level 1", "level 2", "back"):
        loaded, answer = seen[name]
        assert (name, loaded) == (name, ALL)
        assert answer == seen["hbm"][1], name
    assert seen["others"][0] == 0, "KV of the weights of before"
    assert seen["others"][1].content == seen["others, computed"][1].content
    assert seen["others"][1].content != seen["cold"][1].content, "they are to change the answer"
    assert seen["others again"][0] == ALL
    assert seen["others again"][1].tokens == seen["others"][1].tokens


def second(engine: Engine) -> Story:
    """Weights that come before the first request, as a trainer sends them; then those of the
    files."""
    seen: dict[str, Any] = {}
    engine.llm.collective_rpc(scale, args=(4.0,))
    engine.ask(random_tokens("another", 8), max_tokens=1)
    engine.settle()
    engine.llm.collective_rpc(scale, args=(0.25,))
    engine.llm.reset_prefix_cache()
    seen["files again"] = ask(engine)
    return seen


@pytest.fixture(scope="module")
def story(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("sleep")
    model = make_model(directory / "model", TINY)
    vllm = {"model": str(model)}
    seen = dict(start_engine(store=directory / "store", vllm=vllm).call(first))
    warm = start_engine(store=directory / "warm", vllm=vllm)
    warm.call(ask)
    seen |= start_engine(store=directory / "warm", vllm=vllm).call(second)
    return seen


@pytest.mark.parametrize("how", ["sleep 1", "sleep 2", "pause abort", "pause keep"])
def test_every_tier_stays(story: Story, how: str) -> None:
    loaded, answer = story[how]
    assert loaded == ALL
    assert answer.tokens == story["cold"][1].tokens


def test_a_sleep_right_behind_an_answer(story: Story) -> None:
    loaded, before, after = story["at once"]
    assert loaded >= 2 * CHUNK - 128
    assert after.tokens == before.tokens


def test_weights_that_came_and_went(story: Story) -> None:
    loaded, answer = story["there and back"]
    assert loaded == ALL
    assert answer.tokens == story["cold"][1].tokens


def test_new_weights_find_nothing_of_the_old(story: Story) -> None:
    loaded, answer = story["others"]
    assert loaded == 0
    assert answer.content == story["others, computed"][1].content
    assert answer.content != story["cold"][1].content, "they are to change the answer"


def test_what_new_weights_computed_is_theirs(story: Story) -> None:
    assert story["others, after a sleep"][0] == ALL


def test_a_reset_on_demand_drops_all(story: Story) -> None:
    assert story["reset on demand"][0] == 0


def test_kv_of_the_files_outlives_weights_that_came_before_the_first_request(story: Story) -> None:
    loaded, answer = story["files again"]
    assert loaded == ALL
    assert answer.tokens == story["cold"][1].tokens


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_sleeper_that_is_woken_part_by_part(start_engine: StartEngine, ranks: int) -> None:
    """Then faults are planted, and seen."""
    engine = start_engine(tensor_parallel=ranks)
    check_tags(engine.call(by_tags))
    faults = {"rank 0 only": "level 1"} if ranks > 1 else {}
    for fault, match in {**faults, "last rank does not look": "weights of before"}.items():
        engine.call(drop_all)
        seen = engine.call_with_fault(fault, by_tags)
        with pytest.raises(AssertionError, match=match):
            check_tags(seen)
