# SPDX-License-Identifier: Apache-2.0
"""Questions to a remote tier: one a request, for a while, and none where it fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others, RemoteDictIo
from attnstore_vllm.policy.breaker import FAILURES_MAX, PAUSE_MAX_S
from attnstore_vllm.scheduler.request import make_state
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.context import boot_seconds
from attnstore_vllm.tiers.remote import Found
from attnstore_vllm.tiers.remote_io import (
    ASK_MIN_TOKENS,
    AnswerTime,
    awaits_remote,
    worth_asking,
)
from tests.helpers import (
    NAMESPACE,
    Rig,
    conversation,
    lookup_of,
    memory_rig,
    names_of,
    payload_of,
    sequence_of,
)

LONG = 64


@pytest.fixture
def others() -> Others:
    return Others()


@pytest.fixture
def rig(others: Others) -> Iterator[Rig]:
    rig = memory_rig(more_tiers=(MakeRemoteDict(others),))
    yield rig
    rig.store.check_integrity()
    rig.close()


def tier_of(rig: Rig) -> RemoteDictIo:
    io = rig.store.thread.tiers[1]
    assert isinstance(io, RemoteDictIo)
    return io


def asked_for(number: int) -> Lookup:
    return lookup_of(conversation(number, LONG), may_ask=True)


def fill(others: Others, number: int) -> None:
    for name in names_of(sequence_of(conversation(number, LONG))):
        others.put(name, payload_of(name))


def test_one_question_a_request_and_what_it_finds_comes_up(rig: Rig, others: Others) -> None:
    fill(others, 1)
    lookup = asked_for(1)
    assert rig.store.find(lookup, 0, LONG) == []
    rig.until(lambda: not awaits_remote(lookup))
    found = rig.store.find(lookup, 0, LONG)
    assert found[-1].stop == LONG
    rig.until(lambda: len(rig.store.hold_ready(found, lookup.keys, LONG)) == len(found))
    assert tier_of(rig).num_asked == 1
    assert set(rig.store.tiers(found, 0)) == {"asked"}
    while rig.store.residency.num_held():
        rig.store.release(p.chunk for p in found if p.chunk.dram.uses)


def test_who_may_not_ask_does_not(rig: Rig, others: Others) -> None:
    fill(others, 1)
    lookup = lookup_of(conversation(1, LONG))
    assert rig.store.find(lookup, 0, LONG) == []
    assert lookup.asked == ()
    assert tier_of(rig).num_asked == 0


def test_a_late_answer_is_waited_for_no_longer_and_welcome(rig: Rig, others: Others) -> None:
    fill(others, 1)
    others.is_silent = True
    lookup = asked_for(1)
    began = time.monotonic()
    rig.store.find(lookup, 0, LONG)
    assert awaits_remote(lookup)
    rig.until(lambda: not awaits_remote(lookup))
    assert time.monotonic() - began >= RemoteDictIo.answer_deadline_s
    others.is_silent = False
    tier_of(rig).submit()
    rig.until(lambda: len(rig.store.find(lookup, 0, LONG)) == LONG // 16)
    assert rig.store.residency.counts["answers_late"] == 1


def test_an_answer_to_a_question_of_before_a_reset_is_ignored(rig: Rig, others: Others) -> None:
    others.is_silent = True
    lookup = asked_for(1)
    rig.store.find(lookup, 0, LONG)
    (ask,) = lookup.asked
    assert rig.store.reset()
    tier_of(rig).answer(ask, [Found(ask.name(number)) for number in range(4)])
    assert len(rig.store.residency.index) == 0


def test_a_tier_that_does_not_answer_is_left_alone(rig: Rig, others: Others) -> None:
    others.is_silent = True
    io = tier_of(rig)
    for number in range(FAILURES_MAX):
        lookup = asked_for(number)
        rig.store.find(lookup, 0, LONG)
        rig.until(lambda lookup=lookup: not awaits_remote(lookup))  # type: ignore[misc]
    rig.until(lambda: not io.health.reads.in_use)
    lookup = asked_for(50)
    rig.store.find(lookup, 0, LONG)
    assert not awaits_remote(lookup), "no request waits for it"
    others.is_silent = False
    fill(others, 60)

    def works_again() -> bool:
        rig.store.find(asked_for(60), 0, LONG)
        return io.health.reads.in_use

    rig.until(works_again)


def test_who_could_ask_nobody_may_ask_later(rig: Rig, others: Others) -> None:
    """As the first request of an engine, whose weights nobody has looked at yet."""
    fill(others, 1)
    io = tier_of(rig)
    io.has_left = True
    lookup = asked_for(1)
    assert rig.store.find(lookup, 0, LONG) == []
    io.has_left = False
    assert rig.store.find(lookup, 0, LONG) == []
    assert len(lookup.asked) == 1
    rig.until(lambda: not awaits_remote(lookup))
    assert rig.store.find(lookup, 0, LONG)[-1].stop == LONG


def put_out(io: RemoteDictIo) -> None:
    """Out of use, and a probe is due."""
    io.others.is_silent = True
    for _ in range(FAILURES_MAX):
        io.health.reads.failure(-PAUSE_MAX_S)
    assert not io.health.reads.in_use


def test_an_answer_to_a_probe_that_is_late_is_no_end_of_probes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it comes before the store's thread has seen that it is late."""
    io = tier_of(rig)
    put_out(io)
    monkeypatch.setattr(io, "tick", lambda: None)
    lookup = asked_for(1)
    rig.store.find(lookup, 0, LONG)
    (ask,) = lookup.asked
    ask.asked_at -= 1.0
    io.answer(ask, ())
    assert rig.store.residency.counts["answers_late"] == 1
    assert io.health.reads.take_probe(boot_seconds() + PAUSE_MAX_S)


