# SPDX-License-Identifier: Apache-2.0
"""A simulated server that holds blocks of sessions that are away, by policy/holding.py."""

from __future__ import annotations

from typing import Any

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.holding_hbm import HoldingHbm
from attnstore_lab.sim.jobs import EngineStep, Job
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.simulated_store import NAMESPACE
from attnstore_lab.sim.trace import Trace, TraceRequest
from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.policy.holding import Holding


class HoldingServer(Server):
    """As Server, whose requests without a session are served as ever.

    What a return would cost is the machine's time to load and to compute its history.

    Args:
        blocks: another HBM than HoldingHbm makes.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        policy: str,
        holding: Holding,
        *,
        blocks: HoldingHbm | None = None,
        **options: Any,
    ) -> None:
        self._blocks = blocks or HoldingHbm(machine, trace.chunk_tokens)
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
        return session < 0 or self._holding.is_admitted(
            session, job.num_prompt_tokens, self._blocks.tokens_in_use, waited_s, self.now
        )

    def _take(self, job: Job) -> bool:
        while not super()._take(job):
            sessions = self._holding.let_go(self.now, wanted_by=job.request.session)
            if not sessions:
                return False
            for session in sessions:
                self._blocks.let_go(session)
        return True

    def _start(self, job: Job, local: int, found: int, step: EngineStep) -> None:
        super()._start(job, local, found, step)
        if job.request.session < 0:
            return
        computing_s = self._machine.prefill_s(0, job.history)
        return_s = self._return_s(job) if job.history else 0.0
        self._holding.started(job.request.session, job.num_in_all, computing_s, return_s)

    def _return_s(self, job: Job) -> float:
        """Seconds for loading and computing a request's history, if HBM had none of it."""
        machine, loading_s, start = self._machine, 0.0, 0
        if self.store is not None:
            residency, size = self.store.residency, machine.chunk_tokens
            keys = SequenceKeys(root_key(NAMESPACE, None, b""), job.tokens, size)
            for entry in residency.index.entries.find_run(keys.keys(0, job.history // size)):
                chunk = residency.index.live(entry)  # None: at rest on NVMe
                if chunk is not None and chunk.dram.state is State.READY:
                    loading_s += machine.chunk_bytes / machine.hbm_bandwidth
                elif chunk is None or chunk.at(residency.nvme.name).state is State.READY:
                    loading_s += machine.nvme_chunk_bytes / machine.nvme_read
                else:
                    break
                start += size
        return loading_s + machine.prefill_s(start, job.history)

    def _give_back(self, job: Job) -> None:
        session, blocks = job.request.session, self._blocks
        if session >= 0 and self._holding.ended(
            session, job.num_in_all, self._machine.prefill_s(0, job.num_in_all), self.now,
            in_use=blocks.tokens_in_use, held=blocks.held_with(job),
        ):  # fmt: skip
            blocks.hold(job)
        else:
            super()._give_back(job)
