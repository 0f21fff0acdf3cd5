# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters are told apart by content: a name, an id or a path can be given another one."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.connector.requests import LoraIdentities
from attnstore_vllm.testing.tiny_model import TINY
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


def in_place(engine: Engine, directory: Path) -> tuple[list[int], int]:
    """Loaded anew under an id that is in use: nothing of it is used or left any more."""
    prompt = random_tokens("in place", LENGTH)
    path = make_adapter(directory / "it", TINY, seed=21)
    engine.ask(prompt, lora=adapter(21, path), max_tokens=5)
    engine.settle()
    before = engine.store.counts()["saved"]
    make_adapter(path, TINY, seed=22)
    loaded = []
    for lora in (adapter(21, path, in_place=True), adapter(21, path)):
        engine.forget_hbm()
        engine.loaded()
        engine.ask(prompt, lora=lora, max_tokens=5)
        loaded.append(sum(engine.loaded().values()))
    engine.settle()
    return loaded, engine.store.counts()["saved"] - before


def test_loaded_in_place(engine: EngineHost, tmp_path_factory: Any) -> None:
    assert engine.call(in_place, tmp_path_factory.mktemp("loras")) == ([0, 0], 0)
    engine.call(Engine.check_quiet)


# ---- the identities alone -------------------------------------------------------------------


def test_no_adapter_is_an_identity_too() -> None:
    assert LoraIdentities().identify(None) == b""


def test_content_decides(tmp_path: Path) -> None:
    """Not the name, the id, the path or the time."""
    one = make_adapter(tmp_path / "one", TINY, seed=1)
    copy = shutil.copytree(one, tmp_path / "copy")
    os.utime(copy / "adapter_model.safetensors", (1, 1))
    two = make_adapter(tmp_path / "two", TINY, seed=2)
    loras = LoraIdentities()
    of_one = loras.identify(adapter(1, one))
    assert of_one
    assert loras.identify(adapter(2, copy, name="b")) == of_one
    assert loras.identify(adapter(3, two)) not in (of_one, None, b"")


def test_the_configuration_counts(tmp_path: Path) -> None:
    """lora_alpha scales what the weights do."""
    one = make_adapter(tmp_path / "one", TINY, seed=1)
    two = make_adapter(tmp_path / "two", TINY, seed=1)
    config = two / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 16'))
    loras = LoraIdentities()
    assert loras.identify(adapter(1, one)) != loras.identify(adapter(2, two))


def test_files_that_change_under_an_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can say which of the two the workers computed with."""
    path = make_adapter(tmp_path / "one", TINY, seed=1)
    loras = LoraIdentities()
    assert loras.identify(adapter(1, path))
    make_adapter(path, TINY, seed=2)
    with caplog.at_level(logging.WARNING):
        assert loras.identify(adapter(1, path)) is None
    assert loras.is_unclear(adapter(1, path))
    assert caplog.text.count("leaves the LoRA adapter") == 1
    make_adapter(path, TINY, seed=1)
    assert loras.identify(adapter(1, path)) is None, "it stays unclear"
    assert loras.identify(adapter(2, path)), "another id is another adapter"


def test_loading_in_place(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "one", TINY, seed=1)
    loras = LoraIdentities()
    assert loras.identify(adapter(1, path, in_place=True)) is None
    assert loras.identify(adapter(1, path)) is None


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """A path of the hub, say: it cannot be identified, so it is left alone."""
    (tmp_path / "adapter_config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "nowhere"):
        loras = LoraIdentities()
        assert loras.identify(adapter(1, path)) is None
        assert loras.is_unclear(adapter(1, path))
