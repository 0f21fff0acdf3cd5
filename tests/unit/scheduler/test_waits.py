# SPDX-License-Identifier: Apache-2.0
"""Who of those that wait for KV is looked at again in a step: few, each in turn, none for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.scheduler.costs import Costs
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.media import MediaNames, RequestMedia
from attnstore_vllm.scheduler.offer import Offers
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.waits import EMPTY_STEP_WAIT_S, ROUND_S, WAITS_MAX, Waits
from tests.vllm_objects import Clock, as_store, request

DEADLINE_S = 1.0


class Nothing:
    """A store in which nothing ever comes."""

    needs = ()

    def __init__(self) -> None:
        self.residency = SimpleNamespace(num_expired=0)
        self.missing: set[str] = set()
        self.slept: list[int] = []
        self.comes = False

    def has_missing(self, name: str) -> bool:
        return name in self.missing

    def wait_for_any(self, pieces: list[Any], timeout_s: float, asked: list[Any]) -> bool:
        self.slept.append(len(pieces))
        return self.comes


class Rig:
    """Waits over a store in which nothing ever comes."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.clock = Clock()
        self.store = as_store(Nothing())
        costs = Costs(self.store, deadline_s, computes_if_sooner=True, clock=self.clock)
        self.alone = ""
        self.waits = Waits(self.store, costs, self.clock, as_store(self))

    def is_alone(self, name: str) -> bool:
        """As vLLM's queue says it."""
        return name == self.alone

    def request(self, name: str) -> RequestState:
        self.store.missing.add(name)
        asks = request(name)
        media = RequestMedia(MediaNames(), asks)
        state = RequestState(asks, namespace=b"", tenant=b"", chunk_tokens=256, media=media)
        coming: Any = [name]
        state.waiting.coming = coming
        return state

    def step(self, states: list[RequestState], computed: str = "") -> list[RequestState]:
        """vLLM goes through its queue. Returns those that were looked at.

        Args:
            computed: names of those that are told to compute.
        """
        looked = []
        for state in states:
            if not self.waits.goes_on(state):
                looked.append(state)
                if state.request.request_id in computed.split():
                    self.waits.answered(state)
                else:
                    self.waits.add(state, state.waiting.coming)
        self.waits.end_step(is_empty=True)
        return looked


@pytest.fixture
def rig() -> Rig:
    return Rig()


def names(states: list[RequestState]) -> str:
    return "".join(state.request.request_id for state in states)


@pytest.mark.parametrize("step_s", [0.001, 0.2])
def test_all_are_looked_at_in_turn_a_few_in_a_step(step_s: float) -> None:
    rig = Rig(deadline_s=100.0)
    states = [rig.request(str(n)) for n in range(10)]
    turns = []
    for _ in range(12):
        turns.append(names(rig.step(states)))
        rig.clock.now += step_s
    a_round = ["0123", "4567", "89"]
    assert turns == (a_round * 4 if step_s >= ROUND_S else a_round + [""] * 9)
    assert rig.store.slept == [WAITS_MAX] * 12, "a step without work waits for those at the front"
    rig.clock.now += ROUND_S
    later = [names(rig.step(states)) for _ in range(4)]
    assert "0123" in later, "and again"


def test_those_whose_kv_is_on_its_way_take_no_looks_from_others(rig: Rig) -> None:
    coming = [rig.request(f"c{n}") for n in range(6)]
    for state in coming:
        rig.store.missing.discard(state.request.request_id)
    states = [rig.request(str(n)) for n in range(3)]
    assert rig.step([*coming, *states]) == [*coming, *states]


def test_who_has_an_answer_takes_no_looks_from_others(rig: Rig) -> None:
    """How many start in a step is for vLLM to say, also where all have something on NVMe."""
    states = [rig.request(str(n)) for n in range(60)]
    computed = " ".join(str(n) for n in range(50))
    assert rig.step(states, computed) == states[: 50 + WAITS_MAX]
    assert not states[0].waiting.coming, "what it wanted is not kept alive by it"


def test_an_answer_is_not_forgotten_while_vllm_has_no_room(rig: Rig) -> None:
    states = [rig.request(str(n)) for n in range(3)]
    for _ in range(10):
        assert states[0] in rig.step(states, "0")
        rig.clock.now += 0.001
    assert states[0].waiting.since is None
    assert rig.step(states[:1]) == states[:1]  # now it should wait
    assert rig.step(states[:1]) == []


def test_the_deadline_runs_from_the_first_ask_for_all(rig: Rig) -> None:
    states = [rig.request(str(n)) for n in range(40)]
    rig.step(states)
    assert {state.waiting.deadline for state in states[WAITS_MAX:]} == {50.0 + DEADLINE_S}
    assert {state.waiting.since for state in states[WAITS_MAX:]} == {50.0}
    rig.clock.now += DEADLINE_S
    assert not any(rig.waits.goes_on(state) for state in states[WAITS_MAX:])


