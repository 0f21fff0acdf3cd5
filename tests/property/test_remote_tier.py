# SPDX-License-Identifier: Apache-2.0
"""The store machine with a remote tier, which others fill, damage, empty and silence.

Goal: what a request is given are bytes that somebody put under that key and nobody has damaged;
after a reset none that others had before; nothing stays held, whatever others do.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from attnstore_lab.testing.devices import PowerLossDevice
from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.types import Key
from tests.helpers import lookup_of, payload_of
from tests.property.test_store_machine import StoreMachine, ends, prefix_name, sequences

OTHERS = Others()


class RemoteMachine(StoreMachine):
    """See the module. What we write there is of others, too."""

    options: ClassVar[dict[str, Any]] = {
        "more_tiers": (MakeRemoteDict(OTHERS, 6, takes_writes=True),)
    }

    def __init__(self) -> None:
        super().__init__()
        OTHERS.records.clear()
        OTHERS.is_silent = False
        self.theirs: defaultdict[Key, set[bytes]] = defaultdict(set)
        self.is_changed_by_others = False

    @rule(tokens=sequences, end=ends, version=st.integers(1000, 1003))
    def others_put(self, tokens: list[int], end: int, version: int) -> None:
        for stop in range(16, end + 1, 16):
            name = prefix_name(tokens, stop)
            payload = payload_of(name, version)
            self.theirs[name.key].add(payload)
            OTHERS.put(name, payload)

    @precondition(lambda self: bool(OTHERS.records))
    @rule(which=st.integers(0), fate=st.sampled_from(["gone", "damaged", "swapped"]))
    def others_lose(self, which: int, fate: str) -> None:
        self.is_damaged = True
        keys = list(OTHERS.records)
        key = keys[which % len(keys)]
        name, payload, digest = OTHERS.records[key]
        if fate == "gone":
            del OTHERS.records[key]
        elif fate == "damaged":
            OTHERS.put(name, bytes([payload[0] ^ 1]) + payload[1:], digest)
        else:
            other = OTHERS.records[keys[which // 2 % len(keys)]]
            OTHERS.records[key] = (name, other[1], digest)

    @rule(is_silent=st.booleans())
    def others_answer(self, is_silent: bool) -> None:
        OTHERS.is_silent = is_silent

    def find(self, tokens: list[int], start: int, stop: int) -> list[Piece]:
        lookup = lookup_of(tokens, may_ask=True)
        self.rig.store.find(lookup, start, stop)
        self.rig.until(lambda: not awaits_remote(lookup))
        return super().find(tokens, start, stop)

    def check_payload(self, key: Key, payload: bytes) -> None:
        if payload not in self.theirs[key]:
            versions = {self.now.get(key, b""), *self.on_disk[key]}
            assert payload in versions, "wrong bytes"

    def is_known(self, chunk: Chunk) -> bool:
        return super().is_known(chunk) or bool(self.theirs[chunk.name.key])

    @rule(crash=st.sampled_from(["no", "before", "after"]))
    def reset(self, crash: str) -> None:
        super().reset(crash)
        self.theirs.clear()
        OTHERS.records.clear()

    def begin_anew(self, device: PowerLossDevice) -> None:
        for chunk, payload in self.saving:  # its save ends now, and it may be written before we do
            self.theirs[chunk.name.key].add(payload)
        if self.is_volatile:
            OTHERS.records.clear()
        super().begin_anew(device)


TestRemote = RemoteMachine.TestCase
TestRemote.settings = settings(max_examples=15, stateful_step_count=50)
