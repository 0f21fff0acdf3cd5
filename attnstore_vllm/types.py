# SPDX-License-Identifier: Apache-2.0
"""Small types that several packages share. Nothing here has behaviour."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Final, NewType

Clock = Callable[[], float]
"""Seconds since a beginning that is the same for all times it says."""

Key = NewType("Key", bytes)
"""32 bytes that name a whole prefix in one namespace (index/keys.py)."""

KEY_BYTES = 32
TOKEN_BYTES = 4
"""A token id is stored big-endian, so that byte order is token order (index/prefix.py)."""

DRAM: Final = "dram"
NVME: Final = "nvme"
SHARED: Final = "shared"
PEERS: Final = "peers"
"""Names of tiers, as metrics and messages have them."""
OWN_PASS: Final = "own_pass"
"""Stands for a tier where workers compute tokens themselves (scheduler/documents.py)."""


class Flow(Enum):
    """A direction that bytes move in. HBM to DRAM is a save, DRAM to HBM a load."""

    SAVE = "hbm_to_dram"
    LOAD = "dram_to_hbm"
    WRITE_BACK = "dram_to_nvme"
    PREFETCH = "nvme_to_dram"
    TO_SHARED = "dram_to_shared"
    FROM_SHARED = "shared_to_dram"
    FROM_PEERS = "peers_to_dram"


class Word(str, Enum):
    """A word of a fixed set, which is its own text. (StrEnum needs Python 3.11.)"""

    def __str__(self) -> str:
        return str.__str__(self)


class Event(Word):
    """All that is counted by name. The values are labels of metrics: they never change."""

    # Of chunks: the label of `chunks`.
    SAVED = "saved"
    SAVED_AGAIN = "saved_again"
    """Computed though NVMe has it, and kept in DRAM."""
    DROPPED = "dropped"
    """Not saved for want of room."""
    REFUSED = "refused"
    """Not written, since a full NVMe has nothing that is worth less."""
    EVICTED_DRAM = "evicted_dram"
    EVICTED_NVME = "evicted_nvme"
    EVICTED_SHARED = "evicted_shared"
    """Forgotten by this engine, to know of another one there. The record stays."""
    GIVEN_UP = "given_up"
    """Left DRAM though a request far back in the queue wants it."""
    LOST = "lost"
    """Evicted from its last tier."""
    SUPERSEDED = "superseded"
    """Its conversation has gone on beyond it."""
    WRITTEN = "written"
    READ_LATE = "read_late"
    """Not waited for any longer."""
    RECOVERED = "recovered"
    SCRUBBED = "scrubbed"
    UNSAVED = "unsaved"
    """Its copy from HBM was given up for want of room in the write buffer, or failed."""
    EXPIRED = "expired"
    """Looked for after its ttl, and dropped."""
    PINNED = "pinned"
    PIN_REFUSED = "pin_refused"
    """Its tenant or all have their share."""
    DOES_NOT_FIT = "does_not_fit"
    """Encoded it takes more than its place on NVMe has, and stays in DRAM."""
    FOUND = "found"
    """A tier that must be asked (peers, shared) has it."""
    GONE = "gone"
    """Such a tier said so, and had it no more when it was to be loaded."""
    IS_THERE = "is_there"
    """Not written to the shared tier, since another server had."""
    OVER_QUOTA = "over_quota"
    """Not written to the shared tier: its tenant has what it may have there of this server's."""
    ANSWERS_LATE = "answers_late"
    """Questions that such a tier did not answer in time."""
    # What failed: the label of `errors`.
    READ_FAILED = "read_failed"
    WRITE_FAILED = "write_failed"
    CORRUPT = "corrupt"
    """Bytes are not what was written."""
    DEVICE_FULL = "device_full"
    """A write failed since the file system or a quota is full; WRITE_FAILED counts it too."""
    DEVICE_LATE = "device_late"
    DEVICE_OUT = "device_out"
    """Failed again and again, or did not answer, and was left alone for a while."""
    SHARED_READ_FAILED = "shared_read_failed"
    SHARED_WRITE_FAILED = "shared_write_failed"
    SHARED_CORRUPT = "shared_corrupt"
    SHARED_LATE = "shared_late"
    SHARED_OUT = "shared_out"
    # Work beyond a step's budget: the label of `put_off`.
    LOOKUP_LATER = "lookup"
    LOOKUP_DROPPED = "lookup_dropped"
    PREFETCH_LATER = "prefetch"
    PREFETCH_DROPPED = "prefetch_dropped"
    SAVE_LATER = "save"
    SAVE_DROPPED = "save_dropped"
    LEAVE_LATER = "leave"
    END_LATER = "end"
    END_DROPPED = "end_dropped"
    # Hints of requests, and prefetches over HTTP: their `outcome`.
    APPLIED = "applied"
    IGNORED = "ignored"
    HIT = "hit"
    MISS = "miss"
    # Chunks that were computed once more, beside what is stored: the `outcome` of `audits`.
    AGREED = "agreed"
    DIFFERED = "differed"
    NOT_COMPARED = "not_compared"
    """The stored bytes, or room for a copy, were not there when it was computed."""


