# SPDX-License-Identifier: Apache-2.0
"""Which steps may be graphs without hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from attnstore_vllm.connector.facts import _replays


def settings(mode: CUDAGraphMode, method: str) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        speculative_config=SimpleNamespace(method=method),
        num_speculative_tokens=2,
    )


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
    replays = _replays(settings(mode, "ngram"))
    assert replays([1, 400, 1]) == prefill
    assert replays([1, 3, 1]) == decode


def test_the_pass_of_a_draft_model_may_always_be_one() -> None:
    assert _replays(settings(CUDAGraphMode.PIECEWISE, "eagle"))([1, 400, 1])
