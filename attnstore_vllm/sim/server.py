# SPDX-License-Identifier: Apache-2.0
"""A server in virtual time: vLLM's loop in small, and the store itself.

    arrivals -> waiting queue -> steps of the engine -> answers -> the next turn, after a think

Index, policies, cost model, reader and writer are the server's own code (store/store.py), over a
disk that takes its time; what is assumed is the machine (sim/hardware.py) and the loop: continuous
batching, prompts in pieces, first come first served, room for prompt and answer taken at once.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from attnstore_vllm.index.chunk import ChunkName, State
from attnstore_vllm.index.keys import chunk_key
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.index.stops import kept_end
from attnstore_vllm.io.device import Op
from attnstore_vllm.policy.cost import StepCost, pieces_to_wait_for
from attnstore_vllm.sim.disk import SimulatedDisk
from attnstore_vllm.sim.hardware import Machine
from attnstore_vllm.sim.jobs import Job, NoPool, Step, num_answer, num_reserved
from attnstore_vllm.sim.outcome import Outcome
from attnstore_vllm.sim.trace import Request, Trace
from attnstore_vllm.sim.trace_keys import TraceKeys
from attnstore_vllm.store.format import PAGE_BYTES, SegmentHeader
from attnstore_vllm.store.slab import Slab
from attnstore_vllm.store.store import Store
from attnstore_vllm.types import Key

POLICIES = ("attnstore", "lru", "fifo", "infinite", "recompute")
"""lru and fifo know nothing of the queue, and bring nothing up before it is asked for; infinite has
DRAM for all; recompute stores nothing."""

MIN_TOKENS = 16
QUEUED_S = 1.0
"""Who has waited so long had a queue before it."""
_TENANT = bytes(32)
_SHAPE = SegmentHeader(0, 256, PAGE_BYTES, bytes(32), b"simulated segment"[:16], 0, "simulated")


class Server:
    """One run.

    Args:
        warmup: so many requests come before anything is counted.
        until_s: requests that come later are not counted: the last conversations' ends, when others
            have stopped coming.
        step: called after each request, for a progress bar.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        policy: str,
        *,
        warmup: int = 0,
        until_s: float = float("inf"),
        step: Callable[[], object] = lambda: None,
    ) -> None:
        self.now = 0.0
        self._machine = machine
        self._size = machine.chunk_tokens
        assert trace.chunk_tokens == self._size
        self._looks_ahead = policy in ("attnstore", "infinite")
        self._out = Outcome(policy)
        self._step = step
        self._disk = SimulatedDisk(machine, lambda: self.now)
        self._store = None if policy == "recompute" else self._open_store(trace, policy)
        self._cost = StepCost()
        self._known: dict[int, Key] = {}
        self._waiting: dict[str, Job] = {}
        self._running: list[Job] = []
        self._reserved = 0
        self._hbm_tokens = machine.hbm // machine.kv_bytes_per_token
        self._in_hbm: OrderedDict[int, None] = OrderedDict()
        self._later: dict[int, deque[tuple[int, Request]]] = defaultdict(deque)
        self._arrivals: list[tuple[float, int, Request, int]] = []
        self._warmup = warmup
        self._until_s = until_s
        self._saved_tokens = 0
        begun: set[int] = set()
        for number, request in enumerate(trace.requests):
            if request.session >= 0 and request.session in begun:
                self._later[request.session].append((number, request))
            else:
                begun.add(request.session)
                self._arrivals.append((request.arrival_s, number, request, 0))
        heapq.heapify(self._arrivals)

    def _open_store(self, trace: Trace, policy: str) -> Store:
        machine = self._machine
        dram, nvme = (max(1, n // machine.chunk_bytes) for n in (machine.dram, machine.nvme))
        if policy == "infinite":
            dram = nvme = 2 * trace.num_chunks + 64
        nvme = min(nvme, 2 * trace.num_chunks + 64)  # more are never used
        shape = SegmentHeader(
            0, self._size, _SHAPE.payload_bytes, _SHAPE.namespace, _SHAPE.generation, 0, "simulated"
        )
        segment_bytes = PAGE_BYTES + nvme * shape.record_bytes
        slab = Slab(Path("simulated"), segment_bytes, shape, own={0: shape}, fresh=[0])
        return Store(
            NoPool(dram), slab, self._disk, machine.io_depth, io_deadline_s=float("inf"),
            eviction="attnstore" if policy == "infinite" else policy,
            clock=lambda: self.now, threaded=False,
        )  # fmt: skip

    # ---- time --------------------------------------------------------------------------

    def run(self) -> Outcome:
        while self._arrivals or self._waiting or self._running:
            step = self._plan()
            if step is None:
                self._pass_until(min(self._next_arrival, self._disk.next_end, self._next_deadline))
                continue
            began = self.now
            self._pass_until(began + self._seconds(step))
            is_counting = self._is_counting
            self._end(step)
            saving_s, self._saved_tokens = self._machine.saving_s(self._saved_tokens), 0
            if saving_s > 0:
                self._out.busy_s += saving_s if is_counting else 0.0
                self._pass_until(self.now + saving_s)
        out, chunk = self._out, self._machine.chunk_bytes
        out.duration_s = self.now
        self._turn()
        while self._disk.next_end < float("inf"):  # what is still to be written
            self._pass_until(self._disk.next_end)
        out.bytes_read = self._disk.num_moved[Op.READ] * chunk
        out.bytes_written = self._disk.num_moved[Op.WRITE] * chunk
        return out

    @property
    def _next_arrival(self) -> float:
        return self._arrivals[0][0] if self._arrivals else float("inf")

    @property
    def _next_deadline(self) -> float:
        return min((j.deadline_s for j in self._waiting.values() if j.was_asked),
                   default=float("inf"))  # fmt: skip

    def _pass_until(self, end: float) -> None:
        """Let time pass; the disk works on, and requests come."""
        assert end < float("inf"), "nothing will ever happen"
        while (at := min(self._next_arrival, self._disk.next_end)) <= end:
            self.now = max(self.now, at)
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self._arrive(*heapq.heappop(self._arrivals))
            self._turn()
        self.now = max(self.now, end)
        self._turn()

    def _turn(self) -> None:
        if self._store is not None:
            self._store.turn()  # submits, and tells of what has ended
            while self._disk.take_ended():  # which has made room for more
                self._store.turn()

    # ---- a request comes ---------------------------------------------------------------

    def _arrive(self, at: float, number: int, request: Request, history: int) -> None:
        keys = TraceKeys(request.chunks.tolist(), request.known_tokens, self._size, self._known)
        is_counted = number >= self._warmup and at <= self._until_s
        job = Job(str(number), request, is_counted, history, at, keys)
        self._waiting[job.name] = job
        if self._store is not None and self._looks_ahead:
            with self._store.queue() as queue:
                queue.append(job.name)
            self._look_up(job)

    def _look_up(self, job: Job) -> None:
        assert self._store is not None
        _, job.visit = self._store.arrive(job.name, job.keys, job.stop + 1, MIN_TOKENS)

    # ---- a step ------------------------------------------------------------------------

    def _plan(self) -> Step | None:
        """The step that runs next; None if nothing can. Requests that are started leave the
        queue."""
        machine = self._machine
        step = Step([j for j in self._running if j.computed >= j.request.num_tokens])
        budget = machine.max_num_batched_tokens - len(step.generating)
        for job in self._running:
            left = min(job.request.num_tokens - job.computed, budget)
            if left > 0:
                step.prompts.append((job, left))
                budget -= left
        started = []
        is_full = False
        for job in self._waiting.values():
            is_full = self._is_full(job)
            if is_full or budget <= 0:
                break
            if not self._ask(job, step):
                continue
            started.append(job)
            left = min(job.request.num_tokens - job.computed, budget)
            step.prompts.append((job, left))
            budget -= left
            self._start(job)
        for job in started:
            del self._waiting[job.name]
        if self._store is not None and started:
            self._store.leave_queue([job.name for job in started])
        if not step.prompts and not step.generating:
            return None
        if not step.prompts and (is_full or not self._waiting):
            step.num_repeats = self._repeats(step.generating, is_full=is_full)
        return step

    def _is_full(self, job: Job) -> bool:
        if len(self._running) >= self._machine.max_num_seqs:
            return True
        return bool(self._running) and self._reserved + num_reserved(job) > self._hbm_tokens

    def _start(self, job: Job) -> None:
        self._running.append(job)
        self._reserved += num_reserved(job)
        room = max(0, self._hbm_tokens - self._reserved) // self._size
        while len(self._in_hbm) > room:
            self._in_hbm.popitem(last=False)

    def _repeats(self, generating: Sequence[Job], *, is_full: bool) -> int:
        """Steps that only generate, until one of these ends or somebody comes who can start."""
        count = min(num_answer(job) - job.generated for job in generating)
        if not is_full and self._arrivals:
            seconds = self._machine.decode_s(len(generating))
            count = min(count, int((self._next_arrival - self.now) / seconds) + 1)
        return max(1, count)

    def _seconds(self, step: Step) -> float:
        """The step's length, which is noted."""
        machine = self._machine
        prompts = [(job.computed, job.computed + count) for job, count in step.prompts]
        prefill_s = sum(machine.prefill_s(start, stop) for start, stop in prompts)
        decode_s = machine.decode_s(len(step.generating))
        load_s = step.loaded_tokens * machine.kv_bytes_per_token / machine.hbm_bandwidth
        computing_s = prefill_s + decode_s
        seconds = max(computing_s, load_s) if machine.overlap else computing_s + load_s
        self._cost.observe(computing_s, prompts, len(step.generating))
        if self._is_counting:
            self._out.busy_s += seconds * step.num_repeats
            self._out.prefill_s += seconds - decode_s
        return seconds * step.num_repeats

    @property
    def _is_counting(self) -> bool:
        return any(job.is_counted for job in self._running)

    def _end(self, step: Step) -> None:
        if self._store is not None:
            self._store.loaded(step.loaded)
        for job, count in step.prompts:
            job.computed += count
            if job.computed >= job.request.num_tokens:
                job.generated = 1
                self._first_token(job)
            self._save(job)
        for job in step.generating:
            job.generated += step.num_repeats
            self._save(job)
        for job in [j for j in self._running if j.generated >= num_answer(j)]:
            self._finish(job)

    def _first_token(self, job: Job) -> None:
        if job.is_counted:
            seconds = self.now - job.arrived_s
            self._out.ttft_s.append(seconds)
            if job.history:
                self._out.later_ttft_s.append(seconds)

    def _finish(self, job: Job) -> None:
        self._save(job, is_over=True)
        self._running.remove(job)
        self._reserved -= num_reserved(job)
        if self._machine.prefix_cache:
            whole = job.request.known_tokens // self._size
            for number in reversed(job.request.chunks[:whole].tolist()):
                self._in_hbm[number] = None
                self._in_hbm.move_to_end(number)
        later = self._later.get(job.request.session)
        if later:
            number, request = later.popleft()
            history = min(job.request.known_tokens, request.num_tokens)
            heapq.heappush(self._arrivals, (self.now + request.think_s, number, request, history))
        self._step()

    # ---- the store ---------------------------------------------------------------------

    def _ask(self, job: Job, step: Step) -> bool:
        """Whether the job starts now, with what it finds; else it waits for KV."""
        local = self._local(job)
        held: list[Piece] = []
        if self._store is not None:
            if job.visit is None:
                self._look_up(job)
            found = self._store.find(
                job.keys, local, job.stop, MIN_TOKENS, visit=job.visit,
                request_id=job.name if self._looks_ahead else None,
            )  # fmt: skip
            if not job.was_asked:
                self._first_offer(job, local, found)
            held = self._store.hold_ready(found, job.keys, job.stop)
            ready = held[-1].stop if held else local
            if len(held) < len(found) and self._waits(job, ready, found[len(held) :]):
                self._store.release(piece.chunk for piece in held)
                if job.stuck_s is None:
                    job.stuck_s = self.now
                return False
        job.computed = job.computed_from = held[-1].stop if held else local
        step.loaded += [piece.chunk for piece in held]
        step.loaded_tokens += job.computed - local
        self._count(job, local, held)
        return True

    def _local(self, job: Job) -> int:
        """Tokens of it that vLLM's own prefix cache has."""
        found = list(takewhile(self._in_hbm.__contains__, job.request.chunks.tolist()))
        for number in reversed(found):
            self._in_hbm.move_to_end(number)
        return min(len(found) * self._size, job.stop // self._size * self._size)

    def _first_offer(self, job: Job, local: int, found: Sequence[Piece]) -> None:
        job.was_asked = True
        job.deadline_s = self.now + self._machine.load_deadline_s
        ready = [piece for piece in found if piece.chunk.dram.state is State.READY]
        job.ready = frozenset(piece.chunk.name.key for piece in ready)
        if job.is_counted:
            out = self._out
            wanted_tokens = sum(p.stop - p.start for p in found)
            ready_tokens = sum(p.stop - p.start for p in ready)
            out.wanted_tokens += wanted_tokens
            out.ready_tokens += ready_tokens
            if self.now - job.arrived_s >= QUEUED_S:
                out.queued_wanted_tokens += wanted_tokens
                out.queued_ready_tokens += ready_tokens
            out.stored_history += min(found[-1].stop if found else local, job.history)

    def _waits(self, job: Job, ready: int, coming: Sequence[Piece]) -> bool:
        assert self._store is not None
        if self.now >= job.deadline_s:
            return False
        arrivals = self._store.arrivals(job.name, coming)
        if arrivals is None or not self._cost.is_known:
            return True
        return pieces_to_wait_for(ready, [p.stop for p in coming], arrivals, self._cost) > 0

    def _count(self, job: Job, local: int, held: Sequence[Piece]) -> None:
        if not job.is_counted:
            return
        out = self._out
        out.num_requests += 1
        out.prompt_tokens += job.request.num_tokens
        out.history_tokens += job.history
        out.found_history += min(job.computed, job.history)
        out.hbm_tokens += local
        for piece in held:
            tokens = piece.stop - piece.start
            if piece.chunk.name.key in job.ready:
                out.dram_tokens += tokens
            else:
                out.nvme_tokens += tokens
        if job.stuck_s is not None:
            out.waited_s += self.now - job.stuck_s

    def _save(self, job: Job, *, is_over: bool = False) -> None:
        """Save the whole chunks that it has computed, and when it is over what is left."""
        if self._store is None:
            return
        tokens = job.computed + max(0, job.generated - 1)
        known, size = min(tokens, job.request.known_tokens), self._size
        names = [job.keys.name(i, _TENANT) for i in range(job.num_saved, known // size)]
        first, job.num_saved = job.num_saved, max(job.num_saved, known // size)
        stop = kept_end(known, job.request.num_tokens)
        if is_over and stop - known // size * size >= MIN_TOKENS:
            names.append(self._tail(job.keys, known // size, stop))
        saved = []
        for number, name in enumerate(names, start=first):
            run = job.visit.run(number) if job.visit else None
            again = name.position >= job.computed_from
            chunk = self._store.begin_save(name, run, again=again)
            if chunk is not None:
                saved.append(chunk)
        self._saved_tokens += sum(chunk.name.num_tokens for chunk in saved)
        if saved:
            self._store.finish_saves(saved)

    def _tail(self, keys: TraceKeys, number: int, stop: int) -> ChunkName:
        start, parent = number * self._size, keys.parent(number)
        tokens = keys.tokens(start, stop)
        key = chunk_key(parent, b"", tokens)
        return ChunkName(key, parent, b"", _TENANT, start, stop - start, tokens)
