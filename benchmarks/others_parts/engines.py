# SPDX-License-Identifier: Apache-2.0
"""What is done in an engine's process: functions of an Engine, called by tests.vllm.host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.rounding import drift
from tests.vllm.engine import Answer, Engine
from tests.vllm.prompts import random_tokens
from tests.vllm.test_namespace_starts import AUDIO, hears

ANSWER_TOKENS: Final = 8
SPLIT_TOKENS: Final = 256
STILL_S: Final = 2.0
DEADLINE_S: Final = 60.0
SOUND_S, SAMPLES_A_S, TEXT_TOKENS = 8, 16_000, 80

GAINS: Final = {"q_proj": 6.0, "k_proj": 6.0, "v_proj": 3.0, "o_proj": 3.0, "lm_head": 20.0}
"""Of weights with these names."""

Prompts = Sequence[Sequence[int]]
Lora = tuple[int, str] | None
"""Number and path of an adapter whose name is always the same."""


def ask(engine: Engine, prompts: Prompts, lora: Lora = None) -> list[Answer]:
    """Answers, with nothing of any prompt in HBM before. HBM is filled with garbage: what is said
    to be loaded and is not, shows."""
    found = []
    for prompt in prompts:
        engine.forget_hbm()
        found.append(engine.ask(prompt, max_tokens=ANSWER_TOKENS, lora=_request(lora)))
    return found


@contextmanager
def _split(engine: Engine) -> Iterator[None]:
    """Prompts are computed in several steps."""
    scheduler = engine.scheduler
    usual = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = SPLIT_TOKENS
    yield
    scheduler.max_num_scheduled_tokens = usual


def compute(
    engine: Engine, prompts: Prompts, lora: Lora = None
) -> tuple[list[Answer], list[float]]:
    """For an engine without a connector. Returns the answers, and their drifts to the same with
    the prefix in HBM, and in another split: what rounding does here."""
    answers = ask(engine, prompts, lora)
    drifts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        engine.forget_hbm()
        engine.ask(prompt, max_tokens=1, lora=_request(lora))
        again = engine.ask(prompt, max_tokens=ANSWER_TOKENS, lora=_request(lora))
        assert again.cached_tokens > 0
        drifts.append(drift(again, answer))
    with _split(engine):
        split = ask(engine, prompts, lora)
    return answers, [*drifts, *map(drift, split, answers)]


def make_listener(directory: Path) -> Path:
    """tests.vllm's Qwen2-Audio with weights of its own: sharp attention, so that an answer hangs on
    what was heard. vLLM's dummy weights hardly do."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration  # noqa: PLC0415

    hears(directory)
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration(Qwen2AudioConfig.from_pretrained(directory))
    weights = {}
    for name, weight in model.state_dict().items():
        gain = next((g for part, g in GAINS.items() if part in name), 1.0)
        weights[_checkpoint_name(name)] = (weight * gain).to(torch.bfloat16).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _checkpoint_name(name: str) -> str:
    """vLLM takes those that transformers 4 wrote."""
    for new, old in (
        ("lm_head.", "language_model.lm_head."),
        ("model.language_model.", "language_model.model."),
        ("model.", ""),
    ):
        if name.startswith(new):
            return old + name.removeprefix(new)
    raise AssertionError(name)


def listen(engine: Engine, pitches: Sequence[float]) -> list[Answer]:
    """Answers about sounds, each computed or from the connector: vLLM keeps none of them."""
    found = []
    tokens = list(engine.llm.get_tokenizer().convert_tokens_to_ids([AUDIO[1], AUDIO[0], AUDIO[2]]))
    for pitch in pitches:
        sound = np.sin(np.arange(SAMPLES_A_S * SOUND_S) * pitch).astype(np.float32)
        prompt: dict[str, Any] = {
            "prompt_token_ids": tokens + random_tokens("question", TEXT_TOKENS),
            "multi_modal_data": {"audio": [(sound, SAMPLES_A_S)]},
        }
        engine.forget_hbm()
        engine.core.reset_encoder_cache()
        found.append(engine.ask(prompt, max_tokens=ANSWER_TOKENS))
    return found


def hear(engine: Engine, pitches: Sequence[float]) -> tuple[list[Answer], list[float]]:
    """compute() of sounds."""
    answers = listen(engine, pitches)
    with _split(engine):
        split = listen(engine, pitches)
    return answers, list(map(drift, split, answers))


def add_lora(engine: Engine, lora: tuple[int, str]) -> None:
    """What /v1/load_lora_adapter does."""
    assert engine.llm.llm_engine.add_lora(_request(lora))


def settle(engine: Engine, directory: Path) -> None:
    """Until what was saved is written: no file has changed for a while."""
    engine.drain()
    deadline = time.monotonic() + DEADLINE_S
    seen, since = _state(directory), time.monotonic()
    while time.monotonic() - since < STILL_S:
        assert time.monotonic() < deadline, "it never stops writing"
        time.sleep(0.1)
        now = _state(directory)
        if now != seen:
            seen, since = now, time.monotonic()


def _state(directory: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            stat = path.stat()
            found[str(path)] = stat.st_size, stat.st_mtime_ns
    return found


def _request(lora: Lora) -> Any:
    if lora is None:
        return None
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    number, path = lora
    return LoRARequest("it", number, path)
