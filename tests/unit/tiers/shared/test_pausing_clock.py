# SPDX-License-Identifier: Apache-2.0
"""The clock of the process that has Mooncake's client: who polls it sleeps, and no one else."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from attnstore_vllm.tiers.shared.mooncake_backend import MooncakeBackend

POLLS = 3000
PAUSE_S = 20e-6
POLL = f"""
import json, time
def poll(clock):
    began, used = time.perf_counter(), time.process_time()
    times = [clock() for _ in range({POLLS})]
    assert times == sorted(times)
    return time.perf_counter() - began, time.process_time() - used
print(json.dumps([poll(time.time), poll(time.monotonic), time.time()]))
"""


def polled(environment: dict[str, str]) -> tuple[list[float], list[float], float]:
    """Seconds, and of the processor, of polls of the time; the same of another clock; the time."""
    command = ["env", *(f"{name}={value}" for name, value in environment.items())]
    done = subprocess.run(
        [*command, sys.executable, "-c", POLL], check=True, capture_output=True, timeout=60
    )
    assert not done.stderr, "it cannot be loaded"
    wall, other, now = json.loads(done.stdout)
    return wall, other, now


def test_who_polls_sleeps() -> None:
    began = time.time()
    (wall_s, used_s), (other_s, _), now = polled(MooncakeBackend.environment())
    assert wall_s > POLLS * PAUSE_S / 2
    assert used_s < wall_s / 2, "it takes a core"
    assert other_s < wall_s / 4, "only the system's clock is polled by Mooncake"
    assert began <= now <= time.time()
    (plain_s, _), _, _ = polled({})
    assert plain_s < wall_s / 2, "it is this clock that makes them wait"
