# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store in short: the other tests of this directory take it too, with `-m long`."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attnstore_lab.testing.network_stores import NetworkStore
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.tiers.shared.helper import Helper
from attnstore_vllm.tiers.shared.lanes import LaneOp, Lanes
from attnstore_vllm.tiers.shared.record import HEADER_BYTES
from tests.helpers import Rig, conversation
from tests.shared.rigs import NUM_TOKENS, counts, fetch, write
from tests.shared.stranger import Stranger
from tests.shared.test_shared_tier import WHOLE, flipped

PAYLOAD_BYTES, PLACES = 2 << 20, 3
DEADLINE_S = 1.0


def test_a_hit_and_a_flipped_byte(mooncake: NetworkStore, open_shared: Callable[..., Rig]) -> None:
    one, two = open_shared(mooncake), open_shared(mooncake)
    stranger = Stranger(mooncake)
    right, wrong = conversation(1, NUM_TOKENS), conversation(2, NUM_TOKENS)
    write(one, right)
    names = write(one, wrong)
    stranger.put(names[2], flipped(stranger.get(names[2])))
    assert fetch(two, right) == WHOLE
    assert fetch(two, wrong) == WHOLE - 1
    assert counts(two)["shared_corrupt"] == 1
    stranger.close()


def test_a_dead_master_is_seen_at_once(mooncake: NetworkStore) -> None:
    """From the second call on its client tries again for longer than a request may wait."""
    helper = Helper(mooncake.settings, Lanes(PAYLOAD_BYTES, 2, PLACES))
    helper.start()
    names = [secrets.token_bytes(32)]
    assert helper.numbers(0, LaneOp.EXIST, names, DEADLINE_S) == [0]
    mooncake.signal(signal.SIGKILL)
    began = time.monotonic()
    for _ in range(5):
        with pytest.raises(DeviceError):
            helper.numbers(0, LaneOp.EXIST, names, DEADLINE_S)
    assert helper.is_running, "one that hangs would have been ended"
    assert time.monotonic() - began < DEADLINE_S
    helper.close()


def test_transfers_take_no_core(mooncake: NetworkStore) -> None:
    """As PyPI has it, its client waits for them in a loop."""
    helper = Helper(mooncake.settings, Lanes(PAYLOAD_BYTES, 2, PLACES))
    helper.start()
    names = [secrets.token_bytes(32) for _ in range(PLACES)]
    assert helper.numbers(1, LaneOp.PUT, names, DEADLINE_S) == [0] * PLACES
    size = PAYLOAD_BYTES + HEADER_BYTES
    began, used = time.monotonic(), seconds_used(helper)
    while (lasted := time.monotonic() - began) < 1.0:
        assert helper.numbers(1, LaneOp.GET, names, DEADLINE_S) == [size] * PLACES
    busiest = max(now - used.get(thread, 0.0) for thread, now in seconds_used(helper).items())
    helper.close()
    assert busiest < 0.7 * lasted, "a thread does nothing but wait"


def seconds_used(helper: Helper) -> dict[str, float]:
    """Of the processor, by each of the child's threads."""
    tasks = Path(f"/proc/{helper.pid}/task")
    used = {}
    for task in tasks.iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        used[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used
