# SPDX-License-Identifier: Apache-2.0
"""Holding is bounded and lets go in any order of sessions: policy beside the simulator's HBM."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.holding_hbm import HoldingHbm
from attnstore_lab.sim.holding_server import HoldingServer
from attnstore_lab.sim.jobs import EngineStep, Job
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace
from attnstore_vllm.policy.holding import Holding

SIZE = 16
SHARE, LONGEST_S, DEFER_S = 0.6, 8.0, 5.0
MACHINE = Machine(
    kv_bytes_per_token=1, hbm=2000, dram=1, nvme=1, prefill_tokens_per_s=2000, decode_step_s=0.02,
    max_num_seqs=8, max_num_batched_tokens=512, chunk_tokens=SIZE,
)  # fmt: skip


@dataclass(frozen=True)
class Session:
    begin_s: float
    turns: list[tuple[int, int, float]]
    """Tokens of question and answer, and the gap before."""


sessions = st.lists(
    st.builds(
        Session,
        st.floats(0, 20),
        st.lists(
            st.tuples(st.integers(1, 200), st.integers(1, 20), st.floats(0, 12)),
            min_size=1,
            max_size=6,
        ),
    ),
    min_size=1,
    max_size=24,
)


def trace_of(drawn: list[Session]) -> Trace:
    requests = []
    for number, session in enumerate(drawn):
        tokens = 0
        for turn, (question, answer, gap_s) in enumerate(session.turns):
            tokens += question
            known = tokens + answer
            chunks = np.arange(-(-known // SIZE), dtype=np.int64) + 10_000 * number
            at = session.begin_s + 1e-6 * turn
            requests.append(TraceRequest(at, chunks, tokens, answer, known, number, gap_s))
            tokens = known
    return make_trace("drawn", SIZE, requests)


class WatchedHbm(HoldingHbm):
    def __init__(self) -> None:
        super().__init__(MACHINE, SIZE)

    @property
    def sessions(self) -> set[int]:
        return set(self._held)

    def check(self) -> None:
        """Bytes in use are those of running requests and of holds, each block once."""
        users: Counter[int] = Counter()
        for chunks in [*self._hits.values(), *self._held.values()]:
            users.update(chunks)
        assert users == self._users
        held = {number for chunks in self._held.values() for number in chunks}
        assert self.held_tokens == SIZE * len(held)
        assert not set(users) & set(self._cached), "a block is in use, or is cached"
        own = sum(j.num_in_all - SIZE * len(self._hits[key]) for key, j in self._running.items())
        assert self._taken == own + SIZE * len(users)
        is_alone = len(self._running) == 1 and not self._held
        assert is_alone or self._taken + SIZE * len(self._cached) <= MACHINE.hbm

    def check_empty(self) -> None:
        assert not self._held and not self._running and self._taken == 0


class WatchedHolding(Holding):
    @property
    def sessions(self) -> set[int]:
        return set(self._held)


class Watched(HoldingServer):
    """Checks after each step what holds for any load."""

    def __init__(self, trace: Trace) -> None:
        self.policy = WatchedHolding(MACHINE.hbm, share=SHARE, longest_s=LONGEST_S, defer_s=DEFER_S)
        self.blocks = WatchedHbm()
        super().__init__(trace, MACHINE, "recompute", self.policy, blocks=self.blocks)
        self.left_at: dict[int, float] = {}
        self.num_held = 0
        self.num_deferred = 0

    def _schedule(self) -> EngineStep:
        step = super()._schedule()
        assert self.blocks.sessions == self.policy.sessions, "both know who is held"
        assert self.blocks.held_tokens <= SHARE * MACHINE.hbm
        for session in self.blocks.sessions:
            assert self.now - self.left_at[session] <= LONGEST_S, "no longer than the longest hold"
        self.blocks.check()
        return step

    def _give_back(self, job: Job) -> None:
        super()._give_back(job)
        self.left_at[job.request.session] = self.now
        self.num_held += job.request.session in self.blocks.sessions

    def _is_admitted(self, job: Job) -> bool:
        is_admitted = super()._is_admitted(job)
        assert is_admitted or self.now - job.arrival_time < DEFER_S, "the door has a deadline"
        self.num_deferred += not is_admitted
        return is_admitted

    def wait(self, seconds: float) -> None:
        """All are served, and time goes on."""
        self.now += seconds
        self._schedule()


@given(sessions)
def test_holds_are_bounded_and_let_go_and_all_are_served(drawn: list[Session]) -> None:
    trace = trace_of(drawn)
    server = Watched(trace)
    out = server.run()
    assert out.num_requests == len(trace.requests), "none starves"
    server.wait(LONGEST_S)
    server.blocks.check_empty()
    assert server.blocks.held_tokens == 0


def test_the_property_is_of_servers_that_hold_and_defer() -> None:
    """A load like those drawn."""
    turns = [(100, 10, 0.5)] * 5
    server = Watched(trace_of([Session(0.05 * number, turns) for number in range(24)]))
    server.run()
    assert server.num_held > 20
    assert server.num_deferred > 20
