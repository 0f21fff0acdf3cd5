# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side reads of vLLM's objects, and a clock that stands; without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Clock:
    now: float = 50.0

    def __call__(self) -> float:
        return self.now


def as_store(double: object) -> Any:
    """For mypy: it stands for a Store."""
    return double


@dataclass
class Scheduled:
    """A request in a step's output."""

    req_id: str
    num_computed_tokens: int


@dataclass
class Cached:
    """Those that ran in the step before too."""

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Output:
    """A SchedulerOutput."""

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_new_reqs: list[Scheduled]
    scheduled_cached_reqs: Cached
    scheduled_spec_decode_tokens: dict[str, list[int]]
    preempted_req_ids: set[str] | None = None


def output(
    new: dict[str, tuple[int, int]],
    cached: dict[str, tuple[int, int]],
    drafts: Sequence[str] = (),
) -> Any:
    """By request: the tokens it had computed, and how many are scheduled."""
    scheduled = {name: count for name, (_, count) in (new | cached).items()}
    return Output(
        scheduled,
        sum(scheduled.values()),
        [Scheduled(name, at) for name, (at, _) in new.items()],
        Cached(list(cached), [at for at, _ in cached.values()]),
        {key: [1, 2] for key in drafts},
    )


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    lora_request: None = None
    resumable: bool = False
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0


def request(name: str, tokens: Sequence[int] = ()) -> Any:
    return Request(name, list(tokens))
