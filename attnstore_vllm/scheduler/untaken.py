# SPDX-License-Identifier: Apache-2.0
"""Answers that vLLM had no room for, which are given again as they are.

vLLM asks for the head of its queue in each step, also while it has no room for it. What has come
meanwhile could only be used with more blocks than there were: so until as many have come free as
the offer wants, the answer stays, as long as what was offered can still be held.
"""

from __future__ import annotations

from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.scheduler.audits import is_on_trial
from attnstore_vllm.scheduler.request import Answered, RequestState
from attnstore_vllm.scheduler.vllm_types import KVCacheManager
from attnstore_vllm.store.store import Store


class Untaken:
    """All methods run on the scheduler's thread.

    Args:
        block_tokens: of vLLM's blocks.
    """

    def __init__(self, store: Store, block_tokens: int) -> None:
        self.kv_cache_manager: KVCacheManager | None = None
        """vLLM's, when it is known. Before, nothing is remembered."""
        self._store = store
        self._block_tokens = block_tokens

    def note(self, state: RequestState, local: int, held: list[Piece], rest: list[Piece]) -> None:
        """vLLM is told that so much is offered; it may have no room."""
        manager, request = self.kv_cache_manager, state.request
        if manager is None or request.resumable:  # a session's next input is another request
            return
        free_blocks = manager.block_pool.get_num_free_blocks()
        state.untaken = Answered(request.num_tokens, local, free_blocks, held, rest)

    def again(self, state: RequestState, local: int) -> list[Piece] | None:
        """Pieces that are held and offered once more; None: it has to be looked up.

        Cost: a look at each piece.
        """
        manager, last = self.kv_cache_manager, state.untaken
        if last is None or manager is None:
            return None
        is_same = (last.num_tokens, last.local) == (state.request.num_tokens, local)
        free_blocks = manager.block_pool.get_num_free_blocks()
        offered = last.rest or last.pieces
        wanted = offered[-1].stop - local if offered else 0
        has_room = free_blocks > last.free_blocks and free_blocks * self._block_tokens >= wanted
        if is_same and not has_room and self._store.hold_again(last.pieces, last.rest):
            if not is_on_trial(self._store, state, last.pieces):
                return last.pieces
            self._store.release(piece.chunk for piece in last.pieces)
        state.untaken = None
        return None
