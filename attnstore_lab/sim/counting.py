# SPDX-License-Identifier: Apache-2.0
"""Counts of a simulated run, as its requests are asked about, started and answered."""

from __future__ import annotations

from collections.abc import Mapping

from attnstore_lab.sim.jobs import Job
from attnstore_lab.sim.outcome import Outcome
from attnstore_vllm.types import DRAM, NVME

GROUP_COUNTERS = {
    "group_saved_bytes",
    "group_loaded_bytes",
    "shortened_hits",
    "sections_passed",
    "sections_dropped",
}
QUEUED_S = 1.0
"""Who has waited so long had a queue before it."""


class Counting:
    """Writes `out`, of the requests that are counted."""

    def __init__(self, out: Outcome) -> None:
        self._out = out

    def asked(
        self, job: Job, local: int, answer: int | None, said: Mapping[str, float], now: float
    ) -> None:
        """The scheduler side was asked what is stored of a request.

        Args:
            local: tokens that are in HBM.
            answer: its answer; None: ask again.
            said: its counters of what this request wants, which it gives once.
        """
        ready = int(said.get(f"wanted_tokens:{DRAM}", 0))
        wanted = ready + int(said.get(f"wanted_tokens:{NVME}", 0))
        # Before it has looked it may have to wait for other things than KV.
        if not job.was_asked and (wanted or answer is not None):
            job.was_asked = True
            job.ready_tokens = ready
            if job.is_counted:
                self._first_offer(job, local, wanted, now)
        if answer is None:
            if job.stuck_s is None:
                job.stuck_s = now
        elif job.stuck_s is not None:
            if job.is_counted:
                self._out.waited_s += now - job.stuck_s
            job.stuck_s = None

    def by_group(self, said: Mapping[str, float]) -> None:
        """Take the counters by kind of KV cache group: of the whole run."""
        for name, amount in said.items():
            if name.split(":")[0] in GROUP_COUNTERS:
                self._out.by_group[name] += int(amount)

    def _first_offer(self, job: Job, local: int, wanted: int, now: float) -> None:
        out, ready = self._out, job.ready_tokens
        out.wanted_tokens += wanted
        out.ready_tokens += ready
        if now - job.arrival_time >= QUEUED_S:
            out.queued_wanted_tokens += wanted
            out.queued_ready_tokens += ready
        out.stored_history += min(local + wanted, job.history)

    def started(self, job: Job, local: int, loaded: int) -> None:
        """The request has its place, and so many tokens are loaded for it."""
        if not job.is_counted:
            return
        out = self._out
        out.num_requests += 1
        out.prompt_tokens += job.num_prompt_tokens
        out.history_tokens += job.history
        out.found_history += min(local + loaded, job.history)
        out.hbm_tokens += local
        was_ready = min(loaded, job.ready_tokens)
        out.dram_tokens += was_ready
        out.nvme_tokens += loaded - was_ready

    def first_token(self, job: Job, now: float) -> None:
        if job.is_counted:
            seconds = now - job.arrival_time
            self._out.ttft_s.append(seconds)
            of_kind = self._out.later_ttft_s if job.history else self._out.first_ttft_s
            of_kind.append(seconds)

    def finished(self, job: Job, now: float) -> None:
        """The request is answered."""
        session = job.request.session
        if job.is_counted and session >= 0:
            begin, _ = self._out.sessions.get(session, (job.arrival_time, now))
            self._out.sessions[session] = begin, now
