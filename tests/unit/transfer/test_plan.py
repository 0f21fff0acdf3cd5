# SPDX-License-Identifier: Apache-2.0
"""Plans and shapes: which bytes go where, checked token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.transfer.geometry import Geometry, Group, round_chunk_tokens
from attnstore_vllm.transfer.plan import (
    ChunkCopy,
    TransferPlan,
    hole_of,
    last_blocks_last,
    pages,
    plan_load,
    plan_save,
)

BLOCK_TOKENS = 4
CHUNK_TOKENS = 12


def load(
    slots: list[tuple[int, int, int]], block_ids: list[int], start: int, stop: int
) -> tuple[ChunkCopy, ...]:
    return plan_load(
        slots, block_ids, start, stop, block_tokens=BLOCK_TOKENS, chunk_tokens=CHUNK_TOKENS
    )


def test_a_load_from_the_middle_of_a_chunk() -> None:
    copies = load([(7, 8, 12), (3, 12, 18)], [90, 91, 92, 93, 94], 8, 18)
    assert copies == (ChunkCopy(7, 2, (92,)), ChunkCopy(3, 0, (93, 94)))
    assert pages(copies).tolist() == [[7, 2, 92], [3, 0, 93], [3, 1, 94]]


def test_a_load_that_vllm_cuts_short() -> None:
    assert load([(7, 0, 12)], [90, 91, 92, 93], 0, 5) == (ChunkCopy(7, 0, (90, 91)),)


@given(data=st.data())
def test_every_token_comes_from_its_place(data: st.DataObject) -> None:
    """Model: token t of the request lies at t % chunk in chunk t // chunk."""
    num_chunks = data.draw(st.integers(1, 4))
    stop = data.draw(st.integers(1, num_chunks * CHUNK_TOKENS))
    start = data.draw(st.integers(0, (stop - 1) // BLOCK_TOKENS)) * BLOCK_TOKENS
    first = start // CHUNK_TOKENS
    chunks = range(first, -(-stop // CHUNK_TOKENS))
    slot_of = {chunk: 100 + 7 * chunk for chunk in chunks}
    pieces = [
        (slot_of[c], max(start, c * CHUNK_TOKENS), min(stop, (c + 1) * CHUNK_TOKENS))
        for c in chunks
    ]
    num_blocks = -(-stop // BLOCK_TOKENS)
    block_ids = data.draw(st.permutations(range(50, 50 + num_blocks)))
    copies = load(pieces, list(block_ids), start, stop)
    filled = {block: (slot, within) for slot, within, block in pages(copies).tolist()}
    assert TransferPlan(1, "a", copies).num_blocks == len(pages(copies))
    assert len(filled) == num_blocks - start // BLOCK_TOKENS  # each block once, none before start
    for token in range(start, stop):
        slot, within = filled[block_ids[token // BLOCK_TOKENS]]
        assert slot == slot_of[token // CHUNK_TOKENS]
        in_chunk = within * BLOCK_TOKENS + token % BLOCK_TOKENS
        assert in_chunk == token % CHUNK_TOKENS


@given(st.integers(0, 4), st.integers(1, CHUNK_TOKENS))
def test_a_save_and_a_load_agree(chunk: int, num_tokens: int) -> None:
    block_ids = list(range(40, 60))
    position = chunk * CHUNK_TOKENS
    saved = plan_save(5, block_ids, position, num_tokens, block_tokens=BLOCK_TOKENS)
    loaded = load(
        [(5, position, position + num_tokens)], block_ids, position, position + num_tokens
    )
    assert saved == loaded


@pytest.mark.parametrize(
    ("slots", "start", "stop"),
    [
        ([(1, 0, 12)], 2, 8),  # not on a block
        ([(1, 0, 12)], 4, 4),  # nothing
        ([(1, 0, 12)], 0, 13),  # beyond the last chunk
        ([(1, 0, 12), (2, 24, 36)], 0, 30),  # a gap
        ([(1, 12, 24)], 0, 24),  # does not begin where the load does
    ],
)
def test_plans_that_make_no_sense_are_our_bug(
    slots: list[tuple[int, int, int]], start: int, stop: int
) -> None:
    with pytest.raises(AssertionError):
        load(slots, list(range(20)), start, stop)


def test_an_empty_plan_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        TransferPlan(1, "a", ())


def test_geometry_adds_up() -> None:
    g = Geometry.uniform(
        num_ranks=2, num_layers=3, block_tokens=16, page_bytes=1000, chunk_tokens=64
    )
    assert g.blocks_per_chunk == 4
    assert g.rank_bytes == 12000
    assert g.slot_bytes == 24576  # whole pages of 4096
    assert g.token_bytes() == 375.0


@given(
    st.integers(1, 8), st.integers(1, 80), st.integers(1, 128), st.integers(1, 5000),
    st.integers(1, 32),
)  # fmt: skip
def test_a_slot_holds_all_ranks(
    ranks: int, layers: int, block_tokens: int, page_bytes: int, blocks: int
) -> None:
    g = Geometry.uniform(ranks, layers, block_tokens, page_bytes, blocks * block_tokens)
    assert 0 <= g.slot_bytes - ranks * layers * blocks * page_bytes < 4096
    assert g.slot_bytes % 4096 == 0


@pytest.mark.parametrize("chunk_tokens", [15, 40])
def test_a_chunk_is_whole_blocks(chunk_tokens: int) -> None:
    with pytest.raises(AssertionError):
        Geometry.uniform(1, 1, 16, 1, chunk_tokens)


@pytest.mark.parametrize(
    ("wanted", "block_tokens", "rounded"),
    [(256, 16, 256), (256, 128, 256), (100, 16, 112), (16, 128, 128)],
)
def test_chunk_tokens_are_rounded_up(wanted: int, block_tokens: int, rounded: int) -> None:
    assert round_chunk_tokens(wanted, block_tokens) == rounded


def test_the_partly_filled_blocks_of_all_groups_come_last() -> None:
    spine = (ChunkCopy(1, 0, (10, 11)), ChunkCopy(2, 0, (12,)))
    window = (ChunkCopy(3, 1, (20, 21)),)
    copies, num_partial = last_blocks_last([(spine, True), (window, True), ((), True)])
    assert pages(copies).tolist() == [[1, 0, 10], [1, 1, 11], [3, 1, 20], [2, 0, 12], [3, 2, 21]]
    assert num_partial == 2
    assert last_blocks_last([(spine, False)]) == (spine, 0)


@pytest.mark.parametrize(
    ("blocks", "hole"),
    [([9, 9, 9], 0), ([0, 9, 9], 1), ([0, 0, 9], 2), ([0, 0, 0], None), ([9, 0, 9], None),
     ([0, 9], None)],
)  # fmt: skip
def test_a_hole_is_at_the_front_alone(blocks: list[int], hole: int | None) -> None:
    table = [7] * 3 + blocks
    assert hole_of(table, CHUNK_TOKENS, CHUNK_TOKENS, block_tokens=BLOCK_TOKENS) == hole


def test_a_save_with_a_hole_leaves_its_blocks_out() -> None:
    saved = plan_save(5, [1, 2, 3, 0, 8, 9], 12, 12, block_tokens=BLOCK_TOKENS, hole=1)
    assert saved == (ChunkCopy(5, 1, (8, 9)),)


def short_windows() -> Geometry:
    """A spine with one block a chunk, and a window of 8 tokens in blocks of 4."""
    groups = (Group(64, ("a",)), Group(4, ("b",), 1, "window", 8))
    return Geometry(1, (128,), groups, 64)


def test_a_slot_has_room_for_what_a_hit_reads() -> None:
    shape = short_windows()
    assert shape.blocks_per_chunk == 3, "7 tokens lie in 3 blocks at most"
    assert [shape.room(group) for group in range(2)] == [0, 3]
    assert shape.facts()["places"] == 3
    beside = replace(shape, groups=(Group(16, ("a",)), Group(4, ("b",), 1, "window", 33)))
    assert beside.blocks_per_chunk == 16, "9 blocks would not be a third of it"
    assert beside.room(1) == 0 and "places" not in beside.facts()


@given(st.data())
def test_blocks_of_a_short_window_have_places_of_their_own(data: st.DataObject) -> None:
    """A load of any of a section's blocks reads where they were saved, at each end of it."""
    stop = data.draw(st.integers(1, 64))
    blocks = -(-stop // 4)
    hole = data.draw(st.integers(max(0, blocks - 3), blocks - 1))
    first = data.draw(st.integers(hole, blocks - 1))
    ids = [0] * hole + list(range(10 + hole, 10 + blocks))
    sizes = {"block_tokens": 4, "places": 3}
    saved = pages(plan_save(5, ids, 0, stop, hole=hole, **sizes)).tolist()
    assert sorted({place for _, place, _ in saved}) == sorted(place for _, place, _ in saved)
    assert all(place < 3 for _, place, _ in saved)
    where = {block: place for _, place, block in saved}
    loaded = plan_load([(5, 4 * first, stop)], ids, 4 * first, stop, chunk_tokens=64, **sizes)
    found = {block: place for _, place, block in pages(loaded).tolist()}
    assert found == {block: where[block] for block in ids[first:]}
