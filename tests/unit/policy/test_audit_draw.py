# SPDX-License-Identifier: Apache-2.0
"""Which hits are drawn."""

from __future__ import annotations

from attnstore_vllm.policy.audit_draw import BURST_S, Draw


def test_a_share_is_drawn_and_the_same_with_the_same_seed() -> None:
    first, again, other = (Draw(0.01, 1e9, seed) for seed in (b"a", b"a", b"b"))
    drawn = [first.take(100, 0.0) for _ in range(100_000)]
    assert drawn == [again.take(100, 0.0) for _ in range(100_000)]
    assert drawn != [other.take(100, 0.0) for _ in range(100_000)]
    numbers = [number for number in drawn if number is not None]
    assert 900 < len(numbers) < 1100
    assert len(set(numbers)) == len(numbers), "each hit has a number of its own"


def test_all_are_drawn_or_almost_none() -> None:
    every, few = Draw(1.0, 1e9, b"a"), Draw(1e-9, 1e9, b"a")
    assert all(every.take(1, 0.0) for _ in range(1000))
    assert not any(few.take(1, 0.0) for _ in range(1000))


def test_no_more_tokens_are_drawn_than_the_cap_has() -> None:
    draw = Draw(1.0, 10.0, b"a")
    tokens = 0
    for tenth in range(36_000):  # an hour
        tokens += 700 * (draw.take(700, tenth / 10) is not None)
    assert 0.9 * 36_000 < tokens <= 36_000 + 10 * BURST_S + 700


def test_a_hit_that_is_longer_than_the_burst_is_drawn_once_in_a_while() -> None:
    draw = Draw(1.0, 10.0, b"a")
    drawn = [second for second in range(3600) if draw.take(10_000, float(second)) is not None]
    assert len(drawn) == 4, "each costs 1,000 s of the cap, and the burst has 60"


def test_what_is_always_drawn_takes_nothing_of_the_cap() -> None:
    """Else who may ask for it could keep others from being drawn."""
    draw = Draw(1.0, 1.0, b"a")
    assert all(draw.take(100, 0.0, always=True) for _ in range(100))
    assert draw.take(100, 1.0) is not None
    assert draw.take(100, 2.0) is None
    assert draw.take(100, 3.0, always=True) is not None


def test_of_a_thousand_hits_one_is_drawn_at_one_in_a_hundred() -> None:
    for number in range(200):
        draw = Draw(0.01, 1e9, b"seed %d" % number)
        assert any(draw.take(100, 0.0) for _ in range(1000))


def test_each_chunk_of_a_hit_has_its_turn() -> None:
    draw, other = Draw(1.0, 1e9, b"a"), Draw(1.0, 1e9, b"b")
    for num_chunks in (0, 1, 2, 100):
        assert sorted(draw.turns(1, num_chunks)) == list(range(num_chunks))
    assert draw.turns(1, 100) == Draw(1.0, 1e9, b"a").turns(1, 100) != other.turns(1, 100)
    first = [sum(draw.turns(hit, 100)[chunk] < 10 for hit in range(1000)) for chunk in range(100)]
    assert min(first) > 60 and max(first) < 140, "a tenth of all hits, wherever it is"
