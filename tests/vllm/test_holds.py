# SPDX-License-Identifier: Apache-2.0
"""Holds on a real engine, with what it has learned of its own speed.

Goal: what is held is found by its session alone, and nothing that vLLM does to its cache leaves a
hold behind. Time between turns is given; how long computing takes is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import SMALL
from attnstore_vllm.policy.holding import ReturnCost
from attnstore_vllm.scheduler.held_blocks import HeldBlocks
from attnstore_vllm.scheduler.holds import Holds
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import BLOCK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

SHAPE = replace(SMALL, layers=2)
BLOCKS = 40
LENGTH = 3 * BLOCK + 20
GAP_S = 0.02
SALTED = {"share": "salted"}
"""Of requests without a salt tiers have nothing: what HBM loses is computed again."""
SALT = "a tenant"
HOLDING = {**SALTED, "holding": {"longest": "300s"}, "compute_if_sooner": True}
EXACT = {"dtype": "float32"}
"""Prompts are split where hits end: so that no token hangs on rounding."""


def holds_of(engine: Engine) -> Holds:
    holds = engine.side.holds
    assert holds is not None
    return holds


def set_clock(engine: Engine, ahead_s: float) -> None:
    """The time of holds stands still, but for this."""
    holds = holds_of(engine)
    now = (holds.clock() if getattr(holds, "is_stopped", False) else 0.0) + ahead_s
    holds.clock, holds.is_stopped = lambda: now, True  # type: ignore[attr-defined]


def turn(engine: Engine, text: list[int], seed: object, **how: Any) -> tuple[list[int], Answer]:
    """Ask for a text with some more tokens, which an answer may end. (all tokens, answer)"""
    prompt = [*text, *random_tokens(seed, LENGTH if not text else 40)]
    answer = engine.ask(prompt, max_tokens=8, **how)
    return [*prompt, *answer.tokens], answer


def learn(engine: Engine) -> None:
    """Sessions come back soon. What steps cost is known before."""
    set_clock(engine, 0.0)
    for number in range(30):
        engine.ask(random_tokens(("step", number), 40 + 50 * (number % 9)))
    for number in range(10):
        text, _ = turn(engine, [], ("early", number))
        set_clock(engine, GAP_S)
        turn(engine, text, ("early again", number))
    holds_of(engine).clear()


def overrun(engine: Engine) -> None:
    """More than all of HBM, by others. Nothing tells that a session is away longer than usual."""
    for number in range(2 * BLOCKS // 8):
        engine.ask(random_tokens(("other", number), 8 * BLOCK - 20))


def come_back(engine: Engine) -> Mapping[str, Any]:
    if engine.side.holds is not None:
        forget_returns(engine)
    text, _ = turn(engine, [], "one")
    held = holds_of(engine).held_tokens if engine.side.holds is not None else 0
    overrun(engine)
    _, again = turn(engine, text, "two")
    engine.drain()
    return {"held": held, "found": again.cached_tokens, "whole": len(text) // BLOCK * BLOCK}


def talk(engine: Engine) -> tuple[list[Answer], int]:
    """Six sessions of four turns, two at a time, with gaps. (answers, holds that were made)"""
    is_on, made, last = engine.side.holds is not None, 0, set[int]()
    texts, found = [list[int]() for _ in range(6)], []
    for round_ in range(4):
        for pair in (0, 2, 4):
            asked = {}
            for one in (pair, pair + 1):
                size = LENGTH if not round_ else 150
                texts[one] += random_tokens(("talk", one, round_), size)
                asked[one] = engine.submit(texts[one], max_tokens=8, salt=SALT)
            for one, answer in zip(asked, engine.finish(*asked.values()), strict=True):
                texts[one] += answer.tokens
                found.append(answer)
            if is_on:
                set_clock(engine, GAP_S)
                now = {*holds_of(engine).held.sessions}
                made, last = made + len(now - last), now
    engine.drain()
    if is_on:
        holds_of(engine).clear()
    engine.check_quiet()
    return found, made


def reset(engine: Engine, how: str) -> tuple[bool, int, int, int]:
    """Whether it was done, tokens held before and after, and blocks that are still used then."""
    is_done = True
    forget_returns(engine)
    turn(engine, [], ("reset", how))
    holds = holds_of(engine)
    before = holds.held_tokens
    if how == "reset":
        is_done = engine.llm.reset_prefix_cache()
    elif how == "sleep":
        engine.llm.sleep(1)
        engine.llm.wake_up()
    else:
        engine.core.pause_scheduler(mode="abort", clear_cache=how == "pause and clear")
        engine.core.resume_scheduler()
    after = holds.held_tokens
    pool = engine.scheduler.kv_cache_manager.block_pool
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return is_done, before, after, used


def let_go(engine: Engine) -> None:
    set_clock(engine, 1e6)
    engine.ask(random_tokens("later", 40))
    holds_of(engine).clear()
    engine.check_quiet()


def costs(engine: Engine) -> list[float]:
    return [holds_of(engine).computing_s(tokens) for tokens in (0, 500, 1000)]


def told(engine: Engine, tier: str) -> list[tuple[int, int, float]]:
    """Of returns whose KV is in this tier alone: (history, tokens of it there, seconds to load)."""
    holds, seen = holds_of(engine), list[tuple[int, int, float]]()
    find = holds.found

    def found(request_id: str, tokens: int, load_s: float) -> None:
        find(request_id, tokens, load_s)
        arrived = holds.waiting[request_id]
        seen.append((arrived.history, arrived.loaded_tokens, arrived.load_s))

    for number in range(6):
        text, _ = turn(engine, [], (tier, number), salt=SALT)
        engine.settle()
        while holds.make_room("another"):
            pass
        away = holds.away.copy()
        engine.forget_hbm()
        holds.away.update(away)  # as where others had taken its blocks
        if tier == "nvme":
            engine.evict_dram()
        holds.found = found  # type: ignore[method-assign]
        turn(engine, text, (tier, number, "again"), salt=SALT)
        holds.found = find  # type: ignore[method-assign]
        holds.clear()
    return seen


def forget_returns(engine: Engine) -> None:
    """What they have cost on this engine, whose tests before have returns of all kinds."""
    holding = holds_of(engine).holding
    assert holding is not None
    holding.return_cost = ReturnCost()


def leave_held(engine: Engine) -> int:
    """Tokens."""
    forget_returns(engine)
    turn(engine, [], "last")
    return holds_of(engine).held_tokens


def is_held(engine: Engine, seed: object) -> bool:
    turn(engine, [], seed)
    found = holds_of(engine).held_tokens > 0
    holds_of(engine).clear()
    return found


def leaves_nothing(engine: Engine, hints: dict[str, bool]) -> bool:
    """Whether nothing is held of a request with these hints, though as much pays without them."""
    forget_returns(engine)
    assert is_held(engine, "without hints")
    given = {"extra_args": {"kv_transfer_params": {"attnstore": hints}}}
    turn(engine, [], ("hints", *hints), **given)
    found = holds_of(engine).held_tokens == 0
    holds_of(engine).clear()
    return found


def cheap_returns(engine: Engine) -> tuple[bool, bool]:
    """Whether a session is held before and after returns that DRAM has."""
    forget_returns(engine)
    before = is_held(engine, "before")
    told(engine, "dram")
    return before, is_held(engine, "after")


def wrapped(engine: Engine) -> list[str]:
    """Names of vLLM's objects that are not their class's own."""
    manager = engine.scheduler.kv_cache_manager
    pairs = [(manager, "allocate_slots")]
    pairs += [(manager.block_pool, n) for n in ("touch", "free_blocks", "reset_prefix_cache")]
    return [
        name
        for one, name in pairs
        if getattr(getattr(one, name), "__func__", None) is not getattr(type(one), name)
    ]


def cascades(engine: Engine) -> list[str | None]:
    """Why nothing is held, without cascade attention and with it. No argument of 0.32 sets it."""
    from attnstore_vllm.connector import facts

    config = engine.scheduler.vllm_config
    found = []
    for config.model_config.disable_cascade_attn in (False, True):
        found.append(facts.reason_for_no_holds(config))
    return found[::-1]


def check_return(seen: Mapping[str, Any]) -> None:
    assert seen["held"] == seen["whole"] > 0
    assert seen["found"] == seen["whole"], "a return has not found what was held for it"


def check_reset(is_done: bool, before: int, after: int, used: int) -> None:
    assert before >= LENGTH // BLOCK * BLOCK
    assert is_done, "the reset was refused"
    assert (after, used) == (0, 0)


def with_fault(
    engine: Engine, fault: Callable[[Holds, pytest.MonkeyPatch], None], check: Any, *args: str
) -> Any:
    """What a check of this engine sees while the fault is there."""
    holds = holds_of(engine)
    holds.clear()
    with pytest.MonkeyPatch.context() as patch:
        fault(holds, patch)
        seen = check(engine, *args)
    holds.clear()
    engine.check_quiet()
    return seen


def no_user(holds: Holds, patch: pytest.MonkeyPatch) -> None:
    """A hold is counted, and does not use its blocks."""
    idle = SimpleNamespace(blocks=holds.pool.blocks, touch=list, free_blocks=list)
    patch.setattr(holds, "held", HeldBlocks(idle))


def no_name(holds: Holds, patch: pytest.MonkeyPatch) -> None:
    """Held blocks lose their names, so a return does not find them."""
    hold = holds.held.hold

    def nameless(session: int, names: Sequence[object], blocks: Sequence[int], size: int) -> None:
        hold(session, names, blocks, size)
        holds.pool.evict_blocks({*blocks[:size]})

    patch.setattr(holds.held, "hold", nameless)


def kept_in_reset(holds: Holds, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holds, "clear", lambda: None)


@pytest.fixture(scope="module")
def plain(start_engine: StartEngine) -> tuple[Mapping[str, Any], Any, list[str]]:
    """An engine without holding: a return, a talk, and what it wraps."""
    host = start_engine(shape=SHAPE, blocks=BLOCKS, vllm=EXACT, settings=SALTED)
    return host.call(come_back), host.call(talk), host.call(wrapped)


@pytest.fixture(scope="module")
def engine(plain: object, start_engine: StartEngine) -> EngineHost:
    host = start_engine(shape=SHAPE, blocks=BLOCKS, vllm=EXACT, settings=HOLDING)
    host.call(learn)
    return host


def test_a_return_finds_what_others_have_evicted_without(
    plain: tuple[Mapping[str, Any], Any, Any], engine: EngineHost
) -> None:
    without, held = plain[0], engine.call(come_back)
    assert without["found"] == without["held"] == 0
    check_return(held)


def test_answers_are_those_without(
    plain: tuple[Any, tuple[list[Answer], int], Any], engine: EngineHost
) -> None:
    (expected, none), (found, made) = plain[1], engine.call(talk)
    assert not none and made >= 6
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


def test_without_holding_nothing_of_vllm_is_wrapped(
    plain: tuple[Any, Any, list[str]], engine: EngineHost
) -> None:
    assert plain[2] == []
    assert engine.call(wrapped) == ["allocate_slots", "reset_prefix_cache"]


def test_computing_is_what_was_measured(engine: EngineHost) -> None:
    none, some, more = engine.call(costs)
    assert none == 0
    assert 1e-4 < some < 60
    assert 1.5 * some < more < 6 * some


@pytest.mark.parametrize("how", ["reset", "sleep", "pause and clear"])
def test_what_empties_the_cache_lets_go_of_all(engine: EngineHost, how: str) -> None:
    check_reset(*engine.call(reset, how))


def test_a_pause_keeps_what_is_held(engine: EngineHost) -> None:
    _, before, after, used = engine.call(reset, "pause")
    assert before == after == used * BLOCK > 0
    engine.call(let_go)


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_what_tiers_have_is_told(engine: EngineHost, tier: str) -> None:
    seen = engine.call(told, tier)
    assert len(seen) >= 6
    assert all(history == tokens == LENGTH // BLOCK * BLOCK for history, tokens, _ in seen)
    assert (seen[-1][2] > 0) is (tier == "nvme")


@pytest.mark.parametrize("hints", [{"store": False}, {"ended": True}])
def test_what_is_to_leave_nothing_is_not_held(engine: EngineHost, hints: dict[str, bool]) -> None:
    assert engine.call(leaves_nothing, hints)


def test_nothing_is_held_that_dram_brings_back_at_once(engine: EngineHost) -> None:
    before, after = engine.call(cheap_returns)
    assert before and not after


@pytest.mark.parametrize("fault", [no_user, no_name])
def test_a_return_that_does_not_find_its_blocks_is_seen(engine: EngineHost, fault: Any) -> None:
    seen = engine.call(with_fault, fault, come_back)
    with pytest.raises(AssertionError, match="not found what was held"):
        check_return(seen)


def test_holds_that_a_reset_leaves_are_seen(engine: EngineHost) -> None:
    seen = engine.call(with_fault, kept_in_reset, reset, "reset")
    with pytest.raises(AssertionError, match="the reset was refused"):
        check_reset(*seen)


def test_an_engine_ends_while_blocks_are_held(engine: EngineHost) -> None:
    """The last one that uses this engine."""
    assert engine.call(leave_held) > 0
    engine.close()
    assert engine.exit_code == 0


def test_holding_is_refused_with_a_sentence(start_engine: StartEngine) -> None:
    host = start_engine(
        shape=SHAPE, blocks=BLOCKS, vllm={**EXACT, "enable_prefix_caching": False},
        settings=HOLDING,
    )  # fmt: skip
    assert "holding is off, since vLLM's prefix cache is off" in host.log_text()
    assert host.call(wrapped) == []
    without, beside = host.call(cascades)
    assert without is None
    assert beside is not None and beside.startswith("cascade attention is on")
