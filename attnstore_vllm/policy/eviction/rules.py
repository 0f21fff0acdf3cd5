# SPDX-License-Identifier: Apache-2.0
"""Who leaves a full tier: every decision of it, on this page. Pure.

A tier that is full and is asked for a slot brings what could go. These rules say which of it goes:

    DRAM, for a save, a read or a second copy      dram_gives_up()
    DRAM, for what is worth little                 may_go_for_low_value()
    a tier behind DRAM, for what is written back   behind_gives_up()

Which run is worth least is for an order to say (base.py, by_return.py, lru.py), and of a run the
deepest chunk goes first (departures.py). Which slots can go now, and how one becomes free, is the
mechanism: tiers/dram_tier.py, tiers/tier.py and tiers/residency.py, which compare no worths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from enum import Enum, auto
from typing import Protocol

from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import Run

SAVES_PART = 8
"""One slot in so many is kept for what is saved and not yet written, or saves would push out what
was read for the requests at the window's end, to be read again."""
WAIT_MIN_S = 1e-3
USUAL_DIRTY = 4
"""So many are on their way to a disk that keeps up."""
DIRTY_PART = 2
"""When more than one slot in so many is dirty and nothing is written, reads may take what is
nowhere else."""
LATE_PART = 0.5
"""Once so much of what is read comes late, being on a tier behind is taken for being lost."""
KEPT_SLOTS = 16
"""So many slots are given up by one decision, from the same runs, ..."""
KEPT_PART = 16
"""... and at most one of so many that there are, since each changes what reads risk, ..."""
KEPT_S = 0.05
"""... within so long, if nothing else has come or was used meanwhile."""


class For(Enum):
    """Why DRAM makes room."""

    SAVE = auto()
    """KV that no tier has."""
    READ = auto()
    """A waiting request wants it from a tier behind."""
    COPY = auto()
    """It is somewhere already, or is worth little, and no request waits for it."""


class Gives(Enum):
    """Which chunk a tier gives up."""

    CLEAN = auto()
    """The chunk that the order says of those that a tier behind has too, or has refused."""
    DIRTY = auto()
    """The chunk that the order says of those that wait to be written: it is lost."""
    REST = auto()
    """The last of what is dirty in the clean chunk's run: it lies behind that one."""
    WANTED = auto()
    """A chunk that the farthest request waits for."""
    NOTHING = auto()
    REFUSED = auto()
    """Nothing: what asks is worth less than what would have to go."""


class Full(Protocol):
    """A full DRAM. A worth is in returns a second of a slot, and above 0. An answer may cost a pass
    over an order, and is asked for only where it is needed."""

    num_dirty: int

    def clean(self) -> float | None:
        """The worth of the clean chunk that could go. None: there is none."""

    def dirty(self) -> float:
        """The same of the dirty one. Infinite: there is none."""

    def num_rest(self) -> tuple[int, bool]:
        """How much of the clean chunk's run is dirty, and whether some of it could go."""

    def has_room_behind(self) -> bool:
        """Whether a tier that can give the clean chunk back pushes nothing out yet."""

    def poorest_behind(self) -> Iterable[float | None]:
        """The worth of what leaves next, of each tier that has the clean chunk and keeps more than
        DRAM. None: it has room."""

    def late(self) -> float:
        """The share of reads that come too late, guessed from the writes where few were seen."""

    def late_reads(self) -> float:
        """The share of reads that came too late."""

    def waited(self) -> float | None:
        """How long the farthest wanted chunk has waited that could go: for a read, one that can be
        read again; for a save, one of requests with a worse priority than the next one's, which
        may wait for ever. None: there is none."""

    def again(self) -> float:
        """The worth of the chunk that is copied again. 0: no chunk is."""

    def is_stuck(self) -> bool:
        """Whether nothing is being written, though there is much to write."""


