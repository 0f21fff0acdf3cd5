# SPDX-License-Identifier: Apache-2.0
"""How long a chunk is left alone before it is written: by the store's clock, as all its times."""

from __future__ import annotations

from attnstore_vllm.policy.visits import NO_TERMS
from tests.helpers import NAMESPACE, memory_rig, tokens_of
from tests.shared.rigs import io_of, make
from tests.unit.policy.test_visits import Clock, save

PAUSE_S = 0.5


def test_a_pause_is_of_the_stores_clock() -> None:
    """Of another one it would be over at once where the machine has slept."""
    clock = Clock()
    settings = {"redis": {"url": "redis://nowhere:1"}}
    tier = make(settings, NAMESPACE, pause_s=PAUSE_S)
    rig = memory_rig(more_tiers=(tier,), threaded=False, clock=clock)
    shared = io_of(rig).tier
    shared.open_to(True)
    save(rig, tokens_of(1, 32), NO_TERMS)
    shared.ripen(clock.now)
    assert len(shared.waiting) == 0
    clock.now += PAUSE_S
    shared.ripen(clock.now)
    assert len(shared.waiting) == 2
    rig.store.check_integrity()
    for io in rig.store.thread.tiers:
        io.cancel()
        io.close(1.0)
    rig.pool.close()
