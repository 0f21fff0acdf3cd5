# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters are told apart by what the workers have of them in memory.

A name, an id or a path can be given another one, and files are replaced after they were read.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from attnstore_lab.testing.tiny_model import TINY
from attnstore_vllm.identity.live_lora import LiveAdapters
from attnstore_vllm.scheduler.adapters import KEPT_MAX, Adapters, Asked
from tests.vllm.adapters import make_adapter
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

LENGTH = 2 * CHUNK + 1
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}


def adapter(number: int, path: Path, *, name: str = "a", in_place: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path), load_inplace=in_place)


# ---- with the real engine -------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineHost:
    return start_engine(vllm=LORA)


def all_three(
    engine: Engine, seed: str, directory: Path
) -> tuple[list[int], list[Answer], list[Answer]]:
    """(loaded at first, answers from HBM, from the store) of the model and two adapters."""
    prompt = random_tokens(seed, LENGTH)
    loras = [
        None,
        adapter(1, make_adapter(directory / "one", TINY, seed=1), name="one"),
        adapter(2, make_adapter(directory / "two", TINY, seed=2), name="two"),
    ]
    loaded, in_hbm, stored = [], [], []
    for lora in loras:
        engine.forget_hbm()
        engine.loaded()
        engine.ask(prompt, lora=lora)
        loaded.append(sum(engine.loaded().values()))
        in_hbm.append(engine.ask(prompt, lora=lora, max_tokens=5))
    for lora in loras:
        engine.forget_hbm()
        stored.append(engine.ask(prompt, lora=lora, max_tokens=5))
        assert engine.loaded() == {"dram": LENGTH - 1, "nvme": 0}
    return loaded, in_hbm, stored


def test_adapters_do_not_share(engine: EngineHost, tmp_path_factory: Any) -> None:
    loaded, in_hbm, stored = engine.call(all_three, "three", tmp_path_factory.mktemp("loras"))
    assert loaded == [0, 0, 0]
    assert [a.content for a in in_hbm] == [a.content for a in stored]
    assert len({a.tokens for a in stored}) == 3, "the adapters are to change the answer"


def test_an_adapter_that_is_left_out_is_seen(engine: EngineHost, tmp_path_factory: Any) -> None:
    loaded, _in_hbm, _stored = engine.call_with_fault(
        "adapter left out", all_three, "left out", tmp_path_factory.mktemp("loras")
    )
    assert loaded == [0, LENGTH - 1, LENGTH - 1]


def replaced(engine: Engine, directory: Path) -> tuple[Answer, Answer, Answer, list[int]]:
    """Other weights at the same path, loaded under a new id; then the first ones again.

    Returns the answers of the new weights with and without the store, the one of the old ones,
    and what was loaded for each.
    """
    prompt = random_tokens("replaced", LENGTH)
    path = make_adapter(directory / "it", TINY, seed=11)
    old = engine.ask(prompt, lora=adapter(11, path), max_tokens=5)
    loaded = []
    make_adapter(path, TINY, seed=12)
    engine.forget_hbm()
    engine.loaded()
    new = engine.ask(prompt, lora=adapter(12, path), max_tokens=5)
    loaded.append(sum(engine.loaded().values()))
    engine.forget_hbm()
    alone = engine.ask(prompt, lora=adapter(12, path), max_tokens=5, salt="alone")
    make_adapter(path, TINY, seed=11)
    engine.llm.llm_engine.add_lora(adapter(13, path))  # else the first request loads it: too late
    engine.forget_hbm()
    engine.loaded()
    again = engine.ask(prompt, lora=adapter(13, path), max_tokens=5)
    loaded.append(sum(engine.loaded().values()))
    assert old.content[0] == again.content[0] != new.content[0]
    return new, alone, again, loaded


def test_other_weights_under_the_same_path(engine: EngineHost, tmp_path_factory: Any) -> None:
    new, alone, _, loaded = engine.call(replaced, tmp_path_factory.mktemp("loras"))
    assert loaded == [0, LENGTH - 1], "the old weights' KV is found by the old weights only"
    assert new.content == alone.content


