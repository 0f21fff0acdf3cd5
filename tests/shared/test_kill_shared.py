# SPDX-License-Identifier: Apache-2.0
"""Whatever is killed or stopped at random, twenty times: every byte that is found is right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from random import Random

import pytest

from attnstore_lab.testing.network_stores import NetworkStore
from tests.helpers import Rig, conversation, names_of, sequence_of
from tests.shared.rigs import NUM_TOKENS, counts, fetch, io_of

ROUNDS = 20
DEADLINE_S = 1.0
SLACK_S = 1.5
"""Other things may be going on on this machine."""


def kill_child(rig: Rig) -> None:
    pid = io_of(rig).helper.pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_kills_at_random(own_server: NetworkStore, open_shared: Callable[..., Rig]) -> None:
    random = Random(7)
    one, two = (open_shared(own_server, deadline_s=DEADLINE_S, dram_slots=24) for _ in range(2))
    found, longest = 0, 0.0
    for number in range(ROUNDS):
        for name in names_of(sequence_of(conversation(number, NUM_TOKENS)))[:3]:
            one.put(name)
        time.sleep(random.uniform(0.0, 0.5))
        what = random.choice(["store", "stop", "child of one", "child of two"])
        if what == "store":
            own_server.kill()
        elif what == "stop":
            own_server.signal(signal.SIGSTOP)
        else:
            kill_child(one if what.endswith("one") else two)
        for asked in {number, random.randrange(number + 1)}:
            begun_at = time.monotonic()
            found += fetch(two, conversation(asked, NUM_TOKENS))
            longest = max(longest, time.monotonic() - begun_at)
        if what == "store":
            own_server.start()
        elif what == "stop":
            own_server.signal(signal.SIGCONT)
        for rig in (one, two):  # it comes back, with pauses that double
            rig.until(lambda rig=rig: io_of(rig).health.reads.in_use)  # type: ignore[misc]
    assert longest <= 2 * DEADLINE_S + SLACK_S, "a look-up and a load, at most"
    assert found > 0
    assert not counts(two).get("shared_corrupt")
    assert two.store.residency.num_held() == 0
