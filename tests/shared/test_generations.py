# SPDX-License-Identifier: Apache-2.0
"""Generations: engines that are reset together share again, and none meets what was before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from attnstore_vllm.shared.shared_generation import FILE_NAME, MAGIC, SharedGeneration, load, save


class Shared:
    """The one value of a store that engines look at, each when it likes."""

    def __init__(self) -> None:
        self.value: bytes | None = None

    def look(self, engine: SharedGeneration) -> None:
        for _ in range(4):
            order = engine.see(self.value)
            if order is None:
                return
            if order.overwrite or self.value is None:
                self.value = order.value
        raise AssertionError("an engine and the store do not agree")


def started(store: Shared) -> SharedGeneration:
    engine = SharedGeneration()
    engine.weights_seen(True)
    store.look(engine)
    return engine


def test_engines_that_are_reset_together_share_again() -> None:
    store = Shared()
    engines = [started(store) for _ in range(3)]
    first = engines[0].usable
    assert first is not None and all(engine.usable == first for engine in engines)
    for engine in engines:
        engine.reset()
        engine.weights_seen(True)
    for engine in engines:
        store.look(engine)
    assert engines[0].usable not in (None, first)
    assert len({engine.usable for engine in engines}) == 1


def test_who_was_not_reset_keeps_out_until_it_is() -> None:
    store = Shared()
    one, two = started(store), started(store)
    one.reset()
    one.weights_seen(True)
    store.look(one)
    store.look(two)
    assert two.usable is None and two.is_behind
    two.reset()
    two.weights_seen(True)
    store.look(two)
    assert two.usable == one.usable is not None


def test_after_a_reset_it_keeps_out_until_the_weights_were_seen() -> None:
    store = Shared()
    one = started(store)
    one.reset()
    store.look(one)
    assert one.usable is None
    one.weights_seen(True)
    assert one.usable is not None


def test_all_leave_what_was_used_by_who_has_changed_its_weights() -> None:
    store = Shared()
    one, two = started(store), started(store)
    one.reset()
    one.weights_seen(False)
    store.look(one)
    assert one.usable is None
    store.look(two)
    assert two.usable is None
    fresh = started(store)
    assert fresh.usable is not None
    two.reset()
    two.weights_seen(True)
    store.look(two)
    assert two.usable == fresh.usable


def test_a_store_that_lost_everything_is_used_again_by_all() -> None:
    store = Shared()
    one, two = started(store), started(store)
    before, store.value = one.usable, None
    store.look(one)
    store.look(two)
    assert one.usable == two.usable == before


def test_a_value_that_is_none_is_written_over() -> None:
    store = Shared()
    store.value = b"what is this"
    assert started(store).usable is not None


def test_what_was_left_is_left_over_a_restart(tmp_path: Path) -> None:
    store = Shared()
    one = started(store)
    first = one.usable
    one.reset()
    save(tmp_path, one.to_json())
    again = load(tmp_path)
    again.weights_seen(True)
    store.look(again)
    assert again.usable not in (None, first)


def test_a_reset_before_the_first_look_leaves_whatever_is_there(tmp_path: Path) -> None:
    store = Shared()
    first = started(store).usable
    late = SharedGeneration()
    late.reset()
    save(tmp_path, late.to_json())
    for engine in (late, load(tmp_path)):
        engine.weights_seen(True)
        store.look(engine)
        assert engine.usable not in (None, first)


def test_a_file_that_cannot_be_read_leaves_whatever_is_there(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    assert load(tmp_path).must_renew


@pytest.mark.parametrize("was_reset", [False, True])
def test_weights_that_nobody_can_see_are_trusted_until_a_reset(was_reset: bool) -> None:
    engine = SharedGeneration()
    if was_reset:
        engine.reset()
    engine.weights_seen(None)
    Shared().look(engine)
    assert (engine.usable is not None) != was_reset


class Engines(RuleBasedStateMachine):
    """Three engines on one store that may forget. Each value in the store is marked with what was
    computed under it: since which reset of its writer."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Shared()
        self.engines = [SharedGeneration() for _ in range(3)]
        self.forbidden: list[set[bytes]] = [set() for _ in range(3)]
        self.written: set[bytes] = set()

    @rule(which=st.integers(0, 2))
    def look(self, which: int) -> None:
        self.store.look(self.engines[which])

    @rule(which=st.integers(0, 2))
    def see_weights(self, which: int) -> None:
        self.engines[which].weights_seen(True)

    @rule(which=st.integers(0, 2))
    def write(self, which: int) -> None:
        usable = self.engines[which].usable
        if usable is not None:
            assert usable not in self.forbidden[which], "it meets what was there before its reset"
            self.written.add(usable)

    @rule(which=st.integers(0, 2))
    def reset(self, which: int) -> None:
        used, was_behind = self.engines[which].mine, self.engines[which].is_behind
        self.engines[which].reset()
        assert self.engines[which].usable is None
        if used is not None:
            self.forbidden[which].add(used)
        elif self.store.value is not None and not was_behind:
            self.forbidden[which].add(self.store.value[len(MAGIC) :])

    @rule(which=st.integers(0, 2))
    def reset_and_join(self, which: int) -> None:
        self.reset(which)
        self.see_weights(which)
        self.look(which)
        self.write(which)

    @precondition(lambda self: self.store.value is not None)
    @rule()
    def forget(self) -> None:
        self.store.value = None

    @rule(which=st.integers(0, 2))
    def restart(self, which: int) -> None:
        before = self.engines[which]
        self.engines[which] = SharedGeneration(list(before.left), before.must_renew)


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_restart_does_not_join_a_generation_that_came_meanwhile(tmp_path: Path) -> None:
    """The disk has KV of the generation before: it must not get among that of the new one."""
    store = Shared()
    one, two = started(store), started(store)
    save(tmp_path, one.to_json())
    two.reset()
    two.weights_seen(True)
    store.look(two)
    again = load(tmp_path)
    again.weights_seen(True)
    store.look(again)
    assert two.usable is not None
    assert again.usable is None and again.is_behind
