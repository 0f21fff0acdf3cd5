# SPDX-License-Identifier: Apache-2.0
"""The histories of test_ttl.py with pins, with several KV cache groups, and with moved KV.

Goal: neither a pin nor a section, nor a use of KV at another position, makes KV be found that no
request has used for its ttl.
Method: as there. A pin is of the time that hints.py gives it, no longer than a ttl of its request.
A chunk may be found until its lease or its pin ends, and neither may end after the oracle says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from attnstore_vllm.config.settings import PinningConfig, TruncationConfig
from attnstore_vllm.index.chunk import Chunk, ChunkName
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import Run, Terms
from attnstore_vllm.store.lookup import Lookup
from tests.helpers import CHUNK_TOKENS, GRAIN, sequence_of
from tests.property.test_ttl import WEIGHTS, History, Request

LONGEST_PIN_S = 150.0
TENANT = bytes(32)
WITH_CUTS = {**WEIGHTS, "cut": 3}
GROUPS = {
    "window": (Need(1, Reach.WINDOW, 24, GRAIN),),
    "local": (Need(1, Reach.LOCAL, 32, GRAIN),),
    "states": (Need(1, Reach.STATE, 0, GRAIN), Need(2, Reach.WINDOW, 12, GRAIN)),
    "windows alone": (Need(0, Reach.WINDOW, 24, GRAIN), Need(1, Reach.WINDOW, 12, GRAIN)),
}


class PinnedHistory(History):
    """Some requests pin."""

    def options(self) -> dict[str, object]:
        return {**super().options(), "pinning": PinningConfig(share=0.5, tenant_share=0.5)}

    def terms(self, own: float | None, ttls: list[float]) -> Terms:
        pin_s = min([LONGEST_PIN_S, *ttls]) if self.rng.random() < 0.4 else None
        return replace(super().terms(own, ttls), pin_s=pin_s)


class GroupHistory(PinnedHistory):
    """With each chunk of the spine sections of the other groups are saved, or some of them.

    Args:
        groups: of GROUPS.
    """

    def __init__(self, seed: int, eviction: str, groups: str) -> None:
        self.needs = GROUPS[groups]
        self.weights = {**WEIGHTS, "supersede": 1}
        super().__init__(seed, eviction)

    def options(self) -> dict[str, object]:
        return {**super().options(), "needs": self.needs}

    @property
    def others(self) -> list[Need]:
        return [need for need in self.needs if need.group]

    def save(self, request: Request, *, yields: bool) -> None:
        request.is_window = self.needs[0].group == 0
        number = request.next_save
        super().save(request, yields=yields)
        for need in self.others:
            if number < len(request.names()) and self.rng.random() < 0.8:
                self.save_section(request, need, number, yields=yields)

    def save_section(self, request: Request, need: Need, number: int, *, yields: bool) -> None:
        run, stop = request.visit.run(number), min((number + 1) * CHUNK_TOKENS, len(request.tokens))
        if self.rng.random() < 0.3:
            run = replace(run, priority=Priority.LOW_VALUE)
        is_state = need.reach is Reach.STATE
        if is_state:  # where a step ended
            stop = self.rng.choice([stop, number * CHUNK_TOKENS + GRAIN])
            stop = min(stop, len(request.tokens)) // GRAIN * GRAIN
        if stop <= number * CHUNK_TOKENS:
            return
        name = self.section_name(request.tokens, need, number, stop)
        self.save_chunk(request, name, run, group=need.group, is_alone=is_state, yields=yields)

    def section_name(self, tokens: list[int], need: Need, number: int, stop: int) -> ChunkName:
        keys = sequence_of(tokens).section(need.group, 0)
        return keys.name_up_to(number, TENANT, stop)

    def do_supersede(self) -> None:
        """A conversation has gone on: what it had before is forgotten."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        stop = self.rng.randint(2, len(request.tokens))
        need = self.rng.choice(self.others)
        keys = sequence_of(request.tokens).section(need.group, 0)
        is_state = need.reach is Reach.STATE
        self.rig.store.drop_before(keys, stop, low_value=is_state)
        self.say(f"{request.id} has gone on to {stop} in group {need.group}")


class MovedHistory(PinnedHistory):
    """Requests take KV that is moved, too. Some texts are others' with a part cut out."""

    weights: Mapping[str, float] = WITH_CUTS

    def options(self) -> dict[str, object]:
        truncation = TruncationConfig(enabled=True, min_tokens=CHUNK_TOKENS, shared_by="everyone")
        return {**super().options(), "truncation": truncation}

    def lookup_of(self, tokens: Sequence[int]) -> Lookup:
        lookup = Lookup(sequence_of(tokens))
        lookup.finds_moved = self.rng.random() < 0.7
        return lookup

    def do_cut(self) -> None:
        """A conversation's next prompt has lost its middle."""
        text = self.rng.choice(self.texts)
        if len(text) < 2 * CHUNK_TOKENS:
            return
        first = self.rng.choice([0, 3, GRAIN, CHUNK_TOKENS, CHUNK_TOKENS + 3])
        cut = self.rng.randint(first + 1, max(first + 1, len(text) - CHUNK_TOKENS))
        self.texts = [*self.texts[-5:], text[:first] + text[cut:] + self.more(20)]

    def save_chunk(
        self,
        request: Request,
        name: ChunkName,
        run: Run,
        *,
        group: int = 0,
        is_alone: bool = False,
        yields: bool,
    ) -> Chunk | None:
        chunk = super().save_chunk(
            request, name, run, group=group, is_alone=is_alone, yields=yields
        )
        if request.lookup.finds_moved:
            self.rig.store.may_be_moved(name, request.lookup.keys.root)
        return chunk


SEEDS = [range(80), pytest.param(range(80, 1000), marks=pytest.mark.long)]
FEW = [range(40), pytest.param(range(40, 1000), marks=pytest.mark.long)]
EVICTIONS = ["attnstore", "lru", "fifo"]


def play(history: History, seed: int, what: str) -> None:
    try:
        history.play()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {what}\n{error}") from error


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_pin_outlasts_no_ttl(eviction: str, seeds: range) -> None:
    for seed in seeds:
        play(PinnedHistory(seed, eviction), seed, eviction)


@pytest.mark.parametrize("seeds", FEW, ids=["few", "many"])
@pytest.mark.parametrize("groups", GROUPS)
def test_sections_are_kept_no_longer_than_their_tokens(groups: str, seeds: range) -> None:
    for seed in seeds:
        eviction = EVICTIONS[seed % len(EVICTIONS)]
        play(GroupHistory(seed, eviction, groups), seed, f"{eviction}, {groups}")


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_moved_kv_is_kept_no_longer_than_its_users_said(eviction: str, seeds: range) -> None:
    for seed in seeds:
        play(MovedHistory(seed, eviction), seed, eviction)
