# SPDX-License-Identifier: Apache-2.0
"""Pairs of requests that compute the same tokens with the same split: one with KV from the
store, one without. Their answers are equal to the last bit; another split rounds differently.

- A prompt of a whole number of blocks, and one token: vLLM's own prefix cache has all but the
  last token, and so has the store.
- Any other length: a first request leaves KV of `split` tokens, computed in one go, and a
  second one continues it. The reference is computed from nothing, by chunked prefill whose
  first chunk is `split` tokens long.
"""

from __future__ import annotations

from attnstore_vllm.types import Event
from tests.vllm.engine import BLOCK, Answer, Engine
from tests.vllm.prompts import random_tokens
from tests.vllm.stored import events

BLOCKS = (1, 2, 3, 4, 7, 15)
SPLITS = (32, 112, 144, 208, 240, 272, 304, 384, 496, 784, 1296)
"""Multiples of 16, where hits end: inside the first block, beside edges of blocks and chunks."""
CONTINUATION = 37
ANSWER = 6

Pair = tuple[int, Answer, Answer]
"""Length, reference, from the store."""


def whole_blocks(engine: Engine, tier: str, seed: str) -> tuple[list[Pair], dict[str, int]]:
    """Answers with vLLM's own hit, and with the store's; and what came from which tier."""
    prompts = [random_tokens((seed, tier, n), n * BLOCK + 1) for n in BLOCKS]
    references = []
    for prompt in prompts:
        engine.ask(prompt, max_tokens=ANSWER)
        references.append(engine.ask(prompt, max_tokens=ANSWER))
    loaded_early = engine.loaded()
    assert not any(loaded_early.values()), "the reference is to be vLLM's own hit"
    from_store = _ask_again(engine, tier, prompts)
    lengths = [len(prompt) for prompt in prompts]
    return list(zip(lengths, references, from_store, strict=True)), engine.loaded()


def inside_blocks(engine: Engine, tier: str, seed: str) -> tuple[list[Pair], dict[str, int]]:
    """Answers after chunked prefill, and with the store's KV up to the same token."""
    prompts, references = [], []
    usual = engine.scheduler.max_num_scheduled_tokens
    for split in SPLITS:
        prompt = random_tokens((seed, tier, split), split + min(split, CONTINUATION))
        engine.ask(prompt[:split])
        engine.scheduler.max_num_scheduled_tokens = split
        references.append(engine.ask(prompt, max_tokens=ANSWER, salt=f"{seed} {tier} {split}"))
        engine.scheduler.max_num_scheduled_tokens = usual
        prompts.append(prompt)
    engine.loaded()
    from_store = _ask_again(engine, tier, prompts)
    return list(zip(SPLITS, references, from_store, strict=True)), engine.loaded()


def _ask_again(engine: Engine, tier: str, prompts: list[list[int]]) -> list[Answer]:
    if tier == "nvme":
        lost = events(engine, Event.LOST)
        engine.evict_dram()
        assert events(engine, Event.LOST) == lost, "all of it is on NVMe"
        engine.loaded()
    found = []
    for prompt in prompts:
        engine.forget_hbm()
        found.append(engine.ask(prompt, max_tokens=ANSWER))
    return found


def different(pairs: list[Pair]) -> list[int]:
    return [length for length, reference, got in pairs if reference.content != got.content]
