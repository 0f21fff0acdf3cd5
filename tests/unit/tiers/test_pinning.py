# SPDX-License-Identifier: Apache-2.0
"""Pins of one tier: their shares and their ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.policy.lazy_heap import STALE_MAX
from attnstore_vllm.tiers.tier import ENDED_MAX, Pin, Pins

A, B = b"a" * 32, b"b" * 32


def test_a_share_for_all_and_one_for_each_tenant() -> None:
    pins = Pins(0.1, 0.03)
    assert [pins.add(slot, Pin(A, 9.0), 100) for slot in range(4)] == [True] * 3 + [False]
    assert pins.add(10, Pin(B, 9.0), 100)
    others = [pins.add(20 + n, Pin(bytes([n]) * 32, 9.0), 100) for n in range(8)]
    assert others == [True] * 6 + [False] * 2
    assert len(pins) == 10
    pins.remove(0)
    assert pins.add(3, Pin(A, 9.0), 100)


def test_without_a_share_nothing_is_pinned() -> None:
    assert not Pins().add(0, Pin(A, 9.0), 1_000_000)
    assert not Pins(0.5, 0.5).add(0, Pin(A, 9.0), 1)  # half a slot


def test_a_pin_lasts_as_long_as_the_longest_that_was_asked_for() -> None:
    pins = Pins(0.5, 0.5)
    for until in (5.0, 9.0, 2.0):
        assert pins.add(1, Pin(A, until), 10)
    assert pins.take_ended(8.9) == []
    assert pins.take_ended(9.0) == [1]
    assert 1 not in pins
    assert pins.take_ended(99.0) == []


def test_what_an_earlier_chunk_in_the_slot_was_pinned_for_is_forgotten() -> None:
    pins = Pins(0.5, 0.5)
    pins.add(1, Pin(A, 100.0), 10)
    pins.remove(1)
    pins.add(1, Pin(A, 5.0), 10)
    assert pins.take_ended(5.0) == [1]
    pins.add(1, Pin(A, 200.0), 10)
    assert pins.take_ended(150.0) == []


def test_the_work_of_a_look_and_the_memory_are_bounded() -> None:
    pins = Pins(0.5, 0.5)
    for slot in range(5 * ENDED_MAX):
        assert pins.add(slot, Pin(A, 1.0), 1000)
    sizes = [len(pins.take_ended(2.0)) for _ in range(6)]
    assert sizes == [ENDED_MAX] * 5 + [0]
    for n in range(10_000):
        pins.add(1, Pin(A, 10.0 + n), 1000)
        pins.add(2, Pin(A, 10.0 + n), 1000)
        pins.remove(2)
    assert len(pins._ends) <= 2 * len(pins) + STALE_MAX + 1
    assert not Pins(0.5, 0.5)._per_tenant


STEPS = st.lists(
    st.tuples(
        st.sampled_from("pppre"),
        st.integers(0, 11),
        st.sampled_from([A, B]),
        st.integers(1, 20),
    )
)


@given(STEPS)
def test_against_a_plain_model(steps: list[tuple[str, int, bytes, int]]) -> None:
    pins, model, now = Pins(0.5, 0.25), dict[int, Pin](), 0.0
    for action, slot, tenant, time in steps:
        if action == "p":
            before, until = model.get(slot), now + time
            ours = sum(pin.tenant == tenant for pin in model.values())
            fits = before is not None or (len(model) < 6 and ours < 3)
            assert pins.add(slot, Pin(tenant, until), 12) == fits
            if before is not None:
                model[slot] = Pin(before.tenant, max(before.until, until))
            elif fits:
                model[slot] = Pin(tenant, until)
        elif action == "r":
            pins.remove(slot)
            model.pop(slot, None)
        else:
            now += time / 4
            ended = {slot for slot, pin in model.items() if pin.until <= now}
            assert set(pins.take_ended(now)) == ended
            model = {slot: pin for slot, pin in model.items() if slot not in ended}
        assert {slot: pins.get(slot) for slot in pins} == model
        assert pins._per_tenant.total() == len(model)
