# SPDX-License-Identifier: Apache-2.0
"""The page-locked part of the pool: its first slots, as many as the driver takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic
from types import ModuleType

from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.page_tables import MapInOrder

logger = logging.getLogger(__name__)

LOCK_AT_ONCE_BYTES = 8 << 30
"""Memory that is page-locked in one call: what comes behind it is mapped meanwhile. Drivers refuse
some hundred GiB."""
LOCK_AT_LEAST_BYTES = 1 << 30
"""A call that is refused is tried with half of it, down to this."""
SLOTS_MIN = 2
DEADLINE_S = 120.0
"""How long page-locking may take, and for each GiB of it: drivers take about 0.1 s."""
DEADLINE_S_A_GIB = 1.0
WORTH_SAYING_BYTES = 16 << 30
"""Size from which on progress is logged: it takes seconds."""
_CAUSES = {
    "CUDA_ERROR_OUT_OF_MEMORY": (
        "there is a limit on locked memory, or no memory for the GPU's page tables: raise it "
        "(ulimit -l unlimited, or docker run --ulimit memlock=-1), or ask for less"
    ),
    "CUDA_ERROR_INVALID_VALUE": "this driver takes no more memory: ask for less, or update it",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "something else in this process has locked it",
    "CUDA_ERROR_NOT_SUPPORTED": "this driver, or the virtual machine, locks no shared memory",
    "CUDA_ERROR_NOT_PERMITTED": "the container may not lock memory",
}
"""Meanings of refusals, and what to do, by the driver's name of each."""


class LockedPool:
    """Pages of the pool that stay where they are, so that the device copies from and to them.

    Locked some slots at a time, and never those of two files in one call. Threads map the pages
    ahead of that: the driver alone faults them one by one, 1 GiB in a second. Where the driver
    refuses, or time is over, a warning says why, and the slots until there are what there is.

    Args:
        base: address of slot 0 in this process.
        borders: slots at which another file of the pool begins (SharedPool.borders).
    Raises: UnsupportedError if fewer than SLOTS_MIN are locked, or if the device does not see them
        side by side.
    """

    def __init__(
        self,
        native: ModuleType,
        device: int,
        base: int,
        num_slots: int,
        slot_bytes: int,
        borders: Sequence[int] = (),
    ) -> None:
        self._native = native
        self._device = device
        self._base = base
        self._slot_bytes = slot_bytes
        self._locked: list[int] = []
        """Addresses, as they were given to the driver."""
        self.num_slots = 0
        """Slots that are locked."""
        self.seen = 0
        """Address of slot 0 as the device sees it."""
        with ExitStack() as undo:
            undo.callback(self.close)
            with MapInOrder(base, num_slots * slot_bytes) as mapped:
                why_not = self._lock(num_slots, [*borders, num_slots], mapped)
            if why_not:
                self._say(num_slots, why_not)
            undo.pop_all()

    def close(self) -> None:
        """Also if the device has failed: another error is on its way then. Idempotent."""
        while self._locked:
            try:
                self._native.unregister_host(self._locked.pop(), self._device)
            except RuntimeError as error:
                logger.error("the pool stays page-locked until the process ends: %s", error)

    def _lock(self, num_slots: int, ends: Sequence[int], mapped: MapInOrder) -> str:
        """Returns why not all slots are locked; "": all are."""
        total = num_slots * self._slot_bytes
        began = monotonic()
        may_take_s = DEADLINE_S + DEADLINE_S_A_GIB * total / (1 << 30)
        at_once = max(1, LOCK_AT_ONCE_BYTES // self._slot_bytes)
        while self.num_slots < num_slots:
            first = self.num_slots
            took_s = monotonic() - began
            if took_s > may_take_s:
                return f"it has taken {took_s:.0f} s, and may take {may_take_s:.0f} s"
            end = min(first + at_once, *(end for end in ends if end > first))
            mapped.wait(end * self._slot_bytes, may_take_s - took_s)
            try:
                self._lock_slots(first, end)
            except RuntimeError as error:
                at_once = (end - first) // 2
                if at_once * self._slot_bytes < LOCK_AT_LEAST_BYTES:
                    return _meaning(error)
                continue
            self.num_slots = end
            if total >= WORTH_SAYING_BYTES:
                locked = format_size(end * self._slot_bytes)
                logger.info("page-locked %s of %s for the GPU", locked, format_size(total))
        return ""

    def _lock_slots(self, first: int, end: int) -> None:
        offset = first * self._slot_bytes
        address, num_bytes = self._base + offset, (end - first) * self._slot_bytes
        found = int(self._native.register_host(address, num_bytes, self._device))
        self._locked.append(address)
        self.seen = self.seen or found
        if found != self.seen + offset:
            raise UnsupportedError(
                f"the device sees slot {first} of the pool at {found:#x}, and not behind the "
                f"slots before it, at {self.seen + offset:#x}; the store needs one range"
            )

    def _say(self, num_slots: int, why_not: str) -> None:
        """Raises: UnsupportedError if there is too little to go on with."""
        locked, total = (format_size(n * self._slot_bytes) for n in (self.num_slots, num_slots))
        if self.num_slots < SLOTS_MIN:
            raise UnsupportedError(f"{locked} of dram's {total} are page-locked: {why_not}")
        logger.warning(
            "%s of dram's %s are page-locked for the GPU, and AttnStore goes on with these: %s",
            locked,
            total,
            why_not,
        )


def _meaning(error: RuntimeError) -> str:
    """The driver's refusal, and what it means."""
    text = str(error)
    means = next((cause for name, cause in _CAUSES.items() if name in text), None)
    return f"the driver refuses more ({text})" + (f"; {means}" if means else "")