def test_what_is_on_its_way_is_looked_at_whoever_waits(rig: Rig) -> None:
    states = [rig.request(str(n)) for n in range(10)]
    rig.step(states)
    rig.store.missing.discard("9")
    assert states[9] in rig.step(states)


def test_who_has_its_kv_from_another_connector_is_never_told_to_wait(rig: Rig) -> None:
    states = [rig.request(str(n)) for n in range(WAITS_MAX + 4)]
    states[-1].is_at_once = True
    for _ in range(3):
        assert states[-1] in rig.step(states)
        rig.clock.now += 0.001


def test_a_request_that_is_alone_is_waited_for_until_something_comes(rig: Rig) -> None:
    state = rig.request("a")
    rig.waits.add(state, state.waiting.coming)
    assert not rig.waits.lingers(state), "others run or wait"
    assert rig.store.slept == []
    rig.alone = "a"
    assert not rig.waits.lingers(state), "nothing has come"
    rig.store.comes = True
    assert rig.waits.lingers(state)
    assert rig.store.slept == [1, 1]
    assert not rig.waits.lingers(state), "it has been looked at since, and waits for nothing"


def test_a_step_waits_no_longer_for_one_that_is_alone(rig: Rig) -> None:
    rig.alone = "a"
    state = rig.request("a")
    slept: list[float] = []

    def wait(pieces: list[Any], timeout_s: float, asked: list[Any]) -> bool:
        slept.append(timeout_s)
        rig.clock.now += timeout_s
        return False

    rig.store.wait_for_any = wait
    rig.waits.add(state, state.waiting.coming)
    assert not rig.waits.lingers(state)
    rig.waits.end_step(is_empty=True)
    assert slept == [EMPTY_STEP_WAIT_S]
    rig.waits.add(state, state.waiting.coming)
    rig.waits.end_step(is_empty=True)
    assert slept == [EMPTY_STEP_WAIT_S] * 2, "each step has its own"


def test_a_request_is_counted_with_its_first_look_and_not_before(rig: Rig) -> None:
    """Without one nobody knows what it wants: counted then, it would want nothing for ever."""
    anything: Any = SimpleNamespace(rank_bytes=1, chunk_tokens=1, block_tokens=1)
    offers = Offers(rig.store, anything, anything, rig.waits, anything, anything, anything)
    chunk: Any = SimpleNamespace(dram=SimpleNamespace(state=State.ABSENT), behind={"nvme": None})
    states = [rig.request(str(n)) for n in range(WAITS_MAX + 1)]
    last, stats = states[-1], StepStats()
    last.waiting.coming = ()
    for state in states[:-1]:
        assert not rig.waits.goes_on(state)
        rig.waits.add(state, state.waiting.coming)
    assert offers.ask(last, 0, stats) == (None, False)
    assert not last.counted.wanted
    rig.waits.end_step(is_empty=False)
    assert not rig.waits.goes_on(last), "its look"
    rig.waits.add(last, [Piece(chunk, 0, 700)])
    assert offers.ask(last, 0, stats) == (None, False)
    assert last.counted.wanted
    assert stats.data["counters"] == {"wanted_tokens:nvme": 700}


def test_a_request_whose_answer_is_awaited_is_not_looked_up_before(rig: Rig) -> None:
    """It was when it came: a look tells no more before the answer, and costs what one costs."""
    anything: Any = SimpleNamespace(
        rank_bytes=1, chunk_tokens=1, block_tokens=1, leaves=lambda _: 1
    )
    offers = Offers(rig.store, anything, anything, rig.waits, anything, anything, anything)
    state, looks = rig.request("one"), list[str]()
    nothing: dict[str, Any] = {"cache_salt": None, "kv_transfer_params": None, "mm_features": []}
    state.request = SimpleNamespace(
        request_id="one", num_tokens=9, all_token_ids=[], resumable=False, **nothing
    )
    state.adapter = b""
    rig.store.missing.clear()
    question: Any = SimpleNamespace(is_over=False, clock=rig.clock, until=rig.clock.now + 1.0)
    lookup: Any = state.lookup
    lookup.asked = (question,)

    def find(*args: Any, request_id: str, visit: Any) -> list[Piece]:
        looks.append(request_id)
        lookup.asked = (SimpleNamespace(is_over=False, clock=rig.clock, until=9e9),)  # anew
        return []

    rig.store.find = find
    assert offers.ask(state, 0, StepStats()) == (None, False)
    assert looks == []
    rig.waits.end_step(is_empty=True)
    assert rig.store.slept == [0], "a step that computes nothing waits for the answer"
    rig.clock.now += 2.0
    assert not rig.waits.awaits(state)
    assert lookup.asked == (), "what is over is looked at once"
    assert offers.ask(state, 0, StepStats()) == (None, False)
    assert looks == ["one"], "which has asked once more"
