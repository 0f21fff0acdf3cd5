# SPDX-License-Identifier: Apache-2.0
"""Hits that are offered as none, so that vLLM computes them, and the copies of what it computes.

A hit that is drawn costs its request the prefill that it would have saved. As soon as a step
computes what a stored chunk has, its blocks are copied into a spare slot of DRAM, like a save, and
compared there (store/auditor.py). So is what other KV cache groups have of it: windows, and of a
recurrent group the state, where a step ends just there. KV that was moved, or
that a codec changed, is never drawn: it is not what the model computes, and says so.

A long hit has more chunks than there are places for copies. Each has a turn, by chance: one takes
a place only if those of the hit that are still to come with an earlier turn find one, too. In the
order of the prompt its end would never be compared.

What a tier brings up is on trial until some of it has agreed (store/trial.py): such a hit is
offered as none in any case, and drawn if it can be compared.
"""

from __future__ import annotations

import secrets
from bisect import bisect
from collections.abc import Sequence

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.policy.audit_draw import Draw
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.request import AuditedPiece, RequestState
from attnstore_vllm.scheduler.vllm_types import Tables
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import ChunkCopy, in_places
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
        self._geometry = geometry
        self._plans = plans
        self._clock = clock
        self._leaves = {need.group for need in store.needs}
        """Groups whose blocks may be others' from the next step on."""
        self._states = {need.group for need in store.needs if need.reach is Reach.STATE}
        self.draw: Draw | None = None
        if config is not None and store.audit is not None:
            seed = secrets.token_bytes(SEED_BYTES) if seed is None else seed
            self.draw = Draw(config.rate, config.tokens_per_s, seed)

    def takes(
        self, state: RequestState, held: Sequence[Piece], rest: Sequence[Piece], num_tokens: int
    ) -> bool:
        """Whether this hit is offered as none. Asked whenever the request would be offered one; it
        is drawn once, before its first answer.

        Args:
            held: what it would be offered, READY in DRAM.
            rest: what would be loaded in parts: such a hit is not drawn, but for a trial.
            num_tokens: that it would be spared.
        """
        if state.audited:
            return True
        audit = self._store.audit
        if self.draw is None or audit is None or not held or state.approximate is not None:
            return False
        if audit.is_stopped:  # since the request was asked for
            return True
        pieces = (*held, *rest)
        is_new, is_untried = not state.counted.offered, audit.trial.awaits(pieces)
        is_drawn = is_new and state.may_save and not (rest and not is_untried)
        is_drawn &= state.moved is None and all(piece.first is None for piece in held)
        drawn: list[Piece] = []
        if is_drawn:
            is_asked = state.hints.audit
            always = is_untried or is_asked
            hit = self.draw.take(num_tokens, self._clock(), always=always)
            if hit is not None:
                drawn = [p for p in held if audit.compares(p.group) and self._has_block(p)]
                turns = self.draw.turns(hit, len(drawn))
                state.audited = tuple(
                    AuditedPiece(
                        hit, p.chunk, p.chunk.dram, p.start, p.stop, p.group, is_asked, turn
                    )
                    for p, turn in zip(drawn, turns, strict=True)
                )
        if is_untried and is_new:
            audit.put_off(pieces, drawn)
        return is_untried or bool(state.audited)

    def copy(self, state: RequestState, computed: int, tables: Tables) -> None:
        """Plan the copies of what is computed when this step ends, of whole blocks and of states.

        Args:
            computed: tokens of the request that are computed then.
        """
        lasting: list[tuple[Chunk, tuple[ChunkCopy, ...]]] = []
        fleeting: list[tuple[Chunk, tuple[ChunkCopy, ...]]] = []
        come = sorted((p for p in state.audited if p.stop <= computed), key=lambda p: p.turn)
        state.audited = tuple(piece for piece in state.audited if piece.stop > computed)
        to_come = sorted(piece.turn for piece in state.audited)
        for piece in come:
            runs = self._runs(piece, state.computing.first, computed, tables[piece.group])
            blocks = [range(at, at + len(block_ids)) for at, block_ids in runs]
            copy = self._store.begin_audit(
                piece.hit, piece.chunk, piece.was, blocks, piece.group,
                is_asked=piece.is_asked, leaves=bisect(to_come, piece.turn),
            )  # fmt: skip
            if copy is not None:
                copies = [ChunkCopy(copy.dram.slot, at, block_ids) for at, block_ids in runs]
                kept = fleeting if piece.group in self._leaves else lasting
                kept.append((copy, tuple(copies)))
        request = state.request
        name, lora, adapter = request.request_id, request.lora_request, state.adapter
        self._plans.save(name, lasting, lora, adapter)
        self._plans.save(name, fleeting, lora, adapter, is_fleeting=True)

    def _has_block(self, piece: Piece) -> bool:
        """Whether a copy has some of it: a whole block, or the state. Else none is compared."""
        size = self._geometry.groups[piece.group].block_tokens
        return piece.group in self._states or -(-piece.start // size) < piece.stop // size

    def _runs(
        self, piece: AuditedPiece, start: int, computed: int, block_ids: Sequence[int]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Blocks that hold what this piece has, each run with its first place in a slot; empty if
        they are not there any more, or were not computed.

        Args:
            start: what is before it vLLM has got since, maybe from this very chunk.
        """
        size = self._geometry.groups[piece.group].block_tokens
        if piece.group in self._states:
            block = block_ids[(piece.stop - 1) // size]
            return [(0, (block,))] if piece.stop == computed and block else []
        first, stop = -(-max(piece.start, start) // size), piece.stop // size
        if first >= stop:
            return []
        found = tuple(block_ids[first:stop])
        if not all(found):  # a window keeps what is needed to its end, so none is gone
            return []
        at = first - piece.chunk.name.position // size
        places = self._geometry.room(piece.group)
        if not places:
            return [(at, found)]
        return [(copy.first, copy.block_ids) for copy in in_places(0, at, found, places)]


def is_on_trial(store: Store, state: RequestState, pieces: Sequence[Piece]) -> bool:
    """Whether the request may not have some of these yet. To be asked of all that is loaded and was
    not held since Audits.takes() has let it pass: KV that was computed here may have left DRAM
    since, and come up with other bytes. Nor what the audit has stopped the serving of since.
    Approximate KV is not tried."""
    audit = store.audit
    if audit is None:
        return False
    return audit.is_stopped or (state.approximate is None and audit.trial.awaits(pieces))
