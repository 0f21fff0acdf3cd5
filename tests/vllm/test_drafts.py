# SPDX-License-Identifier: Apache-2.0
"""Drafts with KV of their own: an EAGLE head, and a draft model.

KV of the model decides the answer, KV of the drafts how many guesses are right. So both are looked
at: answers, guesses that were accepted, and the bytes in HBM beside those of a run that computed
them. The EAGLE head here is right about half of the time (draft_models.py), so there are rejected
drafts behind every prompt and answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnstore_vllm.index.prefix import GRAIN_TOKENS
from benchmarks.rounding import drift
from tests.vllm import family_checks as checks
from tests.vllm.conftest import StartEngine
from tests.vllm.draft_models import make_eagle_head, make_model
from tests.vllm.engine import BLOCK, CHUNK, Answer, Engine, Tokens
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

LENGTH, ANSWER = 1_808, 64
SHARED = 6 * CHUNK
GUESSES = 3
STEP = 300
"""Tokens of a prefill's step that ends at no block."""
NOISE = 0.004
SAME = 1e-3
"""Numbers of KV that differ by no more are the same, computed in another split."""
ROUNDING = 1e-4
PROMPTS = 2


def settings(models: Path, method: str = "eagle", **fields: Any) -> dict[str, Any]:
    """Fields of EngineSpec. The draft model is a copy of the model itself."""
    model = make_model(models / "drafted")
    draft = make_model(models / "drafted copy")
    if method == "eagle":
        draft = make_eagle_head(models / f"head {NOISE}", NOISE)
    drafts = {"method": method, "model": str(draft), "num_speculative_tokens": GUESSES}
    options = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 4_096,
        "skip_tokenizer_init": True,
        "speculative_config": {**drafts, **fields.pop("drafts", {})},
    }
    return {"vllm": options, "blocks": 320, "dram": "256MiB", "nvme": "1GiB", **fields}


