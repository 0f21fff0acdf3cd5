# SPDX-License-Identifier: Apache-2.0
"""Generations: engines that are reset together share again, and none meets what was before.

It is long since all stories of resets share a store that is one value.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.shared_generation import (
    COUNT_MAX,
    LEFT_MAX,
    OLD_FILE_NAME,
    GenerationId,
    SharedGeneration,
    decode,
    encode,
    file_name,
    from_json,
    load,
    name_of,
    save,
)

KEYS = SharedKeys.of(32 * b"k")
X, Y = 32 * b"x", 32 * b"y"
"""Namespaces."""
FILE_NAME = file_name(X)


class Shared:
    """The one value of a store that engines look at, each when it likes."""

    def __init__(self) -> None:
        self.value: GenerationId | None = None

    def look(self, engine: SharedGeneration) -> None:
        for _ in range(4):
            order = engine.see(self.value)
            if order is None:
                return
            self.value = order
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
    name = name_of(bytes(32), KEYS)
    made = encode(GenerationId(bytes(16), 1), name, KEYS)
    assert decode(made, name, KEYS) == (bytes(16), 1)
    too_high = encode(GenerationId(bytes(16), COUNT_MAX + 1), name, KEYS)
    for value in (b"", b"what is this", made[:-1], made + b"x", made[:20] + b"x" + made[21:]):
        assert decode(value, name, KEYS) is None
    assert decode(too_high, name, KEYS) is None
    assert decode(made, name_of(bytes([1] * 32), KEYS), KEYS) is None
    assert decode(made, name, SharedKeys.of(32 * b"o")) is None
    assert started(Shared()).usable is not None


def test_what_was_left_is_left_over_a_restart(tmp_path: Path) -> None:
    store = Shared()
    one = started(store)
    first = one.usable
    one.reset()
    save(tmp_path, X, one.to_json())
    again = load(tmp_path, X)
    again.weights_seen(True)
    store.look(again)
    assert again.usable not in (None, first)


def test_a_reset_before_the_first_look_leaves_whatever_is_there(tmp_path: Path) -> None:
    store = Shared()
    first = started(store).usable
    late = SharedGeneration()
    late.reset()
    save(tmp_path, X, late.to_json())
    for engine in (late, load(tmp_path, X)):
        engine.weights_seen(True)
        store.look(engine)
        assert engine.usable not in (None, first)


def test_a_file_that_cannot_be_read_leaves_whatever_is_there(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    assert load(tmp_path, X).must_renew


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
        self.forbidden: list[set[GenerationId]] = [set() for _ in range(3)]
        self.kept: list[GenerationId] = []
        """Sealed values that a stranger has read, and can put back."""

    @rule(which=st.integers(0, 2))
    def look(self, which: int) -> None:
        self.store.look(self.engines[which])
        self.keep()

    def keep(self) -> None:
        if self.store.value is not None:
            self.kept.append(self.store.value)

    @precondition(lambda self: self.store.value is not None)
    @rule(which=st.integers(0, 1 << 20))
    def put_back(self, which: int) -> None:
        """An old one of this store. Of one that a store had before it lost all, an engine that has
        not seen it knows nothing."""
        assert self.store.value is not None
        same = [one for one in self.kept if one.anchor == self.store.value.anchor]
        self.store.value = same[which % len(same)] if same else self.store.value

    @rule(which=st.integers(0, 2))
    def see_weights(self, which: int) -> None:
        self.engines[which].weights_seen(True)

    @rule(which=st.integers(0, 2))
    def write(self, which: int) -> None:
        engine = self.engines[which]
        if engine.usable is not None:
            assert engine.mine not in self.forbidden[which], "it meets what was before its reset"

    @rule(which=st.integers(0, 2))
    def reset(self, which: int) -> None:
        used, was_behind = self.engines[which].mine, self.engines[which].is_behind
        self.engines[which].reset()
        assert self.engines[which].usable is None
        if used is not None:
            self.forbidden[which].add(used)
        elif self.store.value is not None and not was_behind:
            self.forbidden[which].add(self.store.value)

    @rule(which=st.integers(0, 2))
    def reset_and_join(self, which: int) -> None:
        self.reset(which)
        self.see_weights(which)
        self.look(which)
        self.write(which)
        self.keep()

    @precondition(lambda self: self.store.value is not None)
    @rule()
    def forget(self) -> None:
        self.store.value = None

    @rule(which=st.integers(0, 2))
    def restart(self, which: int) -> None:
        before = self.engines[which]
        self.engines[which] = from_json(before.to_json())


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_restart_does_not_join_a_generation_that_came_meanwhile(tmp_path: Path) -> None:
    """The disk has KV of the generation before: it must not get among that of the new one."""
    store = Shared()
    one, two = started(store), started(store)
    save(tmp_path, X, one.to_json())
    two.reset()
    two.weights_seen(True)
    store.look(two)
    again = load(tmp_path, X)
    again.weights_seen(True)
    store.look(again)
    assert two.usable is not None
    assert again.usable is None and again.is_behind


def test_who_was_behind_is_behind_after_a_restart(tmp_path: Path) -> None:
    """Also if it has seen that others were reset: its disk has what it had."""
    store = Shared()
    one, two = started(store), started(store)
    reset_and_join(store, two)
    store.look(one)
    assert one.is_behind
    save(tmp_path, X, one.to_json())
    again = load(tmp_path, X)
    again.weights_seen(True)
    store.look(again)
    assert again.usable is None and again.is_behind
    reset_and_join(store, again)
    assert again.usable == two.usable is not None


def reset_and_join(store: Shared, engine: SharedGeneration) -> None:
    engine.reset()
    engine.weights_seen(True)
    store.look(engine)


def test_the_tier_is_in_use_after_any_number_of_resets() -> None:
    store = Shared()
    one, two = started(store), started(store)
    for number in range(1000):
        for engine in (one, two):
            engine.reset()
            if number % 5 == 0:
                engine.reset()  # twice before it looks: it knows none then
            engine.weights_seen(True)
        for engine in (one, two):
            store.look(engine)
        reset_and_join(store, one)  # it is out if the other one has renewed after it
        assert one.usable is not None and one.why_out is None
    assert len(one.left) == 1, "an anchor and a count"
    assert len(one.to_json()) < 200


def test_stores_that_are_new_again_and_again_take_no_more_memory() -> None:
    store = Shared()
    one = started(store)
    for _ in range(2 * LEFT_MAX):
        store.value = None
        fresh = started(store)
        store.look(one)
        assert one.is_behind
        reset_and_join(store, one)
        assert one.usable == fresh.usable is not None
    assert len(one.left) == LEFT_MAX


def test_counts_that_end_begin_anew() -> None:
    store = Shared()
    store.value = GenerationId(bytes(16), COUNT_MAX)
    one = started(store)
    reset_and_join(store, one)
    assert one.usable is not None and one.mine is not None
    assert one.mine.anchor != bytes(16) and one.mine.number == 0


def test_a_generation_that_was_put_back_is_written_over() -> None:
    """A stranger who has kept old values, which are sealed as they should be."""
    store = Shared()
    one = started(store)
    old = [store.value]
    for _ in range(3):
        reset_and_join(store, one)
        old.append(store.value)
    two = started(store)  # it has never been reset, and has seen the last one alone
    for engine in (one, two):
        for value in old[:-1]:
            store.value = value
            store.look(engine)
            assert engine.usable is not None
            assert store.value == engine.mine == old[-1]


def test_who_is_behind_notes_what_it_may_not_join_later() -> None:
    store = Shared()
    one, two = started(store), started(store)
    reset_and_join(store, two)
    store.look(one)
    second = store.value
    reset_and_join(store, two)
    store.look(one)
    last, store.value = store.value, second  # put back, while `one` is reset
    reset_and_join(store, one)
    assert one.usable is not None and one.mine not in (second, None)
    assert last is not None and one.mine == last


def test_a_file_of_the_format_before_is_read(tmp_path: Path) -> None:
    for left, mine, renews in (([], None, False), ([], "aa", False), (["aa"], None, True)):
        text = json.dumps({"left": left, "renew": False, "mine": mine})
        (tmp_path / FILE_NAME).write_text(text)
        assert load(tmp_path, X) == SharedGeneration(must_renew=renews)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"left": {"aa": 1}, "renew": false, "mine": null, "behind": false}',
        '{"left": {"aa": 1e999}, "renew": false, "mine": null, "behind": false}',
    ],
)
def test_a_file_with_what_is_none_leaves_whatever_is_there(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert load(tmp_path, X).must_renew


def test_who_knew_none_joins_none_that_was_there_before() -> None:
    """The value is back at an old one while it renews: the next one has been in use, too."""
    store = Shared()
    one = started(store)
    first, used = store.value, list[GenerationId | None]()
    for _ in range(5):
        reset_and_join(store, one)
        used.append(store.value)
    late = SharedGeneration()
    late.reset()
    late.weights_seen(True)
    store.value = first
    store.look(late)
    assert late.usable is not None and late.mine not in used
    for value in used:
        store.value = value
        store.look(late)
        assert late.usable is not None and late.mine == store.value


def restarted(store: Shared, directory: Path, namespace: bytes) -> SharedGeneration:
    """As a server of this model finds it, which saves what it has seen."""
    engine = load(directory, namespace)
    engine.weights_seen(True)
    store.look(engine)
    save(directory, namespace, engine.to_json())
    return engine


def test_another_model_of_the_directory_is_reset_for_itself(tmp_path: Path) -> None:
    """A server moves from X to Y and back. X and Y were reset once each meanwhile: what its disk
    has of X is of before, though it was reset too."""
    stores = {X: Shared(), Y: Shared()}
    one = started(stores[X])
    two = restarted(stores[X], tmp_path, X)
    assert two.usable == one.usable is not None
    two = restarted(stores[Y], tmp_path, Y)
    reset_and_join(stores[X], one)
    reset_and_join(stores[Y], two)
    save(tmp_path, Y, two.to_json())
    assert two.usable is not None
    two = restarted(stores[X], tmp_path, X)
    assert two.usable is None and two.is_behind
    reset_and_join(stores[X], two)
    assert two.usable == one.usable


def test_a_used_directory_joins_servers_of_another_model(tmp_path: Path) -> None:
    stores = {X: Shared(), Y: Shared()}
    other = started(stores[Y])
    restarted(stores[X], tmp_path, X)
    assert restarted(stores[Y], tmp_path, Y).usable == other.usable is not None


def test_the_first_namespace_takes_the_file_of_all(tmp_path: Path) -> None:
    mine = GenerationId(bytes(16), 7)
    (tmp_path / OLD_FILE_NAME).write_text(SharedGeneration(mine=mine).to_json())
    assert load(tmp_path, X).mine == load(tmp_path, X).mine == mine
    assert load(tmp_path, Y) == SharedGeneration()
