# SPDX-License-Identifier: Apache-2.0
"""Requests and steps of a simulated server, in the form in which vLLM tells of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnstore_lab.sim.trace import TraceRequest
from attnstore_lab.sim.trace_tokens import TraceTokens
from attnstore_vllm.scheduler.vllm_types import CachedRequests, LoRARequest, NewRequest


@dataclass(slots=True)
class _Sampling:
    prompt_logprobs: int | None = None
    skip_reading_prefix_cache: bool = False
    extra_args: None = None


class Plain:
    """A request of vLLM's that asks for nothing special."""

    prompt_token_ids: list[int] | None = []  # noqa: RUF012  all_token_ids has them
    prompt_embeds: Any = None
    mm_features: Sequence[Any] = ()
    sampling_params: Any = _Sampling()
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    shared_prefix_boundary: int = 0
    priority: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    status: Any = None
    num_output_placeholders: int = 0
    num_stale_output_tokens: int = 0
    drop_stale_output: bool = False
    spec_token_ids: list[int] = []  # noqa: RUF012  none is ever added
    block_hashes: list[Any] = []  # noqa: RUF012  as above
    _block_hasher: Callable[[Any], list[Any]] | None = None

    def update_block_hashes(self) -> None:
        """Blocks have no names here."""


@dataclass(eq=False)
class Job(Plain):
    """A request of the trace in the server."""

    request_id: str
    request: TraceRequest
    is_counted: bool
    history: int
    """Tokens of the conversation before it."""
    arrival_time: float
    tokens: TraceTokens
    num_computed_tokens: int = 0
    generated: int = 0
    was_asked: bool = False
    """The scheduler side has said what of it is stored."""
    ready_tokens: int = 0
    """Tokens whose KV was in DRAM then."""
    is_received: bool = False
    """Its KV was loaded before its first step."""
    local_tokens: int = 0
    """Tokens that were in HBM before that."""
    stuck_s: float | None = None
    """Since when it waits for KV."""
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.request.num_tokens
        self.kv_transfer_params = self.request.hints

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self.tokens

    @property
    def num_tokens(self) -> int:
        """Those that have names. Where the trace knows no more, the first of the others has."""
        return min(self.num_prompt_tokens + self.generated, len(self.tokens))

    @property
    def num_answer(self) -> int:
        return max(1, self.request.answer_tokens)

    @property
    def num_in_all(self) -> int:
        return self.num_prompt_tokens + self.num_answer


def step_stop(start: int, stop: int, num_tokens: int, state_tokens: int, junction: int = 0) -> int:
    """Where a prompt's step [start, stop) ends, as vLLM has it: with its blocks, if there are
    states.

    Args:
        num_tokens: of the prompt.
        state_tokens: of a block with a state; 0 without states.
        junction: Request.shared_prefix_boundary.
    """
    if not state_tokens:
        return stop
    if start % state_tokens:
        return min(stop, (start // state_tokens + 1) * state_tokens)
    last = num_tokens // state_tokens * state_tokens
    if stop < last:
        stop = stop // state_tokens * state_tokens
    ends = [last, junction // state_tokens * state_tokens]
    return min((end for end in ends if start < end < stop), default=stop)


@dataclass(slots=True)
class _New:
    req_id: str
    num_computed_tokens: int


@dataclass(slots=True)
class _Cached:
    req_ids: Sequence[str]
    num_computed_tokens: Sequence[int]


@dataclass(slots=True)
class EngineStep:
    """One step of the engine; `output` has it as vLLM's connector hears of it."""

    generating: list[Job]
    prompts: list[tuple[Job, int]] = field(default_factory=list)
    started: list[Job] = field(default_factory=list)
    loaded_bytes: int = 0
    num_repeats: int = 1
    """Steps that only generate are taken as one."""

    @property
    def is_empty(self) -> bool:
        return not self.generating and not self.prompts


class Output:
    """A SchedulerOutput. Repeated steps look like drafts that are all accepted."""

    def __init__(self, step: EngineStep) -> None:
        jobs = [(job, step.num_repeats) for job in step.generating] + step.prompts
        new = {job.request_id for job in step.started}
        old = [job for job, _ in jobs if job.request_id not in new]
        self.scheduled_new_reqs: Sequence[NewRequest] = [
            _New(job.request_id, job.num_computed_tokens) for job in step.started
        ]
        self.scheduled_cached_reqs: CachedRequests = _Cached(
            [job.request_id for job in old], [job.num_computed_tokens for job in old]
        )
        self.num_scheduled_tokens: Mapping[str, int] = {
            job.request_id: count for job, count in jobs
        }
        self.total_num_scheduled_tokens = sum(self.num_scheduled_tokens.values())
        self.scheduled_spec_decode_tokens: Mapping[str, Sequence[int]] = (
            {job.request_id: () for job in step.generating} if step.num_repeats > 1 else {}
        )
        self.preempted_req_ids: Collection[str] | None = None
