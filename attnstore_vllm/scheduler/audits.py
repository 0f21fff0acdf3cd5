# SPDX-License-Identifier: Apache-2.0
"""Hits that are offered as none, so that vLLM computes them, and the copies of what it computes.

A hit that is drawn costs its request the prefill that it would have saved. As soon as a step
computes what a stored chunk has, its blocks are copied into a spare slot of DRAM, like a save, and
compared there (store/auditor.py). KV that was moved, or that a codec changed, is never drawn: it is
not what the model computes, and says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.audit_draw import Draw
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.request import AuditedPiece, RequestState
from attnstore_vllm.scheduler.vllm_types import Tables
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import ChunkCopy
from attnstore_vllm.types import Clock

SEED_BYTES = 16


class Audits:
    """All methods run on the scheduler's thread.

    Args:
        config: None: nothing is drawn.
        seed: of what is drawn; None: by chance.
    """

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        plans: OpenPlans,
        config: AuditConfig | None,
        clock: Clock,
        seed: bytes | None = None,
    ) -> None:
        self._store = store
        self._block_tokens = geometry.block_tokens
        self._plans = plans
        self._clock = clock
        self._tried = {""}
        """Tiers behind DRAM of which a hit was drawn: the first one of each is, in any case. What
        an earlier process or another one wrote is compared before much of it is served."""
        self._draw: Draw | None = None
        if config is not None and store.audit is not None:
            seed = secrets.token_bytes(SEED_BYTES) if seed is None else seed
            self._draw = Draw(config.rate, config.tokens_per_s, seed)

    def takes(self, state: RequestState, held: Sequence[Piece], rest: Sequence[Piece]) -> bool:
        """Whether this hit is offered as none. Asked whenever the request would be offered one; it
        is drawn once, before its first answer.

        Args:
            held: what it would be offered, READY in DRAM.
            rest: what would be loaded in parts: such a hit is not drawn.
        """
        if state.audited:
            return True
        if self._draw is None or not held or rest or state.counted.offered or not state.may_save:
            return False
        is_exact = state.approximate is None and state.moved is None
        if not is_exact or any(piece.first is not None for piece in held):
            return False
        came_from = {piece.chunk.came_from for piece in held} - self._tried
        num_tokens = held[-1].stop - held[0].start
        hit = self._draw.take(num_tokens, self._clock(), always=bool(came_from))
        if hit is None:
            return False
        self._tried |= came_from
        state.audited = tuple(
            AuditedPiece(hit, piece.chunk, piece.chunk.dram, piece.start, piece.stop)
            for piece in held
        )
        return True

    def copy(self, state: RequestState, computed: int, tables: Tables) -> None:
        """Plan the copies of what is computed when this step ends, of whole blocks.

        Args:
            computed: tokens of the request that are computed then.
        """
        size, planned = self._block_tokens, []
        for piece in state.audited:
            first, stop = -(-piece.start // size), piece.stop // size
            if piece.stop > computed or first >= stop:
                continue
            at = piece.chunk.name.position // size
            blocks = range(first - at, stop - at)
            copy = self._store.begin_audit(piece.hit, piece.chunk, piece.was, blocks)
            if copy is not None:
                block_ids = tuple(tables[0][first:stop])
                planned.append((copy, (ChunkCopy(copy.dram.slot, blocks.start, block_ids),)))
        state.audited = tuple(piece for piece in state.audited if piece.stop > computed)
        request = state.request
        self._plans.save(request.request_id, planned, request.lora_request, state.adapter)
