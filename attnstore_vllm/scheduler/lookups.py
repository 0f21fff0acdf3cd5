# SPDX-License-Identifier: Apache-2.0
"""First look-ups of requests, and prefetches: as many in a step as its budget has.

Requests are looked up when they come, so that what they want is brought up before it is their turn.
How many come at once, and how long they are, is for clients to say: so what is beyond the budget
waits in line, and is looked up in a later step or when vLLM asks for it. Until then vLLM hears "not
known yet", and goes on to the next request.

vLLM makes each of the n answers to a prompt a request of its own. What the first is looked up for
is brought up for all: so those that come in the same step are looked up at its end, or when vLLM
asks for them, and not one by one while they come.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping

from attnstore_vllm.hints import PrefetchOrder
from attnstore_vllm.policy.step_budget import StepBudget
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.vllm_types import Request
from attnstore_vllm.types import Event

STEP_TOKENS = 1 << 17
"""Tokens that are looked up in a step, unless the settings say otherwise."""
LOOK_TOKENS = 1 << 10
"""A look-up costs about as much as so many tokens more."""
UNKNOWN_MAX = 512
"""Requests that hear "not known yet" in one step. vLLM looks at its own cache for each of them
first, and would go through all of its queue."""
ALIKE_TOKENS = 8
"""A prompt's last tokens, by which it is told from others."""
ORDERS_MAX = 64
"""Prefetches in line. One beyond them is dropped."""


def look_tokens(num_tokens: int) -> int:
    """The part of the budget that a look-up of so many tokens takes."""
    return num_tokens + LOOK_TOKENS


class Lookups:
    """All methods run on the scheduler's thread. First come, first served; but what vLLM asks for
    comes first, in vLLM's order. Nothing starves: as long as there is a line, what comes stands at
    its end, and the first look-up of a step is always done.

    Args:
        step_tokens: see STEP_TOKENS.
    """

    def __init__(self, step_tokens: int = STEP_TOKENS) -> None:
        self.budget = StepBudget(step_tokens)
        self._num_unknown = 0
        self._line: dict[str, None] = {}
        self._came: set[tuple[object, ...]] = set()
        """Marks of prompts that were looked up since the last step, when they came."""
        self._alike: dict[str, None] = {}
        """Requests that look like one of these, and wait for the end of the step."""
        self._orders: deque[PrefetchOrder] = deque()
        self.put_off = Counter[str]()
        """By kind of work, since they were last taken."""

    def comes(self, request: Request) -> bool:
        """Whether a request that has come is looked up at once; else it stands in line, or waits
        for the end of the step as one of n."""
        seems = looks_like(request)
        if seems in self._came:
            self._alike[request.request_id] = None
            return False
        if not self._line and self.budget.take(look_tokens(request.num_tokens)):
            self._came.add(seems)
            return True
        self._wait(request)
        return False

    def is_asked(self, request: Request) -> bool:
        """Whether a request that vLLM asks for is looked up now; else it stands in line."""
        self._alike.pop(request.request_id, None)
        if self.budget.take(look_tokens(request.num_tokens)):
            self._line.pop(request.request_id, None)
            return True
        self._wait(request)
        return False

    def may_wait(self) -> bool:
        """Whether a request that is not looked up now is asked for again. Else it is computed:
        then vLLM comes to the end of its step."""
        self._num_unknown += 1
        if self._num_unknown <= UNKNOWN_MAX:
            return True
        self.put_off[Event.LOOKUP_DROPPED] += 1
        return False

    def _wait(self, request: Request) -> None:
        if request.request_id not in self._line:
            self._line[request.request_id] = None
            self.put_off[Event.LOOKUP_LATER] += 1

    def orders(self, order: PrefetchOrder) -> bool:
        """Whether a prefetch that has come is looked up at once; else it stands in line, behind all
        requests."""
        is_first = not self._line and not self._orders
        if is_first and self.budget.take(look_tokens(len(order.token_ids))):
            return True
        if len(self._orders) < ORDERS_MAX:
            self._orders.append(order)
            self.put_off[Event.PREFETCH_LATER] += 1
        else:
            self.put_off[Event.PREFETCH_DROPPED] += 1
        return False

    def end_step(
        self, states: Mapping[str, RequestState], *, is_empty: bool
    ) -> Iterator[RequestState | PrefetchOrder]:
        """A step is planned. Who in line is looked up with what is left of its budget; then the
        next one's begins.

        Args:
            is_empty: the step computes nothing: there is time for as much again.
        """
        if is_empty and (self._line or self._alike):
            self.budget.begin_step()
        self._came.clear()
        for line in (self._line, self._alike):
            while line:
                request_id = next(iter(line))
                state = states.get(request_id)
                if state is not None and _waits(state):
                    if not self.budget.take(look_tokens(state.request.num_tokens)):
                        break
                    yield state
                line.pop(request_id, None)
        self.put_off[Event.LOOKUP_LATER] += len(self._alike.keys() - self._line.keys())
        self._line |= self._alike
        self._alike.clear()
        while self._orders and not self._line:
            if not self.budget.take(look_tokens(len(self._orders[0].token_ids))):
                break
            yield self._orders.popleft()
        self._num_unknown = 0
        self.budget.begin_step()


def looks_like(request: Request) -> tuple[object, ...]:
    """A mark that requests of one prompt have in common. Others may too: it says when a request is
    looked up, and never what it finds. Cost: its last ALIKE_TOKENS tokens."""
    return request.num_tokens, *request.all_token_ids[-ALIKE_TOKENS:]


def _waits(state: RequestState) -> bool:
    """Whether it still waits for its first look-up."""
    has_begun = state.visit is not None or state.computing.scheduled_stop > 0
    return not has_begun and state.adapter is not None
