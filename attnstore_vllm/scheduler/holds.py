# SPDX-License-Identifier: Apache-2.0
"""Holds: blocks in HBM of sessions that are away (policy/holding.py says which, and for how long).

A hold is one more user of a session's full blocks in vLLM's pool (held_blocks.py). So no worker
takes part, and what returns finds its blocks in vLLM's own prefix cache. A session is known by its
tokens: its next prompt begins with the blocks that its last request has left.

vLLM has no hook that comes before it preempts a request for want of room, or before it empties its
prefix cache. So two of its methods are called through here: where an allocation finds no room,
holds are let go, twice as many each time, and it is asked again; and all are let go before a reset.
A hold thus never costs a request its place.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnstore_vllm.config.hbm_holds import HoldingConfig
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.hint_sources import read as read_hints
from attnstore_vllm.hints import HintReader
from attnstore_vllm.policy.holding import SESSIONS_MAX, Holding
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.scheduler.costs import Costs
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.held_blocks import HeldBlocks
from attnstore_vllm.scheduler.hidden_blocks import HiddenNames
from attnstore_vllm.scheduler.request import RequestState, brings_kv
from attnstore_vllm.scheduler.vllm_types import KVCacheManager, Request
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.types import Clock, Word

logger = logging.getLogger(__name__)

DOOR_MAX = 256
"""Requests that hear "later" in one step, at the door: vLLM looks at its cache for each of them.
Those beyond it go in."""
PROMPTS_KEPT = 64
"""Prompts that came last, by the names of their last whole blocks. More requests of one are known
to be copies, as the children of one request, which may be thousands."""
_ENDED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Names of vLLM's RequestStatus: such a request may have a next turn."""
_POOL_NAMES = (
    "touch", "free_blocks", "reset_prefix_cache", "blocks", "num_gpu_blocks", "get_num_free_blocks",
)  # fmt: skip

Seconds = Callable[[int], float]
"""For computing so many tokens from the first on; 0 where that is not known."""


HELD = "held_hbm_tokens", ""
"""The gauge of tokens that are held, which has no label."""


class HoldEvent(Word):
    """Labels of the metric `holds`."""

    MADE = "made"
    RETURNED = "returned"
    """Its session has come back, and has its blocks."""
    OVER = "over"
    GAVE_WAY = "gave_way"
    """Let go since a request had no room."""
    DROPPED = "dropped"
    """Let go in a reset, or since the session was aborted."""
    DEFERRED = "deferred"
    """A request that waits at the door."""


@dataclass(slots=True)
class _Arrived:
    """A request that has come and has no blocks yet."""

    session: int
    came_at: float
    history: int
    """Tokens of it that the session had when it left; 0: it is new."""
    loaded_tokens: int = 0
    load_s: float = 0.0
    """Tokens that tiers have of it, and how long they take to load."""
    is_deferred: bool = False
    is_copy: bool = False
    """Another request of this prompt came lately."""


