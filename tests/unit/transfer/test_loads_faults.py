# SPDX-License-Identifier: Apache-2.0
"""Loads whose copies fail: what nobody has read is said once and computed; else the engine stops.

On the bench of test_loads.py, where each piece of a load can fail.
"""

from __future__ import annotations

import pytest

from attnstore_vllm.errors import CopyError
from tests.engine_helpers import ALL, LAYERS
from tests.unit.transfer.test_loads import NOTHING, Ahead, Bench, Told, every_load_ahead, load


@pytest.fixture
def bench() -> Bench:
    return Bench()


@every_load_ahead
def test_a_load_ahead_that_fails_before_it_is_told(ahead: Ahead) -> None:
    """Each of its pieces; others behind it go on. No copy writes to its blocks after that."""
    for failing in range(ahead.pieces):
        bench, plan = Bench(), ahead.plan()
        other = load(2, before=1, slot=2, blocks=(10, 11))
        bench.step(plan, other)
        bench.go_on_to(failing)
        bench.stream.fail_next(CopyError("injected"))
        bench.go_on_to(failing + 1)
        assert bench.step() == Told(set(), {plan.request_id}, [plan.plan_id])
        assert bench.over == ahead.pieces, "what was begun behind it is over, and no more"
        others = bench.give_away()
        assert bench.step() == NOTHING
        bench.go_on_to(ahead.pieces + LAYERS)
        assert bench.step() == Told({other.request_id}, set(), [other.plan_id])
        assert all(bench.is_there(other, layer) for layer in ALL)
        assert others == bench.blocks()


@every_load_ahead
def test_a_load_that_fails_when_it_may_be_read(ahead: Ahead) -> None:
    """Nobody knows what was computed from it: the engine has to stop."""
    for failing in range(ahead.enough, ahead.pieces):
        for when in ("read", "over", "ended", "whole"):
            bench, plan = Bench(), ahead.plan()
            bench.step(plan)
            bench.go_on_to(ahead.enough)
            assert bench.step().received
            bench.go_on_to(failing)
            bench.stream.fail_next(CopyError("injected"))
            if when == "over":
                bench.loads.begin_step((), whole=False)
                bench.go_on_to(failing + 1)
                with pytest.raises(CopyError, match="injected"):
                    bench.end_step()
                continue
            ended = [plan.plan_id] if when == "ended" else []
            with pytest.raises(CopyError, match="injected"):
                bench.step(reads=[], ended=ended, whole=when == "whole")


@pytest.mark.parametrize("failing", range(2))
def test_a_load_that_fails_after_its_request_has_gone(bench: Bench, failing: int) -> None:
    plan = load(before=2)
    bench.step(plan)
    bench.go_on_to(failing)
    bench.step(ended=[1])
    bench.stream.fail_next(CopyError("injected"))
    bench.go_on_to(LAYERS)
    assert bench.step() == Told(set(), {"request 1"}, [1])
    assert bench.step(ended=[1]) == NOTHING


@pytest.mark.parametrize("failing", range(1 + LAYERS))
@pytest.mark.parametrize("hooks", [False, True])
def test_a_load_for_this_step_that_fails(bench: Bench, failing: int, hooks: bool) -> None:
    plan = load(before=0, partial=True)
    bench.loads.begin_step((), whole=False)
    if failing == 0:
        bench.stream.fail_next(CopyError("injected"))
        with pytest.raises(CopyError, match="injected"):
            bench.begin(plan)
        return
    bench.begin(plan)
    bench.go_on_to(failing)
    bench.stream.fail_next(CopyError("injected"))
    if hooks:
        for layer in range(failing - 1):
            bench.loads.wait_layer(layer)
        with pytest.raises(CopyError, match="injected"):
            bench.loads.wait_layer(failing - 1)
    else:
        bench.go_on_to(failing + 1)
        with pytest.raises(CopyError, match="injected"):
            bench.end_step()


def test_close_completes_what_is_in_flight() -> None:
    for fails in (False, True):
        bench = Bench()
        plans = [load(1, before=1), load(2, before=1, slot=2, blocks=(10, 11))]
        bench.step(*plans)
        if fails:
            bench.stream.fail_next(CopyError("injected"))
            bench.go_on_to(1)
        bench.loads.close()
        assert bench.stream.pending == 0
        assert all(bench.is_there(plans[1], layer) for layer in ALL)
