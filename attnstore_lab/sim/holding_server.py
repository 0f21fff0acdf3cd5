# SPDX-License-Identifier: Apache-2.0
"""A simulated server that holds blocks of sessions that are away, by policy/holding.py."""

from __future__ import annotations

from typing import Any

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.holding_hbm import HoldingHbm
from attnstore_lab.sim.jobs import EngineStep, Job
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.trace import Trace, TraceRequest
from attnstore_vllm.policy.holding import Holding


class HoldingServer(Server):
    """As Server, whose requests without a session are served as ever.

    What a return costs that was not held is the machine's time to load and compute its history.
    """

    def __init__(
        self, trace: Trace, machine: Machine, policy: str, holding: Holding, **options: Any
    ) -> None:
        self._blocks = HoldingHbm(machine, trace.chunk_tokens)
        super().__init__(trace, machine, policy, hbm=self._blocks, **options)
        self._holding = holding

    def _arrive(self, at: float, number: int, request: TraceRequest, history: int) -> None:
        super()._arrive(at, number, request, history)
        if request.session >= 0:
            self._holding.came(request.session, self.now)

    def _schedule(self) -> EngineStep:
        for session in self._holding.over(self.now):
            self._blocks.let_go(session)
        return super()._schedule()

    def _is_admitted(self, job: Job) -> bool:
        session, waited_s = job.request.session, self.now - job.arrival_time
        return session < 0 or self._holding.is_admitted(session, job.num_prompt_tokens, waited_s)

    def _take(self, job: Job) -> bool:
        while not super()._take(job):
            session = self._holding.let_go(self.now, job.request.session)
            if session is None:
                return False
            self._blocks.let_go(session)
        return True

    def _start(self, job: Job, local: int, found: int, step: EngineStep) -> None:
        super()._start(job, local, found, step)
        if job.request.session < 0:
            return
        start, history = job.num_computed_tokens, job.history
        lost_s = self._machine.prefill_s(local, history) if local < history else 0.0
        return_s = self._machine.prefill_s(start, history) if start < history else 0.0
        return_s += self._machine.held_bytes(start - local) / self._machine.hbm_bandwidth
        self._holding.started(job.request.session, job.num_in_all, lost_s, return_s)

    def _give_back(self, job: Job) -> None:
        session, computing_s = job.request.session, self._machine.prefill_s(0, job.num_in_all)
        if session >= 0 and self._holding.ended(session, job.num_in_all, computing_s, self.now):
            self._blocks.hold(job)
        else:
            super()._give_back(job)
