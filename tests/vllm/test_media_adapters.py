# SPDX-License-Identifier: Apache-2.0
"""Pictures where adapters have weights in the encoder (--enable-tower-connector-lora).

vLLM puts the adapter's name and a colon before the picture's, and its encoder's cache knows no
more. A client's `uuid` may look so as well. Names are made by vLLM's own function.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector.media_data import encodes_by_adapter, read_media
from attnstore_vllm.scheduler.media import MediaNames, RequestMedia
from tests.vllm.scripted import ScriptedEngine, feature_of
from tests.vllm.scripted_worker import VOCAB, Picture
from tests.vllm.stepped import prompt
from tests.vllm.test_async_scheduling import wait_until_quiet
from tests.vllm.test_lora_races import Workers

TOWERS = LoRAConfig(enable_tower_connector_lora=True, max_loras=2)
A, OF_A = LoRARequest("a", 1, "a"), LoRARequest("a:b", 2, "a:b")


def named(uuid: str, lora: LoRARequest | None) -> str:
    """What vLLM calls a picture."""
    processor: Any = SimpleNamespace(lora_config=TOWERS)
    return InputProcessor._get_mm_identifier(processor, uuid, lora)


def test_vllm_gives_two_adapters_one_name() -> None:
    """Else there is nothing to do here."""
    assert named("a:cat", None) == named("cat", A)
    assert named("b:cat", A) == named("cat", OF_A)


def test_settings_under_which_adapters_change_the_encoder() -> None:
    for lora, changes in ((None, False), (LoRAConfig(), False), (TOWERS, True)):
        config: Any = SimpleNamespace(lora_config=lora)
        assert encodes_by_adapter(config) is changes


def claimed(names: MediaNames, name: str, lora: LoRARequest | None) -> str:
    """The name under which vLLM looks for what its encoder has of a cat."""
    request = Request(
        "a", [1] * 200, SamplingParams(max_tokens=1), None, lora_request=lora,
        mm_features=[feature_of(Picture("cat", 40, 40), name)],
    )  # fmt: skip
    names.end_step()
    media = RequestMedia(names, request)
    media.begin()
    assert not media.is_pending
    return str(request.mm_features[0].identifier)


def test_a_name_is_the_first_adapters() -> None:
    names = MediaNames(read_media, by_adapter=True)
    assert claimed(names, "a:cat", None) == "a:cat"
    of_a = claimed(names, "a:cat", A)
    assert of_a == claimed(names, "a:cat", A) != "a:cat"
    assert claimed(names, "a:cat", None) == "a:cat"
    assert claimed(names, "a:b:cat", A) == "a:b:cat"
    assert claimed(names, "a:b:cat", OF_A) not in ("a:b:cat", of_a)


def test_where_adapters_change_no_encoder_they_share_what_it_has() -> None:
    names = MediaNames(read_media)
    assert claimed(names, "cat", None) == claimed(names, "cat", A) == "cat"


class Towers(ScriptedEngine):
    def _set(self, config: VllmConfig) -> None:
        config.lora_config = TOWERS


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Any]:
    model = make_model(models / "scripted", TINY, weights=False)
    running: list[ScriptedEngine] = []

    def start() -> ScriptedEngine:
        while running:
            running.pop().close()
        engine = Towers(model, tmp_path / "store", num_blocks=60, depth=1, seed=3)
        running.append(engine)
        workers = Workers(engine)
        workers.files.update({"a": "adapter a", "a:b": "another"})
        for lora in (A, OF_A):
            workers.add(lora)
        engine.worker.towers = lambda new: new.lora_request.lora_path if new.lora_request else ""
        wait_until_quiet(engine.ours)  # it has found what is there
        return engine

    yield start
    while running:
        running.pop().close()


def ask(engine: ScriptedEngine, uuid: str, lora: LoRARequest | None) -> int:
    """Ask what a cat does; how many tokens came from the store. The worker looks at all of them:
    what it computed it says is right, from what its encoder has."""
    before = engine.worker.loaded_tokens
    tokens = [*prompt("you see:", 40), *[VOCAB - 1] * 40, *prompt("what?", 60)]
    picture = Picture("cat", 40, 40)
    engine.add("ask", tokens, 5, pictures=[picture], named=lambda _: named(uuid, lora), lora=lora)
    engine.drain()
    wait_until_quiet(engine.ours)
    return engine.worker.loaded_tokens - before


@pytest.mark.parametrize(("uuid", "other", "lora"), [("a:cat", None, A), ("b:cat", A, OF_A)])
def test_a_clients_uuid_is_another_adapters_name(
    start: Any, uuid: str, other: LoRARequest | None, lora: LoRARequest
) -> None:
    """A client gives the `uuid` first under which vLLM looks for the adapter's picture. What vLLM's
    encoder then has is without the adapter. It must not be stored as the adapter's, for good."""
    engine = start()
    ask(engine, uuid, other)
    ask(engine, "cat", lora)
    engine = start()
    assert ask(engine, "cat", lora) > 100
