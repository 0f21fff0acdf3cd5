# SPDX-License-Identifier: Apache-2.0
"""Records that a server itself has put into a tier that others share, and which of them goes for a
tenant at its quota. Pure: names in, names out.

Such a tier evicts as it likes, and tells no server. So this counts what was put and not deleted
since, but for what is known to be gone. Only tenants with a quota are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from attnstore_vllm.policy.eviction.departures import Departures
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.types import Key

PUTS_MAX = 1 << 22
"""Records of one tenant that are counted. Each costs some 300 bytes, and what may be 8 bytes."""


@dataclass(frozen=True, slots=True)
class _Put:
    key: Key
    name: bytes
    """That of its record. After a reset the same chunk has another one."""


@dataclass(slots=True)
class _Begun:
    slot: int
    victim: _Put | None
    """That is to be deleted before; None: nothing, or it is deleted."""
    is_new: bool = True
    """False: it counted before, and does so if this put fails: the tier may still have it."""


class _PutsOf:
    def __init__(self, most: int, order: Callable[[int], Departures]) -> None:
        self.most = min(most, PUTS_MAX)
        self.order = order(self.most)
        self.puts: dict[int, _Put] = {}
        self.slot_of: dict[Key, int] = {}
        self.begun: dict[bytes, _Begun] = {}
        self._free: list[int] = []

    def take_slot(self) -> int:
        """One of `most`, of which some are free."""
        return self._free.pop() if self._free else len(self.puts)

    def enter(self, slot: int, put: _Put, run: Run) -> None:
        self.puts[slot], self.slot_of[put.key] = put, slot
        self.order.add(slot, run)

    def leave(self, slot: int) -> _Put:
        put = self.puts.pop(slot)
        if self.slot_of.get(put.key) == slot:
            del self.slot_of[put.key]
        self.order.remove(slot)
        return put

    def forget(self, slot: int) -> None:
        self.leave(slot)
        self._free.append(slot)


class OwnPuts:
    """See the module.

    Args:
        most: by tenant, the records that it may have there of this server's.
        order: makes an order of departure of so many.
    Cost of each call: O(1) a record, but for begin(), which may cost a look at an order.
    """

    def __init__(self, most: Mapping[bytes, int], order: Callable[[int], Departures]) -> None:
        self._tenants = {tenant: _PutsOf(number, order) for tenant, number in most.items()}

    def orders(self) -> list[Departures]:
        return [tenant.order for tenant in self._tenants.values()]

    def held(self) -> dict[bytes, tuple[int, int]]:
        """By tenant: the records that count, and those that may."""
        return {name: (len(found.puts), found.most) for name, found in self._tenants.items()}

    def use(self, tenant: bytes, keys: Iterable[Key], run: Run) -> None:
        """A run uses these chunks, in the order of depth."""
        found = self._tenants.get(tenant)
        if found is not None and found.puts:
            slots = (found.slot_of.get(key) for key in keys)
            found.order.use([slot for slot in slots if slot is not None], run)

    def begin(self, tenant: bytes, put: tuple[Key, bytes], run: Run, now: float) -> bytes | None:
        """A record is about to be put: its chunk's key, and its name. end() follows, but for None.

        Returns the name of what is to be deleted before, which deleted() is told of; empty: nothing
        is. None: it is not to be put. What would have to go is worth more, is of the same run, or
        is being put itself. Or a record of this name is being put.
        """
        found, new = self._tenants.get(tenant), _Put(*put)
        if found is None:
            return b""
        if new.name in found.begun:  # its chunk was dropped since, and computed again
            return None
        slot = found.slot_of.get(new.key)
        if slot is not None and found.puts[slot] == new:  # it was evicted there, or is damaged
            found.begun[new.name] = _Begun(slot, None, is_new=False)
            found.order.use([slot], run)
            return b""
        if len(found.puts) < found.most:
            slot = found.take_slot()
            found.begun[new.name] = _Begun(slot, None)
            found.enter(slot, new, run)
            return b""
        busy = {begun.slot for begun in found.begun.values()}
        slot = found.order.victim(now, lambda one: one not in busy)
        if slot is None or found.order.run_of(slot) is run:
            return None
        if not found.order.admits(run, slot, now):
            return None
        victim = found.leave(slot)
        found.begun[new.name] = _Begun(slot, victim)
        found.enter(slot, new, run)
        return victim.name

    def deleted(self, tenant: bytes, name: bytes) -> None:
        """The one that was to be deleted for this record is not there any more."""
        found = self._tenants.get(tenant)
        begun = found.begun.get(name) if found is not None else None
        if begun is not None:
            begun.victim = None

    def end(self, tenant: bytes, name: bytes, *, is_there: bool) -> None:
        """The put is over: only who had a name or b"" from begin() says so. What was not deleted
        counts again, and nothing was put for it. It stands as if the new one's run had used it: the
        next put tries to delete another."""
        found = self._tenants.get(tenant)
        begun = found.begun.pop(name, None) if found is not None else None
        if found is None or begun is None:
            return
        if begun.victim is not None:
            assert not is_there
            run = found.order.run_of(begun.slot)
            assert run is not None
            found.leave(begun.slot)
            found.enter(begun.slot, begun.victim, run)
        elif begun.is_new and not is_there:
            found.forget(begun.slot)

    def gone(self, tenant: bytes, name: bytes, key: Key) -> None:
        """The tier has no such record any more."""
        found = self._tenants.get(tenant)
        slot = found.slot_of.get(key) if found is not None else None
        if found is None or slot is None or found.puts[slot].name != name:
            return
        if name not in found.begun:
            found.forget(slot)