ERRORS: Final = (
    Event.READ_FAILED, Event.WRITE_FAILED, Event.CORRUPT,
    Event.DEVICE_FULL, Event.DEVICE_LATE, Event.DEVICE_OUT,
    Event.SHARED_READ_FAILED, Event.SHARED_WRITE_FAILED, Event.SHARED_CORRUPT,
    Event.SHARED_LATE, Event.SHARED_OUT,
)  # fmt: skip
"""Events of the metric `errors`."""
PUT_OFF: Final = (
    Event.LOOKUP_LATER, Event.LOOKUP_DROPPED, Event.PREFETCH_LATER, Event.PREFETCH_DROPPED,
    Event.SAVE_LATER, Event.SAVE_DROPPED, Event.LEAVE_LATER,
    Event.END_LATER, Event.END_DROPPED,
)  # fmt: skip
"""Events of the metric of that name."""
OUTCOMES: Final = (Event.APPLIED, Event.IGNORED, Event.HIT, Event.MISS)
"""Events of the metrics `hints` and `prefetches`."""
AUDITS: Final = (Event.AGREED, Event.DIFFERED, Event.NOT_COMPARED)
"""Events of the metric of that name."""
CHUNK_EVENTS: Final = tuple(e for e in Event if e not in {*ERRORS, *PUT_OFF, *OUTCOMES, *AUDITS})
"""Events of the metric `chunks`: all others."""


class Cause(Word):
    """Why KV of a request was computed, or not stored. Label of `skipped` and `recomputations`,
    and in a request's report; docs/runbook.md has a row each.

    Of a request that is left alone, which neither uses nor leaves stored KV:
    """

    BYPASS = "bypass"
    """It wants every token computed, or has no token ids (scheduler/request.py: bypasses)."""
    NO_SALT = "no_salt"
    """Requests without a cache_salt share nothing here."""
    WEIGHTS_UNKNOWN = "weights_unknown"
    """The weights are not digested yet: it is not known whose KV there is."""
    ADAPTER_NOT_SERVED = "adapter_not_served"
    """Requests with a LoRA adapter are not served here."""
    # Nothing was looked up, or nothing of what is stored may be used.
    ADAPTER_UNKNOWN = "adapter_unknown"
    """The workers could not say what its adapter is."""
    RESET_UNCHECKED = "reset_unchecked"
    """vLLM's cache was reset, the weights were not looked at since, and it does not wait."""
    STEP_BUDGET = "step_budget"
    """There was no time in the step to look it up, or to save its end."""
    MEDIA_UNKNOWN = "media_unknown"
    """It is left alone from the first picture or sound that cannot be told by content."""
    SESSION_CHANGED = "session_changed"
    """A session's later input has another salt or adapter, or wants every token computed."""
    DISTRUSTED = "distrusted"
    """The audit has found wrong KV so often that nothing is served any more."""
    # It was looked up, and is not stored, or cannot be used now.
    NOT_STORED = "not_stored"
    """No tier is known to have it: it is new, or was evicted."""
    RECOVERING = "recovering"
    """No tier is known to have it, and what earlier runs left on NVMe is not all known yet."""
    NOT_ANSWERED = "not_answered"
    """The same, and a tier that other engines write to did not answer in time."""
    EXPIRED = "expired"
    """Its ttl was over."""
    TOO_SHORT = "too_short"
    """Too little is stored to be loaded."""
    OUT_OF_USE = "out_of_use"
    """A tier has it that is left alone after failures, or is not believed any more."""
    DRAM_TOO_SMALL = "dram_too_small"
    """More is stored than DRAM has room for at once."""
    GROUP_LACKS = "group_lacks"
    """Another KV cache group needs more there than is stored."""
    # It was stored, and is computed all the same.
    DEADLINE = "deadline"
    """It did not come up from NVMe in time."""
    DRAM_FULL = "dram_full"
    """The same, and what DRAM held was in use or not written yet: no room came for it."""
    SLOWER = "slower"
    """Computing was expected to be sooner, or another connector brings it."""
    LOST = "lost"
    """It was evicted, unreadable or corrupt by then."""
    COPY_FAILED = "copy_failed"
    """The device failed to copy it."""
    AUDIT = "audit"
    """It was drawn, to be compared with what is computed, or its tier is not tried yet."""
    # What was computed is not stored.
    STORE_FALSE = "store_false"
    """The request said so."""
    SESSION_DRAFTS = "session_drafts"
    """A session whose drafts vLLM counts as computed beyond its stop."""
    NO_ROOM = "no_room"
    """DRAM has no room for it."""
    OUTDATED = "outdated"
    """Part of its KV is from before a reset, or of another adapter or picture."""


RECOMPUTED: Final = (
    Cause.DEADLINE, Cause.DRAM_FULL, Cause.SLOWER, Cause.LOST, Cause.DRAM_TOO_SMALL,
    Cause.COPY_FAILED, Cause.AUDIT,
)  # fmt: skip
"""Causes of the metric `recomputations`."""


class StoreFailure(Enum):
    """Why a chunk was not written to a tier behind; the event that it counts as."""

    FAILED = Event.WRITE_FAILED
    DOES_NOT_FIT = Event.DOES_NOT_FIT
    """Nothing was sent to the tier."""
    IS_THERE = Event.IS_THERE
    """Others have written it to the shared tier: nothing was sent."""
    OVER_QUOTA = Event.OVER_QUOTA
    """Its tenant's quota of the shared tier has no room: nothing was sent."""
    NOT_SHARED = Event.SHARED_WRITE_FAILED
    """As FAILED, of the shared tier."""


class Seen(IntEnum):
    """The result of a look at the live weights. Of several ranks the largest counts."""

    NOTHING = 0
    """No worker has looked."""
    SAME = 1
    UNKNOWN = 2
    """This model's cannot be seen."""
    CHANGED = 3
