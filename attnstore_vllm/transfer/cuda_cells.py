# SPDX-License-Identifier: Apache-2.0
"""Slots that keep pages encoded, on CUDA: kernels encode what goes into cells, and decode what
comes out of them (csrc/cuda/code_words.h). Here is how the host hears of pages that did not fit and
of cells that hold none; and how single tokens come out of them.

A kernel cannot raise. It writes 1 to a word of page-locked memory, and where a page did not fit, a
base that no page has to its cell. So a save reads the bases of its cells, once any page of this
engine has not fitted; and each load has a word of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attnstore_vllm.errors import CopyError, DoesNotFitError
from attnstore_vllm.transfer.cuda_moves import TokenMover
from attnstore_vllm.transfer.cuda_tables import TableRing
from attnstore_vllm.transfer.encoded import by_chunk
from attnstore_vllm.transfer.engine import Pages
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import Moved

CODE_BLOCKS = 128
"""CTAs of 128 threads that encode or decode, at least: at sixteen a multiprocessor, eight of these.
NEVER MEASURED: no GPU has run this. A warp has some 350 bytes on their way, so 180 KiB are."""
_WORDS = 1 << 16
"""More than loads are in flight, as a rule. Those that share one are told of both failures."""
_WORD_BYTES = 8
_NO_BASE = 255
"""csrc/cuda/code_words.h."""

Check = Callable[[], None]


class LoadWord(NamedTuple):
    """Where the kernels of one load tell that a cell holds no page."""

    address: int
    check: Check
    """Raises CopyError if they did. To be called once, when they are over."""


class Cells:
    """One rank's cells in the slots, as the host sees them. Made where slots keep pages encoded.

    Args:
        slots_base: address of slot 0 in this process; mapped as long as this is used.
    """

    def __init__(self, slots_base: int, num_slots: int, rank: int, geometry: Geometry) -> None:
        self._memory = torch.empty(_WORDS + 1, dtype=torch.int64, pin_memory=True)
        self._words: npt.NDArray[np.int64] = self._memory.numpy()
        self._words[:] = 0
        self._unread = np.zeros(_WORDS, np.int32)
        """Loads of each word whose check has not been called."""
        self._next = 0
        size = num_slots * geometry.slot_bytes
        self._slots = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(slots_base))
        self._slot_bytes = geometry.slot_bytes
        self._cell_bytes = np.array(geometry.cells)
        part = geometry.part_at(rank)
        self._bases = np.array(
            [
                part + geometry.region_at(region) + _first_base(page_bytes)
                for region, page_bytes in enumerate(geometry.regions)
            ]
        )
        """In a slot, of the first block of each region."""

    @property
    def misfit_word(self) -> int:
        """Its address, for kernels that encode."""
        return int(self._memory.data_ptr()) + _WORDS * _WORD_BYTES

    def load_word(self) -> LoadWord:
        """For the next load."""
        number, self._next = self._next, (self._next + 1) % _WORDS
        if not self._unread[number]:
            self._words[number] = 0
        self._unread[number] += 1

        def check() -> None:
            self._unread[number] -= 1
            if self._words[number]:
                raise CopyError("a slot holds no encoded page where one was saved")

        return LoadWord(int(self._memory.data_ptr()) + number * _WORD_BYTES, check)

    def check_of(self, pages: Pages, layers: range) -> Check:
        """The check of a save that writes these cells: raises DoesNotFitError. To be called when it
        is over, before the slots are used for anything else."""

        def check() -> None:
            if not self._words[_WORDS]:
                return
            regions = np.arange(layers.start, layers.stop)
            at = self._bases[regions] + pages[:, 1:2] * self._cell_bytes[regions]
            found = self._slots[pages[:, :1] * self._slot_bytes + at] == _NO_BASE
            slots = frozenset(pages[found.any(axis=1), 0].tolist())
            if slots:
                raise DoesNotFitError(slots)

        return check


class DecodedMover(TokenMover):
    """Moves tokens out of slots that keep pages encoded: of each slot, the blocks that are wanted
    are decoded into one chunk in HBM first. The stream keeps the order: one chunk is decoded behind
    what reads the one before it.

    Args:
        native: a PageRotator of _native_cuda, from that chunk, as slot 0, to the blocks.
        copier: a PageCopier of _native_cuda, from the slots to that chunk.
        native_load: Copy.LOAD of _native_cuda.
        block_tokens: of the group.
    """

    def __init__(
        self, native: Any, num_pairs: int, copier: Any, native_load: Any, block_tokens: int
    ) -> None:
        super().__init__(native, num_pairs)
        self._load = native_load
        self._copier = copier
        self._block_tokens = block_tokens

    def give(
        self, moved: Moved, layers: range, ring: TableRing, stream: int, failed: int = 0
    ) -> None:
        """Args: failed: of a LoadWord. What it raises, TokenMover.give() says."""
        no_rows = np.empty(0, np.int64)
        parts = []
        for pages, runs in by_chunk(moved, self._block_tokens):
            self.check(runs, layers)
            parts.append((self._copier.prepare(self._load, pages, no_rows), runs))
        for batch, runs in parts if len(layers) else ():
            staged = ring.stage(batch.words, stream)
            self._copier.by_kernel(
                batch,
                layers.start,
                layers.stop,
                staged.device,
                staged.host,
                CODE_BLOCKS,
                stream,
                failed,
            )
            ring.was_given()
            super().give(runs, layers, ring, stream)


def _first_base(page_bytes: int) -> int:
    """Where the first base of an encoded page is in its cell; csrc/codec/page_codec.h."""
    numbers = page_bytes // 2
    return numbers + -(-numbers // 8) * 3
