# SPDX-License-Identifier: Apache-2.0
"""vLLM as its hooks and objects tell of it: its waiting queue, how long its steps take, resets of
its prefix cache, and names of blocks there that only one request knows."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from blake3 import blake3

from attnstore_vllm.policy.cost import OUTLIER, USUAL_STEPS, StepCost
from attnstore_vllm.policy.step_budget import StepBudget
from attnstore_vllm.scheduler.lookups import STEP_TOKENS, Lookups, look_tokens
from attnstore_vllm.scheduler.messages import StepPlan, StepReport
from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS, RequestState
from attnstore_vllm.scheduler.vllm_types import KVCacheManager, Request, SchedulerOutput
from attnstore_vllm.store.store import Store
from attnstore_vllm.types import Seen

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

OPEN_MAX = 16
"""Steps that were planned and have not come back. More than vLLM has in flight."""


class VllmQueue:
    """Keeps store.queue() like vLLM's. All methods run on the scheduler's thread.

    A request enters at the back when it comes and at the front when it is preempted (or in the
    order of priorities); one that vLLM skips stays in its place. It leaves when it is scheduled or
    has ended.

    Args:
        lookups: whose budget the look-ups of preempted requests are part of.
    """

    def __init__(self, store: Store, lookups: Lookups, *, by_priority: bool) -> None:
        self._store = store
        self._lookups = lookups
        self._leaving = StepBudget(STEP_TOKENS)
        """To leave costs a look at each chunk that is wanted; many may be aborted at once."""
        self._gone = OrderedDict[str, int]()
        """Those that have ended and are still in store.queue(), and what it takes to leave it."""
        self._by_priority = by_priority
        self._running: dict[str, Request] = {}
        """In the order in which they were scheduled, which is the order of vLLM's own list."""
        self._waiting: dict[str, Request] = {}
        self._placed: set[str] = set()

    def on_new_request(self, request: Request) -> None:
        if self._gone.pop(request.request_id, 0):
            self._store.leave_queue([request.request_id])  # another of this name
        self._waiting[request.request_id] = request
        with self._store.queue() as queue:
            if self._by_priority:
                queue.insert(request.request_id, request.priority, request.arrival_time)
            else:
                queue.append(request.request_id)

    def is_alone(self, request_id: str) -> bool:
        """Whether nobody else runs or waits."""
        return not self._running and self._waiting.keys() == {request_id}

    def on_step(self, output: SchedulerOutput, states: Mapping[str, RequestState]) -> None:
        """A step was planned. What was preempted since the last one waits again."""
        while self._gone and self._leaving.take(next(iter(self._gone.values()))):
            self._store.leave_queue([self._gone.popitem(last=False)[0]])
        self._leaving.begin_step()
        preempted = output.preempted_req_ids or ()
        back = [request for name, request in self._running.items() if name in preempted]
        for request in back:
            del self._running[request.request_id]
            self._waiting[request.request_id] = request
        if back:
            self._enter_again(back)
        # A streaming session's next input is scheduled as a new request, behind all that run.
        begun = {new.req_id for new in output.scheduled_new_reqs}
        new = [
            name
            for name in output.num_scheduled_tokens
            if name in begun or name not in self._running
        ]
        if new or self._placed:
            self._store.leave_queue([*new, *self._placed])
            for name in new:
                begins = self._running.pop(name, None) or self._waiting.pop(name, None)
                if begins is not None:
                    self._running[name] = begins
        for request in back:
            if request.request_id not in self._placed:
                self._look_up(request, states)
        self._placed.clear()

    def on_placed(self, request_id: str) -> None:
        """vLLM has given it blocks, and schedules it when its load is received.

        Before on_step(), which may be the one that tells of its preemption: after a reset.
        """
        self._placed.add(request_id)

    def on_finished(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            return
        request = self._waiting.pop(request_id, None)
        tokens = look_tokens(request.num_tokens if request is not None else 0)
        if not self._gone and self._leaving.take(tokens):
            self._store.leave_queue([request_id])
        else:
            self._gone[request_id] = tokens
            self._lookups.put_off["leave"] += 1

    def _enter_again(self, requests: list[Request]) -> None:
        """These were preempted."""
        with self._store.queue() as queue:
            if not self._by_priority:
                queue.prepend([request.request_id for request in requests])
                return
            for request in requests:
                queue.insert(request.request_id, request.priority, request.arrival_time)

    def _look_up(self, request: Request, states: Mapping[str, RequestState]) -> None:
        """Look up what a preempted request will want again."""
        state = states.get(request.request_id)
        if state is None or state.computing.is_outdated or state.adapter is None:
            return
        if request.request_id not in self._waiting:
            return
        if not self._lookups.budget.take(look_tokens(request.num_tokens)):
            self._lookups.put_off["lookup"] += 1  # until vLLM asks for it
        else:
            self._store.find(
                state.sequence,
                0,
                request.num_tokens - 1,
                MIN_LOAD_TOKENS,
                request_id=request.request_id,
                visit=state.visit,
            )


class ResetWatch:
    """Sees a reset of vLLM's own prefix cache, of which no hook tells, and asks why it came. All
    methods run on the scheduler's thread.

    Weights that are updated through collective_rpc or finish_weight_update reach no connector. What
    follows them is a plain reset_prefix_cache, since vLLM's own cache is wrong from then on too. So
    after one all requests wait for one step, in which the workers look whether the weights are what
    they were. The same at the start, since nothing need be reset before the first request; and,
    where vLLM has no prefix cache, when a request comes to a server that had none.

    Args:
        on_reset: called when vLLM's prefix cache has been emptied.
    """

    def __init__(self, on_reset: Callable[[], None] = lambda: None) -> None:
        self._on_reset = on_reset
        self._pool: Any = None
        self._blocks: object = None
        """vLLM's table of cached blocks: a reset puts another in its place."""
        self._in_doubt = True
        """From the start on: weights may come from elsewhere before the first request."""
        self._was_reset = False
        self.is_wanted = False
        """A request waits for the look."""
        self._asked: int | None = None
        """The step in which the workers look."""

    def bind(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._blocks = self._pool.cached_block_hash_to_block

    def must_wait(self) -> bool:
        """vLLM asks what a request finds: is it to ask again? Cost: 0.1 us without a reset."""
        if self._pool is None:
            return False
        blocks = self._pool.cached_block_hash_to_block
        if blocks is not self._blocks:
            self._blocks, self._in_doubt, self._asked = blocks, True, None
            self._was_reset = True
            self._on_reset()
        # Only a step in which requests are scheduled may look: until a pause is over, the
        # weights may still be about to change.
        self.is_wanted = self._in_doubt
        return self._in_doubt

    def doubt(self) -> None:
        """Weights may have been updated: the store was reset, or vLLM has no prefix cache that
        would be reset then. A look of before says nothing of it."""
        self._in_doubt, self._asked = True, None

    def add_to(self, plan: StepPlan) -> None:
        """Have the workers look in this step, if they have not been asked."""
        if self.is_wanted and self._asked is None:
            plan.looks_at_weights = True
            self._asked = plan.number
        self.is_wanted = False

    def is_late(self, report: StepReport) -> bool:
        """Whether a look of before the last reset says that the weights are the same."""
        return report.weights is Seen.SAME and report.number != self._asked

    def on_report(self, report: StepReport) -> bool:
        """Whether the weights are not what they were. Of a model whose weights cannot be seen:
        whether they may be others, since somebody has reset vLLM's cache."""
        if self._asked is not None and report.number == self._asked:
            self._in_doubt, self._asked = False, None
        changed = report.weights is Seen.CHANGED or (
            report.weights is Seen.UNKNOWN and self._was_reset
        )
        if report.weights is not Seen.NOTHING:
            self._was_reset = False
        if changed:
            logger.warning(
                "AttnStore drops every tier: the weights in memory are not those of before"
            )
        return changed


KEY_BYTES = 32
"""Size of a key under which one request's blocks are named. Blocks whose KV is not that of their
tokens alone must not be found by others: whoever finds them computes more of the kind, and leaves
it to the store under an honest name."""


class HiddenNames:
    """Both names of a request's blocks: vLLM's, and from block `first` on others, which are a keyed
    hash of them. They are hidden from the beginning.

    To change between the two costs nothing: a list of names takes the place of the other. Blocks
    that are named meanwhile get both names.

    Args:
        request: that vLLM names the blocks of.
        key: shared by requests that may find each other's blocks.
    """

    def __init__(self, request: Request, first: int, key: bytes) -> None:
        self.first, self._key = first, key
        self._namer = request._block_hasher
        self._exact = request.block_hashes
        self._names = list(self._exact[:first])
        self._seen: Any = None
        self.hide(request)

    def hide(self, request: Request) -> bool:
        """Name the blocks from `first` on, also those to come, so that no other finds them.

        Returns False where vLLM names them otherwise than before; then nothing has changed.
        Cost: one hash for each block that is new.
        """
        exact, names = self._exact, self._names
        is_known = request.block_hashes is exact and request._block_hasher is self._namer
        # vLLM names a block by the name of the one before it: if one is the same, so are all.
        is_known &= len(names) <= len(exact)
        if not is_known or (self._seen is not None and exact[len(names) - 1] != self._seen):
            return False
        names += map(self._hide, exact[len(names) :])
        request.block_hashes, request._block_hasher = names, self._name_new
        return True

    def show(self, request: Request) -> None:
        """Name the blocks as vLLM does: what it computes from here on is exact."""
        exact = self._exact
        del exact[len(request.block_hashes) :]
        self._seen = exact[-1] if exact else None
        request.block_hashes, request._block_hasher = exact, self._namer
        request.update_block_hashes()

    def _hide(self, name: bytes) -> bytes:
        return blake3(name, key=self._key).digest()

    def _name_new(self, request: Request) -> list[Any]:
        """Stands for vLLM's hasher, which names a block by its tokens and the one before it. That
        gets the exact names: so a block's hidden name does not depend on which were hidden when it
        came.
        """
        hidden, exact = request.block_hashes, self._exact
        assert self._namer is not None
        del exact[len(hidden) :]
        request.block_hashes = exact
        try:
            new = self._namer(request)
        finally:
            request.block_hashes = hidden
        exact.extend(new)
        return [self._hide(name) for name in new]


def hide_blocks(request: Request, first: int, key: bytes | None = None) -> HiddenNames | None:
    """Name the blocks from `first` on, also those to come, so that no other finds them.

    Args:
        key: shared by requests that may find each other's blocks; None: there are none.

    Returns both names of them; None where vLLM names no blocks.
    """
    if request._block_hasher is None:
        return None
    return HiddenNames(request, first, key or secrets.token_bytes(KEY_BYTES))


def drop_in_flight(request: Request) -> None:
    """vLLM computes a running request again, from blocks on whose load has failed: what steps in
    flight sample for it comes from what was wrong. As vLLM does when it preempts in a reset."""
    request.spec_token_ids = []
    request.num_output_placeholders = 0
    request.num_stale_output_tokens = request.num_in_flight_tokens
    request.drop_stale_output = True


def hide_session(request: Request, block_tokens: int) -> None:
    """Hide all blocks of a session that has come, but those of its first input.

    With synchronous scheduling vLLM 0.32 counts drafts beyond a stop as computed
    (Scheduler._handle_stopped_request): the next input then follows KV of tokens that are gone.
    """
    hide_blocks(request, request.num_prompt_tokens // block_tokens)


class _Step(NamedTuple):
    planned_at: float
    prompts: list[tuple[int, int]]
    num_generating: int
    num_loaded: int
    """Tokens that were loaded for it."""


class StepTimes:
    """Feeds `cost`. A step begins when it is planned, or when the one before it ends if that is
    later, as with asynchronous scheduling; it ends when its output comes back with its number."""

    def __init__(self, cost: StepCost, clock: Clock = time.monotonic) -> None:
        self._cost = cost
        self._clock = clock
        self._numbers = itertools.count(1)
        self._open: OrderedDict[int, _Step] = OrderedDict()
        self._ended_at = 0.0
        self.load_tokens = 0
        """Tokens that the step loads which is being planned."""
        self.num_running = 0
        """Requests of which the step computes something that was planned last."""
        self.usual_s = 0.0
        """How long a step has taken lately, whatever it computed. One that is far longer counts in
        part."""

    def planned(self, output: SchedulerOutput) -> int:
        """A step was planned. Returns its number, which its output is to come back with."""
        number = next(self._numbers)
        loads, self.load_tokens = self.load_tokens, 0
        self.num_running = len(output.num_scheduled_tokens)
        if not output.total_num_scheduled_tokens:
            return number
        prompts, num_generating = [], 0
        cached = output.scheduled_cached_reqs
        starts = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        new = (
            (request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs
        )
        for request_id, start in itertools.chain(new, starts):
            count = output.num_scheduled_tokens.get(request_id, 0)
            if count == 1 or request_id in output.scheduled_spec_decode_tokens:
                num_generating += 1
            elif count:
                prompts.append((start, start + count))
        self._open[number] = _Step(self._clock(), prompts, num_generating, loads)
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)
        return number

    def ended(self, number: int, load_wait_s: float) -> tuple[float | None, int]:
        """The step's output has come. Returns what StepCost.observe does, and tokens loaded.

        Args:
            load_wait_s: of the step's length, what its loads have cost.
        """
        now = self._clock()
        before, self._ended_at = self._ended_at, now
        step = self._open.pop(number, None)
        if step is None:
            return None, 0
        seconds = now - max(step.planned_at, before) - load_wait_s
        if seconds <= 0:  # seen too late: it says nothing
            return None, step.num_loaded
        counted = min(seconds, OUTLIER * self.usual_s) if self.usual_s else seconds
        self.usual_s += (counted - self.usual_s) / (USUAL_STEPS if self.usual_s else 1)
        wrong = self._cost.observe(seconds, step.prompts, step.num_generating)
        return wrong, step.num_loaded
