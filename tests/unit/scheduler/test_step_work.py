# SPDX-License-Identifier: Apache-2.0
"""Each number that a client chooses, driven far beyond what is usual: the work of a step stays
within its budget, counted in operations; what is put off is done later, and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.config.settings import TruncationConfig
from attnstore_vllm.hints import PrefetchOrder
from attnstore_vllm.index import prefix
from attnstore_vllm.index.chunk import Chunk, InTier, State
from attnstore_vllm.index.keys import MultimodalSpan, SequenceKeys, root_key
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import NUM_KINDS
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.scheduler.costs import BEYOND_MAX, Costs
from attnstore_vllm.scheduler.lookups import LOOK_TOKENS, ORDERS_MAX, UNKNOWN_MAX
from attnstore_vllm.scheduler.saving import SAVE_TOKENS
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.dram_tier import DramTier
from attnstore_vllm.types import Key
from tests.helpers import NAMESPACE, memory_rig, name_of, sequence_of, tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.vllm_objects import output

BUDGET = 1 << 13
STEP_TOKENS = 4 * CHUNK
"""That vLLM computes of prompts."""
SAVES = BUDGET // SAVE_TOKENS
MANY = 300


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepWorld]:
    world = StepWorld(
        monkeypatch, records=1024, slots=1024, step_budget=BUDGET, step_tokens=STEP_TOKENS
    )
    yield world
    world.close()


def _per_step(tokens: int) -> int:
    """Look-ups of so many tokens that a step has room for."""
    return max(1, BUDGET // (tokens + LOOK_TOKENS))


def _ask_all(world: StepWorld, requests: Sequence[Any]) -> list[list[Any]]:
    """Steps in which vLLM asks for all that have no answer, until all have one. Returns who had an
    answer in each; what a step does is asserted to be within the budget."""
    length = requests[0].num_tokens
    left, answered = list(requests), []
    while left:
        world.counts.clear()
        told = [request for request in left if world.ask(request) is not None]
        left = [request for request in left if request not in told]
        answered.append(told)
        world.end_step(*told)  # the others wait; nothing of these is saved before it runs
        assert len(told) >= 1, "a step gets on"
        assert world.counts["look-ups"] <= _per_step(length)
        assert world.counts["chunks hashed"] <= _per_step(length) * -(-length // CHUNK)
    return answered


@pytest.mark.parametrize("length", [CHUNK + 1, 25 * CHUNK, 200 * CHUNK])
def test_children_that_come_at_once(world: StepWorld, length: int) -> None:
    """`n` of a request, and a burst of requests: vLLM makes each child a request."""
    prompt = tokens_of(1, length)
    children = [world.request(str(n), prompt, max_tokens=1) for n in range(MANY)]
    for child in children:
        world.tables[child.request_id] = list(range(1, 2 + length // BLOCK))
    world.counts.clear()
    world.come(*children)
    assert world.counts["look-ups"] == 1, "the others wait for the end of the step"
    assert world.put_off("lookup") == 0
    answered = _ask_all(world, children)
    assert [child for told in answered for child in told] == children, "in their order"
    assert world.put_off("lookup") <= MANY - len(answered[0]), "each is counted once"


def test_a_step_says_not_known_so_often_and_no_more(world: StepWorld) -> None:
    """To each who hears it vLLM has looked at its own cache, and it goes on to the next: a queue
    of thousands would be gone through in each step."""
    prompt = tokens_of(1, 25 * CHUNK)
    children = [world.request(str(n), prompt) for n in range(UNKNOWN_MAX + MANY)]
    world.come(*children)
    for _ in range(3):
        answers = [world.ask(child) for child in children]
        assert answers.count(None) == UNKNOWN_MAX
        world.end_step()
    assert world.put_off("lookup_dropped") > 0


def test_children_are_hashed_once(world: StepWorld) -> None:
    prompt = tokens_of(1, 25 * CHUNK)
    children = [world.request(str(n), prompt) for n in range(4)]
    world.come(children[0])
    world.counts.clear()
    world.come(*children[1:])
    assert world.counts["look-ups"] == world.counts["sequences"] == 0
    world.end_step()
    assert world.counts["look-ups"] == 3
    assert world.counts["chunks hashed"] == 0


def test_children_load_what_the_first_does(world: StepWorld) -> None:
    """Though they are looked up later, when vLLM asks for them or at the end of the step."""
    prompt = tokens_of(1, 25 * CHUNK)
    world.serve(world.request("before", prompt))
    for is_asked in (True, False):
        children = [world.request(f"{is_asked}{n}", prompt) for n in range(4)]
        world.come(*children)
        if not is_asked:
            world.end_step()
            assert all(world.side.requests[child.request_id].visit for child in children)
        world.counts.clear()
        found = {world.ask(child) for child in children}
        assert found == {25 * CHUNK - BLOCK}
        assert world.counts["looks"] == (1 if is_asked else len(children)), "one look-up each"
        world.end_step()
        world.finish(*children)


def test_others_do_not_wait_behind_children(world: StepWorld) -> None:
    children = [world.request(str(n), tokens_of(1, 25 * CHUNK)) for n in range(4)]
    other = world.request("other", tokens_of(2, CHUNK))
    world.come(*children)
    world.counts.clear()
    world.come(other)
    assert world.counts["look-ups"] == 1


def test_a_prompt_larger_than_the_budget_is_looked_up_alone(world: StepWorld) -> None:
    requests = [world.request(str(n), tokens_of(n, 2 * BUDGET)) for n in range(3)]
    for request in requests:
        world.tables[request.request_id] = list(range(1, 2 + 2 * BUDGET // BLOCK))
    world.come(*requests)
    assert world.counts["look-ups"] == 1
    assert len(_ask_all(world, requests)) == 3


def test_who_is_not_asked_for_is_looked_up_in_line(world: StepWorld) -> None:
    """vLLM has no place for them: their KV is brought up meanwhile, and nothing overtakes them."""
    waiting = [world.request(str(n), tokens_of(n, 100)) for n in range(50)]
    world.come(*waiting)
    steps = 0
    while world.side.requests["49"].visit is None:
        world.counts.clear()
        late = world.request(f"late {steps}", tokens_of(60 + steps, 100))
        world.come(late)
        assert world.counts["look-ups"] == 0
        world.end_step()
        steps += 1
        assert world.counts["look-ups"] <= 2 * _per_step(100), "an empty step has time for more"
        assert world.side.requests[late.request_id].visit is None
    assert steps < 50
    assert all(world.side.requests[r.request_id].visit is not None for r in waiting)


def test_searches_for_moved_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search took is taken from the budget: prompts can be written whose search is long."""
    cut, length = 8 * CHUNK, 40 * CHUNK
    moves = TruncationConfig(enabled=True, shared_by="everyone", min_tokens=2 * CHUNK, sinks=0)
    world = StepWorld(
        monkeypatch, records=1024, slots=1024, truncates=True, step_budget=BUDGET,
        step_tokens=STEP_TOKENS, store={"truncation": moves},
    )  # fmt: skip
    stored = tokens_of(1, length + cut)
    world.serve(world.request("stored", stored))
    moved = [world.request(str(n), [*stored[cut:], 9000 + n]) for n in range(MANY)]
    new = [world.request(f"new {n}", tokens_of(50 + n, length + 1)) for n in range(MANY)]
    looked_up = []
    for some in (new, moved):
        world.end_step()
        world.counts.clear()
        world.come(*some)
        looked_up.append(world.counts["look-ups"])
        world.finish(*some)
    assert world.side.requests == {}
    assert looked_up[0] == _per_step(length + 1), "nothing like these is stored"
    assert 1 <= looked_up[1] < looked_up[0]
    world.close()


