# SPDX-License-Identifier: Apache-2.0
"""The store's clock beside one of the machine's and a wall clock, which is put ahead or back."""

from __future__ import annotations

import pytest

from attnstore_vllm.tiers.context import STEP_S, Harness, StoreClock
from tests.unit.policy.test_visits import Clock


def test_a_clock_that_was_set_back_hides_no_pause() -> None:
    """One that was an hour ahead is put right, as where local time was taken for UTC. Then the
    machine is paused for 50 minutes, twice."""
    boot, wall = Clock(), Clock()
    clock = StoreClock(boot, wall)
    boot.now, wall.now = boot.now + 60.0, wall.now + 60.0 - 3600.0
    used_at = clock()
    for number in (1, 2):
        boot.now, wall.now = boot.now + 1.0, wall.now + 3001.0
        assert clock() - used_at == number * 3001.0
    boot.now, wall.now = boot.now + 1.0, wall.now + 1.0
    assert clock() - used_at == 6003.0


def test_a_step_that_two_threads_find_counts_once() -> None:
    boot, wall, inner = Clock(), Clock(), list[float]()

    def looked_at_by_both() -> float:
        if wall.now > 1100.0 and not inner:
            inner.append(0.0)
            inner[0] = clock()  # another thread's, meanwhile
        return wall.now

    clock = StoreClock(boot, looked_at_by_both)
    used_at = clock()
    boot.now, wall.now = boot.now + 1.0, wall.now + 201.0
    assert clock() - used_at == 201.0
    assert inner[0] - used_at == 1.0, "it does not wait for the first"
    boot.now, wall.now = boot.now + 1.0, wall.now + 1.0
    assert clock() - used_at == 202.0


def test_a_thread_that_is_stopped_between_two_clocks_makes_nothing_older() -> None:
    """Each read of a clock takes longer than a wall clock may be put ahead unseen."""
    now = [0.0]

    def slow() -> float:
        now[0] += 10 * STEP_S
        return now[0]

    clock = StoreClock(slow, slow)
    for _ in range(3):
        before = now[0]
        assert before < clock() <= now[0]


@pytest.mark.parametrize("stopped_in", ["boot", "wall"])
def test_a_thread_that_is_stopped_once_makes_nothing_older(stopped_in: str) -> None:
    """Behind one read of a clock, or some, and never again."""
    now, stops = [1000.0], [0]

    def boot() -> float:
        told = now[0]
        stop(stopped_in == "boot")
        return told

    def wall() -> float:
        told = now[0]
        stop(stopped_in == "wall")
        return told

    def stop(is_here: bool) -> None:
        if is_here and stops[0]:
            stops[0] -= 1
            now[0] += 10 * STEP_S

    clock = StoreClock(boot, wall)
    for count in (0, 1, 2, 3, 0, 0):
        now[0] += 1.0
        stops[0] = count
        before = now[0]
        assert before <= clock() <= now[0]


def test_a_server_looks_at_both_clocks() -> None:
    assert isinstance(Harness().clock, StoreClock)
