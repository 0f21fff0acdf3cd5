# SPDX-License-Identifier: Apache-2.0
"""A chunk in DRAM that no tier waits to write gives way to reads, whoever has refused it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.tiers.shared.shared_tier import PAUSE_S, SharedTier
from attnstore_vllm.types import SHARED, StoreFailure
from tests.helpers import CHUNK_TOKENS, conversation, lru, name_of, num_dirty, sequence_of

SLOTS = 4


class _MakeTierBehind:
    name = SHARED
    tier = staticmethod(partial(SharedTier, chunk_tokens=CHUNK_TOKENS))


class _Tiers(Residency):
    """DRAM, NVMe that fails whatever it is to write, and a shared tier."""

    def __init__(self) -> None:
        more: Any = [_MakeTierBehind()]
        super().__init__(SLOTS, SLOTS, lru, chunk_tokens=CHUNK_TOKENS, more=more)
        self.nvme.open(0, SLOTS)
        shared = self.behind[1]
        assert isinstance(shared, SharedTier)
        shared.clock = lambda: 0.0
        self.shared = shared

    def save(self, num_tokens: int, number: int = 1) -> Chunk:
        chunk = self.begin_save(name_of(sequence_of(conversation(number, num_tokens)), 0))
        assert chunk is not None
        self.finish_save(chunk)
        return chunk

    def fail_in_nvme(self, chunk: Chunk) -> None:
        assert self.is_dirty(chunk), "NVMe waits to write it"
        assert self.begin_store(self.nvme) is chunk
        assert self.is_dirty(chunk) or chunk.dram.uses, "it is being written"
        self.finish_store(self.nvme, chunk, StoreFailure.FAILED)

    def is_dirty(self, chunk: Chunk) -> bool:
        self.check_integrity()
        is_dirty = chunk.dram.slot in self.dram.dirty
        assert is_dirty != (chunk.dram.slot in self.dram.clean)
        return is_dirty


@pytest.fixture
def tiers() -> Iterator[_Tiers]:
    tiers = _Tiers()
    yield tiers
    tiers.check_integrity()


@pytest.mark.parametrize(("num_tokens", "is_open"), [(10, True), (CHUNK_TOKENS, False)])
def test_what_the_shared_tier_never_takes_is_clean(
    tiers: _Tiers, num_tokens: int, is_open: bool
) -> None:
    """It takes whole chunks, and none while it is left."""
    tiers.shared.open_to(is_open)
    chunk = tiers.save(num_tokens)
    tiers.fail_in_nvme(chunk)
    assert not tiers.is_dirty(chunk)


def test_what_the_shared_tier_waits_for_is_dirty_until_it_is_left(tiers: _Tiers) -> None:
    tiers.shared.open_to(True)
    chunk = tiers.save(CHUNK_TOKENS)
    tiers.fail_in_nvme(chunk)
    assert tiers.is_dirty(chunk), "it pauses"
    tiers.shared.ripen(PAUSE_S)
    assert num_dirty(tiers) == 1
    assert tiers.is_dirty(chunk)
    tiers.shared.open_to(False)
    assert not tiers.is_dirty(chunk)


def test_what_nvme_will_never_write_is_clean(tiers: _Tiers) -> None:
    before = tiers.save(CHUNK_TOKENS)
    assert tiers.is_dirty(before)
    tiers.lose(tiers.nvme)
    assert not tiers.is_dirty(before)
    after = tiers.save(CHUNK_TOKENS, 2)
    assert not tiers.is_dirty(after)
