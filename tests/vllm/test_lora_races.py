# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters whose files are replaced: what comes between an answer of the workers and the step
that relies on it. Over vLLM's scheduler and a scripted model that knows each byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.identity.live_lora import LiveAdapters
from tests.vllm.scripted import Limits, ScriptedEngine
from tests.vllm.scripted_worker import REFUSED
from tests.vllm.stepped import prompt
from tests.vllm.test_async_scheduling import wait_until_quiet


class Loaded:
    def __init__(self, content: str) -> None:
        self.content = content


class Workers:
    """vLLM's LRUCacheWorkerLoRAManager over files that are strings."""

    def __init__(self, engine: ScriptedEngine, slots: int = 2) -> None:
        self.files: dict[str, str] = {}
        self.slots = slots
        self.loaded: dict[int, Loaded] = {}
        """The least recently used first."""
        self.loads = 0
        self._lora_of: dict[str, LoRARequest | None] = {}
        self.engine = engine
        worker = engine.worker
        worker.side.adapters = LiveAdapters([self])
        worker.base = lambda new: self.content(new.lora_request)
        execute = worker.execute

        def run(output: SchedulerOutput) -> Any:
            for new in output.scheduled_new_reqs:
                self._lora_of[new.req_id] = new.lora_request
            found = [self._lora_of.get(name) for name in output.num_scheduled_tokens]
            # The order is that of a set, so it may be any: newest ids first.
            for lora in sorted((x for x in found if x), key=lambda x: -x.lora_int_id):
                self.add(lora)
            for name in output.scheduled_cached_reqs.resumed_req_ids:
                worker._rows[name].base = self.content(self._lora_of[name])
            return execute(output)

        worker.execute = run  # type: ignore[method-assign]

    def list_adapters(self) -> dict[int, Loaded]:
        return dict(self.loaded)

    def add(self, lora: LoRARequest) -> None:
        """As add_lora() does, and each step."""
        number = lora.lora_int_id
        if number in self.loaded and not lora.load_inplace:
            self.loaded[number] = self.loaded.pop(number)
            return
        new = Loaded(self.files[lora.lora_path])
        self.loads += 1
        self.loaded.pop(number, None)
        if len(self.loaded) + 1 > self.slots:
            del self.loaded[next(iter(self.loaded))]
        self.loaded[number] = new

    def content(self, lora: LoRARequest | None) -> bytes:
        return self.loaded[lora.lora_int_id].content.encode() if lora is not None else b""


Start = Callable[..., tuple[ScriptedEngine, Workers]]


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Start]:
    model = make_model(models / "scripted", TINY, weights=False)
    started: list[ScriptedEngine] = []

    def start(*, slots: int = 2, **options: Any) -> tuple[ScriptedEngine, Workers]:
        options = {"num_blocks": 60, "depth": 1, "seed": 3, **options}
        engine = ScriptedEngine(model, tmp_path / f"{len(started)}", **options)
        started.append(engine)
        return engine, Workers(engine, slots)

    yield start
    for engine in started:
        engine.close()


def settle(engine: ScriptedEngine) -> None:
    engine.drain()
    wait_until_quiet(engine.ours)


def settle_and_check(engine: ScriptedEngine, name: str) -> None:
    """The request's load is refused, and nothing of its answer is from before it was computed."""
    request = engine.scheduler.requests[name]
    was_refused = []
    refuse = engine.worker.side.failed_blocks

    def note() -> set[int]:
        was_refused.append(found := refuse())
        return found

    engine.worker.side.failed_blocks = note  # type: ignore[method-assign]
    settle(engine)
    assert any(was_refused)
    assert request.num_output_tokens and REFUSED not in request.all_token_ids


def ask(engine: ScriptedEngine, name: str, tokens: list[int], lora: LoRARequest) -> int:
    """With an empty HBM. How many tokens were loaded."""
    assert engine.scheduler.reset_prefix_cache()
    before = engine.worker.loaded_tokens
    engine.add(name, tokens, 3, lora=lora)
    settle(engine)
    return engine.worker.loaded_tokens - before


def test_kv_of_another_adapter_is_stored_under_the_old_ones_name(start: Start) -> None:
    """The adapter was thrown out of the workers' cache since its last request; its files
    are others when the next request loads it. What that one computes is stored under the old
    adapter's name, and served to whoever loads the old adapter again (a roll-back)."""
    engine, workers = start()
    path = workers.files
    path["a"], path["b"], path["c"], path["old"] = "old weights", "b", "c", "old weights"
    first, b, c = LoRARequest("a", 1, "a"), LoRARequest("b", 2, "b"), LoRARequest("c", 3, "c")
    ask(engine, "known", prompt("something", 60), first)
    ask(engine, "b", prompt("something", 60), b)
    ask(engine, "c", prompt("something", 60), c)
    assert 1 not in workers.loaded, "thrown out"
    path["a"] = "new weights"
    question = prompt("question", 100)
    assert ask(engine, "new", question, first) == 0
    assert workers.loaded[1].content == "new weights"
    rolled_back = LoRARequest("old", 4, "old")
    workers.add(rolled_back)
    ask(engine, "old", question, rolled_back)  # the scripted worker looks at all that it is given


