# SPDX-License-Identifier: Apache-2.0
"""The simulation with a remote tier: answers come late, and what they say is lost,
damaged or too old by the time it is loaded."""

from __future__ import annotations

import logging
from collections import Counter

from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others
from tests.helpers import names_of, payload_of, sequence_of
from tests.simulation.world import World


class RemoteWorld(World):
    """Others have the same conversations, since they serve the same users."""

    def __init__(self, seed: int, *, takes_writes: bool) -> None:
        self.others = Others()
        make = MakeRemoteDict(self.others, 24, takes_writes=takes_writes)
        super().__init__(seed, more_tiers=(make,))

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.1:
            self.others.is_silent = self.random.random() < 0.3
        elif choice < 0.3 and self.conversations:
            self.others_go_on()
        elif choice < 0.35 and self.others.records:
            self.others_lose()
        super().step()

    def others_go_on(self) -> None:
        """What they compute may be asked for here, too."""
        tokens = self.random.choice(self.conversations)
        if self.random.random() < 0.5:
            tokens = [*tokens, *(self.random.randrange(50_000) for _ in range(40))]
            self.conversations.append(tokens)
        for name in names_of(sequence_of(tokens)):
            self.others.put(name, payload_of(name))

    def others_lose(self) -> None:
        key = self.random.choice(list(self.others.records))
        name, payload, digest = self.others.records.pop(key)
        if self.random.random() < 0.5:
            at = self.random.randrange(len(payload))
            damaged = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
            self.others.put(name, damaged, digest)
            self.counts["damaged by others"] += 1

    def restart(self) -> None:
        self.note()
        super().restart()

    def note(self) -> None:
        for event in ("found", "answers_late", "corrupt"):
            self.counts[event] += self.store.residency.counts[event]

    def close(self) -> None:
        self.note()
        super().close()


def run_asked(seeds: range, steps: int) -> Counter[str]:
    logging.disable(logging.ERROR)
    counts = Counter[str]()
    try:
        for seed in seeds:
            world = RemoteWorld(seed, takes_writes=seed % 2 == 0)
            try:
                world.run(steps)
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
            counts.update(world.counts)
    finally:
        logging.disable(logging.NOTSET)
    return counts


def test_late_lost_damaged_and_expired_answers() -> None:
    counts = run_asked(range(12), 400)
    assert counts["from asked"] > 50
    for event in ("found", "answers_late", "damaged by others", "corrupt", "restarts", "resets"):
        assert counts[event] > 0, event
