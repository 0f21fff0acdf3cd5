# SPDX-License-Identifier: Apache-2.0
"""Faults that the stories of spec_story.py must see, planted in our copies and in our names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from vllm.v1.kv_cache_interface import AttentionSpec, get_kv_quant_mode

from attnstore_vllm.connector import build, groups
from attnstore_vllm.connector.specs import reach_of
from attnstore_vllm.index.keys import SectionKeys, SequenceKeys
from attnstore_vllm.transfer.engine import CopyEngine, CpuEngine, Pages, StreamEvent
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from tests.vllm import scripted
from tests.vllm.drawn_models import Drawn
from tests.vllm.drawn_worker import Cells

Place = tuple[int, int, int, Geometry]
"""Address of the pool, slots, rank and shape, as a copy engine is given them."""


@dataclass(frozen=True)
class Fault:
    """Of copies from slots to HBM, or of names."""

    suits: Callable[[Drawn], object]
    """Whether a story about this model can see it."""
    planted: Callable[[], AbstractContextManager[object]] = nullcontext
    place: Callable[[Place], Place] = lambda place: place
    layouts: Callable[[list[LayerLayout]], list[LayerLayout]] = list
    pages: Callable[[Pages, Geometry], Pages] = lambda pages, _: pages
    around: Callable[[Pages, list[Cells]], AbstractContextManager[object]] | None = None
    """A load, given the tensors of its layers, [blocks, heads, states, bytes]."""
    other_type: bool = False
    """It is seen at a start with another type of KV."""

    def engine(
        self, place: Place, layouts: list[LayerLayout], worker: Callable[[int], Any]
    ) -> CopyEngine:
        return _Faulty(self, place, layouts, worker)


class _Faulty(CpuEngine):
    """Saves as it should, and loads with the fault."""

    def __init__(
        self, fault: Fault, place: Place, layouts: list[LayerLayout], worker: Callable[[int], Any]
    ) -> None:
        super().__init__(*place, layouts)
        self._fault, self._worker, self._place = fault, worker, place
        self._loads = CpuEngine(*fault.place(place), fault.layouts(layouts))

    def load(self, pages: Pages, layers: range, after: StreamEvent | None = None) -> StreamEvent:
        worker = self._worker(self._place[2])
        names = worker.side.geometry.layer_names
        cells = [worker.layers[name].cells for name, region in names.items() if region in layers]
        around = self._fault.around
        with nullcontext() if around is None else around(pages, cells):
            event = self._loads.load(self._fault.pages(pages, self._place[3]), layers, after)
            event.done()
        return event


def is_one_of(*families: str) -> Callable[[Drawn], bool]:
    return lambda drawn: drawn.family in families


@contextmanager
def swap_k_and_v(pages: Pages, cells: list[Cells]) -> Iterator[None]:
    yield
    for layer in cells:
        for block in pages[:, 2]:
            layer[block] = np.roll(layer[block], layer.shape[-1] // 2, axis=-1)


@contextmanager
def keep_scales(pages: Pages, cells: list[Cells]) -> Iterator[None]:
    """Behind each head's numbers stand 8 bytes of scales, as in vLLM's Triton kernels."""
    kept = [layer[pages[:, 2], ..., -8:].copy() for layer in cells]
    yield
    for layer, scales in zip(cells, kept, strict=True):
        layer[pages[:, 2], ..., -8:] = scales


def has_scales(drawn: Drawn) -> bool:
    mode = get_kv_quant_mode(drawn.kv_type)
    return mode.is_per_token_head and drawn.family in ("full", "sinks")


def one_block_before(pages: Pages, geometry: Geometry) -> Pages:
    shifted = pages.copy()
    shifted[:, 1] = (shifted[:, 1] + 1) % geometry.blocks_per_chunk
    return shifted


def has_layers_of_one_kind(drawn: Drawn) -> bool:
    is_uniform = drawn.family in ("full", "sinks", "prompts", "latents", "window alone")
    return is_uniform and all(len(stage) > 1 for stage in drawn.stages)


def are_two(drawn: Drawn) -> bool:
    """Ranks of a stage, with heads or tokens of their own."""
    ranks = drawn.ranks
    return ranks.count == max(ranks.tensor, ranks.decode) == 2


def retains(drawn: Drawn) -> bool:
    return drawn.retained_tokens > 15 and drawn.family in ("windows", "two windows")


def no_retained_tokens() -> AbstractContextManager[object]:
    """What is below a window is not loaded, though vLLM has blocks for it."""

    def of_window(spec: Any) -> Any:
        reach, tokens = reach_of(spec)
        return reach, tokens - getattr(spec, "extra_retained_tokens", 0)

    return mock.patch.object(groups, "reach_of", of_window)


@contextmanager
def parts_in_one_slot() -> Iterator[None]:
    """Those of all ranks, so that one can be taken for the other."""
    with (
        mock.patch.object(build, "parts_of", return_value=(1, "")),
        mock.patch.object(scripted, "parts_of", return_value=(1, "")),
    ):
        yield


def other_rank(place: Place) -> Place:
    address, slots, rank, geometry = place
    return address, slots, rank ^ 1, geometry


def states_of_longer_prefixes() -> AbstractContextManager[object]:
    """A state is named as if it had seen fewer tokens."""
    named = SequenceKeys.name_up_to

    def shorter(sequence: Any, number: int, tenant: bytes, stop: int) -> Any:
        is_far = (stop - 1) % sequence.chunk_tokens >= AHEAD
        return named(sequence, number, tenant, stop - AHEAD if is_far else stop)

    return mock.patch.object(SectionKeys, "name_up_to", shorter)


def one_name_for_all() -> AbstractContextManager[object]:
    """Nothing of a name tells the type of KV: what another type has left is found."""
    return mock.patch.object(build, "fingerprint", return_value=bytes(32))


def has_other_type(drawn: Drawn) -> bool:
    attends = any(isinstance(spec, AttentionSpec) for spec in drawn.specs.values())
    return attends and drawn.of_other_type() is not None


AHEAD = 16
FAULTS = {
    "K and V swapped": Fault(is_one_of("full", "sinks"), around=swap_k_and_v),
    "a block of the chunk off by one": Fault(
        lambda drawn: drawn.chunk_tokens > drawn.block_tokens * drawn.ranks.decode,
        pages=one_block_before,
    ),
    "another rank's record": Fault(
        lambda drawn: are_two(drawn) and is_one_of("full", "windows", "local", "states")(drawn),
        planted=parts_in_one_slot,
        place=other_rank,
    ),
    "layers in another order": Fault(has_layers_of_one_kind, layouts=lambda layouts: layouts[::-1]),
    "scales forgotten": Fault(has_scales, around=keep_scales),
    "retained tokens forgotten": Fault(retains, planted=no_retained_tokens),
    "a state of another length": Fault(is_one_of("states"), planted=states_of_longer_prefixes),
    "another type of KV under the same name": Fault(
        has_other_type, planted=one_name_for_all, other_type=True
    ),
}