class Holds:
    """All methods run on the scheduler's thread. One KV cache group, of full attention.

    Args:
        computing_s: see Seconds.
        hints: reads what a request says of its KV: it holds for HBM, too.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: HoldingConfig,
        computing_s: Seconds,
        hints: HintReader,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config, self.computing_s, self.clock = config, computing_s, clock
        self._hints = hints
        self.holding: Holding | None = None
        """None: vLLM's pool is not known yet, or not as we know it."""
        self.pool: Any = None
        self._block_tokens = 0
        self._numbers = itertools.count()
        self.away = OrderedDict[object, tuple[int, int]]()
        """Session and tokens, by vLLM's name of the last block that it left. SESSIONS_MAX."""
        self._prompts = OrderedDict[object, int]()
        """Prompts that came last, by the names of their last blocks. It was searched when so many
        sessions had been followed, and belongs to none; -1: it belonged to one. PROMPTS_KEPT."""
        self._num_followed = 0
        self.waiting: dict[str, _Arrived] = {}
        self._running: dict[str, tuple[int, bool]] = {}
        """Sessions of requests that have their blocks, each with is_copy."""
        self.held = HeldBlocks(None)
        self._num_deferred = 0
        self._is_open = False
        """The last step was empty while requests waited at the door: the next one goes in."""
        self.counts = dict.fromkeys(HoldEvent, 0)
        self._told_tokens = -1.0

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM's block pool is known. Without its names nothing is ever held."""
        pool = manager.block_pool
        missing = [name for name in _POOL_NAMES if not hasattr(pool, name)]
        if missing or not hasattr(manager, "allocate_slots"):
            logger.warning("holding is off: this vLLM's block pool is not as it is known to be")
            return
        self.pool, self._block_tokens = pool, pool.hash_block_size
        self.held = HeldBlocks(pool)
        self.holding = Holding(
            max(1, (pool.num_gpu_blocks - 1) * self._block_tokens),
            share=self._config.share,
            longest_s=self._config.longest_s,
            defer_s=self._config.defer_s,
        )
        vllm: Any = manager
        allocate, reset = vllm.allocate_slots, pool.reset_prefix_cache

        def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
            found = allocate(request, *args, **kwargs)
            number = 1
            while found is None and self.make_room(request.request_id, number):
                found = allocate(request, *args, **kwargs)
                number *= 2
            if found is not None and request.request_id in self.waiting:
                self._started(request)
            return found

        def reset_prefix_cache() -> bool:
            self.clear()
            return bool(reset())

        vllm.allocate_slots = allocate_slots
        pool.reset_prefix_cache = reset_prefix_cache

    # ---- requests ----------------------------------------------------------------------

    def came(self, request: Request) -> None:
        """A request waits. Cost: a look at each of its blocks, but for the children of one prompt,
        of which one request may have thousands."""
        if self.holding is None or request.resumable or request.skip_reading_prefix_cache:
            return
        arrived = _Arrived(next(self._numbers), self.clock(), history=0)
        self.waiting[request.request_id] = arrived
        names = request.block_hashes
        if not names:
            return
        searched = self._prompts.pop(names[-1], None)
        arrived.is_copy = searched is not None
        if searched != self._num_followed:
            known = next(filter(self.away.__contains__, reversed(names)), None)
            searched = self._num_followed if known is None else -1
            if known is not None:
                arrived.session, arrived.history = self.away.pop(known)
                self.holding.came(arrived.session, arrived.came_at)
        self._prompts[names[-1]] = searched
        if len(self._prompts) > PROMPTS_KEPT:
            self._prompts.popitem(last=False)

    def found(self, request_id: str, tokens: int, load_s: float) -> None:
        """Tiers have so many tokens of a request that has come, and would load them in so long."""
        waiting = self.waiting.get(request_id)
        if waiting is not None:
            waiting.loaded_tokens, waiting.load_s = min(tokens, waiting.history), load_s

    def waits(self, request: Request) -> bool:
        """Whether a request that vLLM asks for waits at the door. Asked again each step."""
        waiting = self.waiting.get(request.request_id)
        if self.holding is None or waiting is None or not waiting.history:
            return False
        if self._is_open or brings_kv(request.kv_transfer_params):
            self._is_open = False
            return False
        now = self.clock()
        waited_s = now - waiting.came_at
        if self._num_deferred >= DOOR_MAX or self.holding.is_admitted(
            waiting.session, request.num_tokens, self._in_use, waited_s, now
        ):
            return False
        self._num_deferred += 1
        self.counts[HoldEvent.DEFERRED] += not waiting.is_deferred
        waiting.is_deferred = True
        return True

    def ended(self, request: Request, blocks: Sequence[int]) -> None:
        """A request has ended, and has its blocks still.

        Args:
            blocks: from its first token on. None: what is in them may be wrong, and is not held.
        """
        request_id = request.request_id
        waiting = self.waiting.pop(request_id, None)
        session, is_copy = self._running.pop(request_id, (None, False))
        if waiting is not None:
            session = waiting.session
        if self.holding is None or session is None:
            return
        hints, size = read_hints(self._hints, request), self._left(request, blocks)
        is_over = getattr(request.status, "name", "") not in _ENDED
        is_over |= hints.terms.priority is Priority.ENDED or not hints.store
        if waiting is not None or not size or is_over:
            self._forget(session)
            return
        names, tokens = request.block_hashes, size * self._block_tokens
        is_held = self.holding.ended(
            session, tokens, self.computing_s(tokens), self.clock(),
            in_use=self._in_use, held=self._block_tokens * self.held.num_with(names, size),
            most_s=min(ttl or math.inf for ttl in (hints.terms.ttl_s, self._hints.ttl_s)),
            is_copy=is_copy,
        )  # fmt: skip
        if is_held:
            self.held.hold(session, names, blocks, size)
            self.counts[HoldEvent.MADE] += 1
        self._follow(names[size - 1], session, tokens)

    def _left(self, request: Request, blocks: Sequence[int]) -> int:
        """How many of its blocks another request finds, from the first on. Cost: a look at those
        that have no name."""
        if isinstance(getattr(request._block_hasher, "__self__", None), HiddenNames):
            return 0
        size = min(len(blocks), len(request.block_hashes))
        while size and self.pool.blocks[blocks[size - 1]].block_hash is None:
            size -= 1
        return size

    def _follow(self, name: object, session: int, tokens: int) -> None:
        """Know the session by this name when it comes back."""
        same = self.away.pop(name, None)
        if same is not None:
            self._forget(same[0])
        self.away[name] = session, tokens
        self._num_followed += 1
        if len(self.away) > SESSIONS_MAX:
            self._forget(self.away.popitem(last=False)[1][0])

    def _forget(self, session: int) -> None:
        assert self.holding is not None
        self.holding.gone(session)
        self.release(session, HoldEvent.DROPPED)

    def _started(self, request: Request) -> None:
        """It has its blocks: those that were held for it are its own by now."""
        assert self.holding is not None
        waiting = self.waiting.pop(request.request_id)
        self._running[request.request_id] = waiting.session, waiting.is_copy
        computing_s = self.computing_s(waiting.history) if waiting.history else 0.0
        return_s = 0.0
        if computing_s:
            rest_s = computing_s - self.computing_s(waiting.loaded_tokens)
            return_s = min(computing_s, waiting.load_s + rest_s)
        self.holding.started(waiting.session, request.num_tokens, computing_s, return_s)
        self.release(waiting.session, HoldEvent.RETURNED)

    # ---- letting go --------------------------------------------------------------------

    def end_step(self, *, is_empty: bool) -> None:
        """A step is planned."""
        self._is_open = is_empty and self._num_deferred > 0
        self._num_deferred = 0
        if self.held:
            assert self.holding is not None
            for session in self.holding.over(self.clock()):
                self.release(session, HoldEvent.OVER)

    def make_room(self, request_id: str, number: int = 1) -> bool:
        """Let go of so many holds, since a request finds no room. Returns False where there is
        none."""
        if self.holding is None or not self.held:
            return False
        waiting = self.waiting.get(request_id)
        wanted_by = waiting.session if waiting else None
        sessions = self.holding.let_go(self.clock(), number, wanted_by)
        for session in sessions:
            self.release(session, HoldEvent.GAVE_WAY)
        return bool(sessions)

    def clear(self) -> None:
        """Let go of all: what HBM has is dropped."""
        for session in self.held.sessions:
            self._forget(session)
        self.away.clear()

    def release(self, session: int, why: HoldEvent) -> None:
        if self.held.release(session):
            self.counts[why] += 1

    # ---- figures -----------------------------------------------------------------------

    @property
    def followed(self) -> tuple[int, int, int]:
        """How many sessions are away, and how many requests wait and run. For tests."""
        return len(self.away), len(self.waiting), len(self._running)

    @property
    def held_tokens(self) -> int:
        """Each block counted once."""
        return self._block_tokens * self.held.num_blocks

    @property
    def _in_use(self) -> int:
        """Tokens of vLLM's blocks that requests and holds have, each block counted once."""
        pool = self.pool
        return int(self._block_tokens * (pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()))

    def add_to(self, stats: StepStats) -> None:
        """Add what has happened since the last call."""
        for event, number in self.counts.items():
            stats.add("holds", event, number)
            self.counts[event] = 0
        held = float(self.held_tokens)
        if held != self._told_tokens:
            self._told_tokens = held
            stats.set(*HELD, held, time.monotonic())


def holds_of(
    config: HoldingConfig | None,
    engine: EngineFacts,
    geometry: Geometry,
    costs: Costs,
    hints: HintReader,
) -> Holds | None:
    """None: nothing is held, by the settings or because it cannot be (then the log says why)."""
    if config is None:
        return None
    why_not = engine.why_no_holds
    if not engine.has_prefix_cache:
        why_not = "vLLM's prefix cache is off"
    elif len(geometry.groups) > 1 or engine.needs or geometry.has_window_alone:
        why_not = "not all layers of this model keep the KV of all tokens"
    if why_not is not None:
        logger.warning("holding is off, since %s", why_not)
        return None
    return Holds(config, lambda tokens: costs.computing_s(0, tokens) or 0.0, hints)


def note_found(holds: Holds, store: Store, state: RequestState) -> None:
    """Tell what tiers have of a request that was just looked up."""
    pieces = state.waiting.coming
    if pieces:
        request_id = state.request.request_id
        arrivals = store.arrivals(request_id, pieces) or [0.0]
        holds.found(request_id, pieces[-1].stop, arrivals[-1])
