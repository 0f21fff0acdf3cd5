# SPDX-License-Identifier: Apache-2.0
"""Requests that are served with moved KV, and how no other request ever is.

Moved KV is approximate: its deeper layers have seen what was cut. So of a request that has some
- vLLM's prefix cache knows the blocks, from the first moved token on, by names that no other
  request can have: a keyed hash of vLLM's own, under a key that is drawn for the request. Taking
  blocks out of the cache at every step would leave the time within one schedule(), in which
  requests that run have their new blocks entered and others look for theirs (docs/design.md);
- what it computes is stored under a lineage of its own (index/keys.py: moved_root).

What is kept of a cut prompt begins at any token, and so does moved KV: it tells single tokens to
a request that may ask for it (index/prefix.py has why that matters). So it is found among requests
of one cache_salt only, unless the operator says that all who send none trust each other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attnstore_vllm.config.settings import TruncationConfig
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.scheduler.hidden_blocks import HiddenNames, hide_blocks
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.scheduler.vllm_types import KVCacheManager, Request
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.plan import CHOSEN_TOGETHER

logger = logging.getLogger(__name__)

WHY_NOT_SHARED = (
    "truncated prompts without a cache_salt are computed: with moved KV others could read them "
    "token by token. Let requests send a cache_salt, or, if all who send none trust each other, "
    "set truncation: {share: everyone}"
)

WHY_NO_DOCUMENTS = (
    "documents are not found in other places (truncation.documents), since this engine makes no "
    "passes of its own: %s. Prompts that were cut are served as without that setting"
)


class Truncation:
    """All methods run on the scheduler's thread.

    Args:
        config: None: no request may ask for it.
        reason: why KV cannot be moved here, or None.
        why_no_passes: why what lies between documents cannot be computed, or None.
    """

    def __init__(
        self,
        store: Store,
        config: TruncationConfig | None,
        reason: str | None,
        why_no_passes: str | None = None,
    ) -> None:
        self._why_no_passes = why_no_passes
        self._store = store
        self._config = config
        self.by_default = config is not None and config.enabled
        """Whether requests that do not say so ask for moved KV."""
        self._reason = reason
        self._has_said = False
        self._hidden: dict[str, HiddenNames] = {}
        """By request, of those whose blocks are hidden now."""
        self._kept: dict[str, HiddenNames] = {}
        """Names of offers that vLLM has not taken: nothing has them, so they serve once more."""
        if config is not None and config.enabled:
            self._say()
        if config is not None and config.documents and why_no_passes is not None:
            logger.warning(WHY_NO_DOCUMENTS, why_no_passes)

    def note(self, state: RequestState) -> None:
        """Note what a request gets that has come and asks for moved KV."""
        config = self._config
        if config is None:
            return
        if self._reason is not None:
            self._say()
        elif state.request.cache_salt or config.shared_by == "everyone":
            state.finds_moved = True
            state.finds_documents = config.documents and self._why_no_passes is None
            state.recompute_rule = f"{config.recompute_by} {config.recompute} {CHOSEN_TOGETHER}"
        elif not self._has_said:
            self._has_said = True
            logger.warning(WHY_NOT_SHARED)

    def _say(self) -> None:
        if self._reason is not None and not self._has_said:
            self._has_said = True
            logger.warning("truncated prompts are computed: %s", self._reason)

    # ---- an offer ----------------------------------------------------------------------

    def offer(
        self, state: RequestState, pieces: Sequence[Piece], manager: KVCacheManager | None
    ) -> None:
        """These are about to be offered: from here on others must not find the request's blocks."""
        moved = [piece for piece in pieces if piece.first is not None]
        if not moved or manager is None:
            return
        state.begin_lineage(range(moved[0].start, moved[-1].stop), documents_of(pieces))
        self._hide(state.request, moved[0].start // manager.block_pool.hash_block_size)

    def withdraw(self, state: RequestState) -> None:
        """The offer was not taken. The next one, if it is the same, costs no hash."""
        if state.moved is not None:
            state.begin_lineage(None)
            names = self._show(state.request)
            if names is not None:
                self._kept[state.request.request_id] = names

    def has_found_moved(self, state: RequestState, local: int) -> bool:
        """vLLM asks for a request without an offer: what it had of moved KV is lost to it.

        Not in vLLM's cache, if a reset has failed: there it finds its own blocks by their hidden
        names. They are not taken, since from here on its names are vLLM's.

        Args:
            local: tokens that are in HBM already.

        Returns whether some of those are moved KV: vLLM has to look, and ask, anew.
        """
        if state.moved is None:
            return False
        is_moved = local > state.moved.start
        self.take_back(state)
        return is_moved

    def take_back(self, state: RequestState) -> None:
        """The request has lost its blocks, or vLLM takes nothing that was moved. Blocks that it had
        may be in vLLM's cache: they are not named so again."""
        self._kept.pop(state.request.request_id, None)
        if state.moved is not None:
            state.begin_lineage(None)
            self._show(state.request)

    def taken(self, state: RequestState, pieces: Sequence[Piece], stop: int) -> None:
        """vLLM takes these pieces' KV of tokens up to `stop`."""
        moved = [piece for piece in pieces if piece.first is not None]
        if moved:
            state.begin_lineage(range(moved[0].start, stop), documents_of(pieces))
            # Not a sum: a request that was preempted may be served so again.
            num_moved = sum(min(piece.stop, stop) - piece.start for piece in moved)
            state.moved_tokens = max(state.moved_tokens, num_moved)
            # What lies between is stored already, where it was computed.
            state.computing.go_on_from(stop // state.chunk_tokens)
        else:
            self.take_back(state)
        if state.may_find_moved:
            for piece in pieces:
                if piece.first is None:  # KV in its place is exact
                    self._store.may_be_moved(piece.chunk.name, state.root)

    def saved(self, state: RequestState, name: ChunkName) -> None:
        """A chunk that the request has computed is stored."""
        if state.may_find_moved:
            stop = state.moved.stop if state.moved is not None else 0
            native_from = max(0, stop - name.position)
            if native_from < name.num_tokens:
                self._store.may_be_moved(
                    name, state.root, native_from, is_exact=state.moved is None
                )

    def finished(self, state: RequestState) -> None:
        self._hidden.pop(state.request.request_id, None)
        self._kept.pop(state.request.request_id, None)

    # ---- vLLM's prefix cache -----------------------------------------------------------

    def _hide(self, request: Request, first: int) -> None:
        """Name the blocks from `first` on, also those to come, so that no other finds them."""
        if request.request_id in self._hidden:
            return
        names = self._kept.pop(request.request_id, None)
        if names is None or names.first != first or not names.hide(request):
            names = hide_blocks(request, first)
        if names is not None:
            self._hidden[request.request_id] = names

    def _show(self, request: Request) -> HiddenNames | None:
        """Name the blocks as vLLM does: what it computes from here on is exact. Returns both names,
        if they were hidden."""
        names = self._hidden.pop(request.request_id, None)
        if names is not None:
            names.show(request)
        return names


def documents_of(pieces: Sequence[Piece]) -> list[range]:
    """The tokens whose KV is moved, in runs; none if there are no gaps between any pieces."""
    if not any(piece.gap for piece in pieces):
        return []
    runs: list[range] = []
    for piece in pieces:
        if piece.first is None:
            continue
        if runs and runs[-1].stop == piece.start:
            runs[-1] = range(runs[-1].start, piece.stop)
        else:
            runs.append(range(piece.start, piece.stop))
    return runs
