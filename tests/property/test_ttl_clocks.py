# SPDX-License-Identifier: Apache-2.0
"""The histories of test_ttl.py on a machine whose clocks move, and that is killed and started anew.

Goal: no step of the wall clock, no pause of the machine and no restart lets KV be found for longer
than docs/operations.md says of times across restarts.
Method: as there, but the store has its own clock over two of the test's. Each history pauses the
machine, and half of them set the wall clock back. Some starts find another `ttl` in the settings.
The model is plain: time is what has passed, pauses included. It differs from the wall clock by
what that was set back. A use is worth as much on the disk as the wall clock said then.
"""

from __future__ import annotations

import math

import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_vllm.tiers.context import LOOK_S, STEP_S, StoreClock
from attnstore_vllm.tiers.nvme import recovery
from attnstore_vllm.types import Key
from tests.helpers import found_slab
from tests.property.test_ttl import EVICTIONS, SEEDS, WEIGHTS, Clock, History, Kept

PAUSES_S = [2 * STEP_S, 15.0, 45.0, 500.0]
STOPS_S = [0.0, 3.0, 30.0, 70.0]
STEPS = 80


class Machine(Clock):
    """Its clocks. `now`: the time that has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.boot, self.wall = 50.0, 1_800_000_000.25

    @property
    def ahead(self) -> float:
        """Of the time that has passed. It changes where the wall clock is set back."""
        return self.wall - self.now

    def go_on(self, seconds: float) -> None:
        self.now += seconds
        self.boot += seconds
        self.wall += seconds


class ClockHistory(History):
    clock: Machine

    def __init__(self, seed: int, eviction: str) -> None:
        self.first_ahead: dict[Key, tuple[Kept, float]] = {}
        self.on_disk: dict[Key, float] = {}
        """Up to when, by the wall clock, a record may let a chunk be found."""
        self.disk_ttl_s: dict[Key, float] = {}
        """The longest ttl that a record of it may have. Who computes a chunk anew leaves the record
        of before where it is, as long as its place is not used."""
        super().__init__(seed, eviction, Machine())
        self.weights = {**WEIGHTS, "pause": 2, "restart": 1.5, "hold": 0.2}
        if self.rng.random() < 0.5:
            self.weights |= {"set_back": 1}

    def options(self) -> dict[str, object]:
        machine = self.clock
        machine.boot = self.rng.uniform(1.0, 1e6)
        self.store_clock = StoreClock(lambda: machine.boot, lambda: machine.wall)
        clocks = {"clock": self.store_clock, "wall": lambda: machine.wall}
        return {**super().options(), **clocks}

    # ---- what moves clocks ---------------------------------------------------------------

    def do_wait(self) -> None:
        self.clock.go_on(self.rng.choice([1.0, 5.0, 10.0, 19.0, 21.0, 40.0, 59.5, 61.0]))

    def do_pause(self) -> None:
        """The machine stands still, and its wall clock is put right: no other one tells of it. The
        store goes on before its clock looks."""
        seconds = self.rng.choice(PAUSES_S)
        self.clock.wall += seconds
        if self.rng.random() < 0.5:
            self.do_tick()
        self.clock.now += seconds
        self.clock.go_on(2 * LOOK_S)
        self.say(f"a pause of {seconds} s")

    def do_set_back(self) -> None:
        seconds = self.rng.choice(PAUSES_S)
        self.clock.wall -= seconds
        self.clock.go_on(2 * LOOK_S)
        self.store_clock()
        self.say(f"the wall clock is set back by {seconds} s")

    def do_hold(self) -> None:
        """The disk hangs, until the next time or the end of the process."""
        assert isinstance(self.device, MemoryDevice)
        if self.device.is_holding:
            self.device.release()
        else:
            self.device.hold()

    # ---- restarts ------------------------------------------------------------------------

    def do_restart(self) -> None:
        """Of the process, or of the machine. What is under way is lost."""
        rng, machine = self.rng, self.clock
        for _ in range(rng.choice([0, 8])):
            self.rig.store.tick()
        self.saving = []
        image = bytes(self.device.image)
        self.device = MemoryDevice(len(image))
        self.device.image[:] = image
        self.close_rig()
        self.running, self.rests, self.oracle.waiting = [], [], []
        machine.go_on(rng.choice(STOPS_S))
        if rng.random() < 0.3:
            self.server_ttl_s = self.server_ttl()
        self.say(f"restart, with a ttl of {self.server_ttl_s}")
        most = math.inf if self.server_ttl_s is None else self.server_ttl_s
        for key, kept in self.oracle.kept.items():
            kept.ttl_s = min(self.disk_ttl_s[key], most)
            kept.ends = min(self.on_disk[key] - machine.ahead, machine.now + kept.ttl_s)
        self.first_ahead = {}
        self.rig = self.open_rig(found_slab(image))
        for _ in range(rng.choice([1, 2, 8])):  # recovery may go on
            self.rig.store.tick()

    # ---- what must hold ------------------------------------------------------------------

    def check(self) -> None:
        machine = self.clock
        for key, kept in self.oracle.kept.items():
            known = self.first_ahead.get(key)
            if known is None or known[0] is not kept:
                self.first_ahead[key] = known = kept, machine.ahead
            end = kept.ends + known[1]
            self.on_disk[key] = max(self.on_disk.get(key, end), end)
            self.disk_ttl_s[key] = max(self.disk_ttl_s.get(key, 0.0), kept.ttl_s)
        residency = self.rig.store.residency
        for chunk in list(residency.index):
            lease, name = residency.run_of(chunk).lease, chunk.name
            left = math.inf if lease is None else lease.expires - self.store_clock()
            kept = self.oracle.kept[name.key]
            assert machine.now + left <= kept.ends + 1e-3, (
                f"tokens {name.position} to {name.position + name.num_tokens} may be found for "
                f"{machine.now + left - kept.ends} s too long ({left} s are left)"
            )


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_no_clock_and_no_restart_lets_kv_be_found_for_longer(
    eviction: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "BATCH_HEADERS", 3)
    monkeypatch.setattr(recovery, "BATCHES", 1)
    for seed in seeds:
        try:
            ClockHistory(seed, eviction).play(STEPS)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {eviction}\n{error}") from error
