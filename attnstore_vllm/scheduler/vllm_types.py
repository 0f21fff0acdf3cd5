# SPDX-License-Identifier: Apache-2.0
"""The parts of vLLM's objects that the scheduler's side reads. What has it will do: the
simulator's too.

Names and meanings are vLLM's (vllm/v1/request.py, vllm/v1/core/sched/output.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

Tables = Sequence[Sequence[int]]
"""The blocks of a request in each group, from its first token on; 0 for what is not there."""


class LoRARequest(Protocol):
    lora_int_id: int
    lora_name: str


class Request(Protocol):
    request_id: str
    status: Any
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    mm_features: Sequence[Any]
    sampling_params: Any
    cache_salt: str | None
    lora_request: LoRARequest | None
    kv_transfer_params: dict[str, Any] | None
    skip_reading_prefix_cache: bool
    resumable: bool
    priority: int
    arrival_time: float
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_preemptions: int
    num_output_placeholders: int
    num_stale_output_tokens: int
    drop_stale_output: bool
    spec_token_ids: list[int]
    num_prompt_tokens: int
    shared_prefix_boundary: int
    """The place where vLLM ends a prompt's step for a state, in whole blocks; 0: none."""
    block_hashes: list[Any]
    _block_hasher: Callable[[Any], list[Any]] | None

    @property
    def num_tokens(self) -> int: ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...

    def update_block_hashes(self) -> None: ...


class NewRequest(Protocol):
    req_id: str
    num_computed_tokens: int


class CachedRequests(Protocol):
    req_ids: Sequence[str]
    num_computed_tokens: Sequence[int]


class SchedulerOutput(Protocol):
    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]]
    preempted_req_ids: Collection[str] | None


class KVCacheManager(Protocol):
    block_pool: Any

    def get_block_ids(self, request_id: str) -> tuple[Sequence[int], ...]: ...
