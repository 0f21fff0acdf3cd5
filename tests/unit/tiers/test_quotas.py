# SPDX-License-Identifier: Apache-2.0
"""Quotas of tenants: who goes, in a residency and in a whole store."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnstore_vllm.config.tenants import Quota
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.policy.visits import unknown_run
from attnstore_vllm.store.limited_residency import LimitedResidency, residency_with, tenant_gauges
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.types import DRAM, NVME
from tests.helpers import CHUNK_TOKENS, lru, memory_rig, name_of, sequence_of, tokens_of

GOLD = tenant_hash("gold")


def name(number: int, salt: str | None = "gold") -> ChunkName:
    return name_of(sequence_of(tokens_of(number, CHUNK_TOKENS), salt), 0, salt)


def limited(dram_slots: int, most: int) -> LimitedResidency:
    tiers = LimitedResidency(
        dram_slots,
        16,
        lru,
        chunk_tokens=CHUNK_TOKENS,
        pin_shares=(0.5, 0.5),
        dram_quotas={GOLD: most},
        nvme_quotas={},
        names={GOLD: "gold"},
    )
    tiers.nvme.open(0, 16)
    return tiers


def save(tiers: LimitedResidency, number: int, salt: str | None = "gold") -> Chunk:
    tiers.now += 1
    chunk = tiers.begin_save(name(number, salt), unknown_run(tiers.now))
    assert chunk is not None
    tiers.finish_save(chunk)
    return chunk


def write_all(tiers: LimitedResidency) -> None:
    while (chunk := tiers.begin_store(tiers.nvme)) is not None:
        tiers.finish_store(tiers.nvme, chunk, b"c" * 16)


def test_at_its_quota_its_own_oldest_goes_though_there_is_room() -> None:
    tiers = limited(8, 2)
    other = save(tiers, 9, None)
    chunks = [save(tiers, n) for n in (1, 2, 3)]
    assert [chunk.dram.state for chunk in chunks] == [State.ABSENT, State.READY, State.READY]
    assert other.dram.state is State.READY, "the oldest of all"
    assert tiers.quotas.held(GOLD) == 2
    tiers.check_integrity()


def test_what_was_used_goes_later_and_what_nvme_has_goes_first() -> None:
    tiers = limited(8, 2)
    first, second = save(tiers, 1), save(tiers, 2)
    tiers.now += 1
    tiers.use([first], unknown_run(tiers.now))
    save(tiers, 3)
    assert (first.dram.state, second.dram.state) == (State.READY, State.ABSENT)
    write_all(tiers)
    dirty = save(tiers, 4)
    save(tiers, 5)
    assert dirty.dram.state is State.READY, "it would be lost"


def test_what_is_pinned_stays_and_a_save_is_refused_where_none_can_go() -> None:
    tiers = limited(8, 2)
    for number in (1, 2):
        tiers.pinning.pin(save(tiers, number), tiers.now + 100, tiers.now)
    assert tiers.begin_save(name(3), unknown_run(tiers.now)) is None
    assert tiers.counts["dropped"] == 1
    save(tiers, 4, None)
    tiers.now += 200
    tiers.pinning.end(tiers.now)
    save(tiers, 3)
    assert tiers.quotas.held(GOLD) == 2


def test_what_is_beyond_goes_before_what_is_older() -> None:
    tiers = limited(3, 1)
    first = save(tiers, 1)
    write_all(tiers)
    other = save(tiers, 9, None)
    write_all(tiers)
    second = save(tiers, 2)
    write_all(tiers)
    assert first.dram.state is State.ABSENT
    tiers.hold(second)
    assert tiers.begin_fetch(first, tiers.nvme), "a request waits for it"
    tiers.finish_fetch(first, verified=True)
    tiers.release(second)
    tiers.now += 1
    tiers.use([first, second], unknown_run(tiers.now))  # by age the other would go
    assert GOLD in tiers.quotas.over
    save(tiers, 10, None)
    assert other.dram.state is State.READY
    assert tiers.quotas.held(GOLD) == 1
    assert not tiers.quotas.over


def test_the_end_of_a_pin_is_a_use() -> None:
    tiers = limited(8, 2)
    first = save(tiers, 1)
    tiers.pinning.pin(first, 100.0, tiers.now)
    tiers.now = 50.0
    second = save(tiers, 2)
    write_all(tiers)
    tiers.now = 100.5
    tiers.pinning.end(tiers.now)
    save(tiers, 3)
    assert (first.dram.state, second.dram.state) == (State.READY, State.ABSENT)
    tiers.check_integrity()


def test_a_prompt_does_not_push_out_its_own_beginning() -> None:
    tiers = limited(8, 2)
    sequence = sequence_of(tokens_of(1, 3 * CHUNK_TOKENS), "gold")
    run = unknown_run(tiers.now)
    begun = [tiers.begin_save(name_of(sequence, n, "gold"), run) for n in range(3)]
    assert [chunk is not None for chunk in begun] == [True, True, False]


def test_without_quotas_the_residency_is_as_ever_and_has_no_series() -> None:
    rig = memory_rig()
    try:
        assert type(rig.store.residency) is Residency
        assert not [key for key in rig.store.gauges() if key[0].startswith("tenant")]
    finally:
        rig.close()


def test_a_store_with_quotas(tmp_path: Path) -> None:
    file = tmp_path / "salt"
    file.write_text("gold\n")
    file.chmod(0o400)
    quotas = (Quota(name="best", salt_file=file, dram=0.25),)
    rig = memory_rig(quotas=quotas)  # 8 slots
    try:
        for number in range(5):
            assert rig.put(name(number)) is not None
            assert rig.put(name(number, None)) is not None
            rig.until_idle()
        gauges = rig.store.gauges()
        size = rig.pool.slot_bytes
        assert gauges["tenant_held_bytes", f"best|{DRAM}"] == 2 * size
        assert gauges["tenant_quota_bytes", f"best|{DRAM}"] == 2 * size
        assert gauges["held_bytes", DRAM] == 7 * size, "the other tenant has all it saved"
        assert rig.chunk(name(0)).at(NVME).state is State.READY
        rig.store.check_integrity()
    finally:
        rig.close()
    with pytest.raises(ConfigError, match="same salt"):
        residency_with((*quotas, Quota(name="b", salt_file=file, dram=0.5)), rig.pool, rig.slab)
    assert tenant_gauges(limited(2, 1), 10, 20)["tenant_quota_bytes", f"gold|{DRAM}"] == 10
