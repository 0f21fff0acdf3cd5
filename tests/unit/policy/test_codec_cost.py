# SPDX-License-Identifier: Apache-2.0
"""Which coding of the codec is written, and when the codec as a whole is slower than the disk."""

from __future__ import annotations

import random

import pytest

from attnstore_vllm.policy.codec_cost import BACK, LATER, SEEN_MIN, CodecCost

CHUNK = 1_000_000
SIZES = {False: 0.66, True: 0.75}


def serve(
    cost: CodecCost,
    disk: float,
    small: float,
    fast: float,
    chunks: int = SEEN_MIN,
    noise: float = 0.0,
) -> int:
    """Read and decode chunks of the coding that is written then. Returns how often it changed.

    Args: disk, small, fast: GB/s, of decoding by one thread.
    """
    chance = random.Random(1)
    changes = 0
    for _ in range(chunks):
        size = round(SIZES[cost.is_fast] * CHUNK)
        factor = 1 + chance.uniform(-noise, noise)
        cost.read(factor * size / (disk * 1e9), size)
        speed = fast if cost.is_fast else small
        cost.decoded(cost.is_fast, factor * CHUNK / (speed * 1e9), CHUNK, size)
        changes += cost.decide()
    return changes


def try_both(cost: CodecCost, small: float, fast: float) -> None:
    for is_fast, speed in ((False, small), (True, fast)):
        cost.tried(is_fast, CHUNK / (speed * 1e9), CHUNK, round(SIZES[is_fast] * CHUNK))


@pytest.mark.parametrize("disk", [0.2, 0.5, 1.0])
def test_a_slow_disk_keeps_the_small_coding(disk: float) -> None:
    cost = CodecCost(threads=1)
    try_both(cost, 2.5, 10)
    assert serve(cost, disk, 2.5, 10, 10 * SEEN_MIN) == 0
    assert not cost.is_fast
    assert not cost.is_later


@pytest.mark.parametrize(("disk", "changes"), [(0.2, 1), (1.0, 1), (2.0, 0), (5.0, 0)])
def test_the_fast_coding_is_written_until_the_disk_proves_slow(disk: float, changes: int) -> None:
    cost = CodecCost(threads=1, has_fast=True)
    try_both(cost, 2.5, 10)
    assert serve(cost, disk, 2.5, 10, SEEN_MIN - 1) == 0, "too little was seen"
    assert cost.is_fast
    assert serve(cost, disk, 2.5, 10, 10 * SEEN_MIN) == changes
    assert cost.is_fast == (not changes)
    assert not cost.is_later


@pytest.mark.parametrize("disk", [2.0, 5.0])
def test_a_fast_disk_gets_the_fast_coding(disk: float) -> None:
    cost = CodecCost(threads=1)
    try_both(cost, 2.5, 10)
    assert serve(cost, disk, 2.5, 10, SEEN_MIN - 1) == 0, "too little was seen"
    assert serve(cost, disk, 2.5, 10, 1) == 1
    assert serve(cost, disk, 2.5, 10, 10 * SEEN_MIN) == 0
    assert cost.is_fast
    assert not cost.is_later
    assert cost.read_speed == pytest.approx(disk * 1e9, rel=0.01)
    assert cost.decode_speed(False) == pytest.approx(2.5e9)
    assert cost.decode_speed(True) == pytest.approx(10e9)


def test_more_threads_keep_the_small_coding_for_longer() -> None:
    cost = CodecCost(threads=4)
    try_both(cost, 2.5, 10)
    assert serve(cost, 2.0, 2.5, 10) == 0
    assert serve(cost, 20.0, 2.5, 10, 10 * SEEN_MIN) == 1


def test_a_codec_with_one_coding_never_changes() -> None:
    cost = CodecCost(threads=1)
    assert serve(cost, 5.0, 2.5, 10, 10 * SEEN_MIN) == 0
    assert cost.is_later


def test_nothing_is_decided_before_reads_were_seen() -> None:
    cost = CodecCost(threads=1)
    try_both(cost, 0.5, 10)
    for _ in range(10 * SEEN_MIN):
        cost.decoded(False, 0.002, CHUNK, CHUNK)
        assert not cost.decide()
    assert not cost.is_later
    assert cost.read_speed == float("inf")


def test_what_is_seen_while_serving_counts_for_more_than_the_trial() -> None:
    """The trial said that the fast coding is fast; here it is not."""
    cost = CodecCost(threads=1)
    try_both(cost, 2.0, 10)
    assert serve(cost, 5.0, 2.0, 1.0) == 1
    assert cost.is_fast
    assert serve(cost, 5.0, 2.0, 1.0, SEEN_MIN - 1) == 0
    assert serve(cost, 5.0, 2.0, 1.0, 1) == 1
    assert not cost.is_fast
    assert serve(cost, 5.0, 2.0, 1.0, 20 * SEEN_MIN) == 0, "it has been seen now"


def test_a_disk_that_becomes_slow_gets_the_small_coding_back() -> None:
    cost = CodecCost(threads=1)
    try_both(cost, 2.5, 10)
    assert serve(cost, 5.0, 2.5, 10, 100 * SEEN_MIN) == 1
    assert serve(cost, 0.2, 2.5, 10, 16 * SEEN_MIN) == 1
    assert not cost.is_fast


@pytest.mark.parametrize("disk", [1.5, 1.6, 1.7, 1.8, 1.9, 2.0])
def test_it_does_not_change_to_and_fro(disk: float) -> None:
    """Around the speed where both are the same, with speeds that differ by a third each time."""
    cost = CodecCost(threads=1)
    try_both(cost, 2.5, 10)
    assert serve(cost, disk, 2.5, 10, 300 * SEEN_MIN, noise=0.33) <= 1
    assert LATER < BACK


def test_the_codec_is_later_where_even_the_fast_coding_is() -> None:
    cost = CodecCost(threads=1)
    try_both(cost, 1, 3)
    assert serve(cost, 5.0, 1, 3) == 1
    assert not cost.is_later, "of the fast coding nothing was seen yet"
    serve(cost, 5.0, 1, 3, SEEN_MIN - 1)
    assert not cost.is_later
    serve(cost, 5.0, 1, 3, 1)
    assert cost.is_later


def test_a_codec_that_keeps_up_with_the_disk_is_not_later() -> None:
    cost = CodecCost(threads=2)
    for _ in range(2 * SEEN_MIN):
        cost.read(0.001, 1_000_000)
        cost.decoded(False, 0.0018, 1_000_000, 660_000)
    assert not cost.is_later


def test_the_first_read_counts_where_decoding_takes_longer() -> None:
    """Decoding takes as long as the disk would; what is read before it comes on top."""
    cost = CodecCost(threads=2)
    for _ in range(SEEN_MIN):
        cost.read(0.001, 1_000_000)
        cost.decoded(False, 0.002, 1_000_000, 660_000)
    assert cost.is_later
