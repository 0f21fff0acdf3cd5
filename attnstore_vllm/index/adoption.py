# SPDX-License-Identifier: Apache-2.0
"""Entering what recovery found, a batch of header pages at a time.

Left out, with their slots still free, are records whose chunk is known to this process or from
a newer record, and tails of which another record holds all tokens. Of the latter some stay, whose
longer chunk came in an earlier batch: they cost a slot each until they are evicted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.index.slots import ADOPTED, FREE, NvmeSlots


class Adopted(NamedTuple):
    """How many records were entered and left out, and how many entered ones were superseded."""

    entered: int
    left_out: int
    superseded: int


class Adoption:
    """Of one index. enter() follows each batch, finish() the last one."""

    def __init__(self, index: PrefixIndex, nvme: NvmeSlots) -> None:
        self._index = index
        self._nvme = nvme

    def enter(
        self, headers: memoryview, slots: npt.NDArray[np.uint32], header_bytes: int
    ) -> Adopted:
        """Enter a batch of records.

        Args:
            headers: one valid header page of format version 2 a slot, one after another.
        Cost: about 3 us a record.
        """
        usable = self._nvme.states()[slots] == FREE
        num_taken = int((~usable).sum())
        if num_taken:
            pages = np.frombuffer(headers, np.uint8)[: len(slots) * header_bytes]
            headers = memoryview(pages.reshape(len(slots), header_bytes)[usable].tobytes())
        bound, entries, freed, entered, left_out, superseded = self._index.adopt(
            headers, slots[usable], header_bytes
        )
        self._nvme.adopt(bound, entries)
        for slot in freed.tolist():
            self._nvme.take_back(slot)
        return Adopted(entered, left_out + num_taken, superseded)

    def order(self) -> npt.NDArray[np.int32]:
        """The adopted slots that nobody has used since, in the order they were written in.

        Needs no lock, on the only thread that adopts and evicts: what others remove meanwhile has
        a place in the order and none when it is used (finish). Cost: about 0.2 s a million.
        """
        slots = np.flatnonzero(self._nvme.states() == ADOPTED).astype(np.int32)
        sequences = self._index.sequences(self._nvme.owners()[slots])
        return slots[np.argsort(sequences, kind="stable")]

    def finish(self, order: npt.NDArray[np.int32], now: float) -> None:
        """All is read: what was adopted and not used since is evicted first, oldest first."""
        self._nvme.order(order, now)
