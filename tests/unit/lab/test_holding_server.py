# SPDX-License-Identifier: Apache-2.0
"""A simulated server that holds blocks, and the public load of agents on it, in small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attnstore_lab.sim.agents import EIGHT, EIGHTEEN, H100, HBM_TOKENS, TOKEN_BYTES, agents, drawn
from attnstore_lab.sim.holding_hbm import HoldingHbm
from attnstore_lab.sim.holding_server import HoldingServer
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.trace import Trace
from attnstore_vllm.policy.holding import Holding

SMALL = replace(H100, hbm=HBM_TOKENS // 5 * TOKEN_BYTES)


class Told(Holding):
    """Sums what it is told of returns."""

    computing_s = return_s = 0.0

    def started(
        self, session: int, num_tokens: int, computing_s: float = 0.0, return_s: float = 0.0
    ) -> None:
        self.computing_s += computing_s
        self.return_s += return_s
        super().started(session, num_tokens, computing_s, return_s)


def plain(trace: Trace) -> Server:
    return Server(trace, SMALL, "recompute", hbm=HoldingHbm(SMALL, trace.chunk_tokens))


def test_loads_are_as_the_pages_say() -> None:
    trace = agents(EIGHT, 3, seed=1)
    assert len(trace.requests) == 8 * 127
    first = [request for request in trace.requests if request.session == 5]
    assert tuple(request.num_tokens for request in first) == EIGHT.prompts
    assert trace.duration_s == pytest.approx(127 / 3, rel=0.1)
    prompts = sorted(EIGHTEEN.prompts)
    assert (prompts[8] + prompts[9]) / 2 == pytest.approx(6945, abs=1)


def test_jobs_share_the_system_prompt_and_nothing_else() -> None:
    trace = agents(EIGHTEEN, 3, seed=1, num_jobs=2)
    one, other = (next(r for r in trace.requests if r.session == job) for job in (0, 1))
    assert one.chunks[:2].tolist() == other.chunks[:2].tolist()
    assert not set(one.chunks[2:].tolist()) & set(other.chunks.tolist())


def test_jobs_that_are_drawn_are_about_as_long() -> None:
    trace = agents(drawn(3.0), 3, seed=1)
    assert np.median([r.num_tokens for r in trace.requests]) == pytest.approx(6945, rel=0.2)
    assert len(trace.requests) / 150 == pytest.approx(18, rel=0.1)
    tools_s = [r.think_s for r in trace.requests if r.think_s]
    assert np.median(tools_s) == pytest.approx(3, rel=0.1)
    assert np.percentile(tools_s, 90) > 2 * np.median(tools_s)


def test_a_job_that_is_alone_takes_its_tools_its_answers_and_its_new_tokens() -> None:
    trace = agents(EIGHT, 1, seed=1, num_jobs=1)
    out = plain(trace).run()
    answers_s = 8 * 19 * (0.0237 + 25.8e-6)  # each answer's first token comes with its prompt
    least_s = 7 * 0.5 + answers_s + 13_193 * 25.8e-6
    assert least_s <= out.session_s <= 1.05 * least_s


def test_blocks_that_run_are_not_beside_themselves_in_the_cache() -> None:
    """Two jobs at once fit into HBM: each finds all that it has had."""
    trace = agents(EIGHT, 100, seed=1, num_jobs=2)
    machine = replace(SMALL, hbm=28_000 * TOKEN_BYTES)
    out = Server(trace, machine, "recompute", hbm=HoldingHbm(machine, trace.chunk_tokens)).run()
    whole = sum(p // 256 * 256 for p in (112, 1860, 3469, 6045, 7474, 10_319, 12_353))
    assert out.hbm_tokens == 2 * whole
    assert Server(trace, machine, "recompute").run().hbm_tokens < 2 * whole, "as Hbm counts them"


def test_holding_ends_thrash_and_new_sessions_wait_no_longer() -> None:
    trace = agents(EIGHT, 3, seed=1, num_jobs=40)
    without = plain(trace).run()
    held = HoldingServer(trace, SMALL, "recompute", Holding(SMALL.hbm // TOKEN_BYTES)).run()
    assert held.num_requests == without.num_requests == 8 * 40
    assert held.session_s < 0.7 * without.session_s
    assert held.hit_tokens_share > without.hit_tokens_share
    assert max(held.first_ttft_s) <= 1.2 * max(without.first_ttft_s)


def test_without_overload_holding_changes_nothing() -> None:
    trace = agents(EIGHT, 1, seed=1, num_jobs=10)
    without = Server(trace, H100, "recompute", hbm=HoldingHbm(H100, trace.chunk_tokens)).run()
    held = HoldingServer(trace, H100, "recompute", Holding(HBM_TOKENS)).run()
    assert held.session_s == pytest.approx(without.session_s)


def test_a_tier_that_has_all_kv_makes_returns_cheap() -> None:
    """131,072 bytes a token at 50 GB/s are a tenth of computing it."""
    trace = agents(EIGHT, 3, seed=1, num_jobs=20)
    ratios = []
    for policy, dram in (("recompute", 1), ("dram", 100_000_000_000), ("dram", 1_000_000_000)):
        holding = Told(SMALL.hbm // TOKEN_BYTES)
        HoldingServer(trace, SMALL.with_sizes(dram=dram), policy, holding).run()
        ratios.append(holding.return_s / holding.computing_s)
    assert ratios[0] == pytest.approx(1.0)
    assert 0.1 < ratios[1] < 0.25, "a chunk that is partly filled is computed"
    assert ratios[1] < ratios[2] < ratios[0]
