# SPDX-License-Identifier: Apache-2.0
"""A long load leaves two tokens to compute, where one alone would wait for all layers.

A hit ends at a multiple of the index's grain: with two tokens left it ends one before that.
"""

from __future__ import annotations

import pytest

from attnstore_vllm.scheduler.costs import LONG_LOAD_S
from attnstore_vllm.scheduler.figures import StepStats
from attnstore_vllm.scheduler.messages import StepReport
from tests.helpers import sequence_of, tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld

LENGTH = 4 * CHUNK + 1
GRAIN = BLOCK


def learn(world: StepWorld, long_tokens: int) -> None:
    """A load of so many tokens is just long."""
    num_bytes = long_tokens * world.side.geometry.rank_bytes // CHUNK
    measured = [(num_bytes, LONG_LOAD_S)] * 20
    world.side.costs.step_ended(StepReport(0, measured=measured), StepStats())


def found_of(world: StepWorld, local: int = 0) -> int:
    """Tokens that are found of a prompt that is stored but for its last."""
    world.rig.put_all(sequence_of(tokens_of(1, LENGTH)))
    request = world.request("one", tokens_of(1, LENGTH))
    world.come(request)
    found = world.answer(request, local)
    world.close()
    return found


@pytest.mark.parametrize(("leaves", "computed"), [(1, 1), (2, 1 + GRAIN)])
def test_a_long_load_leaves_as_many_tokens_as_the_engine_asks_for(
    monkeypatch: pytest.MonkeyPatch, leaves: int, computed: int
) -> None:
    world = StepWorld(monkeypatch, leaves=leaves)
    learn(world, LENGTH)
    assert found_of(world) == LENGTH - computed


def test_a_load_of_unknown_length_leaves_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_of(StepWorld(monkeypatch, leaves=2)) == LENGTH - 1


@pytest.mark.parametrize(
    ("local", "computed"), [(0, 1 + GRAIN), (CHUNK, 1 + GRAIN), (2 * CHUNK, 1)]
)
def test_what_is_in_hbm_is_no_load(
    monkeypatch: pytest.MonkeyPatch, local: int, computed: int
) -> None:
    world = StepWorld(monkeypatch, leaves=2)
    learn(world, 3 * CHUNK)
    assert found_of(world, local) == LENGTH - local - computed
