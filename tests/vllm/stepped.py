# SPDX-License-Identifier: Apache-2.0
"""A scripted engine (scripted.py) whose copies go on only when the test says so.

Each rank has a stream for loads and one for saves; a load fills its blocks with poison when it is
begun. What a load ahead of its step waits for is the test's choice, and so is which steps replay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from attnstore_lab.testing.copy_streams import StreamPiece
from attnstore_lab.testing.memory_engine import MemoryEngine, SteppedStream
from attnstore_vllm.connector.metrics import AttnStoreStats
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.reset_watch import ResetWatch
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from tests.vllm.scripted import ScriptedEngine
from tests.vllm.scripted_worker import BLOCK, LAYERS, VOCAB


class Copies(SteppedStream):
    """A stream that counts its pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        """What is over because the model waits for it, and what is behind that, is not said to be
        over before hear(): as with a GPU, whose host goes on meanwhile."""
        self._begun = 0
        self._before = 0
        self._heard = math.inf
        """That many, from the first on, may be said to be over."""

    def submit(self, work: Callable[[], None], num_bytes: int) -> Any:
        self._begun += 1
        number = self._begun
        piece: Any = super().submit(work, num_bytes)
        done = piece.done
        piece.done = lambda: number <= self._heard and done()
        return piece

    def is_waited_for(self, piece: StreamPiece) -> None:
        if self.is_late:
            self._heard = min(self._heard, self._begun - self.pending)
        super().is_waited_for(piece)

    def hear(self) -> None:
        """The news come, and are not late any more."""
        self.is_late, self._heard = False, math.inf

    @property
    def over(self) -> int:
        """Pieces that are over since mark()."""
        return self._begun - self.pending - self._before

    def mark(self) -> None:
        self._before = self._begun - self.pending

    def go_on(self, pieces: int | None = None) -> None:
        """Carry out so many, or all, of those that are pending."""
        self.step(self.pending if pieces is None else min(pieces, self.pending))

    def go_on_to(self, pieces: int) -> None:
        """Until so many are over since mark(), if there are so many."""
        self.go_on(max(0, pieces - self.over))


