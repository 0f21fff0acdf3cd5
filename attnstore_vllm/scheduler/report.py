# SPDX-License-Identifier: Apache-2.0
"""Why a request's prompt was computed, what of it is not stored, and its report of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnstore_vllm.scheduler.request import MIN_LOAD_TOKENS, RequestState
from attnstore_vllm.scheduler.vllm_types import Request
from attnstore_vllm.types import DRAM, NVME, Cause

Report = dict[str, int | str | None]
"""Plain strings and numbers, since it crosses processes. docs/hints.md has each."""


@dataclass(slots=True)
class LeftAlone:
    """A request that neither uses nor leaves stored KV, as far as it is told of."""

    cause: Cause
    wants_report: bool
    in_hbm: int = 0

    def report(self, request: Request) -> Report:
        return _report(request, self.in_hbm, {}, self.cause, self.cause)


def report_of(state: RequestState) -> Report:
    """Where its prompt's KV came from, for who has sent it."""
    counted, is_found = state.counted, num_computed(state) < state.request.num_prompt_tokens
    whys = why_computed(state), why_not_stored(state)
    audited: Report = {"audited_chunks": counted.audited} if counted.audited else {}
    return _report(state.request, counted.in_hbm, counted.sources, *whys) | {
        "moved_tokens": state.moved_tokens,
        "own_pass_tokens": state.own_pass_tokens,
        "approximate": state.approximate if is_found else None,
        "waited_ms": round(1000 * counted.waited_s),
        **audited,
    }


def _report(
    request: Request,
    in_hbm: int,
    sources: Mapping[str, int],
    why: Cause | None,
    why_not: Cause | None,
) -> Report:
    tokens = {DRAM: 0, NVME: 0} | dict(sources)
    return {
        "prompt_tokens": request.num_prompt_tokens,
        "hbm_tokens": in_hbm,
        **{f"{tier}_tokens": number for tier, number in tokens.items()},
        "moved_tokens": 0,
        "own_pass_tokens": 0,
        "approximate": None,
        "computed_tokens": request.num_prompt_tokens - in_hbm - sum(sources.values()),
        "why_computed": None if why is None else why.value,
        "why_not_stored": None if why_not is None else why_not.value,
        "waited_ms": 0,
    }


def num_computed(state: RequestState) -> int:
    """Tokens of its prompt that were neither in HBM nor loaded."""
    loaded = sum(state.counted.sources.values())
    return state.request.num_prompt_tokens - state.counted.in_hbm - loaded


def why_computed(state: RequestState) -> Cause | None:
    """Why its prompt, or the rest of it, was computed; None: as good as nothing was, or it has
    ended before it had an answer."""
    counted = state.counted
    if state.load_failed is not None:
        return state.load_failed
    if counted.why_computed is not None or not counted.offered:
        return counted.why_computed
    return counted.why_short if num_computed(state) > MIN_LOAD_TOKENS else None


def why_not_stored(state: RequestState) -> Cause | None:
    """Why what it computed is not stored, or not all; None: it is, or there was as good as nothing.
    Asked when it has ended, and its end is saved."""
    computed, computing = state.request.num_computed_tokens, state.computing
    if computed - computing.first < MIN_LOAD_TOKENS:
        return None
    if not state.stores:
        return state.counted.why_not_stored or Cause.STORE_FALSE
    if computing.is_outdated:
        return Cause.OUTDATED
    if state.adapter is None:
        return Cause.ADAPTER_UNKNOWN
    if computing.no_room_at is not None:
        return Cause.NO_ROOM
    usable = max(computing.first, state.usable_tokens())
    if computed - usable >= MIN_LOAD_TOKENS:
        return state.why_unusable()
    return state.counted.why_not_stored
