# SPDX-License-Identifier: Apache-2.0
"""Stores that die, hang, are full or refuse: what a request pays, and how the tier comes back."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.network_stores import NetworkStore
from attnstore_vllm.index.chunk import ChunkName, State
from attnstore_vllm.tiers.shared import shared_generation, shared_io
from attnstore_vllm.tiers.shared.lanes import LaneOp
from attnstore_vllm.tiers.shared.shared_generation import GenerationId
from attnstore_vllm.tiers.shared.shared_io import STORE_LANES
from attnstore_vllm.types import SHARED
from tests.helpers import NAMESPACE, Rig, conversation, lookup_of, memory_rig, names_of, sequence_of
from tests.shared import rigs
from tests.shared.rigs import (
    NUM_TOKENS,
    counts,
    fetch,
    io_of,
    make,
    see_weights,
    whole_chunks,
    write,
)

OpenShared = Callable[..., Rig]
WHOLE = NUM_TOKENS // 16
DEADLINE_S = 0.75
WAITED_S = 0.25
"""Who takes longer has waited for an answer of the store."""
SLACK_S = 0.75
"""For a machine that does other things as well."""


def timed(rig: Rig, number: int) -> float:
    begun_at = time.monotonic()
    fetch(rig, conversation(number, NUM_TOKENS))
    return time.monotonic() - begun_at


@pytest.mark.parametrize(
    "which", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP]
)
def test_a_store_that_dies_or_hangs_costs_a_deadline_once(
    own_server: NetworkStore, open_shared: OpenShared, which: signal.Signals
) -> None:
    one, two = open_shared(own_server), open_shared(own_server, deadline_s=DEADLINE_S)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    own_server.signal(which)
    times = [timed(two, number) for number in range(1, 8)]
    assert max(times) <= DEADLINE_S + SLACK_S
    # Mooncake's client gives up sooner than we do: that opens the breaker as well.
    assert sum(seconds > WAITED_S for seconds in times) <= 2, times
    two.until(lambda: not io_of(two).health.reads.in_use)
    assert timed(two, 9) < SLACK_S, "nothing after the breaker has opened"
    if which is signal.SIGSTOP:
        own_server.signal(signal.SIGCONT)
    else:
        own_server.kill()
        own_server.start()
    two.until(lambda: io_of(two).health.reads.in_use)
    one.until(lambda: io_of(one).health.reads.in_use and io_of(one).health.writes.in_use)
    again = conversation(10, NUM_TOKENS)
    write(one, again)
    assert fetch(two, again) == WHOLE


def test_a_read_that_hangs_ends_with_the_child(
    own_server: NetworkStore, open_shared: OpenShared
) -> None:
    """It was found, and then the store stops: the slot is given back, and nothing waits."""
    one, two = open_shared(own_server), open_shared(own_server, deadline_s=DEADLINE_S)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    io = io_of(two)
    ask = io.helper.numbers

    def stopping(lane: int, op: LaneOp, names: Sequence[bytes], deadline_s: float) -> list[int]:
        if op is LaneOp.GET:
            own_server.signal(signal.SIGSTOP)
        return ask(lane, op, names, deadline_s)

    io.helper.numbers = stopping  # type: ignore[method-assign]
    try:
        assert timed(two, 1) <= 2 * DEADLINE_S + SLACK_S
        assert not io.health.reads.in_use
        assert two.store.residency.num_held() == 0
    finally:
        own_server.signal(signal.SIGCONT)


def test_a_killed_child_is_started_again(server: NetworkStore, open_shared: OpenShared) -> None:
    one, two = open_shared(server), open_shared(server)
    write(one, conversation(1, NUM_TOKENS))
    before = io_of(two).helper.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert timed(two, 2) <= DEADLINE_S + SLACK_S
    two.until(lambda: io_of(two).helper.pid not in (None, before))
    two.until(lambda: io_of(two).health.reads.in_use)
    assert fetch(two, conversation(1, NUM_TOKENS)) == WHOLE


def test_a_full_store_costs_what_is_not_written(
    redis: Callable[..., NetworkStore], open_shared: OpenShared
) -> None:
    server = redis("--maxmemory-policy", "noeviction", memory=1100 << 10)
    rig = open_shared(server, dram_slots=8)
    for number in range(1, 60):
        rig.put(names_of(sequence_of(conversation(number, 17)))[0])
        if counts(rig).get("shared_write_failed"):
            break
        time.sleep(0.05)
    rig.until(lambda: counts(rig).get("shared_write_failed", 0) > 0)
    assert io_of(rig).health.reads.in_use


def test_a_wrong_password_puts_the_tier_out_of_use_and_is_not_told(
    redis: Callable[..., NetworkStore], open_shared: OpenShared, caplog: pytest.LogCaptureFixture
) -> None:
    server = redis("--requirepass", "right", url="redis://:wrong-secret@127.0.0.1")
    rig = open_shared(server, joins=False)
    rig.until(lambda: io_of(rig).helper.is_running)
    assert timed(rig, 1) < SLACK_S
    assert io_of(rig).generation.usable is None
    rig.until(lambda: "WRONGPASS" in caplog.text)
    assert "wrong-secret" not in caplog.text
    command = Path(f"/proc/{io_of(rig).helper.pid}/cmdline").read_bytes()
    assert b"wrong-secret" not in command


def test_a_user_with_the_right_password_and_acl_is_served(
    redis: Callable[..., NetworkStore], open_shared: OpenShared
) -> None:
    server = redis(
        "--user", "kv", "on", ">secret", "~as1/*", "resetchannels", "+get", "+set", "+exists",
        url="redis://kv:secret@127.0.0.1",
    )  # fmt: skip
    one, two = open_shared(server), open_shared(server)
    write(one, conversation(1, NUM_TOKENS))
    assert fetch(two, conversation(1, NUM_TOKENS)) == WHOLE


def test_a_question_that_nobody_is_asked_shows_nothing_of_the_store() -> None:
    """There is no whole chunk to ask for, and the store has failed before."""
    nowhere = {"redis": {"url": "redis://127.0.0.1:1", "timeout_s": 0.1}, "prefix": ""}
    rig = memory_rig(more_tiers=(make(nowhere, NAMESPACE),), threaded=False)
    io = io_of(rig)
    with io.context.progress:
        io.generation.mine = GenerationId(bytes(16), 0)
        io.generation.weights_seen(True)
        now = io.context.clock()
        io.health.reads.failure(now - 60.0, hung=True)
        ask = io.look_up(lookup_of(conversation(1, NUM_TOKENS)), 0, 10)
        assert ask is not None and ask.is_over
        assert io.health.reads.take_probe(now), "another one may be sent"
    assert not io.health.reads.in_use
    assert io.answer_time.mean_s == 0.0
    io.cancel()


# ---- resets ----------------------------------------------------------------------------


def test_after_a_reset_nothing_of_before_is_met(
    server: NetworkStore, open_shared: OpenShared, tmp_path: Path
) -> None:
    one, two = open_shared(server, directory=tmp_path), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    assert one.store.reset()
    assert fetch(one, tokens) == 0, "its weights are in doubt"
    see_weights(one, same=True)
    one.until(lambda: io_of(one).generation.usable is not None)
    assert fetch(one, tokens) == 0
    two.until(lambda: io_of(two).generation.is_behind)
    assert fetch(two, tokens) == 0
    assert two.store.reset()
    see_weights(two, same=True)
    two.until(lambda: io_of(two).generation.usable is not None)
    again = conversation(2, NUM_TOKENS)
    write(two, again)
    assert fetch(one, again) == WHOLE, "both have been reset, and share again"


def test_a_reset_while_the_store_cannot_be_reached_holds_over_a_restart(
    own_server: NetworkStore, open_shared: OpenShared, tmp_path: Path
) -> None:
    one = open_shared(own_server, directory=tmp_path)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    own_server.signal(signal.SIGSTOP)
    assert one.store.reset()
    see_weights(one, same=True)
    assert fetch(one, tokens) == 0
    one.close()
    own_server.signal(signal.SIGCONT)
    again = open_shared(own_server, directory=tmp_path)
    assert fetch(again, tokens) == 0


def test_a_generation_is_used_once_it_is_on_the_disk(
    server: NetworkStore,
    open_shared: OpenShared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With KV of it and no note, a start after a reset of others would join theirs."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shared_generation, "replace_own", full)
        one = open_shared(server, directory=tmp_path, joins=False)
        one.until(lambda: "it cannot be noted" in caplog.text)
        assert io_of(one).generation.mine is not None
        assert io_of(one).generation.usable is None
        assert not gauge_in_use(one)
    see_weights(one, same=True)  # it looks again at once
    one.until(lambda: io_of(one).generation.usable is not None)
    noted = shared_generation.load(tmp_path, io_of(one).namespace)
    assert noted.mine == io_of(one).generation.mine


def gauge_in_use(rig: Rig) -> bool:
    return bool(io_of(rig).gauges_now()["shared_in_use", "reads"])


def test_changed_weights_leave_the_tier_for_good(
    server: NetworkStore, open_shared: OpenShared
) -> None:
    one, two = open_shared(server), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    two.store.reset()
    see_weights(two, same=False)
    two.store.reset()
    see_weights(two, same=True)  # the same as after the change
    time.sleep(0.2)
    assert fetch(two, tokens) == 0
    assert io_of(two).generation.usable is None


def first_chunk(number: int) -> ChunkName:
    return whole_chunks(conversation(number, NUM_TOKENS), None)[0]


def test_who_has_left_writes_nothing_more(
    server: NetworkStore, open_shared: OpenShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit has stopped the serving, or weights have changed: what waits to be written stays
    here, what is saved later too, and neither a look nor a reset opens the tier again."""
    monkeypatch.setattr(shared_io, "LOOK_S", 0.05)
    one = open_shared(server)
    io = io_of(one)
    looks, read = Counter[str](), io.helper.read

    def counted(*given: Any) -> bytes | None:
        looks["looks"] += 1
        return read(*given)

    monkeypatch.setattr(io.helper, "read", counted)
    go_on, busy, ask = threading.Event(), set[int](), io.helper.numbers

    def late(lane: int, *given: Any) -> list[int]:
        if lane in STORE_LANES:
            busy.add(lane)
            go_on.wait(rigs.DEADLINE_S)
        return ask(lane, *given)

    monkeypatch.setattr(io.helper, "numbers", late)
    for number in range(1, 2 + len(STORE_LANES)):
        one.put(first_chunk(number))
        chunk = one.chunk(first_chunk(number))
        one.until(lambda: chunk.at(SHARED).state is State.WRITING)  # noqa: B023 - called at once
        one.until(lambda: len(busy) == min(number, len(STORE_LANES)))  # noqa: B023
    assert io.num_storing == len(STORE_LANES) + 1, "one waits for a thread"
    assert one.store.remote is not None
    one.store.remote.leave()
    go_on.set()
    one.until_idle()
    assert SHARED not in chunk.behind
    assert not io.tier.is_open and io.must_wait() and not gauge_in_use(one)

    def saves(number: int) -> None:
        before = looks["looks"]
        one.until(lambda: looks["looks"] > before + 1)
        one.put(first_chunk(number))
        time.sleep(0.2)
        one.until_idle()
        assert not io.tier.is_open
        assert SHARED not in one.chunk(first_chunk(number)).behind

    saves(10)
    see_weights(one, same=True)
    saves(11)
    one.store.reset()
    see_weights(one, same=True)
    saves(12)
    two = open_shared(server)
    for number in (len(STORE_LANES) + 1, 10, 11, 12):
        assert fetch(two, conversation(number, NUM_TOKENS)) == 0
    write(two, conversation(20, NUM_TOKENS))
    assert fetch(one, conversation(20, NUM_TOKENS)) == 0, "nor is anything read"
