# SPDX-License-Identifier: Apache-2.0
"""Single tokens out of slots that keep pages encoded: a chunk is decoded beside them first.

A page is decoded whole, since the exponents of a token's numbers do not lie together. So KV that is
moved costs the memory of one decoded chunk, and a chunk of which few tokens are wanted costs more
than those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from attnstore_vllm.transfer.plan import Moved

if TYPE_CHECKING:
    import numpy.typing as npt


class LoadsPages(Protocol):
    """A native copier, of pages or of tokens."""

    def load(self, copies: npt.NDArray[np.int64], first_layer: int, stop_layer: int, /) -> None: ...


class DecodedChunk:
    """Memory of one rank's part of a slot, of pages that are not encoded.

    Lifetime: its address is valid as long as it is.

    Args:
        address: of geometry.decoded.slot_bytes bytes, which outlive it; None: it has its own.
    """

    def __init__(self, geometry: Geometry, address: int | None = None) -> None:
        self.geometry = geometry.decoded
        self._memory = np.zeros(self.geometry.slot_bytes if address is None else 0, np.uint8)
        self.address = self._memory.ctypes.data if address is None else address

    def layouts(self) -> list[LayerLayout]:
        """Its pages as blocks of a KV tensor: block i of the chunk is block i."""
        shapes = self.geometry
        return [
            LayerLayout(
                self.address + shapes.region_at(region),
                shapes.blocks_per_chunk,
                page_bytes,
                (0,),
                page_bytes,
            )
            for region, page_bytes in enumerate(shapes.regions)
        ]


class DecodedMoves:
    """Moves tokens of one group as a PageRotator does. One thread calls it.

    Args:
        chunk: that `decoder` fills and `rotator` reads, as slot 0.
        decoder: copies from the slots to chunk.layouts().
        block_tokens: of the group.
    """

    def __init__(
        self, chunk: DecodedChunk, decoder: LoadsPages, rotator: LoadsPages, block_tokens: int
    ) -> None:
        self._chunk = chunk
        self._decoder = decoder
        self._rotator = rotator
        self._block_tokens = block_tokens

    def load(self, moved: Moved, first_layer: int, stop_layer: int, /) -> None:
        """Raises RuntimeError where a slot holds no page."""
        for pages, runs in by_chunk(moved, self._block_tokens):
            self._decoder.load(pages, first_layer, stop_layer)
            self._rotator.load(runs, first_layer, stop_layer)


def by_chunk(
    moved: Moved, block_tokens: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Slot by slot: the pages that bring what is wanted of it into a DecodedChunk, and its runs
    out of that one, as slot 0."""
    for slot in dict.fromkeys(moved[:, 0].tolist()):
        runs = moved[moved[:, 0] == slot]
        first = int(runs[:, 1].min()) // block_tokens
        stop = -(-int((runs[:, 1] + runs[:, 2]).max()) // block_tokens)
        blocks = np.arange(first, stop)
        runs[:, 0] = 0
        yield np.stack([np.full_like(blocks, slot), blocks, blocks], axis=1), runs
