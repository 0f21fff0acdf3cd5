# SPDX-License-Identifier: Apache-2.0
"""Faults that the stories of spec_story.py must see, planted in our copies and in our names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from vllm.v1.kv_cache_interface import AttentionSpec, get_kv_quant_mode

from attnstore_vllm.connector import build
from attnstore_vllm.index import sections
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.transfer.engine import CopyEngine, CpuEngine, Pages, StreamEvent
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from tests.vllm import scripted
from tests.vllm.drawn_models import Drawn

Place = tuple[int, int, int, Geometry]


class Fault:
    """Of copies from slots to HBM: where they read, where they write, and what they leave."""

    other_type = False
    """It is seen at a start with another type of KV."""

    def suits(self, drawn: Drawn) -> bool:
        """Whether a story about this model can see it."""
        return True

    @contextmanager
    def planted(self) -> Iterator[None]:
        yield

    def place(self, place: Place) -> Place:
        return place

    def layouts(self, layouts: list[LayerLayout]) -> list[LayerLayout]:
        return layouts

    def pages(self, pages: Pages, geometry: Geometry) -> Pages:
        return pages

    def before(self, worker: Any, pages: Pages, layers: range) -> Any:
        return None

    def after(self, worker: Any, pages: Pages, layers: range, kept: Any) -> None:
        """When they are over."""

    def engine(
        self, place: Place, layouts: list[LayerLayout], worker: Callable[[int], Any]
    ) -> CopyEngine:
        return Faulty(self, place, layouts, worker)


class Faulty(CpuEngine):
    """Saves as it should, and loads with the fault."""

    def __init__(
        self, fault: Fault, place: Place, layouts: list[LayerLayout], worker: Callable[[int], Any]
    ) -> None:
        super().__init__(*place, layouts)
        self._fault, self._worker, self._place = fault, worker, place
        self._loads = CpuEngine(*fault.place(place), fault.layouts(layouts))

    def load(self, pages: Pages, layers: range, after: StreamEvent | None = None) -> StreamEvent:
        worker = self._worker(self._place[2])
        kept = self._fault.before(worker, pages, layers)
        event = self._loads.load(self._fault.pages(pages, self._place[3]), layers, after)
        event.done()
        self._fault.after(worker, pages, layers, kept)
        return event


def _cells(worker: Any, layers: range) -> Iterator[Any]:
    """Of the layers in these regions, [blocks, heads, states, bytes]."""
    for name, region in worker.side.geometry.layer_names.items():
        if region in layers:
            yield worker.layers[name].cells


class KAndVSwapped(Fault):
    def suits(self, drawn: Drawn) -> bool:
        return drawn.family in ("full", "sinks")

    def after(self, worker: Any, pages: Pages, layers: range, kept: Any) -> None:
        for cells in _cells(worker, layers):
            for block in pages[:, 2]:
                cells[block] = np.roll(cells[block], cells.shape[-1] // 2, axis=-1)


class BlockOffByOne(Fault):
    """Of the chunk's blocks the one before is read."""

    def suits(self, drawn: Drawn) -> bool:
        return drawn.chunk_tokens > drawn.block_tokens * drawn.decode

    def pages(self, pages: Pages, geometry: Geometry) -> Pages:
        shifted = pages.copy()
        shifted[:, 1] = (shifted[:, 1] + 1) % geometry.blocks_per_chunk
        return shifted


class OtherRanksRecord(Fault):
    def suits(self, drawn: Drawn) -> bool:
        return drawn.tensor == 2 and drawn.family in ("full", "windows", "local", "states")

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The parts of all ranks lie in one slot, so that one can be taken for the other."""
        with (
            mock.patch.object(build, "parts_of", return_value=(1, "")),
            mock.patch.object(scripted, "parts_of", return_value=(1, "")),
        ):
            yield

    def place(self, place: Place) -> Place:
        address, slots, rank, geometry = place
        return address, slots, rank ^ 1, geometry


class LayerOrder(Fault):
    """Pages of the first layer go to the last one."""

    def suits(self, drawn: Drawn) -> bool:
        is_uniform = drawn.family in ("full", "sinks", "prompts", "latents", "window alone")
        return is_uniform and all(len(stage) > 1 for stage in drawn.stages)

    def layouts(self, layouts: list[LayerLayout]) -> list[LayerLayout]:
        return layouts[::-1]


class ScalesForgotten(Fault):
    """Behind each head's numbers stand 8 bytes of scales, as in vLLM's Triton kernels."""

    def suits(self, drawn: Drawn) -> bool:
        mode = get_kv_quant_mode(drawn.kv_type)
        return mode.is_per_token_head and drawn.family in ("full", "sinks")

    def before(self, worker: Any, pages: Pages, layers: range) -> Any:
        return [cells[pages[:, 2], ..., -8:].copy() for cells in _cells(worker, layers)]

    def after(self, worker: Any, pages: Pages, layers: range, kept: Any) -> None:
        for cells, scales in zip(_cells(worker, layers), kept, strict=True):
            cells[pages[:, 2], ..., -8:] = scales


class StateOfAnotherLength(Fault):
    """The state of a shorter prefix is offered where there is none."""

    AHEAD: ClassVar = 16

    def suits(self, drawn: Drawn) -> bool:
        return drawn.family == "states"

    @contextmanager
    def planted(self) -> Iterator[None]:
        real = sections._last_state

        def last_state(*arguments: Any) -> tuple[list[Piece], int]:
            pieces, end = real(*arguments)
            stop = arguments[4]
            if pieces and end + self.AHEAD <= stop:
                end += self.AHEAD
                pieces = [replace(pieces[0], start=end - 1, stop=end)]
            return pieces, end

        with mock.patch.object(sections, "_last_state", last_state):
            yield


class TypeLeftOut(Fault):
    """Nothing of a name tells the type of KV: what another type has left is found."""

    other_type = True

    def suits(self, drawn: Drawn) -> bool:
        return drawn.of_other_type() is not None and any(
            isinstance(spec, AttentionSpec) for spec in drawn.specs.values()
        )

    @contextmanager
    def planted(self) -> Iterator[None]:
        def fingerprint(*_: Any) -> bytes:
            return bytes(32)

        with mock.patch.object(build, "fingerprint", fingerprint):
            yield


FAULTS: dict[str, Fault] = {
    "K and V swapped": KAndVSwapped(),
    "a block of the chunk off by one": BlockOffByOne(),
    "another rank's record": OtherRanksRecord(),
    "layers in another order": LayerOrder(),
    "scales forgotten": ScalesForgotten(),
    "a state of another length": StateOfAnotherLength(),
    "another type of KV under the same name": TypeLeftOut(),
}
