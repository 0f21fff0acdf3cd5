# SPDX-License-Identifier: Apache-2.0
"""Kinds of requests: which of them use stored KV, which leave some, and who may share it."""

from __future__ import annotations

import pytest

from attnstore_vllm.index.prefix import whole_blocks
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import BLOCK, CHUNK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.stored import chunks, foreign_chunks, stored_tokens

NONE = {"dram": 0, "nvme": 0}


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineHost:
    return start_engine(vllm={"enable_prompt_embeds": True})


def num_saved(engine: Engine) -> int:
    engine.settle()
    return engine.store.figures().counts.get("saved", 0)


def again(engine: Engine, prompt: list[int], **how: object) -> tuple[Answer, dict[str, int]]:
    """The answer when HBM is empty, and what was loaded for it."""
    engine.forget_hbm()
    engine.loaded()
    return engine.ask(prompt, **how), engine.loaded()


# ---- short ones -----------------------------------------------------------------------------


def short_prompts(engine: Engine) -> list[tuple[int, int, bool]]:
    """(tokens, loaded, same answer) of prompts shorter than a chunk."""
    found = []
    for length in (1, 2, 15, 16, 17, 100, 130, 250):
        prompt = random_tokens(("short", length), length)
        first = engine.ask(prompt, max_tokens=5)
        second, loaded = again(engine, prompt, max_tokens=5)
        found.append((length, loaded["dram"], first.tokens == second.tokens))
    return found


def test_shorter_than_a_chunk(engine: EngineHost) -> None:
    """They leave a tail, if it is worth it, and come back from it."""
    for length, loaded, same in engine.call(short_prompts):
        assert same, length
        # 4 of the answer's 5 tokens have KV: no whole block lies between prompt and end.
        assert loaded == whole_blocks(length - 1)


def recomputed_beside_hbm(engine: Engine) -> tuple[float, float]:
    """Recomputations after a hit in HBM that leaves few tokens, and after one without its KV."""
    counts = []
    for rest in (11, 100):
        longer = random_tokens(("beside", rest), 3 * BLOCK)
        engine.ask(longer)
        prompt = longer[: 2 * BLOCK + rest]
        if rest == 100:  # gone between the request's arrival and its turn
            number = engine.submit(prompt)
            engine.store.drop(chunks(engine))
            engine.finish(number)
        else:
            engine.ask(prompt)
        engine.ask(random_tokens("nudge", 5))
        counts.append(engine.metric("recomputations", "lost"))
    return counts[0], counts[1]


def test_a_rest_too_short_to_load_is_no_recomputation(engine: EngineHost) -> None:
    short, lost = engine.call(recomputed_beside_hbm)
    assert short == 0
    assert lost == 1


# ---- n answers to one prompt ----------------------------------------------------------------


def three_answers(engine: Engine) -> tuple[list[Answer], list[Answer], dict[str, int], list[int]]:
    prompt = random_tokens("three", 2 * BLOCK + 1)
    how = {"n": 3, "seed": 5, "temperature": 2.0, "max_tokens": 40}
    engine.ask(prompt)

    def ask() -> list[Answer]:
        number = engine.submit(prompt, **how)  # type: ignore[arg-type]
        engine.wait_for(lambda: number in engine.done, engine.step)
        found = engine.answers(number)
        engine.drain()
        return found

    in_hbm = ask()
    engine.forget_hbm()
    engine.loaded()
    stored = ask()
    sequences = [(None, [*prompt, *answer.tokens]) for answer in in_hbm]
    return in_hbm, stored, engine.loaded(), [stored_tokens(engine, *s) for s in sequences]


def test_several_answers_to_one_prompt(engine: EngineHost) -> None:
    """The prompt is loaded once and shared in HBM; each answer leaves KV of its own."""
    in_hbm, stored, loaded, kept = engine.call(three_answers)
    assert [a.content for a in in_hbm] == [a.content for a in stored]
    assert len({a.tokens for a in in_hbm}) == 3, "the seeds are to differ"
    assert loaded == {"dram": 2 * BLOCK, "nvme": 0}
    assert kept == [2 * BLOCK + 1 + 39] * 3


# ---- who neither uses nor leaves KV ---------------------------------------------------------


def with_prompt_logprobs(engine: Engine) -> tuple[dict[str, int], int, int]:
    """(loaded, chunks left, chunks left of a prompt that was stored)."""
    stored = random_tokens("stored", 600)
    engine.ask(stored)
    before = num_saved(engine)
    # With a hit vLLM has no candidates for what it did not compute: 0.30 cannot write them as text.
    how = {"prompt_logprobs": 2, "detokenize": False}
    _, loaded = again(engine, stored, **how)
    same = num_saved(engine) - before
    again(engine, random_tokens("new", 600), **how)
    return loaded, num_saved(engine) - before, same


def test_prompt_logprobs_neither_use_nor_leave_kv(engine: EngineHost) -> None:
    assert engine.call(with_prompt_logprobs) == (NONE, 0, 0)


def test_prompt_logprobs_that_leave_kv_are_seen(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)
    _, left, _ = engine.call_with_fault("nobody bypasses", with_prompt_logprobs)
    assert left == 3


