# SPDX-License-Identifier: Apache-2.0
"""What begins with a tail that others share, and a section of which another has the beginning.

Goal: a request's own text is kept no longer than it has said, though its chunk begins as a stored
tail, or another request ends within it on other tokens.
Method: requests come and save as the scheduler has them do; then the lease of that text is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from attnstore_vllm.config.settings import PinningConfig
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.policy.visits import NO_TERMS, Terms, Visit
from attnstore_vllm.store.lookup import Lookup
from tests.helpers import CHUNK_TOKENS, GRAIN, memory_rig, name_of, sequence_of
from tests.unit.policy.test_visits import Clock

TENANT = bytes(32)
WINDOW = (Need(1, Reach.WINDOW, 24, GRAIN),)
TTL_S = 20.0


class Server:
    """A store, and what requests do to it."""

    def __init__(self, needs: Sequence[Need]) -> None:
        self.clock = Clock()
        pinning = PinningConfig(share=0.5, tenant_share=0.5)
        rig = memory_rig(
            dram_slots=16, clock=self.clock, wall=self.clock, threaded=False, needs=needs,
            pinning=pinning,
        )  # fmt: skip
        self.store = rig.store

    def ask(self, tokens: Sequence[int], terms: Terms = NO_TERMS) -> Visit:
        self.clock.now += 1
        lookup = Lookup(sequence_of(tokens))
        return self.store.arrive(f"{self.clock.now}", lookup, len(tokens), 1, terms)[1]

    def save(self, visit: Visit, tokens: Sequence[int], sections: Sequence[int] = ()) -> None:
        keys = sequence_of(tokens)
        stops = [min(len(tokens), at) for at in range(CHUNK_TOKENS, len(tokens) + CHUNK_TOKENS, 16)]
        names = [keys.name_up_to(number, TENANT, stop) for number, stop in enumerate(stops)]
        names += [keys.section(1, 0).name_up_to(n, TENANT, stops[n]) for n in sections]
        for name in names:
            chunk = self.store.begin_save(name, visit.run(name.position // CHUNK_TOKENS))
            if chunk is not None:
                self.store.finish_saves([chunk])
        self.store.answered(visit.own, 0)


@pytest.mark.parametrize("needs", [(), WINDOW], ids=["all", "window"])
@pytest.mark.parametrize("asks_twice", [False, True])
def test_a_chunk_that_begins_as_a_shared_tail_is_its_requests_own(
    needs: Sequence[Need], asks_twice: bool
) -> None:
    server = Server(needs)
    prompt = [*range(1, 9)]  # as of a system prompt that was sent alone
    server.save(server.ask(prompt), prompt)
    server.ask([*prompt, *range(60, 85)])  # others have it as their beginning
    private = [*prompt, *range(100, 130)]
    visits = [server.ask(private, Terms(ttl_s=TTL_S)) for _ in range(1 + asks_twice)]
    for visit in visits:
        server.save(visit, private)
    chunk = server.store.residency.index.get(name_of(sequence_of(private), 0).key)
    assert chunk is not None
    assert server.store.residency.found_until(chunk) <= server.clock.now + TTL_S


@pytest.mark.parametrize("pin_s", [None, 1000.0])
def test_a_section_is_no_use_of_who_ends_within_it_on_other_tokens(pin_s: float | None) -> None:
    """The spine has a chunk of these tokens, and the window's group that of others."""
    server = Server(WINDOW)
    private = [*range(1, 28), *range(56, 61)]
    other = [*range(1, 33)]  # goes on otherwise from token 27 on
    server.save(server.ask(private, Terms(ttl_s=TTL_S)), private, sections=(0, 1))
    server.save(server.ask(other), other)
    residency = server.store.residency
    name = sequence_of(private).section(1, 0).name_up_to(1, TENANT, 32)
    section = residency.index.get(name.key)
    assert section is not None
    before = residency.found_until(section)
    pieces = server.store.find(Lookup(sequence_of(other[:29])), 0, 28)
    assert any(piece.chunk is section for piece in pieces), "it has a part of it"
    server.ask(other[:29], Terms(pin_s=pin_s))
    assert residency.found_until(section) == before
    assert residency.pinning.of(section, server.clock.now) is None