def test_what_vllm_has_under_an_adapters_name_is_stored_as_anothers(start: Start) -> None:
    """Unload, replace the files, load under the same name and path: vLLM's own prefix
    cache goes by name and path, and serves the old one's blocks (its fault, until they leave HBM).
    We store these blocks as the new adapter's KV, for good."""
    engine, workers = start()
    workers.files["a"] = "old weights"
    question = prompt("question", 100)
    ask(engine, "old", question, LoRARequest("a", 1, "a"))
    del workers.loaded[1]
    workers.files["a"] = "new weights"
    again = LoRARequest("a", 2, "a")
    workers.add(again)
    engine.worker.deluded = lambda name: name == "by vLLM"
    engine.add("by vLLM", [*question, 1, 2, 3], 3, lora=again)
    settle(engine)
    ask(engine, "new", question, again)  # HBM is empty: all that is wrong now is ours


def test_in_place_too(start: Start) -> None:
    """load_inplace: the same id."""
    engine, workers = start()
    workers.files["a"] = "old weights"
    question = prompt("question", 100)
    lora = LoRARequest("a", 1, "a")
    ask(engine, "old", question, lora)
    workers.files["a"] = "new weights"
    workers.add(LoRARequest("a", 1, "a", load_inplace=True))
    engine.worker.deluded = lambda name: name == "by vLLM"
    engine.add("by vLLM", [*question, 1, 2, 3], 3, lora=lora)
    settle(engine)
    ask(engine, "new", question, lora)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_step_that_loads_kv_throws_its_adapter_out(start: Start, depth: int) -> None:
    """The workers said that they have the old adapter; the step that the request is
    scheduled in loads two others before it, and then its own anew, from files that are others."""
    engine, workers = start(depth=depth)
    workers.files |= {"a": "old weights", "b": "b", "c": "c"}
    question = prompt("question", 100)
    lora = LoRARequest("a", 1, "a")
    ask(engine, "known", question, lora)
    ask(engine, "b", prompt("something", 60), LoRARequest("b", 2, "b"))
    workers.files["a"] = "new weights"
    assert engine.scheduler.reset_prefix_cache()
    engine.add("a", question, 3, lora=lora)  # asks its question
    engine.add("c", prompt("other", 10), 3, lora=LoRARequest("c", 3, "c"))
    settle_and_check(engine, "a")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_loaded_in_place_while_a_request_waits_for_room(start: Start, depth: int) -> None:
    """out an eviction: the request has its answer, and no room in HBM."""
    engine, workers = start(num_blocks=14, depth=depth)
    workers.files["a"] = "old weights"
    question = prompt("question", 100)
    lora = LoRARequest("a", 1, "a")
    ask(engine, "known", question, lora)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("big", prompt("big", 90), 70)
    for _ in range(10):
        engine.step()
    engine.add("a", question, 3, lora=lora)
    for _ in range(10):
        engine.step()
    assert engine.scheduler.requests["a"].num_computed_tokens == 0
    workers.files["a"] = "new weights"
    workers.add(LoRARequest("a", 1, "a", load_inplace=True))
    settle_and_check(engine, "a")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_before_anybody_has_said_what_the_adapter_is(start: Start, depth: int) -> None:
    """With steps in flight (asynchronous scheduling, the default on GPUs) all that runs is
    reset, the first request of an adapter among it, before its first step has reported; the others
    take the next step. The queue's view looks it up, with an adapter that nobody knows."""
    engine, workers = start(num_blocks=60, depth=depth, limits=Limits(batched_tokens=48))
    workers.files["a"] = "weights"
    for number in range(5):
        engine.add(f"other {number}", prompt(f"other {number}", 46), 60)
    for _ in range(14):  # each has some tokens in a block that is not full
        engine.step()
    engine.add("a", prompt("question", 40), 30, lora=LoRARequest("a", 1, "a"))
    request = engine.scheduler.requests["a"]
    while not request.num_computed_tokens:
        engine.step()
    with suppress(RuntimeError):  # vLLM's: blocks are held while a step is in flight
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions
    settle(engine)
