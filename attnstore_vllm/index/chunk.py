# SPDX-License-Identifier: Apache-2.0
"""One chunk of KV, and where its bytes are.

                 begin_save              begin_fetch
    DRAM:  ABSENT ---------> SAVING     ABSENT ---------> READING
           ABSENT <--evict-- READY <--- finish_save, finish_fetch

                 begin_store
    each tier behind:  ABSENT ---------> WRITING --> READY --evict--> ABSENT

Only READY bytes are ever read. A chunk is *clean* in DRAM when a tier behind has it READY too.

A chunk that is on NVMe only, and that is not looked at, is an entry of the index and no object
(index/prefix.py). Its token ids are on the disk then: a Chunk made of such an entry does not
know them before it has been read. A chunk that is READY in DRAM always does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from attnstore_vllm.policy.visits import NO_RUN, Run
from attnstore_vllm.types import Key


class State(Enum):
    """The state of a chunk's bytes in one tier."""

    ABSENT = "absent"
    SAVING = "the workers copy it out of HBM"
    READING = "it comes up from a tier behind"
    WRITING = "it is being written"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class ChunkName:
    """All that names a chunk, and is stored beside its bytes."""

    key: Key
    parent: Key
    extra: bytes
    tenant: bytes
    position: int
    """The position of its first token: K carries the rotation of this position."""
    num_tokens: int
    tokens: bytes
    """Its token ids, big-endian uint32; empty while they are not known."""

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.position + self.num_tokens


@dataclass(slots=True, eq=False)
class InTier:
    """A chunk's bytes in one tier."""

    state: State
    slot: int = -1
    checksum: bytes = b""
    """The payload's, once a tier behind DRAM has it READY."""
    uses: int = 0
    """Transfers that read or write the slot now: it cannot be given away."""


NOWHERE: Final = InTier(State.ABSENT)
"""In a tier that has nothing of the chunk. Never changed."""


class _Referable:
    """Lets a class with slots be referred to weakly."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class Chunk(_Referable):
    """A chunk that at least one tier has, or is getting. Changed by index/ alone."""

    name: ChunkName
    dram: InTier = NOWHERE
    behind: dict[str, InTier] = field(default_factory=dict)
    """By the name of the tier: of those that have it, or are getting it."""
    refused_by: set[str] = field(default_factory=set)
    """Tiers that are full of what is worth more: it comes there only if it is used again."""
    written_if_room: bool = False
    """It was refused beforehand, and goes to those tiers as long as they have room to spare."""
    dram_only: bool = False
    """No tier behind may have it: what they give back is not what they were given."""
    is_alone: bool = False
    """It is of use at its own length alone (a state), so it takes no shorter one's place."""
    dropped: bool = False
    """Not found any more; its slots are freed when the last transfer lets go."""
    repeats: int = 0
    """Those of its tokens that a tail which it supersedes had written before."""
    run: Run = NO_RUN
    """That used it last. Of a chunk that is no object only its tier's policy knows it."""
    entry: int = -1
    """Its place in the index, while it is in it."""
    came_from: str = ""
    """The tier that its DRAM bytes came up from, while no request has loaded them since."""
    brought_by: str = ""
    """The tier that its last DRAM bytes came up from, if another process wrote them there; empty:
    this one has computed them (TierBehind.source_of)."""
    origin: str = ""
    """The tier of others that it was copied from (remote.py); empty: it was computed here."""
    copied_for: Run | None = None
    """The run that it was copied for. No other has used it since, as long as tiers refuse it."""

    def at(self, tier: str) -> InTier:
        """Its bytes in a tier behind DRAM."""
        return self.behind.get(tier, NOWHERE)

    @property
    def is_behind(self) -> bool:
        """Whether some tier behind DRAM has it READY."""
        for copy in self.behind.values():  # noqa: SIM110 - asked of every chunk of every request
            if copy.state is State.READY:
                return True
        return False

    @property
    def usable(self) -> bool:
        """Whether a request that waits a little could load it."""
        if self.dropped:
            return False
        return self.dram.state in (State.READY, State.READING) or self.is_behind
