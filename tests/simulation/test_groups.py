# SPDX-License-Identifier: Apache-2.0
"""Models of several KV cache groups on a vLLM in small: whatever a step may look at is right.

A few seeds of each model; a long run is python -m tests.simulation.run --groups. The second half
plants the faults that all this is for, and wants them seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attnstore_vllm.index import keys, sections
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.scheduler import saving
from attnstore_vllm.scheduler.offer import Offers
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.store import lookup
from attnstore_vllm.transfer.plan import hole_of
from tests.simulation.group_memory import MODELS
from tests.simulation.run import run_groups

SEEDS_OF_A_FAULT = 40


@pytest.mark.parametrize("model", MODELS)
def test_seeds_of_groups(model: str) -> None:
    counts = run_groups(model, 0, 3, 250)
    assert counts["served"] > 10
    assert counts["tokens"] > 1000
    beside = {group.reach for group in MODELS[model][1:]}
    for kind in ("full", "window", "local", "state"):
        for name in ("shortened_hits", "sections_passed", "sections_dropped"):
            is_counted = counts[f"{name} {kind}"] > 0
            if kind != "full" or kind not in beside:  # which is hardly ever short of anything
                assert is_counted == (kind in beside), f"{name} {kind}"


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_many_seeds_of_groups(model: str) -> None:
    counts = run_groups(model, 1000, 100, 400)
    for event in (
        "from dram",
        "from nvme",
        "ends within a block",
        "preempted",
        "aborted",
        "given up",
        "restarts",
        "resets",
        "error",
        "flipped bit",
        "lost write",
        "misplaced write",
        "hang",
        "full",
        "power loss",
    ):
        assert counts[event] > 0, event
    has_states = any(group.reach == "state" for group in MODELS[model])
    assert (counts["received"] > 0) == has_states or not has_states


@pytest.mark.parametrize("model", MODELS)
def test_less_than_was_offered_is_right_or_computed(model: str) -> None:
    """vLLM takes any shorter part, none too, and some offers in a later step."""
    counts = run_groups(model, 0, 3, 250, cuts=True)
    assert counts["cut"] > 10
    assert counts["taken late"] > 0
    assert counts["received"] > 0, "what is backed is loaded"
    assert counts["refused"] > 0, "what is not is computed"


# ---- faults ----------------------------------------------------------------------------


def a_group_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    """The last group backs any hit, whether or not it has what it needs there."""
    fit = sections.fit

    def without_last(index: Any, sequence: Any, needs: Any, *rest: Any) -> Any:
        return fit(index, sequence, needs[:-1], *rest)

    patch.setattr(lookup, "fit", without_last)


def holes_have_no_name(patch: pytest.MonkeyPatch) -> None:
    """A section is found whatever it lacks."""
    named = keys.section_parent
    patch.setattr(keys, "section_parent", lambda parent, group, hole: named(parent, group, 0))


def holes_are_too_short(patch: pytest.MonkeyPatch) -> None:
    """A section is said to have one block more than it has."""
    whole = hole_of

    def shorter(*args: Any, **sizes: Any) -> int | None:
        hole = whole(*args, **sizes)
        return hole - 1 if hole else hole

    patch.setattr(saving, "hole_of", shorter)


def windows_are_too_short(patch: pytest.MonkeyPatch) -> None:
    """A group is asked for a block less than it needs."""
    first = Need.first

    def later(need: Need, stop: int) -> int:
        at = first(need, stop)
        return at if need.reach is Reach.STATE else min(stop, at + need.block_tokens)

    patch.setattr(Need, "first", later)


def states_of_other_lengths(patch: pytest.MonkeyPatch) -> None:
    """The state nearest to a hit's end is taken for the one at its end."""
    last = sections._last_state

    def nearest(index: Any, sequence: Any, need: Any, start: int, stop: int, there: Any) -> Any:
        found, reached = last(index, sequence, need, start, stop, there)
        return found, stop if found else reached

    patch.setattr(sections, "_last_state", nearest)


def states_of_early_ends(patch: pytest.MonkeyPatch) -> None:
    """The state after a step is named as if it had seen a block less."""
    named = keys.SequenceKeys.name_up_to

    def shorter(sequence: Any, number: int, tenant: bytes, stop: int) -> Any:
        return named(sequence, number, tenant, stop - 16 if stop % 64 > 32 else stop)

    patch.setattr(keys.SectionKeys, "name_up_to", shorter)


def states_come_late(patch: pytest.MonkeyPatch) -> None:
    """States are loaded in the step that needs them: vLLM has copied them by then."""
    patch.setattr(Offers, "_layers_before", lambda *_: 0)


def nothing_is_fleeting(patch: pytest.MonkeyPatch) -> None:
    """Saves of blocks that vLLM takes back after the step wait for room all the same."""
    save = OpenPlans.save
    patch.setattr(
        OpenPlans, "save", lambda *args, is_fleeting=False: save(*args, is_fleeting=False)
    )


def tables_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    """Blocks of the groups stay in vLLM's order."""
    patch.setattr(Scheduler, "_tables", lambda _, block_ids: block_ids)


def any_length_is_backed(patch: pytest.MonkeyPatch) -> None:
    """What backs the whole offer is taken to back each part of it."""
    taken = Offers.part_taken

    def whole(self: Any, state: Any, num_tokens: int) -> Any:
        held, state.withdrawn = state.offered, None
        if held is None or num_tokens > held.stop - held.start:
            return taken(self, state, num_tokens)
        state.offered = None
        return held

    patch.setattr(Offers, "part_taken", whole)


def a_group_is_not_asked_for_less(patch: pytest.MonkeyPatch) -> None:
    """The last group backs any shorter length."""
    backed = sections.backed

    def without_last(index: Any, sequence: Any, needs: Any, *rest: Any) -> Any:
        return backed(index, sequence, needs[:-1], *rest)

    patch.setattr(lookup, "backed", without_last)


def a_shorter_state_is_the_nearest(patch: pytest.MonkeyPatch) -> None:
    """The state nearest to where a shorter part ends is taken for the one that is there."""
    backed = sections.backed

    def nearest(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            states_of_other_lengths(inner)
            return backed(*args)

    patch.setattr(lookup, "backed", nearest)


@pytest.mark.parametrize(
    ("fault", "model"),
    [
        (any_length_is_backed, "window"),
        (any_length_is_backed, "local"),
        (any_length_is_backed, "state"),
        (a_group_is_not_asked_for_less, "two windows"),
        (a_group_is_not_asked_for_less, "window and state"),
        (a_shorter_state_is_the_nearest, "state"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_faults_of_shorter_parts_are_seen(
    fault: Callable[[pytest.MonkeyPatch], None], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"seed \d+"):
        run_groups(model, 0, SEEDS_OF_A_FAULT, 250, cuts=True)


@pytest.mark.parametrize(
    ("fault", "model"),
    [
        (a_group_is_not_asked, "window"),
        (a_group_is_not_asked, "two windows"),
        (a_group_is_not_asked, "window and state"),
        (holes_have_no_name, "small blocks"),
        (holes_have_no_name, "local"),
        (holes_are_too_short, "window"),
        (windows_are_too_short, "window and local"),
        (states_of_other_lengths, "window and state"),
        (states_of_early_ends, "state of a chunk"),
        (states_come_late, "state"),
        (nothing_is_fleeting, "small blocks"),
        (tables_are_mixed_up, "two windows"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_faults_are_seen(
    fault: Callable[[pytest.MonkeyPatch], None], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"seed \d+"):
        run_groups(model, 0, SEEDS_OF_A_FAULT, 250)
