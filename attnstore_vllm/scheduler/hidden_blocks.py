# SPDX-License-Identifier: Apache-2.0
"""Names of blocks in HBM that one request alone knows, so that vLLM serves them to no other."""

from __future__ import annotations

import secrets
from typing import Any

from blake3 import blake3

from attnstore_vllm.scheduler.vllm_types import Request

KEY_BYTES = 32
"""Size of a key under which one request's blocks are named. Blocks whose KV is not that of their
tokens alone must not be found by others: a request that finds them computes more of the kind, and
leaves it to the store under an honest name."""


class HiddenNames:
    """Both names of a request's blocks: vLLM's, and from block `first` on others, which are a keyed
    hash of them. They are hidden from the beginning.

    To change between the two costs nothing: a list of names takes the place of the other. Blocks
    that are named meanwhile get both names.

    Args:
        request: that vLLM names the blocks of.
        key: shared by requests that may find each other's blocks.
    """

    def __init__(self, request: Request, first: int, key: bytes) -> None:
        self.first, self._key = first, key
        self._namer = request._block_hasher
        self._exact = request.block_hashes
        self._names = list(self._exact[:first])
        self._seen: Any = None
        self.hide(request)

    def hide(self, request: Request) -> bool:
        """Name the blocks from `first` on, also those to come, so that no other finds them.

        Returns False where vLLM names them otherwise than before; then nothing has changed.
        Cost: one hash for each block that is new.
        """
        exact, names = self._exact, self._names
        is_known = request.block_hashes is exact and request._block_hasher is self._namer
        # vLLM names a block by the name of the one before it: if one is the same, so are all.
        is_known &= len(names) <= len(exact)
        if not is_known or (self._seen is not None and exact[len(names) - 1] != self._seen):
            return False
        names += map(self._hide, exact[len(names) :])
        request.block_hashes, request._block_hasher = names, self._name_new
        return True

    def show(self, request: Request) -> None:
        """Name the blocks as vLLM does: what it computes from here on is exact."""
        exact = self._exact
        del exact[len(request.block_hashes) :]
        self._seen = exact[-1] if exact else None
        request.block_hashes, request._block_hasher = exact, self._namer
        request.update_block_hashes()

    def _hide(self, name: bytes) -> bytes:
        return blake3(name, key=self._key).digest()

    def _name_new(self, request: Request) -> list[Any]:
        """Stands for vLLM's hasher, which names a block by its tokens and the one before it. That
        gets the exact names: so a block's hidden name does not depend on which were hidden when it
        came.
        """
        hidden, exact = request.block_hashes, self._exact
        assert self._namer is not None
        del exact[len(hidden) :]
        request.block_hashes = exact
        try:
            new = self._namer(request)
        finally:
            request.block_hashes = hidden
        exact.extend(new)
        return [self._hide(name) for name in new]


def hide_blocks(request: Request, first: int, key: bytes | None = None) -> HiddenNames | None:
    """Name the blocks from `first` on, also those to come, so that no other finds them.

    Args:
        key: shared by requests that may find each other's blocks; None: there are none.

    Returns both names of them; None where vLLM names no blocks.
    """
    if request._block_hasher is None:
        return None
    return HiddenNames(request, first, key or secrets.token_bytes(KEY_BYTES))


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
