# SPDX-License-Identifier: Apache-2.0
"""Conversations in a store over a file with encoded records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnstore_vllm.index.chunk import ChunkName
from tests.helpers import Rig, names_of, sequence_of, tokens_of


@dataclass(frozen=True, slots=True)
class Conversations:
    """Of three chunks each, told by their numbers; a chunk's name says what its bytes are."""

    payload: Callable[[ChunkName], bytes]

    def put_all(self, rig: Rig, number: int) -> None:
        for name in names_of(sequence_of(tokens_of(number, 40))):
            assert rig.put(name, self.payload(name)) is not None
        rig.until_idle()

    def check_read(self, rig: Rig, number: int) -> int:
        found = rig.read(sequence_of(tokens_of(number, 40)))
        for name, payload in found:
            assert payload == self.payload(name)
        return len(found)
