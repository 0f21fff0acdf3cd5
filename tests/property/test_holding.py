# SPDX-License-Identifier: Apache-2.0
"""Holding is bounded and lets go, whatever sessions do: the policy beside the simulator's HBM."""

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


class Watched(HoldingServer):
    """Checks after each step what holds for any load."""

    def __init__(self, trace: Trace) -> None:
        self.policy = Holding(MACHINE.hbm, share=SHARE, longest_s=LONGEST_S, defer_s=DEFER_S)
        super().__init__(trace, MACHINE, "recompute", self.policy)
        self.left_at: dict[int, float] = {}
        self.num_held = 0

    def _schedule(self) -> EngineStep:
        step = super()._schedule()
        held = self._blocks._held
        assert set(held) == set(self.policy._held), "both know who is held"
        assert self.policy.held_tokens <= SHARE * MACHINE.hbm
        for session in held:
            assert self.now - self.left_at[session] <= LONGEST_S, "no longer than the longest hold"
        check_blocks(self._blocks)
        return step

    def _give_back(self, job: Job) -> None:
        super()._give_back(job)
        self.left_at[job.request.session] = self.now
        self.num_held += job.request.session in self._blocks._held

    def _is_admitted(self, job: Job) -> bool:
        is_admitted = super()._is_admitted(job)
        assert is_admitted or self.now - job.arrival_time < DEFER_S, "the door has a deadline"
        return is_admitted


def check_blocks(hbm: HoldingHbm) -> None:
    """Bytes in use are those of running requests and of holds, each block once."""
    users: Counter[int] = Counter()
    for chunks in [*hbm._hits.values(), *hbm._held.values()]:
        users.update(chunks)
    assert users == hbm._users
    assert not set(users) & set(hbm._cached), "a block is in use, or is cached"
    own = sum(job.num_in_all - SIZE * len(hbm._hits[key]) for key, job in hbm._running.items())
    assert hbm._taken == own + SIZE * len(users)
    alone = len(hbm._running) == 1 and not hbm._held
    assert alone or hbm._taken + SIZE * len(hbm._cached) <= MACHINE.hbm


@given(sessions)
def test_holds_are_bounded_and_let_go_and_all_are_served(drawn: list[Session]) -> None:
    trace = trace_of(drawn)
    server = Watched(trace)
    out = server.run()
    assert out.num_requests == len(trace.requests), "none starves"
    server.now += LONGEST_S
    server._schedule()
    assert not server._blocks._held and server._blocks._taken == 0
    assert server.policy.held_tokens == 0


def test_the_property_is_of_servers_that_hold() -> None:
    """A load like those drawn, in which sessions are held, let go and deferred."""
    turns = [(100, 10, 0.5)] * 5
    server = Watched(trace_of([Session(0.05 * number, turns) for number in range(24)]))
    server.run()
    assert server.num_held > 20
