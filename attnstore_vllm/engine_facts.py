# SPDX-License-Identifier: Apache-2.0
"""Facts of vLLM and its model that the store and the scheduler side go by (connector/facts.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from attnstore_vllm.index.sections import Need
from attnstore_vllm.policy.kv_compare import Comparison


def _never(_: Collection[int]) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Read once, at start. The defaults are those of a plain engine."""

    # ---- the model's KV

    needs: tuple[Need, ...] = ()
    """Needs of the KV cache groups beside the spine, and of the spine if it needs less than all
    tokens; a hit ends where all have what they need."""
    ahead: int = 0
    """So many tokens behind it decide KV of a token too (drafts): a hit ends before those of which
    that is not known."""
    hit_tokens: int = 0
    """See Geometry."""
    why_not_moved: str | None = None
    """Why KV cannot be moved to other positions; None: it can."""

    # ---- passes of our own

    why_no_passes: str | None = "it is not known to"
    """Why there are none; None: there may be."""
    pass_tokens: int = 0
    """Tokens of a pass of our own and of the step before it, at most."""
    pass_rows: int = 0
    """Runs of tokens of a pass of our own, at most."""

    # ---- vLLM's steps

    step_tokens: int = 1 << 30
    """Tokens of one prompt that a step computes, at most."""
    replays: Callable[[Collection[int]], bool] = _never
    """Whether a step may be a CUDA graph that calls no hook, by the tokens of each of its
    requests."""
    leaves: int = 1
    """Tokens that a long load leaves to compute, at least."""
    in_lockstep: bool = False
    """The steps of data-parallel engines wait for each other."""
    by_priority: bool = False
    """vLLM orders waiting requests by priority; else first come, first served."""
    overcounts_drafts: bool = False
    """vLLM counts drafts beyond a session's stop as computed."""

    cuts_hits: bool = False
    """vLLM may take less than it is offered (connector/facts.py)."""

    # ---- its blocks

    rows: int | None = None
    """Size of each worker's write buffer, in blocks; None where copies do not run beside the
    model."""
    gives_blocks_away: bool = True
    """KV that finished requests leave is saved from blocks that are free."""
    loads_in_parts: bool = True
    """vLLM computes what a part does not bring, and no other connector is there."""
    has_prefix_cache: bool = True
    """vLLM has one, which is reset when weights are updated."""
    why_no_holds: str | None = None
    """Why no block may have a user that is no request; None: it may (scheduler/holds.py)."""
    serves_adapters: bool = True
    """Requests with a LoRA adapter use and leave KV as others do."""
    comparisons: tuple[Comparison | None, ...] = ()
    """How stored KV of each KV cache group is compared with what is computed once more, the spine's
    first; None: it is not. Empty: nothing is audited."""

    # ---- for people

    info: tuple[str, ...] = ()
    """Labels of the metric of that name: versions, disk I/O, eviction."""
