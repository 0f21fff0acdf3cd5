# SPDX-License-Identifier: Apache-2.0
"""Quotas of NVMe: who goes, who is refused, and whose what a restart finds is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_vllm.config.tenants import Quota
from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.policy.visits import Run, unknown_run
from attnstore_vllm.store.limited_residency import SHRINK_MAX, LimitedResidency
from attnstore_vllm.types import DRAM, NVME
from tests.helpers import (
    CHUNK_TOKENS,
    RECORD_BYTES,
    Rig,
    found_slab,
    lru,
    memory_rig,
    name_of,
    sequence_of,
    tokens_of,
)

GOLD, TIN = tenant_hash("gold"), tenant_hash("tin")
PLAIN = tenant_hash(None)


def name(number: int, salt: str | None = "gold", chunk: int = 0) -> ChunkName:
    sequence = sequence_of(tokens_of(number, (chunk + 1) * CHUNK_TOKENS), salt)
    return name_of(sequence, chunk, salt)


def limited(nvme_slots: int, most: dict[bytes, int], dram_slots: int = 16) -> LimitedResidency:
    tiers = LimitedResidency(
        dram_slots,
        nvme_slots,
        lru,
        chunk_tokens=CHUNK_TOKENS,
        pin_shares=(0.5, 0.5),
        dram_quotas={},
        nvme_quotas=most,
        names=dict.fromkeys(most, "any"),
    )
    tiers.nvme.open(0, nvme_slots)
    return tiers


def save(
    tiers: LimitedResidency,
    number: int,
    salt: str | None = "gold",
    run: Run | None = None,
    chunk: int = 0,
) -> Chunk:
    tiers.now += 1
    saved = tiers.begin_save(name(number, salt, chunk), run or unknown_run(tiers.now))
    assert saved is not None
    tiers.finish_save(saved)
    return saved


def write_all(tiers: LimitedResidency) -> None:
    while (chunk := tiers.begin_store(tiers.nvme)) is not None:
        tiers.finish_store(tiers.nvme, chunk, b"c" * 16)
    tiers.check_integrity()


def written(tiers: LimitedResidency, *numbers: int, salt: str | None = "gold") -> list[Chunk]:
    chunks = []
    for number in numbers:
        chunks.append(save(tiers, number, salt))
        write_all(tiers)
    return chunks


def on_nvme(*chunks: Chunk) -> list[bool]:
    return [chunk.at(NVME).state is State.READY for chunk in chunks]


def test_at_its_quota_its_own_oldest_goes_though_there_is_room() -> None:
    tiers = limited(16, {GOLD: 2})
    (other,) = written(tiers, 9, salt=None)
    chunks = written(tiers, 1, 2, 3)
    assert on_nvme(*chunks) == [False, True, True]
    assert on_nvme(other) == [True], "the oldest of all"
    assert tiers.nvme_quotas.held(GOLD) == 2
    assert chunks[0].dram.state is State.READY, "DRAM has no quota"
    tiers.use([chunks[1]], unknown_run(tiers.now + 1))
    (fourth,) = written(tiers, 4)
    assert on_nvme(chunks[1], chunks[2], fourth) == [True, False, True], "what was used stays"


def test_what_nvme_alone_has_is_counted_and_goes_too() -> None:
    tiers = limited(16, {GOLD: 2})
    chunks = written(tiers, 1, 2)
    tiers.leave_dram(*chunks)
    keys = [chunk.name.key for chunk in chunks]
    del chunks
    tiers.check_integrity()
    written(tiers, 3)
    assert [tiers.index.get(key) is not None for key in keys] == [False, True]
    assert tiers.nvme_quotas.held(GOLD) == 2
    tiers.drop_all()
    tiers.check_integrity()
    assert tiers.nvme_quotas.held(GOLD) == 0


def test_a_prompt_does_not_push_out_its_own_beginning() -> None:
    tiers = limited(16, {GOLD: 2})
    run = unknown_run(0.0)
    chunks = [save(tiers, 1, run=run, chunk=number) for number in range(3)]
    write_all(tiers)
    assert on_nvme(*chunks) == [True, True, False]
    assert chunks[2].refused_by == {NVME}


def test_who_is_refused_keeps_no_other_waiting() -> None:
    """What is pinned stays. That no slot is found for one tenant must not end the writing."""
    tiers = limited(16, {GOLD: 2})
    for chunk in written(tiers, 1, 2):
        tiers.pinning.pin(chunk, tiers.now + 100, tiers.now)
    refused, other = save(tiers, 3), save(tiers, 9, None)
    tiers.use([refused], unknown_run(tiers.now + 1))  # it is written first, so it is asked first
    write_all(tiers)
    assert on_nvme(refused, other) == [False, True]
    tiers.now += 200
    tiers.use([refused], unknown_run(tiers.now))
    write_all(tiers)
    assert on_nvme(refused) == [True], "its pins have ended"
    assert tiers.nvme_quotas.held(GOLD) == 2


def test_what_is_read_or_waited_for_stays() -> None:
    tiers = limited(16, {GOLD: 1})
    (first,) = written(tiers, 1)
    tiers.leave_dram(first)
    assert tiers.begin_fetch(first, tiers.nvme)
    second = save(tiers, 2)
    write_all(tiers)
    assert on_nvme(first, second) == [True, False]


def test_tenants_without_a_quota_are_not_counted() -> None:
    tiers = limited(4, {GOLD: 2})
    written(tiers, 1, 2, 3, salt="tin")
    assert tiers.nvme_quotas.held(GOLD) == 0
    assert not tiers.nvme_quotas.is_full(TIN)


# ---- a restart -----------------------------------------------------------------------------


def salt_file(folder: Path, salt: str) -> Path:
    file = folder / salt
    file.write_text(salt)
    file.chmod(0o400)
    return file


def restarted(rig: Rig, quotas: tuple[Quota, ...], dram_slots: int = 8) -> Rig:
    assert isinstance(rig.device, MemoryDevice)
    rig.until_idle()
    image = bytes(rig.device.image)
    rig.close()
    device = MemoryDevice(len(image))
    device.image[:] = image
    new = Rig(device, found_slab(image), dram_slots, options={"quotas": quotas})
    new.until_idle()
    return new


def put_all(rig: Rig, salt: str | None, *numbers: int) -> None:
    for number in numbers:
        assert rig.put(name(number, salt)) is not None
        rig.until_idle()


def found(rig: Rig, salt: str | None, *numbers: int) -> list[bool]:
    index = rig.store.residency.index
    return [index.get(name(number, salt).key) is not None for number in numbers]


def test_what_a_restart_finds_is_of_whom_its_records_say(tmp_path: Path) -> None:
    """No counter is kept: a quota that is new, or smaller, holds for what there was."""
    rig = memory_rig(16)
    put_all(rig, "gold", 1, 2, 3, 4)
    put_all(rig, "tin", 5, 6, 7)
    put_all(rig, None, 8)
    quotas = (
        Quota(name="best", salt_file=salt_file(tmp_path, "gold"), nvme=2 * RECORD_BYTES),
        Quota(name="plain", salt_file=None, nvme=0.5),
    )
    rig = restarted(rig, quotas)
    try:
        rig.store.check_integrity()
        gauges = rig.store.gauges()
        assert gauges["tenant_held_bytes", f"best|{NVME}"] == 4 * RECORD_BYTES
        assert gauges["tenant_quota_bytes", f"best|{NVME}"] == 2 * RECORD_BYTES
        assert gauges["tenant_held_bytes", f"plain|{NVME}"] == RECORD_BYTES
        assert gauges["tenant_quota_bytes", f"plain|{NVME}"] == 8 * RECORD_BYTES
        assert not [label for _, label in gauges if label.endswith(f"|{DRAM}")]
        put_all(rig, "tin", 9)
        assert found(rig, "gold", 1, 2, 3, 4) == [True] * 4, "there is room"
        put_all(rig, "gold", 10)
        assert found(rig, "gold", 1, 2, 3, 4, 10) == [False] * 3 + [True, True], "the oldest go"
        assert found(rig, "tin", 5, 6, 7, 9) == [True] * 4
        rig.store.check_integrity()
    finally:
        rig.close()


def test_what_is_beyond_goes_before_what_is_older(tmp_path: Path) -> None:
    rig = memory_rig(8)
    put_all(rig, "tin", 1, 2, 3)
    put_all(rig, "gold", 4, 5, 6, 7)
    put_all(rig, "tin", 8)  # full
    gold = Quota(name="best", salt_file=salt_file(tmp_path, "gold"), nvme=3 * RECORD_BYTES)
    rig = restarted(rig, (gold,), dram_slots=4)
    try:
        put_all(rig, "tin", 20)
        assert found(rig, "gold", 4, 5, 6, 7) == [False, True, True, True]
        assert found(rig, "tin", 1, 2, 3, 8, 20) == [True] * 5
        put_all(rig, "tin", 21)
        assert found(rig, "gold", 5, 6, 7) == [True] * 3, "it is within its quota"
        assert found(rig, "tin", 1, 2, 3, 8) == [False, True, True, True]
        rig.store.check_integrity()
    finally:
        rig.close()


def test_one_write_makes_way_for_a_bounded_number(tmp_path: Path) -> None:
    rig = memory_rig(32)
    put_all(rig, "gold", *range(1, 21))
    gold = Quota(name="best", salt_file=salt_file(tmp_path, "gold"), nvme=2 * RECORD_BYTES)
    rig = restarted(rig, (gold,))
    try:
        held = [20]
        for number in range(30, 34):
            put_all(rig, "gold", number)
            held.append(
                int(rig.store.gauges()["tenant_held_bytes", f"best|{NVME}"]) // RECORD_BYTES
            )
        assert held == [20, 21 - SHRINK_MAX, 22 - 2 * SHRINK_MAX, 2, 2]
    finally:
        rig.close()


@pytest.mark.parametrize("use", [True, False])
def test_a_found_one_is_used_pinned_and_dropped(tmp_path: Path, *, use: bool) -> None:
    rig = memory_rig(16)
    put_all(rig, "gold", 1, 2)
    gold = Quota(name="best", salt_file=salt_file(tmp_path, "gold"), nvme=2 * RECORD_BYTES)
    rig = restarted(rig, (gold,))
    try:
        if use:
            sequence = sequence_of(tokens_of(1, CHUNK_TOKENS), "gold")
            assert rig.check_read(sequence) == 1
            rig.until_idle()
        put_all(rig, "gold", 3)
        assert found(rig, "gold", 1, 2, 3) == [use, not use, True]
        rig.store.drop([rig.chunk(name(3))])
        rig.until_idle()
        rig.store.check_integrity()
        residency = rig.store.residency
        assert isinstance(residency, LimitedResidency)
        assert residency.nvme_quotas.held(GOLD) == 1
    finally:
        rig.close()


def headers_of(*numbers: int) -> tuple[memoryview, int]:
    """Headers of records of these chunks, one after another, and how long one is."""
    rig = memory_rig(len(numbers))
    put_all(rig, "gold", *numbers)
    assert isinstance(rig.device, MemoryDevice)
    size, offsets = rig.slab.header_bytes, map(rig.slab.offset, range(len(numbers)))
    headers = b"".join(bytes(rig.device.image[at : at + size]) for at in offsets)
    rig.close()
    return memoryview(headers), size


def test_a_record_that_is_left_out_is_not_counted() -> None:
    headers, size = headers_of(1)
    tiers = limited(4, {GOLD: 2})
    for slot in (0, 1):  # the same chunk once more
        tiers.nvme.adopt(headers, np.array([slot], dtype=np.uint32), size)
        assert tiers.nvme_quotas.held(GOLD) == 1
    tiers.check_integrity()


def test_what_is_used_while_recovery_goes_on_stands_where_its_use_says() -> None:
    headers, size = headers_of(1, 2)
    tiers = limited(4, {GOLD: 2})
    tiers.nvme.adopt(headers, np.arange(2, dtype=np.uint32), size)
    assert tiers.nvme_quotas.held(GOLD) == 2
    first = tiers.index.get(name(1).key)
    assert first is not None
    tiers.use([first], unknown_run(tiers.now))
    tiers.check_integrity()
    tiers.nvme.all_adopted(tiers.nvme.adopted(), tiers.now)
    tiers.check_integrity()
    (third,) = written(tiers, 3)
    assert on_nvme(first, third) == [True, True]
    (fourth,) = written(tiers, 4)
    assert on_nvme(first, third, fourth) == [False, True, True]
