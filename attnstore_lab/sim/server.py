# SPDX-License-Identifier: Apache-2.0
"""A server in virtual time: vLLM's loop in small, and the store's own code.

    arrivals -> waiting queue -> steps of the engine -> answers -> the next turn, after a think

The loop calls scheduler/scheduler.py as vLLM's does through the connector: what is looked up,
waited for, offered, loaded and saved is decided there, over a disk that takes its time. What is
assumed is the machine (hardware.py) and the loop: continuous batching, prompts in pieces, first
come first served, room for prompt and answer taken at once.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from attnstore_lab.sim.counting import Counting
from attnstore_lab.sim.disk import SimulatedDisk
from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.hbm import Hbm
from attnstore_lab.sim.jobs import EngineStep, Job, Output, step_stop
from attnstore_lab.sim.outcome import Outcome
from attnstore_lab.sim.simulated_store import open_scheduler
from attnstore_lab.sim.trace import Trace, TraceRequest
from attnstore_lab.sim.trace_tokens import TraceTokens
from attnstore_vllm.io.device import Op
from attnstore_vllm.scheduler.messages import StepPlan, StepReport
from attnstore_vllm.tiers.tier_io import MakeTier
from attnstore_vllm.types import Seen

POLICIES = ("attnstore", "lru", "fifo", "infinite", "recompute", "lru-ahead", "dram")
"""lru and fifo know nothing of the queue, and bring nothing up before it is asked for; lru-ahead
does. infinite has DRAM for all, dram has no NVMe; recompute stores nothing."""

SPIN_S = 0.01
"""vLLM's loop turns without a pause while requests wait for KV and nothing can be computed. Here it
turns when something has happened, and after so long."""


class Server:
    """One run.

    Args:
        warmup: so many requests come before anything is counted.
        until_s: requests that come later are not counted: the last conversations' ends, when others
            have stopped coming.
        patience_s: the run ends when a request has waited for so long: the load is more than the
            server can serve.
        step: called after each request, for a progress bar.
        more_tiers: behind NVMe.
        hbm: another one than Hbm makes.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        policy: str,
        *,
        warmup: int = 0,
        until_s: float = float("inf"),
        patience_s: float = float("inf"),
        step: Callable[[], object] = lambda: None,
        more_tiers: Sequence[MakeTier] = (),
        hbm: Hbm | None = None,
    ) -> None:
        assert machine.shape is not None or trace.chunk_tokens == machine.chunk_tokens
        self.now = 0.0
        self._machine = machine
        self._state_tokens = machine.state_tokens
        self._num_chunks = trace.num_chunks
        self._trace_chunk_tokens = trace.chunk_tokens
        self._out = Outcome(policy)
        self._counting = Counting(self._out)
        self._step = step
        self._hbm = hbm or Hbm(machine, trace.chunk_tokens)
        self._disk = SimulatedDisk(machine, lambda: self.now)
        self._scheduler, self.store = None, None
        if policy != "recompute":
            num_tokens = trace.num_chunks * trace.chunk_tokens
            self._scheduler, self.store = open_scheduler(
                machine, policy, num_tokens, self._disk, lambda: self.now, more_tiers
            )
            self._scheduler.bind_kv_cache_manager(self._hbm)
        self._waiting: dict[str, Job] = {}
        self._running: list[Job] = []
        self._loading: dict[str, Job] = {}
        """Requests that have blocks, and wait for their KV to be received."""
        self._later: dict[int, deque[tuple[int, TraceRequest]]] = defaultdict(deque)
        self._arrivals: list[tuple[float, int, TraceRequest, int]] = []
        self._warmup = warmup
        self._until_s, self._patience_s = until_s, patience_s
        begun: set[int] = set()
        for number, request in enumerate(trace.requests):
            if request.session >= 0 and request.session in begun:
                self._later[request.session].append((number, request))
            else:
                begun.add(request.session)
                self._arrivals.append((request.arrival_s, number, request, 0))
        heapq.heapify(self._arrivals)

    @property
    def queues(
        self,
    ) -> tuple[
        list[tuple[float, int, TraceRequest, int]], dict[int, deque[tuple[int, TraceRequest]]]
    ]:
        """Requests that come at their times, a heap; and by session those that follow."""
        return self._arrivals, self._later

    # ---- time --------------------------------------------------------------------------

    def run(self) -> Outcome:
        for _ in self.live():
            pass
        return self.end()

    def live(self) -> Iterator[None]:
        """Serve all requests. Time passes by itself here; hosts.py lets it pass for many."""
        while self._is_live:
            if self._is_overrun():
                self._out.gave_up_at_s = self.now
                return
            step = self._schedule()
            plan = self._scheduler.build_step(Output(step)) if self._scheduler else StepPlan()
            if step.is_empty:
                if plan.loads:
                    yield from self._pass_until(self.now + self._loading_s(plan))
                if not self._report(plan) and self._is_live:
                    tick = self.now + SPIN_S if self.is_busy else float("inf")
                    yield from self._wait_until(tick)
                continue
            yield from self._compute(step, plan)

    def end(self) -> Outcome:
        """Let the disk end what it has begun, and what is still to be written."""
        out, chunk = self._out, self._machine.nvme_chunk_bytes
        out.duration_s = self.now
        self._tick()
        while self._next_end < float("inf"):
            self.now = max(self.now, self._next_end)
            self._tick()
        self._figures()
        out.bytes_read = self._disk.num_moved[Op.READ] * chunk
        out.bytes_written = self._disk.num_moved[Op.WRITE] * chunk
        return out

    @property
    def _is_live(self) -> bool:
        return bool(self._arrivals) or self.is_busy

    def _is_overrun(self) -> bool:
        """Whether the first in the queue has waited for too long."""
        first = next(iter(self._waiting.values()), None)
        return first is not None and self.now - first.arrival_time > self._patience_s

    @property
    def is_busy(self) -> bool:
        """Whether a request is here, or a transfer of one."""
        return bool(self._waiting or self._running or self._loading) or self._has_transfers()

    def _has_transfers(self) -> bool:
        return self._scheduler is not None and self._scheduler.any_open()

    @property
    def _next_arrival(self) -> float:
        return self._arrivals[0][0] if self._arrivals else float("inf")

    @property
    def _next_end(self) -> float:
        return self._disk.next_end

    def _wait_until(self, tick: float) -> Iterator[None]:
        """Nothing can be computed before something happens."""
        yield from self._pass_until(min(self._next_arrival, self._next_end, tick))

    def _pass_until(self, end: float) -> Iterator[None]:
        """Let time pass; the disk works on, and requests come."""
        assert end < float("inf"), "nothing will ever happen"
        while (at := min(self._next_arrival, self._next_end)) <= end:
            self.now = max(self.now, at)
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self._arrive(*heapq.heappop(self._arrivals))
            self._tick()
        self.now = max(self.now, end)
        self._tick()
        yield from ()

    def _tick(self) -> None:
        if self.store is not None:
            self.store.tick()  # submits, and tells of what has ended
            while self._disk.take_ended():  # which has made room for more
                self.store.tick()

    def _arrive(self, at: float, number: int, request: TraceRequest, history: int) -> None:
        tokens = TraceTokens(
            request.chunks,
            request.known_tokens,
            self._trace_chunk_tokens,
            self._num_chunks + number,
        )
        is_counted = number >= self._warmup and at <= self._until_s
        job = Job(str(number), request, is_counted, history, at, tokens)
        self._waiting[job.request_id] = job
        if self._scheduler is not None:
            self._scheduler.on_new_request(job)

    # ---- a step ------------------------------------------------------------------------

    def _schedule(self) -> EngineStep:
        """The step that runs next, in the order of vLLM's schedule(): who runs goes on, then who
        waits is asked about, has room, and starts."""
        machine = self._machine
        step = EngineStep([job for job in self._running if job.generated])
        least = max(1, self._state_tokens)  # who has no room for a whole block waits
        budget = max(machine.max_num_batched_tokens - len(step.generating), least)
        for job in self._running:
            left = self._num_prompt_tokens(job, budget)
            if not job.generated and left > 0:
                step.prompts.append((job, left))
                budget -= left
        is_full = False
        for job in self._waiting.values():
            is_full = len(self._running) >= machine.max_num_seqs
            if is_full or budget < least:
                break
            if not job.is_received and not self._is_admitted(job):
                continue
            found: int | None = 0
            local, is_ahead = self._hbm.cached_tokens(job), False
            if not job.is_received:
                job.shared_prefix_boundary = 0
                found, is_ahead = self._ask(job, local)
            if found is None:
                continue
            is_full = not job.is_received and not self._take(job)
            if is_full:
                break
            if is_ahead:
                self._place(job, local, found)
                continue
            self._start(job, local, found, step)
            left = self._num_prompt_tokens(job, budget)
            step.prompts.append((job, left))
            budget -= left
        for job in (*step.started, *self._loading.values()):
            self._waiting.pop(job.request_id, None)
        if not step.prompts and step.generating and (is_full or not self._waiting):
            step.num_repeats = self._repeats(step, is_full=is_full)
        return step

    def _is_admitted(self, job: Job) -> bool:
        """Whether a waiting request is asked about in this step. holding_server.py defers some."""
        return True

    def _take(self, job: Job) -> bool:
        return self._hbm.take(job)

    def _give_back(self, job: Job) -> None:
        self._hbm.give_back(job)

    def _num_prompt_tokens(self, job: Job, budget: int) -> int:
        """Tokens of the prompt that the step computes."""
        start = job.num_computed_tokens
        stop = min(job.num_prompt_tokens, start + budget)
        junction = job.shared_prefix_boundary
        return step_stop(start, stop, job.num_prompt_tokens, self._state_tokens, junction) - start

    def _ask(self, job: Job, local: int) -> tuple[int | None, bool]:
        """Tokens that the store offers, behind those in HBM; None: not yet. And whether they are
        loaded before the job's first step."""
        if self._scheduler is None:
            return 0, False
        found, is_ahead = self._scheduler.get_num_new_matched_tokens(job, local)
        said = {} if job.was_asked else self._figures()
        self._counting.asked(job, local, found, said, self.now)
        return found, is_ahead

    def _figures(self) -> Mapping[str, float]:
        """The scheduler side's counters since the last call."""
        stats = None if self._scheduler is None else self._scheduler.take_stats()
        said: Mapping[str, float] = {} if stats is None else stats.data["counters"]
        self._counting.by_group(said)
        return said

    def _place(self, job: Job, local: int, found: int) -> None:
        """The job has its blocks, and waits until what is found is received."""
        assert self._scheduler is not None
        tables = self._hbm.tables(job, local + found)
        self._scheduler.update_state_after_alloc(job, tables, found)
        job.num_computed_tokens, job.local_tokens = local + found, local
        self._loading[job.request_id] = job

    def _loading_s(self, plan: StepPlan) -> float:
        """Seconds that the plan's loads take, where no step hides them."""
        block_tokens = self._machine.geometry.block_tokens
        num_tokens = block_tokens * sum(load.num_blocks for load in plan.loads)
        return self._machine.held_bytes(num_tokens) / self._machine.hbm_bandwidth

    def _receive(self, plan: StepPlan) -> None:
        """Jobs whose last part is loaded go on before all that waits, as far as it was loaded."""
        ends = [load for load in plan.loads if load.layers_before and not load.has_more]
        for load in ends:
            job = self._loading.pop(load.request_id)
            if load.missing:
                (blocks, *_) = self._hbm.get_block_ids(job.request_id)
                size = self._machine.geometry.block_tokens
                job.num_computed_tokens = list(blocks).index(load.missing[0]) * size
            job.is_received = True
            self._waiting = {job.request_id: job, **self._waiting}

    def _start(self, job: Job, local: int, found: int, step: EngineStep) -> None:
        if job.is_received:
            local, found = job.local_tokens, job.num_computed_tokens - job.local_tokens
        elif self._scheduler is not None:
            tables = self._hbm.tables(job, local + found)
            self._scheduler.update_state_after_alloc(job, tables, found)
        job.num_computed_tokens = local + found
        self._running.append(job)
        step.started.append(job)
        step.loaded_bytes += 0 if job.is_received else self._machine.held_bytes(found)
        self._counting.started(job, local, found)

    def _repeats(self, step: EngineStep, *, is_full: bool) -> int:
        """Steps that only generate, until one of these ends or a request comes that can start."""
        count = min(job.num_answer - job.generated for job in step.generating)
        if not is_full and self._next_arrival < float("inf"):
            seconds = self._machine.decode_s(len(step.generating))
            count = min(count, int((self._next_arrival - self.now) / seconds) + 1)
        return max(1, count)

    def _compute(self, step: EngineStep, plan: StepPlan) -> Iterator[None]:
        machine, began = self._machine, self.now
        is_counting = any(job.is_counted for job in self._running)
        prefill_s = sum(
            machine.prefill_s(job.num_computed_tokens, job.num_computed_tokens + count)
            for job, count in step.prompts
        )
        decode_s = machine.decode_s(len(step.generating))
        load_s = step.loaded_bytes / machine.hbm_bandwidth
        computing_s = prefill_s + decode_s
        seconds = max(computing_s, load_s) if machine.overlap else computing_s + load_s
        yield from self._pass_until(began + seconds)
        self._report(plan, load_wait_s=seconds - computing_s)
        yield from self._pass_until(began + seconds * step.num_repeats)
        self._end(step)
        saving_s = self._saving_s()
        if is_counting:
            self._out.busy_s += seconds * step.num_repeats + saving_s
            self._out.prefill_s += seconds - decode_s
        if saving_s > 0:
            yield from self._pass_until(self.now + saving_s)

    def _saving_s(self) -> float:
        """Seconds that the engine waits until what it began to save is saved."""
        if self.store is None:
            return 0.0
        saved, self.store.saved_tokens = self.store.saved_tokens, 0
        return self._machine.saving_s(saved)

    def _report(self, plan: StepPlan, load_wait_s: float = 0.0) -> bool:
        """The workers have done what the plan says. Returns whether it was anything."""
        if self._scheduler is None:
            return False
        done = [p.plan_id for plans in (plan.loads, plan.saves, plan.saves_before) for p in plans]
        weights = Seen.SAME if plan.looks_at_weights else Seen.NOTHING
        self._scheduler.on_report(
            StepReport(plan.number, Counter(done), load_wait_s=load_wait_s, weights=weights)
        )
        self._receive(plan)
        return bool(done) or plan.looks_at_weights

    def _end(self, step: EngineStep) -> None:
        for job, count in step.prompts:
            job.num_computed_tokens += count
            if job.num_computed_tokens >= job.num_prompt_tokens:
                job.generated = 1
                self._counting.first_token(job, self.now)
        for job in step.generating:
            job.num_computed_tokens += step.num_repeats
            job.generated += step.num_repeats
        for job in [j for j in self._running if j.generated >= j.num_answer]:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        if self._scheduler is not None:
            tables = self._hbm.get_block_ids(job.request_id)
            keeps_blocks, _ = self._scheduler.request_finished(job, tables)
            assert not keeps_blocks, "saves are over when they are begun"
        self._running.remove(job)
        self._counting.finished(job, self.now)
        self._give_back(job)
        later = self._later.get(job.request.session)
        if later:
            number, request = later.popleft()
            history = min(job.request.known_tokens, request.num_tokens)
            heapq.heappush(self._arrivals, (self.now + request.think_s, number, request, history))
        self._step()
