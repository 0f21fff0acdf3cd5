# SPDX-License-Identifier: Apache-2.0
"""Drafts with KV of their own beside several KV cache groups, and beside windows alone.

As test_drafts.py, whose checks these are: answers, guesses that were accepted, and the bytes in HBM
beside those of a run that computed them. "three groups": a layer with a window, one that has all
tokens, and the head. "windows alone": one layer with a window, and a head to which vLLM gives the
same one. All KV in HBM is garbage before each load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.index.prefix import GRAIN_TOKENS
from attnstore_vllm.scheduler.saving import MIN_TAIL_TOKENS
from tests.vllm import family_checks as checks
from tests.vllm import test_drafts as drafts
from tests.vllm.conftest import StartEngine
from tests.vllm.draft_models import make_model
from tests.vllm.engine import BLOCK, CHUNK, Engine, Tokens, read_kv
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.test_drafts import ANSWER, LENGTH, SAME, SHARED

WINDOW = 640
SHAPES = {"three groups": (3, 3), "windows alone": (1, 2)}
"""By name: groups, and layers with the head's."""
ENDS = (CHUNK, 2 * CHUNK, WINDOW, LENGTH)
"""Prompts end around these."""
Distances = dict[str, dict[int, float]]
"""By layer and block, what differs from computed KV."""


def settings(models: Path, name: str) -> dict[str, Any]:
    """Fields of EngineSpec."""
    found = drafts.settings(models)
    before = name == "three groups"
    found["vllm"]["model"] = str(make_model(models / name, WINDOW, before=before))
    return found


@pytest.fixture(scope="module", params=[
    pytest.param("three groups"), pytest.param("windows alone", marks=pytest.mark.long),
])  # fmt: skip
def shape(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(shape: str, start_engine: StartEngine, models: Path) -> EngineHost:
    return start_engine(**settings(models, shape))


# ---- what is looked at, in the engine's process ------------------------------------------------


def kv_of(engine: Engine, prompt: Tokens, salt: str | None) -> tuple[int, dict[str, Any]]:
    """(tokens that were found, KV by layer and block) as the answer begins; only of blocks that
    the request still has."""
    number = engine.submit(prompt, max_tokens=32, salt=salt)
    engine.wait_for(lambda: bool(engine.answers(number)), engine.step)
    found = engine.answers(number)[0].cached_tokens
    manager = engine.scheduler.kv_cache_manager
    tables = manager.get_block_ids(engine.request(number).request_id)
    kv: dict[str, Any] = {}
    names = [n for g in engine.scheduler.kv_cache_config.kv_cache_groups for n in g.layer_names]
    for group, table in zip(engine.scheduler.kv_cache_config.kv_cache_groups, tables, strict=True):
        ids = table[: len(prompt) // BLOCK]
        (layers,) = engine.llm.collective_rpc(read_kv, args=(ids,))
        for name in group.layer_names:
            pages = layers[sorted(names).index(name)]
            kv[name] = {at: page for at, page in enumerate(pages) if ids[at]}
    engine.finish(number)
    engine.drain()
    return found, kv


def differences(engine: Engine, prompt: Tokens, salt: str) -> tuple[int, Distances]:
    checks.forget(engine)
    found, loaded = kv_of(engine, prompt, None)
    _, computed = kv_of(engine, prompt, salt)
    return found, {
        name: {
            at: drafts._distance(page, computed[name][at])
            for at, page in loaded[name].items()
            if at in computed[name]
        }
        for name in sorted(loaded)
    }  # fmt: skip


def branch(engine: Engine, seed: str) -> tuple[int, Distances]:
    """Another goes on in its own way where a chunk and a block end."""
    prompt = random_tokens(("branch", seed), LENGTH)
    engine.ask(prompt, max_tokens=1)
    other = [*prompt[:SHARED], *random_tokens(("other", seed), 300)]
    return differences(engine, other, f"branch {seed}")


def turn(engine: Engine, seed: str) -> tuple[int, Distances]:
    """What follows an answer of several blocks, in which some guesses were accepted."""
    prompt = random_tokens(("short", seed), 500)
    first = engine.ask(prompt, max_tokens=600)
    follows = [*prompt, *first.tokens, *random_tokens(("follows", seed), 150)]
    return differences(engine, follows, f"turn {seed}")


def lengths(engine: Engine) -> list[tuple[int, int, float]]:
    """Prompts that end around each border, continued: (length, tokens found, what differs)."""
    found = []
    for end in checks.around(ENDS):
        prompt = random_tokens(("ends", end), end + 200)
        engine.ask(prompt[:end], max_tokens=ANSWER)
        stored, layers = differences(engine, prompt, f"ends {end}")
        found.append((end, stored, max(max(by_block.values()) for by_block in layers.values())))
    return found


# ---- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["nvme", pytest.param("dram", marks=pytest.mark.long)])
def test_answers_and_guesses(engine: EngineHost, tier: str) -> None:
    pairs = engine.call(drafts.ask_again, tier)
    drafts.check(pairs)
    computed, _ = drafts.rates(pairs)
    assert 0.02 < computed < 0.95


def test_kv_of_a_branch(engine: EngineHost, shape: str) -> None:
    found, layers = engine.call(branch, "right")
    assert found == SHARED - GRAIN_TOKENS
    assert (engine.call(checks.num_groups), len(layers)) == SHAPES[shape]
    assert max(max(by_block.values()) for by_block in layers.values()) < SAME


def test_a_last_token_that_is_offered_is_seen(engine: EngineHost) -> None:
    found, layers = engine.call_with_fault("last token offered", branch, "wrong")
    assert found == SHARED
    *model, head = layers.values()
    assert max(max(by_block.values()) for by_block in model) < SAME, "the answer is right"
    assert head[SHARED // BLOCK - 1] > SAME


def test_kv_of_answers(engine: EngineHost) -> None:
    found, layers = engine.call(turn, "right")
    assert found > 1_000
    assert max(max(by_block.values()) for by_block in layers.values()) < SAME


@pytest.mark.long
def test_lengths_around_borders(engine: EngineHost) -> None:
    for end, stored, difference in engine.call(lengths):
        print(f"{stored} of {end} found, {difference:.1e}")
        rest = end % CHUNK if end % CHUNK >= MIN_TAIL_TOKENS else end % CHUNK + GRAIN_TOKENS
        assert stored >= end - rest % GRAIN_TOKENS - 3 * GRAIN_TOKENS
        assert difference < SAME


@pytest.mark.parametrize("group", range(3))
def test_a_group_that_is_left_out_is_seen(shape: str, engine: EngineHost, group: int) -> None:
    """Of the model the answers are wrong, of the head only guesses."""
    if group >= SHAPES[shape][0]:
        pytest.skip("it has fewer groups")
    pairs = engine.call_with_fault(f"without group {group}", drafts.ask_again, "dram", group)
    computed, loaded = drafts.rates(pairs)
    same = [a.answer.tokens == b.answer.tokens for a, b in pairs]
    print(f"rates {computed:.2f} {loaded:.2f}, answers {same}")
    assert not any(same) or (all(same) and loaded < computed / 2)


def test_nothing_is_held_afterwards(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)
