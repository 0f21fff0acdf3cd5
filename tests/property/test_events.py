# SPDX-License-Identifier: Apache-2.0
"""What a router hears against what the store has, after every step of random stories.

Goal: each block comes to a tier once and leaves it once, whatever chunks it is in, with its tokens
and the block before it; and what the router makes of that is what the store has, also after it was
told to forget everything, after resets, damage, power loss and restarts.
Method: the stories of test_store_machine.py. Which blocks a chunk has, the test works out itself.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import settings
from hypothesis.stateful import invariant, rule

from attnstore_lab.testing.devices import PowerLossDevice
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.store.announcer import Announcer
from attnstore_vllm.tiers.announced import Name, NamedBlocks
from attnstore_vllm.types import Key
from tests.event_helpers import Subscriber, TestTeller, content_of
from tests.property.test_store_machine import StoreMachine

TELLER = TestTeller()


class EventsMachine(StoreMachine):
    options: ClassVar[dict[str, Any]] = {"teller": TELLER}

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[Key, tuple[Name, ...]] = {}
        """Of all chunks that were ever put."""
        self.last: dict[Key, bytes] = {}
        self.nameless: dict[Key, ChunkName] = {}
        """Chunks that came before their parents had names: only a restart can name them."""
        self.told: set[Key] = set()
        """Chunks that the router is to hear of, while the store has them."""
        self.router = Subscriber()

    @property
    def announcer(self) -> Announcer:
        found = self.rig.store.announcer
        assert found is not None
        return found

    def begin(self, name: ChunkName) -> None:
        before = len(self.saving)
        super().begin(name)
        if len(self.saving) == before:
            return
        if blocks := self.blocks_of(name):
            self.announcer.name(self.saving[-1][0], blocks)
            self.told.add(name.key)
        else:
            self.nameless[name.key] = name

    def blocks_of(self, name: ChunkName) -> NamedBlocks | None:
        """None: the chunk before it was never named."""
        if name.parent != TELLER.root() and name.parent not in self.last:
            return None
        blocks = TELLER.blocks(self.last.get(name.parent), name.tokens)
        self.names[name.key], self.last[name.key] = blocks.names, blocks.last
        return blocks

    @rule()
    def router_forgets(self) -> None:
        """Also while events wait, and with the next turn under way."""
        self.announcer.all_cleared()
        self.router.all_cleared()

    @rule()
    def nobody_takes_events(self) -> None:
        """Whatever happens until the next look: what came and went meanwhile is not told."""
        self.takes = False

    takes = True

    def begin_anew(self, device: PowerLossDevice) -> None:
        super().begin_anew(device)
        self.router = Subscriber()
        self.told.clear()
        self.is_new = True

    is_new = False

    @invariant()
    def the_router_knows_what_there_is(self) -> None:
        if not self.takes:
            self.takes = True
            return
        self.device.settle()
        store = self.rig.store
        if not all(tier.is_at_rest for tier in store.thread.tiers):
            return  # the device holds what recovery reads
        self.listen()
        if self.is_new:
            self.is_new = False
            self.told |= self.found_again()
        index = store.residency.index
        self.told = {key for key in self.told if index.entries.find(key) >= 0}
        names = {key: self.names[key] for key in self.told}
        assert self.router.content == content_of(store, names)

    def found_again(self) -> set[Key]:
        """Of what recovery has found, and was not put since: chunks that follow named ones.

        Where the chunk before left or was put since, what follows it may be named or not: the
        names came in time, or too late.
        """
        found = {TELLER.root()}
        for name in sorted(self.nameless.values(), key=lambda name: name.position):
            self.blocks_of(name)
        chunks = sorted(self.rig.store.residency.index, key=lambda chunk: chunk.name.position)
        for name in (chunk.name for chunk in chunks if chunk.name.key in self.names):
            if name.key in self.told:
                continue
            if name.parent in found or self.has_heard_of(name.key):
                found.add(name.key)
        return found - {TELLER.root()}

    def has_heard_of(self, key: Key) -> bool:
        return any(content.issuperset(self.names[key]) for content in self.router.content.values())

    def listen(self) -> None:
        def has_heard() -> bool:
            while events := self.announcer.take(3):
                self.router.hear(events)
            return self.announcer.is_quiet()

        if not has_heard():
            self.rig.store.thread.wake()
            self.rig.until(has_heard)


TestEvents = EventsMachine.TestCase
TestEvents.settings = settings(max_examples=30, stateful_step_count=40)