def replaced_behind(engine: Engine, directory: Path) -> tuple[list[Answer], list[int]]:
    """Loaded by vLLM's own call; its files replaced before anybody asks, then loaded once more.

    Returns the answers of the old weights, of the new ones, and of the new ones computed; and
    what each has loaded.
    """
    prompt = random_tokens("behind", LENGTH)
    path = make_adapter(directory / "it", TINY, seed=31)
    engine.llm.llm_engine.add_lora(adapter(31, path))
    make_adapter(path, TINY, seed=32)
    answers, loaded = [], []
    engine.llm.llm_engine.add_lora(adapter(32, path))
    for number, how in ((31, {}), (32, {}), (32, {"salt": "alone"})):
        engine.forget_hbm()
        engine.loaded()
        answers.append(engine.ask(prompt, lora=adapter(number, path), max_tokens=5, **how))
        loaded.append(sum(engine.loaded().values()))
    return answers, loaded


def test_files_that_were_replaced_after_loading(engine: EngineHost, tmp_path_factory: Any) -> None:
    (old, new, alone), loaded = engine.call(replaced_behind, tmp_path_factory.mktemp("loras"))
    assert loaded == [0, 0, 0], "the old adapter's KV is not the new one's"
    assert new.content == alone.content
    assert old.tokens != new.tokens


def in_place(engine: Engine, directory: Path) -> tuple[list[int], list[Answer]]:
    """Loaded anew under an id that is in use: another adapter. And back again."""
    prompt = random_tokens("in place", LENGTH)
    path = directory / "it"
    loaded, answers = [], []
    for seed in (21, 22, 21):
        make_adapter(path, TINY, seed=seed)
        engine.forget_hbm()
        engine.llm.llm_engine.add_lora(adapter(21, path, in_place=True))
        for _ in range(2):
            engine.forget_hbm()
            engine.loaded()
            answers.append(engine.ask(prompt, lora=adapter(21, path), max_tokens=5))
            loaded.append(sum(engine.loaded().values()))
    return loaded, answers


def test_loaded_in_place(engine: EngineHost, tmp_path_factory: Any) -> None:
    loaded, answers = engine.call(in_place, tmp_path_factory.mktemp("loras"))
    assert loaded == [0, LENGTH - 1, 0, LENGTH - 1, LENGTH - 1, LENGTH - 1]
    first, second = answers[0].tokens, answers[2].tokens
    assert first != second
    assert [a.tokens for a in answers] == [first, first, second, second, first, first]
    engine.call(Engine.check_quiet)


def thrown_out(engine: Engine, directory: Path) -> tuple[list[int], list[Answer]]:
    """Thrown out of vLLM's cache by four others; its files are others when it comes back."""
    prompt = random_tokens("thrown out", LENGTH)
    path = make_adapter(directory / "it", TINY, seed=41)
    others = [make_adapter(directory / f"other {i}", TINY, seed=50 + i) for i in range(4)]
    loaded, answers = [], []

    def ask(salt: str | None = None) -> None:
        engine.forget_hbm()
        engine.loaded()
        answers.append(engine.ask(prompt, lora=adapter(41, path), max_tokens=5, salt=salt))
        loaded.append(sum(engine.loaded().values()))

    ask()
    make_adapter(path, TINY, seed=42)
    for i, other in enumerate(others):
        engine.ask(prompt[:100], lora=adapter(51 + i, other))
    ask()
    ask(salt="alone")
    return loaded, answers


def test_files_that_were_replaced_while_it_was_out(
    engine: EngineHost, tmp_path_factory: Any
) -> None:
    loaded, (old, new, alone) = engine.call(thrown_out, tmp_path_factory.mktemp("loras"))
    assert loaded == [0, 0, 0]
    assert new.content == alone.content
    assert old.tokens != new.tokens


def nowhere(engine: Engine, directory: Path) -> list[int]:
    """Its files are gone once it is loaded: as with a name of the hub, there is nothing to read."""
    prompt = random_tokens("nowhere", LENGTH)
    path = make_adapter(directory / "it", TINY, seed=61)
    engine.llm.llm_engine.add_lora(adapter(61, path))
    shutil.rmtree(path)
    loaded = []
    for _ in range(2):
        engine.forget_hbm()
        engine.loaded()
        engine.ask(prompt, lora=adapter(61, Path("some/name")), max_tokens=5)
        loaded.append(sum(engine.loaded().values()))
    return loaded


def test_an_adapter_without_files(engine: EngineHost, tmp_path_factory: Any) -> None:
    assert engine.call(nowhere, tmp_path_factory.mktemp("loras")) == [0, LENGTH - 1]


# ---- the parts alone ------------------------------------------------------------------------


