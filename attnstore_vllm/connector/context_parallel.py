# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: which tokens of a block a rank has.

Under decode context parallelism (DCP) vLLM lays the tokens of a block over a group of ranks, some
at a time (the interleave size). A block id means the same tokens on all of them, and has as many
more of them. On each rank its page is as large as without, and has that rank's part.

    block of 8 tokens, 2 ranks, 2 at a time     rank 0: 0 1 4 5     rank 1: 2 3 6 7

So to the store a block has the tokens of all ranks, and each rank's page is a part of its record. A
hit has all parts: wherever it ends, each rank's page of the last block is copied whole, and what is
behind the end is written anew by the rank that has it.

Prefill context parallelism (PCP) shares work out and no KV: each of its ranks has all that a DCP
group says. DCP groups may lie along it. Each rank stores what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnstore_vllm.connector.groups import hit_tokens_of
from attnstore_vllm.connector.specs import one_spec
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.rank import part_text
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.transfer.geometry import Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def sizes_of(vllm_config: VllmConfig) -> tuple[int, int]:
    """Ranks that share the tokens of a block, and ranks that share a prompt's work."""
    parallel = vllm_config.parallel_config
    return (
        int(getattr(parallel, "decode_context_parallel_size", 1)),
        int(getattr(parallel, "prefill_context_parallel_size", 1)),
    )


def check_context(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError where this vLLM does not say which caches it lays over ranks."""
    from vllm.v1.kv_cache_interface import KVCacheSpec  # noqa: PLC0415

    if max(sizes_of(vllm_config)) > 1 and not hasattr(KVCacheSpec, "dcp_sharded"):
        raise UnsupportedError(
            "this vLLM's KV cache specs do not say which caches context parallelism lays over "
            "ranks (dcp_sharded), as those of 0.32 do. Take that version, or start vLLM without "
            "--decode-context-parallel-size and --prefill-context-parallel-size, or without "
            "--kv-transfer-config"
        )


def over_ranks(
    groups: Sequence[Group], kv_cache_config: KVCacheConfig, vllm_config: VllmConfig
) -> tuple[Group, ...]:
    """The groups, their blocks with the tokens of all ranks. Raises UnsupportedError."""
    dcp, _ = sizes_of(vllm_config)
    if dcp == 1:
        return tuple(groups)
    if hit_tokens_of(kv_cache_config):
        raise UnsupportedError(
            f"its hits end where its blocks do, and {dcp} ranks share the tokens of a block "
            "(--decode-context-parallel-size): where they end then is not known"
        )
    found = []
    for group in groups:
        spec: Any = one_spec(kv_cache_config.kv_cache_groups[group.number])
        if spec.dcp_sharded and group.reach != Reach.FULL.value:
            raise UnsupportedError(
                f"tokens of its {type(spec).__name__} lie on {dcp} ranks (dcp_sharded), and it "
                "does not keep all of them; that is known of caches of all tokens alone"
            )
        size = group.block_tokens * (dcp if spec.dcp_sharded else 1)
        found.append(replace(group, block_tokens=size))
    return tuple(found)


def num_ranks_of(vllm_config: VllmConfig) -> int:
    """Workers that have KV of their own in this engine."""
    return int(vllm_config.parallel_config.tensor_parallel_size) * sizes_of(vllm_config)[1]


def rank_of(vllm_config: VllmConfig, tensor_rank: int) -> int:
    """This worker's number among them, as vLLM counts: tensor ranks first."""
    if sizes_of(vllm_config)[1] == 1:
        return tensor_rank
    from vllm.distributed.parallel_state import get_pcp_group  # noqa: PLC0415

    tensor_size = int(vllm_config.parallel_config.tensor_parallel_size)
    return int(get_pcp_group().rank_in_group) * tensor_size + tensor_rank


def part_of(vllm_config: VllmConfig) -> str:
    """Which tokens this worker has, for the name: "" where it has all.

    Asked of the worker's own configuration: vLLM sets the interleave size there, beside NIXL to
    that of a block, and the scheduler's side does not learn it.
    """
    dcp, pcp = sizes_of(vllm_config)
    if dcp == pcp == 1:
        return ""
    from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group  # noqa: PLC0415

    return part_text(
        (int(get_dcp_group().rank_in_group) if dcp > 1 else 0, dcp),
        (int(get_pcp_group().rank_in_group) if pcp > 1 else 0, pcp),
        int(vllm_config.parallel_config.cp_kv_cache_interleave_size),
    )


def why_not_turned(vllm_config: VllmConfig) -> str | None:
    """Why KV cannot be moved to other positions, or None."""
    dcp, _ = sizes_of(vllm_config)
    if dcp == 1:
        return None
    return f"tokens that follow each other lie on {dcp} ranks (--decode-context-parallel-size)"