def test_prefetches_that_come_at_once(world: StepWorld) -> None:
    for number in range(3 * ORDERS_MAX):
        order = PrefetchOrder(tokens_of(number, 1000), None)
        world.come(world.request("order", (1,), kv_transfer_params=order.as_params()))
    assert world.counts["looks"] == _per_step(1000)
    told = world.side.take_stats().data["counters"]
    assert told["put_off:prefetch"] == ORDERS_MAX
    assert told["put_off:prefetch_dropped"] == 2 * ORDERS_MAX - _per_step(1000)
    for _ in range(ORDERS_MAX):
        world.counts.clear()
        world.end_step()
        assert world.counts["looks"] <= _per_step(1000)
    assert world.counts["looks"] == 0, "the line is empty"


def _run_all(world: StepWorld, length: int) -> list[Any]:
    """Requests that run, with all of their prompts computed in the step that is being planned."""
    requests = [world.request(str(n), tokens_of(n, length)) for n in range(MANY)]
    world.come(*requests)
    for told in _ask_in_turn(world, requests):
        for request in told:
            world.start(request, 0)
    return requests


def _ask_in_turn(world: StepWorld, requests: Sequence[Any]) -> Iterator[list[Any]]:
    left = list(requests)
    while left:
        told = [request for request in left if world.ask(request) is not None]
        left = [request for request in left if request not in told]
        world.report(world.side.build_step(output({}, {})))
        yield told


