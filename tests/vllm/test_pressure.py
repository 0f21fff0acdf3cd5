# SPDX-License-Identifier: Apache-2.0
"""More requests than HBM holds: preemption, priorities, speculative decoding.

A preempted request loses its blocks and comes back with what the store has of it. Its answer is
that of an engine with room for all, but for rounding, which is measured in the same run. Every
chunk that is stored continues a sequence that there was: no token that a draft guessed and the
model rejected is among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.rounding import beyond, bound, drift
from tests.vllm.conftest import StartEngine, some_long
from tests.vllm.engine import BLOCK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.stored import foreign_chunks

ROOM = {"blocks": 24, "dram": "16MiB"}
LENGTHS = (400, 515, 300, 700, 260, 640)
ANSWER = 160
DRAFTS = 4

CONFIGURATIONS = {
    "priorities": {"max_model_len": 2048, "scheduling_policy": "priority"},
    "drafts": {
        "max_model_len": 2048,
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": DRAFTS,
            "prompt_lookup_min": 1, "prompt_lookup_max": 3,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=some_long(CONFIGURATIONS, "drafts"))
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> EngineHost:
    return start_engine(**ROOM, vllm=CONFIGURATIONS[request.param])


@dataclass(frozen=True, slots=True)
class Found:
    pairs: list[tuple[Answer, Answer]]
    """(alone and without the store, all at once and with it)."""
    rounding: float
    preemptions: int
    loaded: int
    drafted: int
    accepted: int
    foreign: list[tuple[int, int]]


def count(engine: Engine, name: str) -> int:
    return sum(int(m.value) for m in engine.llm.get_metrics() if m.name == f"vllm:{name}")


def prompts(seed: str) -> list[list[int]]:
    """They repeat themselves, so that n-grams are found, but not what follows them."""
    found = []
    for length in LENGTHS:
        phrase = random_tokens((seed, length), length // 2)
        found.append([*phrase, *phrase[: length - len(phrase)]])
    return found


def all_at_once(engine: Engine, seed: str) -> Found:
    asked = prompts(seed)
    usual = engine.scheduler.max_num_scheduled_tokens
    alone, split = [], []
    for prompt in asked:
        engine.forget_hbm()
        alone.append(engine.ask(prompt, max_tokens=ANSWER, salt=f"alone {seed}"))
    engine.scheduler.max_num_scheduled_tokens = 77
    for prompt in asked:
        engine.forget_hbm()
        split.append(engine.ask(prompt, max_tokens=ANSWER, salt=f"split {seed}"))
    engine.scheduler.max_num_scheduled_tokens = usual
    assert not any(a.cached_tokens for a in (*alone, *split))
    engine.forget_hbm()
    engine.loaded()
    before = [count(engine, n) for n in ("num_preemptions", *_SPECULATION)]
    numbers = [
        engine.submit(prompt, max_tokens=ANSWER, priority=-i) for i, prompt in enumerate(asked)
    ]
    together = engine.finish(*numbers)
    after = [count(engine, n) for n in ("num_preemptions", *_SPECULATION)]
    engine.check_quiet()
    sequences = [
        (salt, [*prompt, *answer.tokens])
        for salt, found in (
            (f"alone {seed}", alone), (f"split {seed}", split), (None, together)
        )
        for prompt, answer in zip(asked, found, strict=True)
    ]  # fmt: skip
    differences = [b - a for a, b in zip(before, after, strict=True)]
    return Found(
        pairs=list(zip(alone, together, strict=True)),
        rounding=bound(drift(a, b) for a, b in zip(alone, split, strict=True)),
        preemptions=differences[0],
        loaded=sum(engine.loaded().values()),
        drafted=differences[1],
        accepted=differences[2],
        foreign=foreign_chunks(engine, sequences),
    )


_SPECULATION = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")


def reload(engine: Engine, seed: str) -> list[tuple[Answer, Answer]]:
    """(from HBM, from the store) for what was computed with drafts: equal to the last bit."""
    pairs = []
    for prompt in prompts(seed):
        said = engine.ask(prompt, max_tokens=ANSWER)
        text = [*prompt, *said.tokens]
        text = text[: (len(text) - 1) // BLOCK * BLOCK + 1]
        in_hbm = engine.ask(text, max_tokens=4)
        engine.forget_hbm()
        stored = engine.ask(text, max_tokens=4)
        assert in_hbm.cached_tokens == stored.cached_tokens == len(text) - 1
        pairs.append((in_hbm, stored))
    return pairs


def next_turns(engine: Engine, seed: str) -> tuple[list[tuple[Answer, Answer]], int]:
    """(without, with) the store, for a next turn: it loads up to the last token of an answer."""
    pairs, loaded = [], 0
    for prompt in prompts(seed):
        said = engine.ask(prompt, max_tokens=ANSWER)
        turn = [*prompt, *said.tokens, *random_tokens((seed, "turn"), 30)]
        engine.forget_hbm()
        engine.loaded()
        stored = engine.ask(turn, max_tokens=8)
        loaded += sum(engine.loaded().values()) - len(prompt) - len(said.tokens) + 1
        engine.forget_hbm()
        pairs.append((engine.ask(turn, max_tokens=8, salt=f"alone {seed}"), stored))
    return pairs, loaded


def test_all_at_once(engine: EngineHost) -> None:
    found = engine.call(all_at_once, "all")
    assert found.preemptions > 0
    assert found.loaded > 0
    if "speculative_config" in engine.spec.vllm:
        assert 0 < found.accepted < found.drafted
    assert beyond(found.pairs, found.rounding) == []
    assert found.foreign == []


def test_reload(engine: EngineHost) -> None:
    pairs = engine.call(reload, "reload")
    assert [a.content for a, _ in pairs] == [b.content for _, b in pairs]


def test_next_turns(engine: EngineHost) -> None:
    pairs, more = engine.call(next_turns, "turns")
    # The last token may have been a draft that was accepted: then its KV was computed.
    assert 0 <= more <= (len(pairs) if "speculative_config" in engine.spec.vllm else 0)
    assert beyond(pairs, bound([])) == []


def test_a_token_too_many_is_seen(engine: EngineHost) -> None:
    """The KV of the last token of an answer was not computed, or is that of a rejected draft."""
    pairs, more = engine.call_with_fault("tail too long", next_turns, "too long")
    assert more == len(pairs)
    assert beyond(pairs, bound([])) != []


@pytest.mark.long
def test_wrong_kv_is_seen(engine: EngineHost) -> None:
    found = engine.call_with_fault("wrong slot", all_at_once, "wrong")
    assert beyond(found.pairs, found.rounding) != []
