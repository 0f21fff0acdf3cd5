# SPDX-License-Identifier: Apache-2.0
"""Names in vLLM's prefix cache that only one request knows.

Blocks whose KV is not that of their tokens alone must not be found by others: whoever finds them
computes more of the kind, and leaves it to the store under an honest name.
"""

from __future__ import annotations

import secrets
from typing import Any

from blake3 import blake3

from attnstore_vllm.scheduler.vllm_types import Request

KEY_BYTES = 32


def hide_blocks(request: Request, first: int) -> Any:
    """Name the blocks from `first` on, also those to come, so that nobody else finds them.

    Returns what has named them so far, for show_blocks(); None where vLLM names no blocks.
    """
    hasher = request._block_hasher
    if hasher is None:
        return None
    key = secrets.token_bytes(KEY_BYTES)

    def hide(name: bytes) -> bytes:
        return blake3(name, key=key).digest()

    # vLLM names a block by its tokens and the name of the one before: what follows a hidden
    # one would be hidden by that alone, but there may be none yet.
    def hidden(given: Request) -> list[Any]:
        return [hide(name) for name in hasher(given)]

    request.block_hashes[first:] = [hide(name) for name in request.block_hashes[first:]]
    request._block_hasher = hidden
    return hasher


def show_blocks(request: Request, first: int, hasher: Any) -> None:
    """Name the blocks as vLLM does: what it computes from here on is exact."""
    request._block_hasher = hasher
    del request.block_hashes[first:]
    request.update_block_hashes()


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