def test_a_reset_while_a_probe_is_out_is_no_end_of_probes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = tier_of(rig)
    put_out(io)
    monkeypatch.setattr(io, "tick", lambda: None)
    rig.store.find(asked_for(1), 0, LONG)
    assert not io.health.reads.take_probe(boot_seconds()), "one at a time"
    io.forget_asks()
    assert io.health.reads.take_probe(boot_seconds())


def test_hearsay_is_no_copy(rig: Rig, others: Others) -> None:
    """What others have said to have, and a request has computed, is saved all the same."""
    fill(others, 1)
    lookup = asked_for(1)
    rig.store.find(lookup, 0, LONG)
    rig.until(lambda: not awaits_remote(lookup))
    name = names_of(lookup.keys)[0]
    assert rig.put(name, payload_of(name)) is not None


def test_an_empty_step_waits_for_an_answer(rig: Rig, others: Others) -> None:
    others.is_silent = True
    lookup = asked_for(1)
    rig.store.find(lookup, 0, LONG)
    began = time.monotonic()
    rig.store.wait_for_any((), 0.01, [lookup])
    assert time.monotonic() - began >= 0.01
    others.is_silent = False
    tier_of(rig).submit()
    rig.store.wait_for_any((), 5.0, [lookup])
    assert not awaits_remote(lookup)


@pytest.mark.parametrize(
    ("params", "may_ask"),
    [(None, True), ({"do_remote_prefill": True}, False), ({"do_remote_prefill": False}, True)],
)
def test_kv_that_another_connector_brings_is_not_asked_for(
    params: dict[str, bool] | None, may_ask: bool
) -> None:
    request: Any = SimpleNamespace(
        kv_transfer_params=params,
        all_token_ids=list(range(64)),
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        resumable=False,
    )
    assert make_state(request, NAMESPACE, b"", 16).lookup.may_ask == may_ask


def test_when_a_question_pays() -> None:
    assert not worth_asking(ASK_MIN_TOKENS - 1, None, 0.0)
    assert worth_asking(ASK_MIN_TOKENS, None, 1.0)
    assert worth_asking(1000, 0.5, 0.001)
    assert not worth_asking(1000, 0.0005, 0.001)
    times = AnswerTime()
    for _ in range(1000):
        times.observe(0.002)
    assert times.mean_s == pytest.approx(0.002)
