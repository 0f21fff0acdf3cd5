# SPDX-License-Identifier: Apache-2.0
"""Reading somebody's prompt by how much of one's own was cached, under vLLM's real scheduler.

The attacker knows the beginning of a stored sequence, and tries what may follow, a candidate a
request. Where the answers differ, it has learned something. vLLM's own cache tells whole blocks of
16 tokens: who has guessed less of a block may learn nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.helpers import wait_until
from tests.vllm.scripted import CHUNK, ScriptedEngine
from tests.vllm.scripted_worker import VOCAB

BLOCK = 16
NOBODYS = VOCAB + 1
"""A token that no stored sequence has."""
UNSTORED = {"attnstore": {"store": False}}
SECRET = [(7 * n + n * n) % VOCAB for n in range(3 * CHUNK + 20)]
"""A prompt: somebody's template, and what nobody else is to know."""


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(model, tmp_path / "store", num_blocks=64, depth=2, seed=1)
    try:
        yield engine
        wait_until(engine.ours.store.is_idle, engine.ours.store)
        engine.ours.check_quiet()
    finally:
        engine.close()


names = map(str, itertools.count())


def ask(engine: ScriptedEngine, prompt: list[int], max_tokens: int = 1, **how: Any) -> int:
    """How many tokens the answer says were cached. vLLM's own cache is empty then: what it tells
    is vLLM's affair."""
    assert engine.scheduler.reset_prefix_cache()
    name = next(names)
    engine.add(name, prompt, max_tokens, **how)
    stats = engine.scheduler.requests[name].prefill_stats
    assert stats is not None
    engine.drain()
    return stats.num_cached_tokens


def answer(engine: ScriptedEngine, prompt: list[int], max_tokens: int) -> list[int]:
    """Somebody's request, and the tokens of it that have KV then."""
    name = next(names)
    engine.add(name, prompt, max_tokens)
    request = engine.scheduler.requests[name]
    engine.drain()
    return list(request.all_token_ids)[:-1]


def guesses(engine: ScriptedEngine, known: list[int], right: int, **how: Any) -> set[int]:
    """What is said of each candidate for the next token, and another one that is wrong."""
    how = {"params": UNSTORED, **how}
    wrong = (right + 1) % VOCAB
    candidates = [right, wrong, *range(0, VOCAB, 7)]
    return {ask(engine, [*known, token, NOBODYS, NOBODYS], **how) for token in candidates}


def cool(engine: ScriptedEngine) -> None:
    """Every chunk leaves DRAM, as if others had needed its room."""
    store = engine.ours.store
    wait_until(store.is_idle, store)
    with store.queue():
        for chunk in list(store.residency.dram.owned.values()):
            store.residency.leave_dram(chunk)


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_the_next_token_cannot_be_found(engine: ScriptedEngine, tier: str) -> None:
    stored = answer(engine, SECRET, 40)
    places = [at for at in range(2 * CHUNK, 3 * CHUNK + 30) if at % BLOCK != BLOCK - 1]
    for at in places[::4]:
        if tier == "nvme":
            cool(engine)
        assert len(guesses(engine, stored[:at], stored[at])) == 1, at


@pytest.mark.parametrize("beyond", [1, 2])
@pytest.mark.parametrize("known", [CHUNK + BLOCK, 2 * CHUNK + BLOCK])
def test_the_last_tokens_of_a_prompt_cannot_be_found(
    engine: ScriptedEngine, known: int, beyond: int
) -> None:
    """It ends just behind what is known; the answer adds next to nothing."""
    stored = answer(engine, SECRET[: known + beyond], 3)
    assert len(guesses(engine, stored[:known], stored[known])) == 1
    assert len(guesses(engine, stored[: known + 1], stored[known + 1])) == 1


def test_planted_guesses_tell_nothing(engine: ScriptedEngine) -> None:
    """The attacker stores its guesses, before and after the secret is: what is stored beside them,
    or takes their place, makes no difference to it."""
    known = SECRET[: 2 * CHUNK + BLOCK]
    candidates = [SECRET[len(known)], *range(0, VOCAB, 9)]
    for token in candidates[::2]:
        answer(engine, [*known, token], 4)
    answer(engine, SECRET, 4)
    for token in candidates[1::2]:
        answer(engine, [*known, token], 4)
    assert len(guesses(engine, known, SECRET[len(known)])) == 1
    assert len(guesses(engine, known, SECRET[len(known)], params=None)) == 1


def test_whole_blocks_are_told_as_vllm_tells_them(engine: ScriptedEngine) -> None:
    """And the end of an answer: it is what makes a conversation's next turn a hit."""
    stored = answer(engine, SECRET, 40)
    assert len(stored) % BLOCK not in (0, BLOCK - 1)
    last = len(stored) // BLOCK * BLOCK
    assert ask(engine, [*stored, 1, 2, 3], params=UNSTORED) == len(stored)
    assert ask(engine, [*stored[:-1], NOBODYS, 2], params=UNSTORED) == last - BLOCK
    for at in range(BLOCK, last - BLOCK, BLOCK):
        assert ask(engine, [*stored[:at], NOBODYS, 2], params=UNSTORED) == at


def test_who_says_no_salt_shares_nothing(model: Path, tmp_path: Path) -> None:
    engine = ScriptedEngine(
        model, tmp_path / "store", num_blocks=64, depth=2, seed=1, share="salted"
    )
    try:
        for salt, found in ((None, 0), ("a", len(SECRET) // BLOCK * BLOCK)):
            ask(engine, SECRET, 1, salt=salt)
            stored = engine.ours.store.figures().counts.get("saved", 0)
            assert (stored > 0) == (salt is not None)
            assert ask(engine, [*SECRET, 1, 2], salt=salt) == found
        assert ask(engine, [*SECRET, 1, 2], salt="b") == 0
        assert ask(engine, [*SECRET, 1, 2]) == 0
    finally:
        engine.close()


@pytest.mark.parametrize("right", [True, False])
def test_a_lease_of_a_guess_that_somebody_renews(
    models: Path, tmp_path: Path, *, right: bool
) -> None:
    """The attacker's answer ends one to three tokens behind the last block that it knows, and
    expires after a second without use. The victim's request, which says `store: false`, has the
    blocks: it renews it, whether or not the guess behind them was right."""
    model = make_model(models / "scripted", TINY, weights=False)
    engine = ScriptedEngine(model, tmp_path / "store", num_blocks=64, depth=1, seed=1)
    try:
        known = SECRET[: 2 * CHUNK + BLOCK]
        # An attacker chooses what is generated (logit_bias); here the victim says what was.
        planted = answer_with(engine, known, 2, ttl="1s")
        assert len(planted) == len(known) + 1
        victim = list(planted)
        if not right:
            victim[-1] += 1
        ask(engine, [*victim, *SECRET[:30]], params=UNSTORED)
        time.sleep(0.7)
        ask(engine, [*victim, *SECRET[:30]], params=UNSTORED)
        time.sleep(0.6)
        alive = ask(engine, [*planted, NOBODYS, NOBODYS], params=UNSTORED)
        wait_until(engine.ours.store.is_idle, engine.ours.store)
        assert alive == len(planted), "the attacker knows whether its guess was right"
    finally:
        engine.close()


def answer_with(
    engine: ScriptedEngine, prompt: list[int], max_tokens: int, **hints: str
) -> list[int]:
    engine.add("planted", prompt, max_tokens, params={"attnstore": hints})
    request = engine.scheduler.requests["planted"]
    engine.drain()
    return list(request.all_token_ids)[:-1]
