# SPDX-License-Identifier: Apache-2.0
"""What is sooner, waiting or computing: learned from steps and reads, with what is in doubt."""

from __future__ import annotations

from random import Random

import pytest

from attnstore_vllm.policy.cost import (
    OUTLIER,
    PROBE_EVERY,
    READS_MIN,
    STEPS_MIN,
    CopyCost,
    QueuePace,
    ReadCost,
    StepCost,
    pieces_to_wait_for,
    read_pays,
)

C0, C1, C2, C3 = 0.004, 2e-4, 5e-9, 3e-4


def length(prompts: list[tuple[int, int]], num_generating: int) -> float:
    seconds = C0 + C3 * num_generating
    for start, stop in prompts:
        seconds += C1 * (stop - start) + C2 * (stop - start) * (start + stop) / 2
    return seconds


def trained(noise: float = 0.0, steps: int = 400, speed: float = 1.0) -> StepCost:
    cost, rng = StepCost(), Random(3)
    for _ in range(steps):
        start = rng.randrange(0, 30_000)
        prompts = [(start, start + rng.randrange(2, 2048))] if rng.random() < 0.4 else []
        generating = rng.randrange(0, 24)
        seconds = length(prompts, generating) * (1 + rng.gauss(0, noise)) / speed
        cost.observe(max(seconds, 1e-4), prompts, generating)
    return cost


def test_steps_tell_what_tokens_cost_at_any_context() -> None:
    cost = trained()
    for start, stop in ((0, 256), (0, 8192), (20_000, 20_256)):
        want = length([(start, stop)], 0) - C0
        assert cost.seconds(start, stop) == pytest.approx(want, rel=0.01)
        assert cost.seconds(start, stop, -1.0) == pytest.approx(want, rel=0.02)


def test_noise_becomes_doubt() -> None:
    cost = trained(noise=0.2, steps=2000)
    want = length([(0, 4096)], 0) - C0
    assert cost.seconds(0, 4096) == pytest.approx(want, rel=0.15)
    assert 0.65 * want < cost.seconds(0, 4096, -1.0) < 0.95 * want
    assert cost.seconds(0, 4096, 1.0) > 1.05 * want


def test_nothing_is_said_before_enough_was_seen() -> None:
    cost = StepCost()
    for number in range(STEPS_MIN):
        assert not cost.is_known
        assert cost.observe(0.1, [(0, 100 + number)], 0) is None
    assert cost.is_known
    assert cost.observe(0.1, [(0, 100)], 0) is not None
    assert cost.observe(0.1, [], 3) is None  # no prompt, nothing to be wrong about


def test_what_is_negative_is_left_out_and_an_outlier_counts_little() -> None:
    cost = StepCost()
    for number in range(50):  # longer contexts are quicker, more tokens are not
        cost.observe(1.0 - 0.01 * number, [(1000 * number, 1000 * number + 100)], 0)
    assert cost.seconds(0, 1000) >= 0
    assert cost.seconds(200_000, 201_000) >= 0
    cost = trained()
    before = cost.seconds(0, 1000)
    wrong = cost.observe(1000.0, [(0, 1000)], 0)
    assert wrong == pytest.approx(OUTLIER - 1, rel=0.01)
    for _ in range(8):
        cost.observe(length([(0, 500)], 0), [(0, 500)], 0)
    assert cost.seconds(0, 1000) < 1.5 * before


def test_a_step_that_seems_to_take_no_time_counts_little() -> None:
    """Both steps in flight had ended when somebody looked."""
    cost = trained()
    before = cost.seconds(0, 1000)
    cost.observe(1e-5, [(0, 2000)], 0)
    cost.observe(1e-5, [], 4)
    for _ in range(8):
        cost.observe(length([(0, 500)], 0), [(0, 500)], 0)
    assert cost.seconds(0, 1000) > 0.7 * before


def test_doubt_is_never_total() -> None:
    cost, rng = trained(), Random(2)
    for _ in range(2000):
        slow = OUTLIER if rng.random() < 0.2 else 1.0
        cost.observe(slow * length([(0, 1000)], 0), [(0, 1000)], 0)
    assert cost.seconds(0, 100_000, -1.0) > 0.2 * cost.seconds(0, 100_000) > 0


