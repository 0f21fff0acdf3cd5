# SPDX-License-Identifier: Apache-2.0
"""One chunk of KV, and where its bytes are.

                 begin_save            begin_prefetch
    DRAM:  ABSENT ---------> SAVING   ABSENT ---------> READING
           ABSENT <-evict--- READY <-- finish_save, finish_prefetch

                 begin_write_back
    NVMe:  ABSENT -----------------> WRITING --> READY --evict--> ABSENT

Only READY bytes are ever read. A chunk is *clean* in DRAM when it is READY on NVMe too.

A chunk that is on NVMe only, and that nobody looks at, is an entry of the index and no object
(index/prefix.py). Its token ids are on the disk then: a Chunk made of such an entry does not
know them before it has been read. A chunk that is READY in DRAM always does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from attnstore_vllm.policy.returns import NO_RUN, Run
from attnstore_vllm.types import Key


class Dram(Enum):
    ABSENT = "absent"
    SAVING = "the workers copy it out of HBM"
    READING = "it comes up from NVMe"
    READY = "ready"


class Nvme(Enum):
    ABSENT = "absent"
    WRITING = "it is being written back"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class ChunkName:
    """What names a chunk, and is stored beside its bytes."""

    key: Key
    parent: Key
    extra: bytes
    tenant: bytes
    position: int
    """The position of its first token: K carries the rotation of this position."""
    num_tokens: int
    tokens: bytes
    """Its token ids, big-endian uint32; empty while they are not known."""


class _Referable:
    """Lets a class with slots be referred to weakly."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class Chunk(_Referable):
    """A chunk that at least one tier has, or is getting. Changed by index/ alone."""

    name: ChunkName
    dram: Dram = Dram.ABSENT
    dram_slot: int = -1
    nvme: Nvme = Nvme.ABSENT
    nvme_slot: int = -1
    checksum: bytes = b""
    """Of the payload on NVMe; set with the first write-back or by recovery."""
    holds: int = 0
    """Transfers that read or write its DRAM slot now: it cannot be evicted."""
    reads: int = 0
    """Device requests that touch its NVMe slot now: the slot cannot be given away."""
    dropped: bool = False
    """Not found any more; its slots are freed when the last transfer lets go."""
    refused: bool = False
    """NVMe is full of what is worth more: it is not written back unless it is used again."""
    repeats: int = 0
    """Of its tokens, those that a tail which it supersedes had written to NVMe before."""
    run: Run = NO_RUN
    """That used it last. Of a chunk on NVMe only the tier's policy knows it."""
    entry: int = -1
    """Its place in the index, while it is in it."""
    from_nvme: bool = field(default=False)
    """Its DRAM bytes came up from NVMe, and no request has loaded them since."""

    @property
    def usable(self) -> bool:
        """Whether a request that waits a little could load it."""
        if self.dropped:
            return False
        return self.dram in (Dram.READY, Dram.READING) or self.nvme is Nvme.READY