class Held:
    """What stands for vLLM's LoRAModel and its manager."""

    def __init__(self, number: int, a: torch.Tensor, scaling: float = 1.0) -> None:
        self.id = number
        self.loras = {"layer": {"lora_a": a, "lora_b": [a, None], "scaling": scaling}}


class Manager:
    def __init__(self, *held: Held) -> None:
        self.held = {one.id: one for one in held}

    def list_adapters(self) -> dict[int, Held]:
        return self.held


def test_content_decides() -> None:
    a = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    manager = Manager(
        Held(1, a),
        Held(2, a.clone()),
        Held(3, a + 1),
        Held(4, a, scaling=2.0),
        Held(5, a.reshape(3, 2)),
        Held(6, a.float()),
    )
    told = LiveAdapters([manager]).tell([1, 2, 3, 4, 5, 6, 7])
    assert told[1] == told[2], "not the id"
    assert told[7] is None
    assert len({told[number] for number in (1, 3, 4, 5, 6)}) == 5


def test_an_adapter_that_comes_back_is_digested_anew() -> None:
    a = torch.ones(2, 3)
    manager = Manager(Held(1, a))
    live = LiveAdapters([manager])
    first = live.tell([1])
    assert live.tell([1]) == first
    manager.held[1] = Held(1, a + 1)
    assert live.tell([1]) != first


def request(number: int) -> Any:
    return adapter(number, Path("nowhere"))


def enter(known: Adapters, number: int) -> Any:
    runs: Any = as_any(Runs(f"runs {number}", request(number)))
    known.enter(runs)
    return runs


def as_any(double: object) -> Any:
    return double


@dataclass
class Runs:
    """A request of vLLM."""

    request_id: str
    lora_request: Any
    mm_features: tuple[()] = ()


def test_names_that_have_stood_for_two() -> None:
    """While something of the first may be in a cache of vLLM's, which go by the name."""
    known = Adapters(num_ranks=1)
    runs = enter(known, 1)
    for number, digest in enumerate((b"one", b"one", b"two", b"two")):
        known.plan(number, ["runs 1"])
        assert known.on_report(number, {1: {0: digest}}) == (
            {runs.lora_request.lora_name} if number == 2 else set()
        )
        assert known.may_be_mixed(runs, local=16) == (number >= 2)
    assert not known.may_be_mixed(runs, local=0), "all of it is computed"
    known.hbm_is_empty()
    assert not known.may_be_mixed(runs, local=16)
    runs.mm_features = ("picture",)
    assert known.may_be_mixed(runs, local=0), "a reset of the prefix cache leaves the encoder's"


def test_an_answer_is_of_a_step_that_was_planned_later() -> None:
    known = Adapters(num_ranks=1)
    early = known.ask()
    assert known.answer(request(1), early) == (None, True), "nobody has said"
    assert known.plan(1, []) == (1,)
    late = known.ask()  # plan 1 is on its way, and may say what is not so any more
    known.on_report(1, {1: {0: b"one"}})
    identity, waits = known.answer(request(1), early)
    assert identity is not None and not waits
    assert known.answer(request(1), late) == (None, True)
    enter(known, 1)
    assert known.plan(2, ["runs 1", "another"]) == (1,)
    known.on_report(2, {1: {0: b"two"}})
    assert known.answer(request(1), late)[0] not in (None, identity)


def test_all_ranks_make_the_identity() -> None:
    known = Adapters(num_ranks=2)
    asked = known.ask()
    enter(known, 1)
    known.plan(1, ["runs 1"])
    known.on_report(1, {1: {0: b"one"}})
    assert known.answer(request(1), asked) == (None, False), "one rank has not loaded it"
    known.on_report(2, {1: {0: b"one", 1: b"one"}})
    both = known.answer(request(1), asked)[0]
    known.on_report(3, {1: {0: b"one", 1: b"two"}})
    assert known.answer(request(1), asked)[0] not in (None, both)


def test_nobody_waits_for_ever() -> None:
    known = Adapters(num_ranks=1)
    asked = Asked(number=9, until=0.0)
    assert known.answer(request(1), asked) == (None, False)


def test_what_is_kept_has_a_limit() -> None:
    known = Adapters(num_ranks=1)
    for number in range(KEPT_MAX + 5):
        known.on_report(number, {number: {0: b"x"}})
    assert known.identity(request(1)) is None
    assert known.identity(request(KEPT_MAX)) is not None
    assert known.identity(None) == b""
