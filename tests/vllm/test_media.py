# SPDX-License-Identifier: Apache-2.0
"""Pictures and sounds: their names are not taken for their content, whoever has chosen them.

Names are made by vLLM's own function, by its own settings; the rest is its scheduler, our two sides
and a scripted model whose KV depends on what is seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import MultiModalDataParser
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector.media_data import counts_media, read_media
from attnstore_vllm.scheduler.media import ALL_TOKENS, MediaNames, RequestMedia
from tests.vllm.scripted import CHUNK, ScriptedEngine, seen
from tests.vllm.scripted_worker import VOCAB, Picture
from tests.vllm.stepped import prompt
from tests.vllm.test_async_scheduling import wait_until_quiet

LENGTH = 200


def settings(*, caches: bool = False, processor_cache_gb: float = 0) -> Any:
    """Of vLLM, as far as names are a matter of them."""
    model = SimpleNamespace(
        multimodal_config=MultiModalConfig(mm_processor_cache_gb=processor_cache_gb)
    )
    return SimpleNamespace(
        model_config=model, cache_config=CacheConfig(enable_prefix_caching=caches)
    )


def names(config: Any, number: int, uuids: list[str | None] | None = None) -> list[str | None]:
    """What vLLM calls the two sounds of its request `number`, before it looks at their content."""
    renderer: Any = SimpleNamespace(config=config, model_config=config.model_config)
    renderer._validate_mm_uuids = lambda *_: None
    data: dict[str, Any] = {"audio": [[0.0] * 400, [1.0] * 400]}
    items = MultiModalDataParser(target_sr=16_000).parse_mm_data(data)
    given: Any = {"audio": uuids} if uuids is not None else {}
    named = BaseRenderer._process_mm_uuids(renderer, data, items, given, f"renderer0-mm-{number}")
    found: Any = named.get("audio", [None, None])
    return list(found)


def request(*named: Any) -> Request:
    return Request(
        "a", [1] * LENGTH, SamplingParams(max_tokens=1), None,
        mm_features=[
            MultiModalFeatureSpec(seen("it"), "audio", name, PlaceholderRange(60 * i + 40, 40))
            for i, name in enumerate(named)
        ],
    )  # fmt: skip


def known(asked: Request, names: MediaNames | None = None) -> int:
    """Tokens of it that may be known."""
    media = RequestMedia(names or MediaNames(read_media), asked)
    media.begin()
    return media.known_tokens()


def test_names_that_vllm_counts_are_none() -> None:
    counted = names(settings(), 7)
    assert counted == ["renderer0-mm-7-audio-0", "renderer0-mm-7-audio-1"]
    assert known(request(*counted)) == 40
    assert known(request(f"adapter:{counted[0]}")) == 40
    mixed = names(settings(), 7, ["a user's", None])
    assert known(request(*mixed)) == 100
    # Where vLLM counts, nobody can say that a name which looks otherwise is its user's.
    assert known(request(*mixed), MediaNames(read_media, counted=True)) == 40
    assert names(settings(caches=True), 7) == [None, None]  # by content, later
    assert names(settings(processor_cache_gb=1), 7) == [None, None]


@pytest.mark.parametrize("name", ["", None])
def test_no_name_at_all(name: str | None) -> None:
    assert known(request("ab" * 32, name)) == 100


def test_names_by_content_and_by_users() -> None:
    found = ["ab" * 32, "a user's", "renderer0", "renderer0-mm-1"]
    for name in found:
        assert known(request(name)) == ALL_TOKENS
    assert known(request(), MediaNames(read_media, counted=True)) == ALL_TOKENS


def test_settings_under_which_vllm_counts() -> None:
    assert counts_media(settings())
    assert not counts_media(settings(caches=True))
    assert not counts_media(settings(processor_cache_gb=1))


@pytest.mark.long
def test_the_settings_of_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen2AudioConfig

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = {"model_type": "qwen2", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128}
    Qwen2AudioConfig(
        text_config=text, architectures=["Qwen2AudioForConditionalGeneration"]
    ).save_pretrained(tmp_path)
    for caches, gb, counts in ((False, 0, True), (True, 0, False), (False, 1, False)):
        config = EngineArgs(
            model=str(tmp_path),
            load_format="dummy",
            enable_prefix_caching=caches,
            mm_processor_cache_gb=gb,
            max_model_len=1024,
            skip_tokenizer_init=True,
        ).create_engine_config()
        assert counts_media(config) is counts
        assert (names(config, 1)[0] is not None) is counts


# ---- two starts -----------------------------------------------------------------------------


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Any]:
    model = make_model(models / "scripted", TINY, weights=False)
    running: list[ScriptedEngine] = []

    def start() -> ScriptedEngine:
        while running:
            running.pop().close()
        running.append(ScriptedEngine(model, tmp_path / "store", num_blocks=60, depth=1, seed=3))
        wait_until_quiet(running[0].ours)  # it has found what is there
        return running[0]

    yield start
    while running:
        running.pop().close()


def loaded(engine: ScriptedEngine, sound: str, name: str, *, empties: bool = True) -> int:
    """Ask what is heard; how many tokens came from the store. The worker looks at all of them.

    Args:
        empties: all caches of vLLM's, before.
    """
    if empties:
        assert engine.scheduler.reset_prefix_cache()
        engine.scheduler.reset_encoder_cache()
        engine.worker.encoded.clear()
    before = engine.worker.loaded_tokens
    tokens = [*prompt("you hear:", 40), *[VOCAB - 1] * 40, *prompt("what?", 60)]
    engine.add(sound, tokens, 5, pictures=[Picture(sound, 40, 40)], named=lambda _: name)
    engine.drain()
    wait_until_quiet(engine.ours)
    return engine.worker.loaded_tokens - before


def test_a_counter_that_begins_anew(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A question about a dog gets no KV of a cat; the text before it may be served."""
    counted = str(names(settings(), 1)[0])
    log = logging.getLogger("attnstore_vllm.scheduler.media")
    log.setLevel(logging.WARNING)
    log.addHandler(caplog.handler)
    assert loaded(start(), "cat", counted) == 0
    engine = start()
    assert loaded(engine, "dog", counted) == CHUNK
    assert loaded(engine, "bird", counted) == CHUNK
    log.removeHandler(caplog.handler)
    log.setLevel(logging.NOTSET)
    said = {id(record) for record in caplog.records if counted in record.getMessage()}
    assert len(said) == 2  # one a start


def test_a_name_that_lasts(start: Any) -> None:
    assert loaded(start(), "cat", "ab" * 32) == 0
    assert loaded(start(), "cat", "ab" * 32) > 100


def test_a_name_that_means_another_one_now(start: Any) -> None:
    """A dog's question under the name of a cat gets no KV of it: emptied caches, and a restart."""
    engine = start()
    assert loaded(engine, "cat", "cam-7") == 0
    assert loaded(engine, "dog", "cam-7") == CHUNK
    assert loaded(engine, "cat", "cam-7") > 100
    engine = start()
    assert loaded(engine, "bird", "cam-7") == CHUNK
    assert loaded(engine, "dog", "cam-7") > 100


def test_what_vllm_has_under_the_name_is_not_the_dogs(start: Any) -> None:
    """vLLM's own caches answer by the name. What they had must not be stored as the dog's, for
    good: the worker looks at what is loaded after the restart."""
    engine = start()
    loaded(engine, "cat", "cam-7")
    loaded(engine, "dog", "cam-7", empties=False)
    loaded(engine, "cat", "cam-7", empties=False)
    engine = start()
    for sound in ("dog", "cat"):
        assert loaded(engine, sound, "cam-7") > 100