def test_a_change_of_speed_is_learned() -> None:
    cost = trained()
    rng = Random(5)
    for _ in range(1500):
        stop = rng.randrange(100, 4000)
        cost.observe(3 * length([(0, stop)], 0), [(0, stop)], 0)
    assert cost.seconds(0, 2000) == pytest.approx(3 * (length([(0, 2000)], 0) - C0), rel=0.1)


def test_answers_do_not_take_away_what_prompts_taught() -> None:
    cost = trained()
    before = cost.seconds(0, 4096)
    for _ in range(5000):
        cost.observe(length([], 8), [], 8)
    cost.observe(length([(0, 300)], 8), [(0, 300)], 8)
    assert cost.seconds(0, 4096) == pytest.approx(before, rel=0.05)


def test_reads_in_a_row_with_a_spread_on_top() -> None:
    reads = ReadCost()
    for number in range(READS_MIN):
        assert reads.mean_s is None
        reads.observe(0.010 if number % 2 else 0.030)
    assert reads.mean_s == pytest.approx(0.020)
    assert reads.seconds(4) == pytest.approx(4 * 0.020 + 2 * 0.010)
    assert reads.seconds(0) == 0


def test_waits_for_what_comes_sooner_than_it_is_computed() -> None:
    cost = trained()
    piece = cost.seconds(0, 256, -1.0)
    stops = [256, 512, 768]
    fast = [0.5 * piece * (n + 1) for n in range(3)]
    slow = [2.0 * piece * (n + 1) for n in range(3)]
    assert pieces_to_wait_for(0, stops, fast, cost) == 3
    assert pieces_to_wait_for(0, stops, slow, cost) == 0
    # The first two are nearly here, and the third would take longer than it saves.
    assert pieces_to_wait_for(0, stops, [0.0, 0.0, 1.5 * piece], cost) == 2
    assert pieces_to_wait_for(0, [], [], cost) == 0
    # A read that takes a little longer than the first piece, and brings three, is waited for.
    assert pieces_to_wait_for(0, stops, [1.2 * piece, 1.2 * piece, 1.2 * piece], cost) == 3
    # What is computed at the end of a long context costs more than at its beginning.
    arrivals = [1.1 * piece * (n + 1) for n in range(3)]
    assert pieces_to_wait_for(0, stops, arrivals, cost) == 0
    far = [40_000 + stop for stop in stops]
    assert pieces_to_wait_for(40_000, far, arrivals, cost) == 3


def test_a_copy_slower_than_computing_is_not_made_but_now_and_then() -> None:
    cost, copies = trained(), CopyCost()
    assert copies.pays(0, 1000, cost)
    for _ in range(READS_MIN):
        copies.observe(1000, 10 * cost.seconds(0, 1000))
    said = [copies.pays(0, 1000, cost) for _ in range(4 * PROBE_EVERY)]
    assert sum(said) == 4
    for _ in range(2000):
        copies.observe(1000, 0.1 * cost.seconds(0, 1000))
    assert all(copies.pays(0, 1000, cost) for _ in range(PROBE_EVERY))


# ---- one that stands alone, and a change that stays ------------------------------------------

PAUSE_S = 60.0
"""A virtual machine that was stopped while it copied, or read."""


def computed_of(hits: int, copies: CopyCost, steps: StepCost, seconds: float) -> int:
    """Of so many hits in DRAM, those that are computed. What is copied takes `seconds`."""
    computed = 0
    for _ in range(hits):
        if copies.pays(0, 1000, steps):
            copies.observe(1000, seconds)
        else:
            computed += 1
    return computed


@pytest.mark.parametrize("before", [0, 1, READS_MIN - 1, READS_MIN, 50, 1000])
def test_one_long_copy_teaches_nothing_whenever_it_comes(before: int) -> None:
    steps, copies = trained(), CopyCost()
    copy_s = 0.1 * steps.seconds(0, 1000)
    assert computed_of(before, copies, steps, copy_s) == 0
    copies.observe(1000, PAUSE_S)
    assert computed_of(1000, copies, steps, copy_s) == 0


def test_two_pauses_within_a_second_teach_little() -> None:
    steps, copies = trained(), CopyCost()
    copy_s = 0.1 * steps.seconds(0, 1000)
    for _ in range(2):
        assert computed_of(200, copies, steps, copy_s) == 0
        copies.observe(1000, PAUSE_S)
        copies.observe(1000, PAUSE_S)
        assert computed_of(200, copies, steps, copy_s) == 0


