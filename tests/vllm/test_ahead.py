# SPDX-License-Identifier: Apache-2.0
"""Which loads begin before their step, and which steps may be graphs without hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from attnstore_vllm.connector.build import _replays
from attnstore_vllm.connector.costs import Costs
from attnstore_vllm.connector.messages import StepReport
from attnstore_vllm.connector.metrics import AttnStoreStats

LAYERS = 10
BYTES = 1_000_000


def make_costs(*, ahead_layers: int = LAYERS, step_tokens: int = 1 << 30) -> Costs:
    store: Any = None
    return Costs(store, 1.0, True, ahead_layers=ahead_layers, step_tokens=step_tokens)


def teach(costs: Costs, *, load_s: float | None, token_s: float | None) -> None:
    """BYTES take load_s to load, a token token_s to compute."""
    measured = [(BYTES, load_s)] * 20 if load_s is not None else []
    costs.step_ended(StepReport(0, measured=measured), AttnStoreStats.empty())
    for count in range(100, 3100, 100) if token_s is not None else ():
        assert token_s is not None
        costs._steps.observe(0.001 + token_s * count, [(0, count)], 0)


@pytest.mark.parametrize(
    ("load_s", "layers"),
    # Computing 1,000 tokens takes a second: 9 tenths of it hide 9 of 10 layers behind the first.
    [(0.5, 0), (0.9, 0), (2.0, 6), (5.0, 9), (100.0, 10)],
)
def test_a_load_that_its_step_does_not_hide_begins_before_it(load_s: float, layers: int) -> None:
    costs = make_costs()
    teach(costs, load_s=load_s, token_s=0.001)
    assert costs.layers_before(BYTES, 0, 5000, 6000) == layers


def test_loads_that_are_before_it_count() -> None:
    costs = make_costs()
    teach(costs, load_s=0.9, token_s=0.001)
    assert costs.layers_before(BYTES, 0, 5000, 6000) == 0
    assert costs.layers_before(BYTES, 9 * BYTES, 5000, 6000) >= 8


def test_only_the_first_step_of_a_long_prompt_counts() -> None:
    costs = make_costs(step_tokens=100)
    teach(costs, load_s=0.9, token_s=0.001)
    assert costs.layers_before(BYTES, 0, 5000, 6000) >= 8


def test_without_measurements_every_load_is_for_its_step() -> None:
    for load_s, token_s in ((None, 0.001), (5.0, None)):
        costs = make_costs()
        teach(costs, load_s=load_s, token_s=token_s)
        assert costs.layers_before(BYTES, 0, 5000, 6000) == 0


def test_where_copies_do_not_run_beside_the_model() -> None:
    costs = make_costs(ahead_layers=0)
    teach(costs, load_s=5.0, token_s=0.001)
    assert costs.layers_before(BYTES, 0, 5000, 6000) == 0


@pytest.mark.parametrize(
    ("mode", "prefill", "decode"),
    [
        (CUDAGraphMode.NONE, False, False),
        (CUDAGraphMode.PIECEWISE, False, False),
        (CUDAGraphMode.FULL, True, True),
        (CUDAGraphMode.FULL_DECODE_ONLY, False, True),
        (CUDAGraphMode.FULL_AND_PIECEWISE, False, True),
    ],
)
def test_which_steps_may_be_whole_graphs(mode: CUDAGraphMode, prefill: bool, decode: bool) -> None:
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode), num_speculative_tokens=2
    )
    replays = _replays(config)
    assert replays([1, 400, 1]) == prefill
    assert replays([1, 3, 1]) == decode