def with_embeddings(engine: Engine) -> tuple[Answer, Answer, Answer, dict[str, int], int]:
    """Embeddings of two texts of one length. There are no tokens to tell them apart."""
    import torch

    def embeddings(seed: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(seed)
        shape = (2 * CHUNK + 40, engine.spec.shape.hidden)
        return {"prompt_embeds": torch.randn(shape, generator=generator).to(torch.bfloat16)}

    before = num_saved(engine)
    engine.loaded()
    first = engine.ask(embeddings(1), max_tokens=5)
    engine.forget_hbm()
    second = engine.ask(embeddings(2), max_tokens=5)
    engine.forget_hbm()
    third = engine.ask(embeddings(1), max_tokens=5)
    return first, second, third, engine.loaded(), num_saved(engine) - before


def test_embeddings_neither_use_nor_leave_kv(engine: EngineHost) -> None:
    first, second, third, loaded, left = engine.call(with_embeddings)
    assert first.content == third.content != second.content
    assert (loaded, left) == (NONE, 0)


# ---- tenants --------------------------------------------------------------------------------

SALTS = (None, "alice", "bob")


def salted(engine: Engine, seed: str) -> list[list[int]]:
    """Tokens that [asking] finds after [storing] has asked the same, by salt."""
    found = []
    for storing in SALTS:
        prompt = random_tokens((seed, storing), 2 * CHUNK + 1)
        engine.ask(prompt, salt=storing)
        row = []
        for asking in SALTS:
            engine.forget_hbm()
            engine.loaded()
            number = engine.submit(prompt, salt=asking, max_tokens=9)
            engine.step()  # after a reset one step looks at the weights
            engine.step()
            row.append(engine.loaded()["dram"])
            engine.abort(number)  # so that it leaves no more than it found
            engine.drain()
        found.append(row)
    return found


def test_a_salt_finds_its_own_kv_only(engine: EngineHost) -> None:
    found = engine.call(salted, "salts")
    # Whoever asks leaves KV under the own salt, but each row asks with each salt once.
    assert found == [
        [2 * CHUNK if asking == storing else 0 for asking in SALTS] for storing in SALTS
    ]


def test_a_salt_that_is_left_out_is_seen(engine: EngineHost) -> None:
    found = engine.call_with_fault("salt left out", salted, "no salts")
    assert found == [[2 * CHUNK] * 3] * 3


# ---- reset ----------------------------------------------------------------------------------


def reset(engine: Engine, seed: str) -> tuple[bool, int, list[dict[str, int]], int]:
    """(success, chunks left, loaded for prompts of each tier, tokens left by one that ran)."""
    prompts = [random_tokens((seed, i), 700) for i in range(3)]
    engine.ask(prompts[0])
    engine.evict_dram()
    engine.ask(prompts[1])
    engine.settle()
    running = engine.submit(prompts[2], max_tokens=300)
    for _ in range(5):
        engine.step()
    worked = engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    left = len(chunks(engine))
    (answer,) = engine.finish(running)
    engine.settle()
    of_running = stored_tokens(engine, None, [*prompts[2], *answer.tokens])
    return worked, left, [again(engine, prompt)[1] for prompt in prompts[:2]], of_running


def test_reset_drops_every_tier(engine: EngineHost) -> None:
    """Also what a request that was running goes on to compute: it began with the old weights."""
    worked, left, loaded, of_running = engine.call(reset, "reset")
    assert worked
    assert left == 0
    assert loaded == [NONE, NONE]
    assert of_running == 0
    engine.call(Engine.check_quiet)


def test_a_reset_without_effect_is_seen(engine: EngineHost) -> None:
    worked, left, loaded, of_running = engine.call_with_fault(
        "reset without effect", reset, "no reset"
    )
    assert worked
    assert left > 0
    assert loaded == [{"dram": 0, "nvme": 688}, {"dram": 688, "nvme": 0}]
    assert of_running > 700


def pause(engine: Engine) -> tuple[int, dict[str, int], Answer]:
    """What a weight update or vLLM's sleep does: pause, which clears vLLM's caches, and resume."""
    prompt = random_tokens("pause", 700)
    engine.ask(prompt)
    engine.settle()
    engine.core.pause_scheduler(mode="abort", clear_cache=True)
    left = len(chunks(engine))
    engine.core.resume_scheduler()
    answer, loaded = again(engine, prompt)
    return left, loaded, answer


def test_a_pause_keeps_every_tier(engine: EngineHost) -> None:
    """The weights are named by what they are: KV of other ones has another name."""
    left, loaded, _ = engine.call(pause)
    assert left > 0
    assert loaded == {"dram": 688, "nvme": 0}


# ---- the end --------------------------------------------------------------------------------


def drop_and_ask(engine: Engine) -> None:
    """All that is stored is dropped; since then there is one prompt."""
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.ask(random_tokens("last", 700))
    engine.settle()


def test_nothing_is_held_and_nothing_else_is_stored(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)
    engine.call(drop_and_ask)
    assert engine.call(foreign_chunks, [(None, random_tokens("last", 700))]) == []


# ---- without vLLM's own prefix cache --------------------------------------------------------


def no_prefix_cache(engine: Engine) -> list[tuple[Answer, Answer, dict[str, int]]]:
    found = []
    for length in (BLOCK + 1, 777, 4 * CHUNK + 1):
        prompt = random_tokens(("plain", length), length)
        first = engine.ask(prompt, max_tokens=30)
        engine.llm.collective_rpc(_poison)
        engine.loaded()
        second = engine.ask(prompt, max_tokens=30)
        found.append((first, second, engine.loaded()))
    return found


def _poison(worker: object) -> None:
    from tests.vllm.engine import poison

    poison(worker)


def test_without_prefix_caching(start_engine: StartEngine) -> None:
    """--no-enable-prefix-caching turns off vLLM's cache; ours is asked for by name, and works."""
    engine = start_engine(vllm={"enable_prefix_caching": False})
    for first, second, loaded in engine.call(no_prefix_cache):
        assert first.cached_tokens == 0
        assert loaded == {"dram": second.cached_tokens, "nvme": 0}
        assert second.cached_tokens > 0
        assert first.tokens == second.tokens
    engine.call(Engine.check_quiet)