class SteppedEngine(ScriptedEngine):
    """See the module.

    Args:
        rows: of the write buffer, in blocks.
        options: of ScriptedEngine.
    """

    def __init__(self, model: Path, store: Path, *, depth: int, rows: int, **options: Any) -> None:
        self.depth = depth
        self.loads: list[Copies] = []
        self.saves: list[Copies] = []
        """One a rank."""
        self.layers_before = 0
        """Of the loads that are planned next."""
        self.replays: Callable[[], bool] = lambda: False
        """Asked of each step."""
        self.reported: Counter[str] = Counter()
        """Requests whose load a step has said to be received, or to have failed."""
        self.histories: dict[str, list[int]] = {}
        """What leave() has left, by name."""
        self.num_freed = 0
        """Requests whose kept blocks a step has said to be free."""
        self.stats = StepStats()
        self.is_broken = False
        """A step has raised, or did not end: whoever comes after need not look."""
        self.makes_drafts = bool(options.get("drafts"))
        self._num_rows = rows
        looks = options.pop("looks_at_weights", False)
        options.setdefault("compute_if_sooner", False)
        super().__init__(model, store, depth=depth, make_engine=self._make_engine, **options)
        self.ours.costs.layers_before = lambda *_: self.layers_before
        replays = replace(self.ours._engine, replays=lambda _: self.replays())
        self.ours._engine = replays
        if not looks:  # it takes a step after each reset, where a test counts steps
            self.ours._watch = ResetWatch()
        take_stats = self.ours.take_stats

        def keep_stats() -> StepStats:
            taken: StepStats = take_stats()
            AttnStoreStats(data=self.stats.data).aggregate(AttnStoreStats(data=taken.data))
            return taken

        self.ours.take_stats = keep_stats

    def _make_engine(
        self, place: tuple[int, int, int, Geometry], layouts: list[LayerLayout]
    ) -> MemoryEngine:
        loads, saves = Copies(), Copies()
        self.loads.append(loads)
        self.saves.append(saves)
        return MemoryEngine(
            *place,
            layouts,
            loads=loads,
            saves=saves,
            num_rows=self._num_rows,
            poison=True,
        )

    @property
    def streams(self) -> list[Copies]:
        return [*self.loads, *self.saves]

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        try:
            result = super()._execute(output)
        except Exception:
            self.is_broken = True
            raise
        found = result.kv_connector_output
        assert found is not None
        self.reported.update(found.finished_recving or ())
        self.num_freed += len(found.finished_sending or ())
        return result

    def leave(self, name: str, num_tokens: int) -> None:
        """A request that leaves so many tokens of KV, the last block's from its answer: a hit may
        end where they do (index/prefix.py)."""
        at = num_tokens - BLOCK
        # With three steps in flight the last token's KV is computed as well before it ends.
        self.add(name, prompt(name, at), BLOCK + (self.depth < 3))
        request = self.scheduler.requests[name]
        self.settle()
        self.histories[name] = list(request.all_token_ids)[:num_tokens]

    def begin_case(self) -> None:
        """What is counted is counted anew."""
        self.reported.clear()
        self.num_freed = 0
        self.stats = StepStats()
        for worker in self.workers:
            worker.sequences.clear()
        for stream in self.streams:
            stream.mark()

    def settle(self, steps_max: int = 200) -> None:
        """To the end of all requests, with copies that are quick; then nothing is held."""
        for _ in range(steps_max):
            if not (self.scheduler.has_requests() or self.in_flight):
                break
            for stream in self.streams:
                stream.go_on()
            self.step()
        else:
            self.is_broken = True
            raise AssertionError(f"requests are left after {steps_max} steps")
        assert not any(stream.pending for stream in self.streams)
        assert not self.ours.plans.any_open()
        assert self.scheduler.reset_prefix_cache(), "blocks are held"

    def reset_running(self, *, reset_connector: bool = False) -> bool:
        """What runs loses its blocks. Returns whether vLLM could empty its prefix cache: it cannot
        while a step is in flight, or a copy holds blocks of what does not run."""
        try:
            return self.scheduler.reset_prefix_cache(True, reset_connector)
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            return False

    def load_state(self, request_id: str) -> str:
        """How far the request's load ahead is, for the worker and for vLLM."""
        request = self.scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return "gone"
        if request.status == RequestStatus.RUNNING:
            return "running"
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            return "waiting"
        if request_id in self.scheduler.finished_recving_kv_req_ids:
            return "received"
        return "reported" if self.reported[request_id] else "loading"

    def count(self, name: str) -> float:
        """A counter ("name:label") since begin_case()."""
        return float(self.stats.data["counters"].get(name, 0))


def prompt(name: str, length: int) -> list[int]:
    """Tokens that are this name's."""
    random = Random(name)
    return [random.randrange(VOCAB) for _ in range(length)]


def leave_to_chance(engine: SteppedEngine, seed: int) -> None:
    """Everything that is the test's choice, and what may come while a step is in flight."""
    random = Random(seed)
    rates = [random.choice((0.02, 0.1, 0.5)) for _ in engine.streams]

    def go_on() -> None:
        for stream, rate in zip(engine.streams, rates, strict=True):
            if random.random() < rate:
                stream.go_on(random.randrange(1, 2 * LAYERS))

    def happen() -> None:
        if random.random() < 0.02 and engine.scheduler.requests:
            engine.abort(random.choice(list(engine.scheduler.requests)))
        # A worker that made its drafts itself does not know which ones a reset drops.
        if random.random() < 0.02 and not engine.makes_drafts:
            engine.reset_running()

    for worker in engine.workers:
        worker.between = go_on
    engine.ours.costs.layers_before = lambda *_: random.choice((0, *range(LAYERS + 1)))
    engine.replays = lambda: random.random() < 0.2
    engine.before_update = happen
