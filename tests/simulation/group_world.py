# SPDX-License-Identifier: Apache-2.0
"""A model of several KV cache groups on a vLLM in small, over a disk that fails, from one seed.

It is long since engine, disk and workers are one world.

The scheduler side, the store and the workers' loads and saves are the real ones; the engine that
calls them (schedule, step, finish), its blocks and its disk are simulated. Whenever a step computes
a token, all that the layers of each group may look at must have the right bytes: what came from
HBM, DRAM and NVMe, through tails, holes, branches, states, preemptions, aborts and restarts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from attnstore_lab.sim.jobs import Plain, step_stop
from attnstore_lab.sim.simulated_store import SimulatedStore
from attnstore_lab.testing.copy_streams import SteppedStream
from attnstore_lab.testing.memory_engine import MemoryEngine
from attnstore_lab.testing.small_store import SMALL
from attnstore_vllm.connector.groups import needs_of
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.errors import CopyError, CorruptRecordError
from attnstore_vllm.scheduler.messages import StepPlan, StepReport
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.tiers.context import Harness
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES
from attnstore_vllm.tiers.nvme.slab import Slab, new_generation
from attnstore_vllm.transfer.geometry import Group
from attnstore_vllm.transfer.layout import LayerLayout
from attnstore_vllm.transfer.pool import SharedPool
from attnstore_vllm.transfer.worker_copies import Loads, Saves
from attnstore_vllm.types import Seen
from tests.helpers import NAMESPACE, SHAPE, format_image, found_slab, open_pool
from tests.simulation.disk import SimulatedDisk, Weather
from tests.simulation.group_memory import BLOCK_BYTES, GroupMemory, Truth, geometry_of
from tests.simulation.world import WEATHERS
from tests.vllm_objects import output

TOKENS_MAX = 400
RUNNING_MAX = 4
REST_STEPS = 5000


class Names:
    """See scheduler.Names."""

    namespace: bytes | None = NAMESPACE

    def be_live(self, live: Mapping[int, bytes | None]) -> None:
        """No test of these changes weights."""
        raise AssertionError(live)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(eq=False)
class Job(Plain):
    """A request in the engine."""

    request_id: str
    all_token_ids: list[int]
    num_answer: int
    truth: Truth
    arrival_time: float = 0.0
    num_computed_tokens: int = 0
    local: int = 0
    """Tokens that vLLM's own cache had, which are not in its blocks yet."""
    was_loaded: str = ""
    is_received: bool = False
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass(slots=True)
class GroupWorld:
    """One run of a model. `counts` says what happened in it."""

    seed: int
    groups: tuple[Group, ...]
    cuts: bool = False
    """The engine may take less than it is offered, and in a later step."""
    random: Random = field(init=False)
    disk: SimulatedDisk = field(init=False)
    counts: Counter[str] = field(init=False, default_factory=Counter)
    conversations: list[list[int]] = field(init=False, default_factory=list)
    edition: int = field(init=False, default=0)
    waiting: list[Job] = field(init=False)
    remote: dict[str, Job] = field(init=False)
    """Whose load runs ahead; none of them is scheduled."""
    late: dict[str, tuple[int, int]] = field(init=False)
    """Of those in `remote` that have not taken what they were offered: that, and the tokens before.
    """
    leaving: set[str] = field(init=False)
    """Requests that ended while their load ran ahead."""
    running: list[Job] = field(init=False)
    hbm: GroupMemory = field(init=False)
    pool: SharedPool = field(init=False)
    store: SimulatedStore = field(init=False)
    scheduler: Scheduler = field(init=False)
    loads: Loads = field(init=False)
    saves: Saves = field(init=False)
    streams: tuple[SteppedStream, SteppedStream] = field(init=False)
    engine: MemoryEngine = field(init=False)
    num_jobs: int = field(init=False, default=0)
    is_beside: bool = field(init=False)
    """Copies run beside the model, as on GPUs; else they are over when they are begun."""
    zeroes: bool = field(init=False)
    budget: int = field(init=False)
    """Tokens of a step."""
    shape: Any = field(init=False)
    records: int = field(init=False)
    is_unsure: bool = field(init=False, default=False)
    """A reset has said that it failed: the file must not be used again."""

    def __post_init__(self) -> None:
        random = self.random = Random(self.seed)
        geometry = geometry_of(self.groups)
        has_states = any(group.reach == "state" for group in self.groups)
        self.is_beside = random.random() < 0.5
        self.zeroes = has_states or random.random() < 0.3
        self.budget = random.choice((64, 96, 200))
        self.records = random.choice((30, 80, 200))
        self.shape = replace(
            SHAPE, chunk_tokens=geometry.chunk_tokens, payload_bytes=geometry.slot_bytes
        )
        segment_bytes = PAGE_BYTES + self.records * self.shape.record_bytes
        self.disk = SimulatedDisk(bytearray(PAGE_BYTES + segment_bytes), random)
        self._open(self._new_slab())

    def _new_slab(self) -> Slab:
        segment_bytes = PAGE_BYTES + self.records * self.shape.record_bytes
        slab = Slab(Path("memory"), segment_bytes, self.shape)
        slab.own[0] = replace(self.shape, number=0, generation=new_generation())
        slab.fresh.append(0)
        format_image(self.disk.image, slab)
        return slab

    def _open(self, slab: Slab) -> None:
        geometry = geometry_of(self.groups)
        random = self.random
        self.waiting, self.running, self.remote, self.leaving = [], [], {}, set()
        self.late = {}
        self.hbm = GroupMemory(self.groups, random.choice((90, 160)), random)
        self.pool = open_pool(random.choice((10, 20, 50)), geometry.slot_bytes)
        eviction: Literal["attnstore", "lru"] = random.choice(("attnstore", "lru"))
        rows = random.choice((8, 16, 64)) if self.is_beside else None
        nvme = replace(SMALL.nvme, scrub_bytes_per_s=1 << 20)
        config = replace(
            SMALL, nvme=nvme, io_depth=4, load_deadline_ms=200, eviction=eviction,
            look_ahead=random.random() < 0.7, compute_if_sooner=random.random() < 0.3,
        )  # fmt: skip
        engine = EngineFacts(
            needs=needs_of(geometry), rows=rows, gives_blocks_away=not self.zeroes,
            step_tokens=self.budget, cuts_hits=self.cuts,
        )  # fmt: skip
        harness = Harness(clock=self._clock, threaded=False)
        self.store = SimulatedStore(self.pool, slab, self.disk, config, engine, harness=harness)
        self.scheduler = Scheduler(self.store, geometry, Names(), config, engine, clock=self._clock)
        self.scheduler.bind_kv_cache_manager(self.hbm)
        layout = LayerLayout(
            self.hbm.memory.ctypes.data, len(self.hbm.memory), BLOCK_BYTES, (0,), BLOCK_BYTES
        )
        self.streams = SteppedStream(), SteppedStream()
        loads, saves = self.streams
        self.engine = MemoryEngine(
            self.pool.address,
            self.pool.num_slots,
            0,
            geometry,
            [layout],
            loads=loads,
            saves=saves,
            num_rows=rows or 0,
            poison=True,
        )
        self.loads, self.saves = Loads(self.engine, 1), Saves(self.engine, 1, rows or 0)

    def _clock(self) -> float:
        return self.disk.now

    # ---- a run -------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        for _ in range(steps):
            choice = self.random.random()
            if choice < 0.01:
                self.disk.weather = self.random.choice(WEATHERS)
            elif choice < 0.013:
                self.restart()
            elif choice < 0.016:
                self.reset()
            elif choice < 0.03 and self.running + self.waiting:
                self._end(self.random.choice(self.running + self.waiting), "aborted")
            elif choice < 0.035 and self.remote:
                self._end(self.random.choice(list(self.remote.values())), "aborted ahead")
            elif choice < 0.3 and len(self.waiting) < 4:
                self.arrive()
            self.step()
            if self.random.random() < 0.02:
                self.store.check_integrity()
        self.come_to_rest()
        self.counts.update(self.disk.faults)

    def come_to_rest(self) -> None:
        self.disk.weather = Weather()
        for job in [*self.running, *self.waiting, *self.remote.values()]:
            self._end(job, "aborted")
        for _ in range(REST_STEPS):
            is_quiet = not (self.scheduler.plans.any_open() or self.remote)
            if is_quiet and self.store.is_idle():
                break
            self.step()
            self.disk.now += 0.05
        assert self.store.is_idle(), f"{self}: does not come to rest"
        self.scheduler.check_quiet()
        assert self.hbm.num_used == 0, f"{self}: blocks are lost"
        self._close()

    def _close(self) -> None:
        self.engine.close()
        self.pool.close()

    def __str__(self) -> str:
        return f"seed {self.seed}"

    # ---- requests ----------------------------------------------------------------------

    def arrive(self) -> None:
        random = self.random
        new = [random.randrange(50_000) for _ in range(random.randrange(1, 90))]
        prompt: list[int] = []
        choice = random.random()
        if self.conversations and choice < 0.8:
            prompt = random.choice(self.conversations)
            if choice < 0.3:  # branches off
                prompt = prompt[: random.randrange(1, len(prompt) + 1)]
            if choice < 0.15:  # where whole blocks end
                prompt = prompt[: max(16, len(prompt) // 16 * 16)]
        if not (prompt and choice < 0.1):  # else the same prompt again
            prompt = (prompt + new)[: TOKENS_MAX - 40] if len(prompt) < TOKENS_MAX - 60 else new
        self.num_jobs += 1
        tokens = list(prompt)
        job = Job(
            str(self.num_jobs),
            tokens,
            random.randrange(1, 40),
            Truth(tokens, self.edition),
            self.disk.now,
        )
        self.waiting.append(job)
        self.scheduler.on_new_request(job)

    def _end(self, job: Job, how: str) -> None:
        """It has its answer, or somebody has given it up."""
        self.counts[how] += 1
        name = job.request_id
        tables: Sequence[Sequence[int]] = [[] for _ in self.groups]
        if name in self.hbm.tables:
            self.hbm.forget_before(name, job.num_computed_tokens)
            tables = self.hbm.get_block_ids(name)
        keeps, _ = self.scheduler.request_finished(job, tables)
        if self.late.pop(name, None):
            del self.remote[name]
        if name in self.remote:
            self.leaving.add(name)
        elif not keeps:
            self.hbm.give_back(name)
        if job in self.running:
            self.running.remove(job)
            self.conversations.append(job.all_token_ids)
            del self.conversations[: -self.random.choice((6, 10))]
        elif job in self.waiting:
            self.waiting.remove(job)

    # ---- a step ------------------------------------------------------------------------

    def step(self) -> None:
        preempted: set[str] = set()
        if self.running and self.random.random() < 0.02:
            self._preempt(self.random.choice(self.running), preempted)
        counts: dict[Job, int] = {}
        for name in [name for name in self.late if self.random.random() < 0.5]:
            self._take(self.remote[name], *self.late.pop(name))
            self.counts["taken late"] += 1
        old = self._go_on(counts, preempted)
        self._start(counts, preempted)
        told = {job.request_id: (job.num_computed_tokens, n) for job, n in counts.items()}
        plan_for = output(
            {name: at for name, at in told.items() if name not in old},
            {name: at for name, at in told.items() if name in old},
        )
        plan_for.preempted_req_ids = preempted
        plan = self.scheduler.build_step(plan_for)
        self._check_figures(plan)
        for job, count in counts.items():
            job.num_computed_tokens += count
            job.num_in_flight_tokens = count
        self._execute(plan, counts)
        self._report(plan)
        for job in counts:
            job.num_in_flight_tokens = 0
            if job.num_computed_tokens == job.num_tokens:
                job.all_token_ids.append(self.random.randrange(50_000))
            if job.num_tokens - job.num_prompt_tokens >= job.num_answer:
                self._end(job, "finished")
        self.disk.now += self.random.choice((0.001, 0.01, 0.05, 0.3))
        self.store.tick()

    def _check_figures(self, plan: StepPlan) -> None:
        """The figures by kind of group say what the plan does."""
        told = Counter(self.scheduler.take_stats().data["counters"])
        loaded = Counter[str]()
        for load in plan.loads:
            kinds = self.hbm.kinds_of(load.request_id)
            for copy in load.copies:
                for block in copy.block_ids:
                    loaded[kinds[block]] += BLOCK_BYTES
        for kind in ("full", "window", "local", "state"):
            assert told[f"group_loaded_bytes:{kind}"] == loaded[kind], f"{self}: {kind} {loaded}"
            for name in ("shortened_hits", "sections_passed", "sections_dropped"):
                self.counts[f"{name} {kind}"] += told[f"{name}:{kind}"]
        saved = sum(p.num_blocks for p in (*plan.saves, *plan.saves_before)) * BLOCK_BYTES
        names = [name for name in told if name.startswith("group_saved_bytes:")]
        assert sum(told[name] for name in names) == saved, f"{self}: {told}"

    def _preempt(self, job: Job, preempted: set[str]) -> None:
        self.running.remove(job)
        self.hbm.give_back(job.request_id)
        job.num_computed_tokens = 0
        job.num_preemptions += 1
        preempted.add(job.request_id)
        self.waiting.insert(0, job)
        self.counts["preempted"] += 1

    def _go_on(self, counts: dict[Job, int], preempted: set[str]) -> set[str]:
        """Those that run."""
        budget = self.budget
        for job in list(self.running):
            if job not in self.running:
                continue
            count = self._count(job, job.num_computed_tokens, budget)
            while count and not self._grow(job, count):
                victim = self.running[-1]
                counts.pop(victim, None)
                self._preempt(victim, preempted)
                if victim is job:
                    count = 0
            if count:
                counts[job] = count
                budget -= count
        return {job.request_id for job in counts}

    def _grow(self, job: Job, count: int) -> bool:
        at = job.num_computed_tokens
        return self.hbm.grow(job.request_id, at, at + count)

    def _count(self, job: Job, start: int, budget: int) -> int:
        """Tokens of its next step. Where there are states, a prompt's steps end where blocks do."""
        end = min(job.num_tokens, start + budget)
        for group in self.groups:
            size = group.block_tokens
            if group.reach != "state" or start >= job.num_prompt_tokens:
                continue
            end = step_stop(start, end, job.num_tokens, size)
        return max(0, end - start)

    def _start(self, counts: dict[Job, int], preempted: set[str]) -> None:
        """Those that wait and have a place."""
        budget = self.budget - sum(counts.values())
        for job in list(self.waiting):
            if len(self.running) + len(self.remote) >= RUNNING_MAX or budget <= 0:
                return
            if job.request_id in preempted:
                continue
            if job.is_received:
                count = self._count(job, job.num_computed_tokens, budget)
                if not count or not self._grow(job, count):
                    return
                job.is_received = False
            else:
                local = self._local_hit(job)
                found, is_ahead = self.scheduler.get_num_new_matched_tokens(job, local)
                if found is None:
                    continue
                if self.cuts and found:
                    found = self._cut(found)
                    is_ahead = is_ahead and found > 0
                at = local + found
                count = 0 if is_ahead else self._count(job, at, budget)
                stop = at + count
                is_full = not (count or is_ahead) or not self.hbm.grow(
                    job.request_id, at, stop, is_ahead=is_ahead
                )
                if is_full:
                    self.hbm.give_back(job.request_id)
                    return
                if is_ahead and self.cuts and self.random.random() < 0.2:
                    self.late[job.request_id] = local, found
                else:
                    self._take(job, local, found)
                if is_ahead:
                    self.waiting.remove(job)
                    self.remote[job.request_id] = job
                    continue
            self.waiting.remove(job)
            self.running.append(job)
            counts[job] = count
            budget -= count

    def _cut(self, found: int) -> int:
        """How much of an offer is taken."""
        choice = self.random.random()
        if choice < 0.3:
            return found
        self.counts["cut"] += 1
        taken = 0 if choice < 0.35 else self.random.randrange(1, found + 1)
        return taken if choice < 0.5 else taken // 16 * 16

    def _take(self, job: Job, local: int, found: int) -> None:
        """It has blocks, and takes what it was offered."""
        tables = self.hbm.get_block_ids(job.request_id)
        self.scheduler.update_state_after_alloc(job, tables, found)
        job.local, job.num_computed_tokens = local, local + found
        job.was_loaded = f"{local} in HBM, {found} loaded"
        self.counts["served"] += found > 0
        self.counts["tokens"] += found
        self.counts["ends within a block"] += found % 16 > 0
        for tier, tokens in self.scheduler.sources(job, found).items() if found else ():
            self.counts[f"from {tier}"] += tokens

    def _local_hit(self, job: Job) -> int:
        """What vLLM's own cache has: whole blocks of all groups. It is right by itself."""
        if self.random.random() < 0.7:
            return 0
        whole = (job.num_tokens - 1) // 64
        return 64 * self.random.randrange(whole + 1)

    # ---- the workers -------------------------------------------------------------------

    def _execute(self, plan: StepPlan, counts: dict[Job, int]) -> None:
        started = [*counts, *self.remote.values()]
        if self.is_beside and self.zeroes:
            self._prepare(counts, started)
        self._turn_streams()
        whole = plan.may_replay or self.random.random() < 0.5 or not self.is_beside
        self.loads.begin_step(plan.ended_loads, whole=whole)
        self.saves.begin_step(plan.saves_before, plan.saves, plan.preempted, by_layer=False)
        if not (self.is_beside and self.zeroes):
            self._prepare(counts, started)
        if counts or not self.is_beside:
            self.loads.begin(plan.loads, whole=whole)
        self._turn_streams()
        if counts:
            self.loads.wait_layer(0)
        for job, count in counts.items():
            stop = job.num_computed_tokens
            where = f"{self}: request {job.request_id} ({job.was_loaded})"
            self.hbm.check(job.request_id, job.truth, stop - count, stop, where)
            self.hbm.fill(job.request_id, job.truth, stop - count, stop)
        if not counts and self.is_beside:
            self.loads.begin(plan.loads, whole=whole)
        self._turn_streams()
        self.loads.end_step()
        self.saves.end_step(plan.finished_saving)

    def _prepare(self, counts: dict[Job, int], started: Sequence[Job]) -> None:
        """vLLM makes blocks ready for this step."""
        if self.zeroes:
            self.hbm.memory[self.hbm.fresh] = 0
        self.hbm.fresh.clear()
        for job in started:
            if job.local:
                self.hbm.fill(job.request_id, job.truth, 0, job.local)
                job.local = 0
        for job, count in counts.items():
            stop = job.num_computed_tokens
            self.hbm.move_states(job.request_id, stop - count, stop)

    def _turn_streams(self) -> None:
        loads, saves = self.streams
        if self.is_beside and self.random.random() < 0.01:
            saves.fail_next(CopyError("simulated"))
        for stream in (loads, saves):
            stream.step(self.random.randrange(stream.pending + 1))

    def _report(self, plan: StepPlan) -> None:
        freed = self.saves.take_freed()
        received, failed = self.loads.take_received()
        assert self.cuts or not failed
        self.scheduler.on_failed_requests(failed)
        saved, given_up = self.saves.take_finished()
        seen = Seen.SAME if plan.looks_at_weights else Seen.NOTHING
        done = Counter([*self.loads.take_finished(), *saved, *given_up])
        report = StepReport(plan.number, done, set(given_up), Counter(freed), weights=seen)
        self.scheduler.on_report(report)
        self.counts["given up"] += len(given_up)
        for name in freed:
            self.hbm.give_back(name)
        for name in sorted(received | failed):
            job = self.remote.pop(name)
            if name in self.leaving:
                self.leaving.remove(name)
                self.hbm.give_back(name)
                continue
            self.counts["received"] += name in received
            self.counts["refused"] += name in failed
            job.is_received = name in received
            if name in failed:  # vLLM begins it anew
                self.hbm.give_back(name)
                job.num_computed_tokens = job.local = 0
            self.waiting.insert(0, job)

    # ---- what happens to it ------------------------------------------------------------

    def restart(self) -> None:
        """Killed, or the power goes; the next start finds what is on the medium."""
        image = self.disk.lose_power() if self.random.random() < 0.5 else self.disk.kill()
        if self.random.random() < 0.2:
            at = self.random.randrange(8192, len(image))
            image[at] ^= 1 << self.random.randrange(8)
        self.counts.update(self.disk.faults)
        self._close()
        disk, self.disk = self.disk, SimulatedDisk(image, self.random)
        self.disk.now = disk.now
        try:
            slab = found_slab(image, self.shape) if not self.is_unsure else self._new_slab()
        except CorruptRecordError:
            slab = self._new_slab()
        self.is_unsure = False
        self._open(slab)
        self.counts["restarts"] += 1

    def reset(self) -> None:
        """New weights, while nothing runs: all KV of before is wrong from now on."""
        for job in [*self.running, *self.waiting, *self.remote.values()]:
            self._end(job, "aborted")
        # Whether the new generations are on the medium, only reading them again would tell.
        weather = self.disk.weather
        self.disk.weather = replace(weather, lost_write=0.0, misplaced_write=0.0)
        resets = self.store.thread.reset()
        for _ in range(REST_STEPS):  # as Store.reset does, in our time
            if all(reset.is_over for reset in resets):
                break
            self.disk.now += 0.05
            self.store.tick()
        self.disk.weather = weather
        self.is_unsure |= not all(reset.succeeded for reset in resets)
        self.edition += 1
        self.counts["resets"] += 1