def test_requests_that_cross_a_chunk_in_one_step(world: StepWorld) -> None:
    requests = _run_all(world, CHUNK + 1)
    world.counts.clear()
    told = {r.request_id: (0, r.num_tokens) for r in requests}
    world.report(world.side.build_step(output(told, {})))
    assert world.counts["saves"] == SAVES
    assert world.put_off("save") == MANY - SAVES
    for request in requests:
        request.num_computed_tokens = request.num_tokens
    for _ in range(MANY // SAVES):
        world.counts.clear()
        told = {r.request_id: (r.num_tokens, 0) for r in requests}
        world.report(world.side.build_step(output({}, told)))
        assert world.counts["saves"] <= SAVES
    found = [sequence_of(r.all_token_ids) for r in requests]
    assert all(world.store.find(Lookup(keys), 0, CHUNK) for keys in found), "nothing is lost"


def test_requests_that_end_in_one_step(world: StepWorld) -> None:
    """What is beyond the budget is not saved, and counted; no hole is left before what is."""
    requests = _run_all(world, 3 * CHUNK)
    told = {r.request_id: (0, r.num_tokens) for r in requests}
    for request in requests:
        request.num_computed_tokens = request.num_tokens
    world.side.build_step(output(told, {}))
    world.put_off("save")
    world.counts.clear()
    world.finish(*requests)
    assert world.counts["saves"] <= SAVES
    assert world.put_off("save_dropped") > 0
    world.end_step()
    saves = world.counts["saves"]
    later = world.request("later", tokens_of(999, 3 * CHUNK))
    world.serve(later)
    assert world.counts["saves"] == saves + 3, "the next one is saved as ever"


def test_requests_that_are_aborted_while_they_wait(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Counter[str]()
    leave = DramTier.leave_queue

    def counted(tier: DramTier, request_id: str) -> None:
        left["queue"] += 1
        leave(tier, request_id)

    monkeypatch.setattr(DramTier, "leave_queue", counted)
    requests = [world.request(str(n), tokens_of(1, 10_000)) for n in range(MANY)]
    world.come(*requests)
    world.finish(*requests)
    # Whatever the settings say: to leave is not to look up.
    assert left["queue"] == (1 << 17) // (10_000 + LOOK_TOKENS)
    assert world.put_off("leave") == MANY - left["queue"]
    again = world.request("299", tokens_of(1, 10_000))
    world.come(again)
    world.finish(again)
    for _ in range(MANY):
        before = left["queue"]
        world.end_step()
        assert left["queue"] - before <= (1 << 17) // (10_000 + LOOK_TOKENS)
    with world.store.queue() as queue:
        assert len(queue) == 0


def test_priorities_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that differ in all that an order of departure tells apart, and DRAM is full."""
    lanes = 240
    world = StepWorld(monkeypatch, records=16, slots=lanes, step_budget=BUDGET)
    store = world.store

    def save(number: int) -> None:
        run = Run(number, number * 7 % NUM_KINDS, float(number), False, Priority(number % 3 - 1))
        chunk = store.begin_save(name_of(sequence_of(tokens_of(number, CHUNK)), 0), run,
                                 dram_only=True)  # fmt: skip
        assert chunk is not None
        store.finish_saves([chunk])

    for number in range(lanes):
        save(number)
    world.counts.clear()
    for number in range(lanes, lanes + 64):
        save(number)
    assert world.counts["worths looked at"] <= 64 * 16
    world.close()


def test_pieces_that_dram_has_no_room_for() -> None:
    """Whether a prompt larger than DRAM is waited for is asked in each step that it waits."""
    rig = memory_rig(16, 8)
    for _ in range(100):
        rig.store.thread.tiers[0].cost.observe(1e-3)
    costs = Costs(rig.store, 1.0, computes_if_sooner=True)
    for number in range(200):
        costs._steps.observe(1e-3 * (1 + number), [(0, 100 * (1 + number))], 0)
    looked = Counter[str]()

    class Looked(SimpleNamespace):
        @property
        def stop(self) -> int:
            looked["at"] += 1
            return int(self.end)

    here = Chunk(name_of(sequence_of(tokens_of(1, CHUNK)), 0), dram=InTier(State.READY, 0))
    pieces: Any = [Looked(chunk=here, start=n, end=(n + 1) * CHUNK) for n in range(100_000)]
    state: Any = SimpleNamespace(request=SimpleNamespace(request_id="long"))
    found = costs.num_that_pay(state, pieces)
    assert 8 <= found <= len(pieces)
    assert 8 < looked["at"] <= 8 + BEYOND_MAX + 1
    rig.close()


def test_branches_of_one_prompt(world: StepWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    beginning = tokens_of(1, CHUNK)
    for number in range(2, MANY):
        world.serve(world.request(str(number), beginning + tokens_of(number, CHUNK)))
    looked = Counter[str]()
    offer = prefix.Best.offer

    def counted(best: prefix.Best, *args: Any, **how: Any) -> None:
        looked["at"] += 1
        offer(best, *args, **how)

    monkeypatch.setattr(prefix.Best, "offer", counted)
    world.come(world.request("another", beginning + tokens_of(1, CHUNK)))
    assert looked["at"] <= 2 * prefix.NEIGHBOURS_MAX + 1


class _Counted(int):
    """A place that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        _Counted.compared += 1
        return int(self) < other

    def __add__(self, other: int) -> _Counted:
        return _Counted(int(self) + other)


def test_media_of_one_prompt() -> None:
    """Each chunk looks at the media that lie in it, and not at all of the prompt's."""
    count = 200
    spans = [MultimodalSpan(bytes(32), _Counted(n * CHUNK), CHUNK) for n in range(count)]
    _Counted.compared = 0
    SequenceKeys(Key(bytes(32)), tokens_of(1, count * CHUNK), CHUNK, spans).keys(0, count)
    assert 0 < _Counted.compared <= 8 * count


def test_salts(world: StepWorld) -> None:
    """A salt is hashed with the first key alone, however many chunks follow."""
    keys = {root_key(NAMESPACE, str(n), b"") for n in range(MANY)}
    assert len(keys) == MANY
    requests = [world.request(str(n), tokens_of(1, 100), cache_salt=str(n)) for n in range(MANY)]
    for request in requests:
        world.tables[request.request_id] = list(range(1, 30))
    world.come(*requests)
    _ask_all(world, requests)