def dram_gives_up(full: Full, what: For) -> Gives:
    """First what no request waits for and a tier behind has too, or has refused. Then what requests
    wait for that come after the one that asks. What is dirty would be lost: it goes for a save
    alone, which brings what no tier has; and for what a request waits for, if writing is stuck.

    What is dirty also goes before any of these if less is lost with it. A save takes no room from
    what the next requests wait for. That is of use for certain; to read it again takes the disk's
    time, and may come late.
    """
    clean = full.clean()
    if clean is not None:
        if not full.num_dirty:
            return Gives.CLEAN  # nothing else can go
        if full.has_room_behind() and not full.late():
            return Gives.CLEAN  # nothing is lost with it
        return _poorer(full, clean, full.dirty())
    dirty, waited = full.dirty(), full.waited()
    if waited is not None:
        # It is taken to wait as long again.
        is_less = dirty < full.late_reads() / max(waited, WAIT_MIN_S)
        return Gives.DIRTY if is_less else Gives.WANTED
    if dirty == math.inf:
        return Gives.NOTHING
    may_be_lost = what is For.SAVE or (what is For.READ and full.is_stuck())
    may_be_lost = may_be_lost or dirty < full.late_reads() * full.again()
    return Gives.DIRTY if may_be_lost else Gives.NOTHING


def _poorer(full: Full, clean: float, dirty: float) -> Gives:
    """Weigh the clean chunk against what is dirty. KV behind a chunk is nothing without it, so it
    is lost with it.

    What can be read again is lost as often as reads come late. It is lost for good where the tiers
    that have it are smaller than DRAM, or keep nothing that is worth so little: such a tier forgets
    sooner than DRAM does, and newer chunks are about to push it out.
    """
    num_rest, rest_can_go = full.num_rest()
    if clean <= dirty and not num_rest:
        return Gives.CLEAN  # no risk makes it more
    least = min(dirty, clean)
    outlasts = any(worth is None or worth < least for worth in full.poorest_behind())
    risked = (full.late() if outlasts else 1.0) * clean * (1 + num_rest)
    if rest_can_go and clean < min(dirty, risked):
        return Gives.REST
    return Gives.DIRTY if dirty < risked else Gives.CLEAN


def may_be_lost(run: Run, since: float, growing: Container[Run]) -> bool:
    """Whether a dirty chunk of this run may go for another: else a prompt would push out its own
    beginning, and two that grow each other's. Of a run the beginning is written first, and what is
    dirty of it is nothing without that.

    Args:
        since: when the request came that a save is for: the run's must have come before.
        growing: runs of which something is being saved.
    """
    return run.since < since and run not in growing


def comes_back(late: float) -> bool:
    """Whether what leaves DRAM for a tier behind is taken for kept. Else it is rather computed
    again than read in time, and a prompt keeps its beginning here.

    Args:
        late: the share of reads that come too late.
    """
    return late < LATE_PART


def lag(num_dirty: int, num_slots: int) -> float:
    """The share of reads that come too late, before some were seen: a disk that cannot keep up with
    saves is taken for one that cannot with reads."""
    return min(1.0, DIRTY_PART * max(0, num_dirty - USUAL_DIRTY) / num_slots)


def is_stuck(num_dirty: int, num_slots: int, *, writes_stalled: bool) -> bool:
    """See Full."""
    return writes_stalled and num_dirty > num_slots // DIRTY_PART


def is_full_of_wanted(num_staying: int, num_slots: int) -> bool:
    """Whether a read may only take the place of what farther requests want.

    Args:
        num_staying: slots of what is wanted, held or pinned.
    """
    return num_staying >= num_slots - num_slots // SAVES_PART


def may_go_for_low_value(run: Run, gives: Gives) -> bool:
    """Whether a chunk of this run, which DRAM gives up, may go for one that is worth little: only
    another such chunk may."""
    return gives is not Gives.WANTED and run.priority <= Priority.LOW_VALUE


def behind_gives_up(
    *,
    is_wanted: bool,
    has_idle: bool,
    has_wanted: Callable[[], bool],
    is_own: Callable[[], bool],
    is_admitted: Callable[[], bool],
) -> Gives:
    """A tier behind gives up this for a chunk that is written back; CLEAN: what its order says.

    What a request waits for goes only if nothing else is found, the farthest first, and only for
    what a request waits for too, or has pinned.

    Args:
        is_wanted: a request waits for the chunk that is written, or has pinned it.
        has_idle: something that no request waits for could go.
        has_wanted: something that a request waits for could go.
        is_own: that idle chunk is of the same run: its beginning, without which it is nothing.
        is_admitted: the chunk is worth its slot, as the order says.
    """
    if is_wanted:
        if has_idle:
            return Gives.CLEAN
        return Gives.WANTED if has_wanted() else Gives.NOTHING
    if not has_idle:
        return Gives.REFUSED if has_wanted() else Gives.NOTHING
    return Gives.REFUSED if is_own() or not is_admitted() else Gives.CLEAN