METHODS = [pytest.param("eagle"), pytest.param("draft_model", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(method: str, start_engine: StartEngine, models: Path) -> EngineHost:
    return start_engine(**settings(models, method))


# ---- what is looked at, in the engine's process ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, and what became of the guesses for it."""

    answer: Answer
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted


def tell(engine: Engine, prompt: Tokens, salt: str | None = None) -> Told:
    before = guesses(engine)
    answer = engine.ask(prompt, max_tokens=ANSWER, salt=salt)
    drafted, accepted = (n - m for n, m in zip(guesses(engine), before, strict=True))
    return Told(answer, drafted, accepted)


def guesses(engine: Engine) -> tuple[int, int]:
    """(drafted, accepted) so far."""
    found: dict[str, Any] = {m.name: m for m in engine.llm.get_metrics()}
    drafted, accepted = (
        int(found[f"vllm:spec_decode_num_{name}_tokens"].value) for name in ("draft", "accepted")
    )
    return drafted, accepted


def ask_again(engine: Engine, tier: str, seed: object = "again") -> list[tuple[Told, Told]]:
    """(computed, loaded) of prompts and of the turns that follow them."""
    found = []
    for number in range(PROMPTS):
        prompt = random_tokens(("drafts", tier, seed, number), LENGTH)
        first = tell(engine, prompt)
        turn = [*prompt, *first.answer.tokens, *random_tokens(("turn", number), 45)]
        for asked, told in ((prompt, first), (turn, None)):
            if tier == "nvme":
                engine.evict_dram()
            checks.forget(engine)
            loaded = tell(engine, asked)
            found.append((told or tell(engine, asked, salt=f"{seed} {tier} {number}"), loaded))
    return found


def kv_of(engine: Engine, prompt: Tokens, salt: str | None) -> tuple[int, list[list[bytes]]]:
    """(tokens that were found, KV of each layer and block) as the answer begins."""
    number = engine.submit(prompt, max_tokens=32, salt=salt)
    engine.wait_for(lambda: bool(engine.answers(number)), engine.step)
    found = engine.answers(number)[0].cached_tokens
    (layers,) = engine.kv(engine.block_ids(number)[: len(prompt) // BLOCK])
    engine.finish(number)
    engine.drain()
    return found, layers


def differences(engine: Engine, prompt: Tokens, salt: str) -> tuple[int, list[list[float]]]:
    """(tokens that were found, by layer and block what differs from computed KV)."""
    checks.forget(engine)
    found, loaded = kv_of(engine, prompt, None)
    _, computed = kv_of(engine, prompt, salt)
    return found, [
        [_distance(a, b) for a, b in zip(here, there, strict=True)]
        for here, there in zip(loaded, computed, strict=True)
    ]


def _distance(a: bytes, b: bytes) -> float:
    return float(np.abs(np.frombuffer(a, np.float32) - np.frombuffer(b, np.float32)).max())


def branch(engine: Engine, seed: str) -> tuple[int, list[list[float]]]:
    """Another goes on in its own way where a chunk and a block end."""
    prompt = random_tokens(("branch", seed), LENGTH)
    engine.ask(prompt, max_tokens=1)
    other = [*prompt[:SHARED], *random_tokens(("other", seed), 300)]
    assert other[SHARED] != prompt[SHARED]
    return differences(engine, other, f"branch {seed}")


def turn(engine: Engine, seed: str) -> tuple[int, list[list[float]]]:
    """What follows an answer of several blocks, in which some guesses were accepted."""
    prompt = random_tokens(("short", seed), 500)
    first = engine.ask(prompt, max_tokens=600)
    follows = [*prompt, *first.tokens, *random_tokens(("follows", seed), 150)]
    return differences(engine, follows, f"turn {seed}")


def chunked(engine: Engine) -> tuple[int, list[list[float]]]:
    """A prompt whose prefill is cut into steps that are no blocks, and what follows it."""
    prompt = random_tokens("steps", LENGTH)
    usual = engine.scheduler.max_num_scheduled_tokens
    engine.scheduler.max_num_scheduled_tokens = STEP
    try:
        engine.ask(prompt, max_tokens=1)
    finally:
        engine.scheduler.max_num_scheduled_tokens = usual
    return differences(engine, [*prompt, *random_tokens("more", 200)], "steps")


def crowd(engine: Engine) -> list[tuple[int, int, float]]:
    """More than HBM holds, some of it given up in mid-answer. Of what follows each that was
    answered: (its length, tokens that were found, what differs at most)."""
    prompts = [random_tokens(("crowd", n), 600 + 30 * n) for n in range(8)]
    numbers = [engine.submit(prompt, max_tokens=300) for prompt in prompts]
    engine.wait_for(lambda: sum(map(bool, map(engine.answers, numbers))) > 4, engine.step)
    for number in numbers[:2]:
        engine.abort(number)
    answers = engine.finish(*numbers[2:])
    assert checks.preemptions(engine) > 0
    found = []
    for n, (prompt, answer) in enumerate(zip(prompts[2:], answers, strict=True)):
        follows = [*prompt, *answer.tokens, *random_tokens(("after", n), 140)]
        stored, layers = differences(engine, follows, f"crowd {n}")
        found.append((len(follows) - 140, stored, max(map(max, layers))))
    return found


def own_hits(engine: Engine, tier: str) -> list[tuple[Told, Told]]:
    """As ask_again(), from vLLM's own cache, where there is no store."""
    found = []
    for number in range(PROMPTS):
        prompt = random_tokens(("drafts", tier, "again", number), LENGTH)
        first = tell(engine, prompt)
        turn = [*prompt, *first.answer.tokens, *random_tokens(("turn", number), 45)]
        found += [(first, tell(engine, prompt))]
        found += [(tell(engine, turn, salt=f"own {number}"), tell(engine, turn))]
    return found


def come_back(engine: Engine) -> Told:
    """A prompt that an engine before this one may have left."""
    return tell(engine, random_tokens("comes back", LENGTH))


def leave(engine: Engine) -> Told:
    told = come_back(engine)
    engine.settle()
    return told


# ---- tests -------------------------------------------------------------------------------------


def check(pairs: list[tuple[Told, Told]]) -> None:
    for computed, loaded in pairs:
        found, length = loaded.answer.cached_tokens, LENGTH
        print(f"{found} found, rates {computed.rate:.2f} {loaded.rate:.2f}")
        assert found > length - 3 * GRAIN_TOKENS
        assert drift(computed.answer, loaded.answer) < ROUNDING
        assert loaded.answer.tokens == computed.answer.tokens
    computed_rate, loaded_rate = rates(pairs)
    assert loaded_rate >= computed_rate


def rates(pairs: list[tuple[Told, Told]]) -> tuple[float, float]:
    """Accepted of all guesses, (computed, loaded)."""
    both = zip(*pairs, strict=True)
    first, second = (sum(t.accepted for t in x) / sum(t.drafted for t in x) for x in both)
    return first, second


@pytest.mark.parametrize("tier", ["nvme", pytest.param("dram", marks=pytest.mark.long)])
def test_answers_and_guesses(engine: EngineHost, method: str, tier: str) -> None:
    pairs = engine.call(ask_again, tier)
    check(pairs)
    computed, _ = rates(pairs)
    assert computed == 1.0 if method == "draft_model" else 0.2 < computed < 0.9


def test_kv_of_a_branch(engine: EngineHost, method: str) -> None:
    """The last token's is an EAGLE head's only where the next token is the same, too."""
    found, layers = engine.call(branch, "right")
    assert found == (SHARED - GRAIN_TOKENS if method == "eagle" else SHARED)
    assert max(map(max, layers)) < SAME


def test_kv_of_answers(engine: EngineHost) -> None:
    found, layers = engine.call(turn, "right")
    assert found > 1_000
    assert max(map(max, layers)) < SAME


@pytest.mark.parametrize(
    "fault", ["skipped layer", pytest.param("unsaved layer", marks=pytest.mark.long)]
)
def test_wrong_kv_of_drafts_costs_guesses_and_no_answer(engine: EngineHost, fault: str) -> None:
    """And the checks see it: the last layer is the drafts'."""
    pairs = engine.call_with_fault(fault, ask_again, "dram", fault)
    computed, loaded = rates(pairs)
    print(f"{fault}: rates {computed:.2f} {loaded:.2f}")
    assert loaded < computed / 2
    assert all(a.answer.tokens == b.answer.tokens for a, b in pairs)


def test_a_last_token_that_is_offered_is_seen(engine: EngineHost, method: str) -> None:
    if method == "draft_model":
        pytest.skip("its KV depends on no later token")
    found, (model, head) = engine.call_with_fault("last token offered", branch, "wrong")
    assert found == SHARED
    assert max(model) < SAME, "the answer is right"
    assert head[SHARED // BLOCK - 1] > SAME


def test_kv_of_a_prefill_in_steps(engine: EngineHost, method: str) -> None:
    """vLLM 0.32 itself takes the prompt's last token for the one behind a step's end: there the
    head's KV is that of no text."""
    found, (*model, drafts) = engine.call(chunked)
    assert found > LENGTH - 3 * GRAIN_TOKENS
    assert max(map(max, model)) < SAME
    ends = {(end - 1) // BLOCK for end in range(STEP, found, STEP)}
    wrong = {block for block, distance in enumerate(drafts) if distance > SAME}
    assert wrong == (ends if method == "eagle" else set())


def test_nothing_is_held_afterwards(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_preemption_and_aborts(method: str, start_engine: StartEngine, models: Path) -> None:
    engine = start_engine(**settings(models, method, blocks=36))
    for length, found, difference in engine.call(crowd):
        print(f"{found} of {length} found, {difference:.1e}")
        assert found > length - 3 * GRAIN_TOKENS
        assert difference < SAME
    engine.call(Engine.check_quiet)


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_as_many_guesses_as_behind_vllms_own_hits(
    method: str, start_engine: StartEngine, models: Path
) -> None:
    pairs = start_engine(**settings(models, method)).call(ask_again, "dram")
    alone = start_engine(**settings(models, method, store=None)).call(own_hits, "dram")
    for (_, ours), (_, own) in zip(pairs, alone, strict=True):
        print(f"found {ours.answer.cached_tokens}, vLLM {own.answer.cached_tokens}")
        assert ours.answer.tokens == own.answer.tokens
        assert ours.answer.cached_tokens >= own.answer.cached_tokens > 0
    (_, ours_rate), (_, own_rate) = rates(pairs), rates(alone)
    print(f"rates {ours_rate:.3f}, vLLM {own_rate:.3f}")
    assert ours_rate >= own_rate


@pytest.mark.long
def test_restart(start_engine: StartEngine, models: Path, tmp_path: Path) -> None:
    """What depends on the drafts is found by those who make the same ones, and by nobody else."""
    store = tmp_path / "store"
    left = start_engine(**settings(models, store=store)).call(leave)
    again = start_engine(**settings(models, store=store)).call(come_back)
    assert again.answer.cached_tokens > LENGTH - 3 * GRAIN_TOKENS
    assert again.answer.tokens == left.answer.tokens
    assert again.accepted == left.accepted
    fewer = settings(models, store=store, drafts={"num_speculative_tokens": 2})
    found = start_engine(**fewer).call(come_back)
    assert found.answer.cached_tokens > LENGTH - 3 * GRAIN_TOKENS
    assert found.answer.tokens == left.answer.tokens
    another = make_eagle_head(models / "another head", 2 * NOISE)
    found = start_engine(**settings(models, store=store, drafts={"model": str(another)})).call(
        come_back
    )
    assert found.answer.cached_tokens == 0
    assert found.answer.tokens == left.answer.tokens
