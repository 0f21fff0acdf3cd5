# SPDX-License-Identifier: Apache-2.0
"""Passes of our own for requests with documents: they compute the tokens between them, and some of
the documents' own.

Which of their own may be said by the plan, or be chosen by how far K in the second layer is from
what was loaded (CacheBlend, EuroSys'25). K of the first layer depends on a token and its place
alone. So a pass over all tokens is ended in the second layer, once its K is written:

    compare    a layer of all tokens, and K of the next -> how far each token's K is off
    compute    gaps, and the groups of tokens that are furthest off, in the order of their positions

Tokens are chosen in groups of neighbours: a row of the batch for each token alone costs more than
the token does.

All ranks choose the same tokens: each adds what its heads say, and takes the first rank's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from vllm.distributed.parallel_state import get_tp_group

from attnstore_vllm.connector.own_pass import OwnPass
from attnstore_vllm.transfer.plan import CHOSEN_TOGETHER, PassPlan, Selection, TokenRun


class _IsComparedError(Exception):
    """Ends a pass in the compared layer."""


@dataclass(slots=True)
class _Compared:
    """Tokens of one request, of its documents and between them."""

    token_ids: dict[int, int] = field(default_factory=dict)
    """By position."""
    off_by: list[torch.Tensor] = field(default_factory=list)
    """The squared distances of K of each pass's tokens, [tokens] float32."""
    chosen: list[int] | None = None
    """Positions of all tokens that are computed, in their order."""


class DocumentPasses:
    """One pass at a time, on the thread that runs vLLM's steps.

    Args:
        make: makes OwnPass. Called with the first plan, when the model is loaded and warm.
    """

    def __init__(self, make: Callable[[], OwnPass]) -> None:
        self._make = make
        self._own: OwnPass | None = None
        self._compared: dict[str, _Compared] = {}
        """By request, from its first pass to its last load."""
        self._ends_in: str | None = None
        """The layer in which the running pass ends; None: it computes all."""
        self._attends = False
        """Whether it ends behind that layer's attention, and not before."""

    def compute(self, plan: PassPlan) -> None:
        """Write KV of the plan's tokens to the request's blocks. Raises: what the model raises."""
        own = self._own = self._own or self._make()
        if plan.selection is None:
            own.compute(plan.runs, plan.block_ids)
        elif plan.selection.part:
            self._compute_chosen(own, plan, plan.selection)
        else:
            self._compare(own, plan)

    def layer_reached(self, layer: str) -> None:
        """The running pass is about to attend in this layer."""
        if layer == self._ends_in and not self._attends:
            raise _IsComparedError

    def layer_computed(self, layer: str) -> None:
        """The running pass has attended in this layer."""
        if layer == self._ends_in:
            raise _IsComparedError

    def forget(self, request_ids: Iterable[str]) -> None:
        """No pass of these requests comes any more."""
        for request_id in request_ids if self._compared else ():
            self._compared.pop(request_id, None)

    def _compare(self, own: OwnPass, plan: PassPlan) -> None:
        compared = self._compared.setdefault(plan.request_id, _Compared())
        (blocks,) = plan.block_ids
        layer = own.compared_layer()
        self._attends = not own.writes_first(layer)
        for part in chain.from_iterable(own.slices([run]) for run in plan.runs):
            (run,) = part
            positions = range(run.start, run.stop)
            loaded = own.keys(positions, blocks).float()
            self._ends_in = layer
            try:
                own.compute(part, plan.block_ids)
            except _IsComparedError:
                pass
            finally:
                self._ends_in = None
            off = (own.keys(positions, blocks).float() - loaded).square()
            compared.off_by.append(off.flatten(1).sum(1))
            compared.token_ids |= dict(zip(positions, run.token_ids, strict=True))

    def _compute_chosen(self, own: OwnPass, plan: PassPlan, selection: Selection) -> None:
        compared = self._compared[plan.request_id]
        if compared.chosen is None:
            compared.chosen = choose(compared.off_by, list(compared.token_ids), selection)
        part = selection.part
        own.compute(
            list(_runs(compared.chosen[part.start : part.stop], compared.token_ids)), plan.block_ids
        )


def choose(
    off_by: Sequence[torch.Tensor], positions: Sequence[int], selection: Selection
) -> list[int]:
    """The positions of all tokens in gaps, and of the groups of documents that are furthest off.

    Args:
        off_by: of this rank's heads, of the tokens at `positions`.
        positions: in their order.
    """
    ranks = get_tp_group()
    distances = ranks.all_reduce(torch.cat(list(off_by)))
    in_gaps = {at for gap in selection.gaps for at in gap}
    of_documents = [n for n, at in enumerate(positions) if at not in in_gaps]
    at = torch.tensor(of_documents, device=distances.device)
    groups = torch.tensor([positions[n] // CHOSEN_TOGETHER for n in of_documents], device=at.device)
    _, groups = groups.unique(return_inverse=True)
    sums = distances.new_zeros(len(positions)).index_add(0, groups, distances[at])
    # Stable, so that a group's tokens stay together. The last group may be cut.
    furthest = sums[groups].argsort(descending=True, stable=True)[: selection.num_chosen]
    found = ranks.broadcast(at[furthest], src=0)
    return sorted(in_gaps | {positions[n] for n in found.tolist()})


def _runs(positions: Sequence[int], token_ids: dict[int, int]) -> Iterator[TokenRun]:
    """As few runs as there can be."""
    start = 0
    for n, at in enumerate(positions):
        if n + 1 == len(positions) or positions[n + 1] != at + 1:
            run = positions[start : n + 1]
            yield TokenRun(run[0], tuple(token_ids[one] for one in run))
            start = n + 1