def test_a_pause_now_and_then_is_still_one_that_stands_alone() -> None:
    steps, copies = trained(), CopyCost()
    copy_s = 0.1 * steps.seconds(0, 1000)
    for _ in range(12):
        assert computed_of(100, copies, steps, copy_s) == 0
        copies.observe(1000, PAUSE_S)
    assert computed_of(100, copies, steps, copy_s) == 0


@pytest.mark.parametrize("times", [5, 20, 1000])
def test_copies_that_stay_slow_are_learned(times: int) -> None:
    """Within what a mean without a bound would need, and a few more."""
    steps, copies = trained(), CopyCost()
    copy_s = 0.5 * steps.seconds(0, 1000)
    assert computed_of(300, copies, steps, copy_s) == 0
    needed = 2 + 256 / (times - 1)  # mean above 2 x, for the doubt in what computing takes
    copied = 0
    while copies.pays(0, 1000, steps):
        copies.observe(1000, times * copy_s)
        copied += 1
        assert copied <= needed + 6


def test_copies_that_are_slow_now_and_then_are_learned_too() -> None:
    """One in eight takes a hundred times as long: on the mean copying is dearer."""
    steps, copies, rng = trained(), CopyCost(), Random(4)
    copy_s = 0.2 * steps.seconds(0, 1000)
    for _ in range(2000):
        copies.observe(1000, copy_s * (100 if rng.random() < 1 / 8 else 1))
    assert computed_of(100, copies, steps, copy_s) > 80


@pytest.mark.parametrize("burst", [1, 8])
def test_one_long_read_teaches_nothing(burst: int) -> None:
    """Reads that end one by one, and eight at a time."""
    reads = ReadCost()

    def read(number: int) -> None:
        for _ in range(number // burst):
            for place in range(burst):
                reads.observe(0.010 * burst if place == 0 else 1e-5)

    read(400)
    before = reads.seconds(32)
    assert reads.mean_s == pytest.approx(0.010, rel=0.1), "what is usual was cut off"
    reads.observe(PAUSE_S)
    assert reads.seconds(32) < 1.5 * before
    for _ in range(3000):
        reads.observe(0.1)
    assert reads.mean_s == pytest.approx(0.1, rel=0.01)


def test_a_disk_that_stays_slow_is_learned_within_a_few_reads() -> None:
    reads = ReadCost()
    for _ in range(400):
        reads.observe(0.001)
    for _ in range(20):
        reads.observe(1.0)
    assert reads.mean_s is not None
    assert reads.mean_s > 0.8 * 20 / 256, "as without a bound, but for the first few"


# ---- the queue, and what is read for it ---------------------------------------------------


def test_pace_is_learned_from_requests_that_have_others_behind_them() -> None:
    pace = QueuePace()
    assert pace.mean_s == 0
    now = 0.0
    for _ in range(400):
        now += 100.0  # nobody waits
        pace.left(1, True, now)
        for number, has_more in ((1, True), (2, True), (1, False)):
            now += number * 0.5
            pace.left(number, has_more, now)
    assert pace.mean_s == pytest.approx(0.5, rel=0.05)
    pace.left(0, True, now + 50)
    pace.left(1, True, now + 100)
    assert pace.mean_s == pytest.approx(0.5, rel=0.05), "none had left: nobody waited since"


@pytest.mark.parametrize(
    ("reads", "turn_s", "computing_s", "pays"),
    [
        ((1, 4), 0.0, (1.5, 2.0), True),
        ((1, 4), 0.0, (0.9, 2.0), False),
        ((1, 4), 0.0, (0.9, 4.1), True),  # all of it does: attention over much context
        ((3, 6), 2.0, (0.9, 2.0), False),
        ((3, 6), 2.5, (0.9, 2.0), True),  # it is nearly here when its turn comes
    ],
)
def test_a_read_pays_if_it_comes_before_its_tokens_would_be_computed(
    reads: tuple[int, int], turn_s: float, computing_s: tuple[float, float], pays: bool
) -> None:
    assert read_pays(reads, 1.0, turn_s, computing_s) == pays
