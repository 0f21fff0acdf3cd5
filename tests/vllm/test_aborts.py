# SPDX-License-Identifier: Apache-2.0
"""Requests that end early, at every stage; and prompts that are computed in parts.

After each, nothing is held, what was left is KV of the request's own tokens, and it gives the
right answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.prefix import whole_blocks
from attnstore_vllm.io.device import IoRequest, Op
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Answer, Engine
from tests.vllm.host import EngineHost, HostError
from tests.vllm.prompts import random_tokens
from tests.vllm.stored import stored_tokens

BUDGET = 512
"""Tokens of a step: longer prompts are computed in parts of this size, which is whole chunks."""
LENGTH = 1700
ANSWER = 6


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineHost:
    return start_engine(dram="4MiB", vllm={"max_num_batched_tokens": BUDGET})


class Gate:
    """Reads of the store's device wait here until it is opened."""

    def __init__(self, device: Any) -> None:
        self._submit = device.submit
        self._waiting: list[IoRequest] = []
        self.patch = mock.patch.object(device, "submit", self.submit)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        self._waiting += [r for r in requests if r.op is Op.READ]
        self._submit([r for r in requests if r.op is not Op.READ])

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def open(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.patch.stop()
        self._submit(waiting)


@contextmanager
def closed_gate(engine: Engine) -> Iterator[Gate]:
    """Open at the end, however that comes: the tests after this one have the same disk."""
    gate = Gate(engine.device)
    gate.patch.start()
    try:
        yield gate
    finally:
        gate.open()


def reference(engine: Engine, prompt: list[int], length: int = ANSWER) -> Answer:
    """The answer without the store: under a salt that nobody else has, from empty HBM."""
    engine.forget_hbm()
    answer = engine.ask(prompt, max_tokens=length, salt=f"reference {prompt[:4]} {len(prompt)}")
    assert answer.cached_tokens == 0
    return answer


def from_store(engine: Engine, prompt: list[int]) -> tuple[Answer, int]:
    """The answer with what the store has, and how many tokens that was."""
    engine.forget_hbm()
    engine.loaded()
    answer = engine.ask(prompt, max_tokens=ANSWER)
    return answer, sum(engine.loaded().values())


def queued(engine: Engine) -> tuple[Answer, Answer, int]:
    """Aborted before any step: its chunks are on NVMe, and the reads have begun."""
    prompt = random_tokens("queued", LENGTH)
    expected = reference(engine, prompt)
    engine.ask(prompt)
    engine.evict_dram()
    with closed_gate(engine) as gate:
        number = engine.submit(prompt)
        engine.wait_for(lambda: gate.num_waiting > 0)  # the store's thread may bring them
        engine.abort(number)
        engine.drain()
        held = engine.side.store.residency.num_held
        engine.wait_for(lambda: held() == gate.num_waiting)  # what has begun stays held
    engine.check_quiet()
    return expected, *from_store(engine, prompt)


def waiting_for_nvme(engine: Engine) -> tuple[Answer, Answer, int, bool]:
    """Aborted while vLLM asks again and again; another request goes ahead meanwhile."""
    prompt = random_tokens("waiting", LENGTH)
    expected = reference(engine, prompt)
    engine.ask(prompt)
    engine.evict_dram()
    with closed_gate(engine):
        number = engine.submit(prompt)
        other = engine.submit(random_tokens("other", 100), max_tokens=20)
        engine.finish(other)
        was_waiting = engine.request(number).num_computed_tokens == 0
        engine.abort(number)
        engine.drain()
    engine.check_quiet()
    return expected, *from_store(engine, prompt), was_waiting


def past_its_deadline(engine: Engine) -> tuple[Answer, Answer, int, dict[str, int]]:
    """The disk does not answer: after the deadline the prompt is computed, and is right."""
    prompt = random_tokens("deadline", LENGTH)
    expected = reference(engine, prompt)
    engine.ask(prompt)
    engine.evict_dram()
    engine.forget_hbm()
    engine.loaded()
    with closed_gate(engine), mock.patch.object(engine.side.costs, "load_deadline_s", 0.05):
        computed = engine.ask(prompt, max_tokens=ANSWER)
    loaded = engine.loaded()
    engine.check_quiet()
    assert computed.content == expected.content
    return expected, *from_store(engine, prompt), loaded


def in_prefill(engine: Engine, steps: int) -> tuple[Answer, Answer, int, int]:
    """Aborted when some parts of its prompt were computed."""
    prompt = random_tokens(("prefill", steps), LENGTH)
    expected = reference(engine, prompt)
    number = engine.submit(prompt)
    for _ in range(steps):
        engine.step()
    computed = engine.request(number).num_computed_tokens
    engine.abort(number)
    engine.check_quiet()
    kept = stored_tokens(engine, None, prompt)
    assert kept == computed, dict(engine.store.figures().counts)
    return expected, *from_store(engine, prompt), computed


def decoding(engine: Engine) -> tuple[Answer, Answer, int, int]:
    """Aborted in the middle of its answer: what it said is stored too."""
    prompt = random_tokens("decoding", 500)
    number = engine.submit(prompt, max_tokens=200)
    request = engine.request(number)
    for _ in range(60):
        engine.step()
    said = list(request.all_token_ids)
    engine.abort(number)
    engine.check_quiet()
    kept = stored_tokens(engine, None, said)
    assert kept == len(said) - 1, "the KV of the last token was not computed"
    turn = [*said, *random_tokens("next turn", 20)]
    return reference(engine, turn), *from_store(engine, turn), len(said)


def offered_without_room(engine: Engine) -> tuple[Answer, Answer, int]:
    """Offered, and then there is no block for it: what it was offered is let go each time."""
    prompt = random_tokens("no room", LENGTH)
    expected = reference(engine, prompt)
    engine.ask(prompt)
    engine.settle()
    engine.forget_hbm()
    room = (engine.spec.blocks - 2) * 128
    large = [engine.submit([n + 20] * 3800, max_tokens=60, salt="large") for n in range(3)]
    assert room < 3 * 3800 + LENGTH
    engine.wait_for(lambda: engine.request(large[-1]).num_computed_tokens >= 3800, engine.step)
    number = engine.submit(prompt)
    for _ in range(5):
        engine.step()
        assert engine.request(number).num_computed_tokens == 0
        chunks = engine.side.store.residency.dram.owned.values()
        # Those of the others are being written. Its own may have gone, and come up again.
        ready = [c for c in chunks if c.dram.state is State.READY and c.name.tenant == bytes(32)]
        assert not any(chunk.dram.uses for chunk in ready)
    engine.abort(number)
    for other in large:
        engine.abort(other)
    engine.check_quiet()
    return expected, *from_store(engine, prompt)


def test_in_the_queue(engine: EngineHost) -> None:
    expected, got, loaded = engine.call(queued)
    assert got.tokens == expected.tokens
    assert loaded == whole_blocks(LENGTH - 1)


def test_waiting_for_nvme(engine: EngineHost) -> None:
    expected, got, loaded, was_waiting = engine.call(waiting_for_nvme)
    assert was_waiting
    assert got.tokens == expected.tokens
    assert loaded == whole_blocks(LENGTH - 1)


def test_past_its_deadline(engine: EngineHost) -> None:
    expected, got, loaded, loaded_late = engine.call(past_its_deadline)
    assert sum(loaded_late.values()) == 0
    assert got.tokens == expected.tokens
    assert loaded == whole_blocks(LENGTH - 1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_in_prefill(engine: EngineHost, steps: int) -> None:
    """What is left was computed with the same split as the reference: equal to the last bit."""
    expected, got, loaded, computed = engine.call(in_prefill, steps)
    assert loaded == computed == steps * BUDGET
    assert got.content == expected.content


def test_decoding(engine: EngineHost) -> None:
    expected, got, loaded, said = engine.call(decoding)
    assert loaded == said - 1
    assert got.tokens == expected.tokens


def test_no_room_in_hbm(engine: EngineHost) -> None:
    expected, got, loaded = engine.call(offered_without_room)
    assert got.tokens == expected.tokens
    assert loaded == whole_blocks(LENGTH - 1)


def test_an_offer_that_is_kept_is_seen(engine: EngineHost) -> None:
    with pytest.raises(HostError, match="AssertionError"):
        engine.call_with_fault("offers kept", offered_without_room)
