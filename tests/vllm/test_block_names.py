# SPDX-License-Identifier: Apache-2.0
"""What we take for granted of vLLM.

Of its blocks (scheduler/rests.py): the same object names a block as long as its KV stays, and
another one, or none, after that, be its tokens the same. Of its list of tokens: what it shows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.utils import ConstantList

from attnstore_vllm.scheduler.request import list_of

NUM_BLOCKS = 5
SIZE = 16


def request_of(*hashes: bytes) -> Any:
    return SimpleNamespace(block_hashes=[BlockHash(h) for h in hashes], request_id="a")


def fill(pool: BlockPool, name: bytes) -> list[Any]:
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(
        request=request_of(name),
        blocks=blocks,
        num_cached_blocks=0,
        num_full_blocks=1,
        block_size=SIZE,
        kv_cache_group_id=0,
    )
    return blocks


def test_a_name_stays_until_the_block_is_given_away() -> None:
    pool = BlockPool(
        NUM_BLOCKS, enable_caching=True, hash_block_size=SIZE, enable_kv_cache_events=False
    )
    (block,) = fill(pool, b"same tokens")
    name = block.block_hash
    assert name is not None
    assert pool.blocks[block.block_id] is block
    pool.free_blocks([block])
    assert block.block_hash is name, "it is free, and has its KV"
    pool.touch([block])
    pool.free_blocks([block])
    assert block.block_hash is name, "another request has read it"
    others = pool.get_new_blocks(NUM_BLOCKS - 1)
    assert block in others
    assert block.block_hash is None
    pool.free_blocks(others)
    anew = [fill(pool, b"same tokens")[0] for _ in range(NUM_BLOCKS - 1)]
    assert block in anew
    assert block.block_hash == name
    assert block.block_hash is not name, "the same tokens, but their KV is not computed yet"
    pool.free_blocks(anew)
    assert pool.reset_prefix_cache()
    assert block.block_hash is None


def test_a_prompt_is_read_where_vllm_keeps_it() -> None:
    """No part of vLLM's list is copied to be read, and what it grows by is seen."""
    tokens = [1, 2, 3]
    held = list_of(ConstantList(tokens))
    assert held is tokens
    tokens.append(4)
    assert list(held) == [1, 2, 3, 4]
    others = (1, 2, 3)
    assert list_of(others) is others, "what is no list of vLLM's is sliced, as any sequence"
