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


def adopt(
    index: PrefixIndex,
    nvme: NvmeSlots,
    headers: memoryview,
    slots: npt.NDArray[np.uint32],
    header_bytes: int,
) -> Adopted:
    """Enter a batch of records.

    Args:
        headers: one valid header page of format version 2 a slot, one after another.
    Cost: about 3 us a record.
    """
    usable = nvme.states()[slots] == FREE
    num_taken = int((~usable).sum())
    if num_taken:
        pages = np.frombuffer(headers, np.uint8)[: len(slots) * header_bytes]
        headers = memoryview(pages.reshape(len(slots), header_bytes)[usable].tobytes())
    bound, entries, freed, entered, left_out, superseded = index.adopt(
        headers, slots[usable], header_bytes
    )
    nvme.adopt(bound, entries)
    for slot in freed.tolist():
        nvme.take_back(slot)
    return Adopted(entered, left_out + num_taken, superseded)


def oldest_first(index: PrefixIndex, nvme: NvmeSlots) -> npt.NDArray[np.int32]:
    """The adopted slots that nobody has used since, in the order they were written in."""
    slots = np.flatnonzero(nvme.states() == ADOPTED).astype(np.int32)
    sequences = index.sequences(nvme.owners()[slots])
    return slots[np.argsort(sequences, kind="stable")]
