# SPDX-License-Identifier: Apache-2.0
"""The store over a real file: AiofilesDevice, O_DIRECT where the file system has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attnstore_vllm.index.chunk import State
from attnstore_vllm.io.aiofiles_device import AiofilesDevice, direct_flag
from attnstore_vllm.types import NVME
from tests.device_helpers import needs_uring
from tests.helpers import (
    NAMESPACE,
    PAYLOAD_BYTES,
    SHAPE,
    Rig,
    capacity_for,
    lookup_of,
    name_of,
    names_of,
    payload_of,
    sequence_of,
    starting,
    tokens_of,
)

NUM_RECORDS, DRAM_SLOTS = 12, 6
Open = Callable[..., Rig]


@pytest.fixture(params=["aiofiles", pytest.param("uring", marks=needs_uring)])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Starts the store in tmp_path; an earlier one there is closed first."""
    path = tmp_path / "slab"
    with starting(path, SHAPE, NUM_RECORDS, DRAM_SLOTS, request.param) as begin:

        def start(num_records: int = NUM_RECORDS, namespace: bytes = NAMESPACE) -> Rig:
            return begin(replace(SHAPE, namespace=namespace), num_records)

        yield start
    assert path.stat().st_blocks * 512 <= capacity_for(NUM_RECORDS)


def put_on_nvme_only(rig: Rig) -> list[int]:
    """Three conversations of 3 chunks; the first is pushed out of DRAM by the others."""
    for number in (1, 2, 3):
        rig.put_all(sequence_of(tokens_of(number, 40)))
        rig.until_idle()
    tokens = tokens_of(1, 40)
    for name in names_of(sequence_of(tokens)):
        assert (rig.chunk(name).dram.state, rig.chunk(name).at(NVME).state) == (
            State.ABSENT,
            State.READY,
        )
    return tokens


def test_save_write_back_evict_prefetch_equal(start: Open) -> None:
    rig = start()
    tokens = put_on_nvme_only(rig)
    assert rig.check_read(sequence_of(tokens)) == 3
    assert rig.check_read(sequence_of(tokens_of(3, 40))) == 3
    assert rig.store.figures().counts["written"] == 9
    assert "corrupt" not in rig.store.figures().counts


def test_a_restart_recovers_the_bytes(start: Open) -> None:
    start().put_all(sequence_of(tokens_of(1, 90)))
    again = start()
    assert again.store.figures().counts["recovered"] == 6
    assert again.check_read(sequence_of(tokens_of(1, 90))) == 6


def test_a_restart_with_another_capacity_keeps_what_fits(start: Open) -> None:
    start().put_all(sequence_of(tokens_of(1, 90)))
    again = start(num_records=4)
    found = again.check_read(sequence_of(tokens_of(1, 90)))
    kept = again.store.figures().counts["recovered"]
    assert 4 <= kept < 6
    assert 0 <= found <= kept
    assert start(num_records=NUM_RECORDS).store.figures().counts["recovered"] == kept


def test_another_namespace_finds_nothing_and_destroys_nothing(start: Open) -> None:
    start().put_all(sequence_of(tokens_of(1, 40)))
    other = start(namespace=bytes(32))
    assert other.read(sequence_of(tokens_of(1, 40))) == []
    other.put_all(sequence_of(tokens_of(2, 40)))
    assert start().check_read(sequence_of(tokens_of(1, 40))) == 3
    assert start(namespace=bytes(32)).check_read(sequence_of(tokens_of(2, 40))) == 3


def test_a_namespace_that_needs_all_room_pushes_the_other_out(start: Open) -> None:
    start().put_all(sequence_of(tokens_of(1, 40)))
    other = start(namespace=bytes(32))
    for number in range(2, 12):
        other.put_all(sequence_of(tokens_of(number, 40)))
        other.until_idle()
    other.store.check_integrity()
    assert other.check_read(sequence_of(tokens_of(11, 40))) == 3
    assert start().read(sequence_of(tokens_of(1, 40))) == []


def test_a_reset_holds_after_a_restart(start: Open) -> None:
    rig = start()
    rig.put_all(sequence_of(tokens_of(1, 40)))
    rig.until_idle()
    assert rig.store.reset()
    assert rig.read(sequence_of(tokens_of(1, 40))) == []
    rig.put_all(sequence_of(tokens_of(2, 40)))
    assert start().store.figures().counts["recovered"] == 0


@pytest.mark.parametrize("in_header", [True, False])
def test_damage_between_two_starts_is_a_miss(start: Open, tmp_path: Path, in_header: bool) -> None:
    rig = start()
    rig.put_all(sequence_of(tokens_of(1, 40)))
    rig.until_idle()
    slot = rig.chunk(name_of(sequence_of(tokens_of(1, 40)), 1)).at(NVME).slot
    at = rig.slab.offset(slot) + (100 if in_header else rig.slab.header_bytes + 5000)
    rig.close()
    with (tmp_path / "slab").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x40]))
    again = start()
    assert again.check_read(sequence_of(tokens_of(1, 40))) == 1, "the chunks before it"
    assert again.store.figures().counts["corrupt"] == 1, "at the start, or when it is read"


def test_a_file_that_is_cut_under_the_store_costs_chunks_only(start: Open, tmp_path: Path) -> None:
    rig = start()
    tokens = put_on_nvme_only(rig)
    os.truncate(tmp_path / "slab", rig.slab.offset(1))
    assert rig.check_read(sequence_of(tokens)) <= 1
    assert rig.store.figures().counts["read_failed"] >= 1
    rig.put_all(sequence_of(tokens_of(5, 40)))
    assert rig.check_read(sequence_of(tokens_of(5, 40))) == 3


def test_closing_writes_back_even_while_much_is_wanted(start: Open) -> None:
    rig = start()
    tokens = put_on_nvme_only(rig)
    rig.store.find(lookup_of(tokens), 0, 40)
    rig.put_all(sequence_of(tokens_of(9, 40)))
    again = start()
    assert again.check_read(sequence_of(tokens_of(9, 40))) == 3


def test_the_page_cache_is_bypassed_where_that_is_possible(start: Open, tmp_path: Path) -> None:
    rig = start()
    if isinstance(rig.device, AiofilesDevice):
        assert rig.device.is_direct == bool(direct_flag(tmp_path / "slab"))
    name = name_of(sequence_of(tokens_of(1, 16)), 0)
    rig.put(name)
    rig.until_idle()
    record = rig.chunk(name).at(NVME).slot
    with (tmp_path / "slab").open("rb") as file:
        file.seek(rig.slab.offset(record) + rig.slab.header_bytes)
        assert file.read(PAYLOAD_BYTES) == payload_of(name)
