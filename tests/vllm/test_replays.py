# SPDX-License-Identifier: Apache-2.0
"""Which steps may be graphs without hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from attnstore_vllm.connector.facts import _leaves, _replays


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


@pytest.mark.parametrize(
    ("mode", "method", "leaves"),
    [
        (CUDAGraphMode.NONE, None, 1),
        (CUDAGraphMode.PIECEWISE, None, 1),
        (CUDAGraphMode.FULL, None, 1),
        (CUDAGraphMode.FULL_DECODE_ONLY, None, 2),
        (CUDAGraphMode.FULL_AND_PIECEWISE, None, 2),
        (CUDAGraphMode.FULL_AND_PIECEWISE, "ngram", 1),
        (CUDAGraphMode.FULL_AND_PIECEWISE, "eagle", 1),
    ],
)
def test_a_load_leaves_what_is_no_whole_graph(
    mode: CUDAGraphMode, method: str | None, leaves: int
) -> None:
    config = settings(mode, method or "ngram")
    if method is None:
        config.speculative_config, config.num_speculative_tokens = None, 0
    assert _leaves(config) == leaves
    if leaves == 2:
        assert _replays(config)([1]) and not _replays(config)([leaves])
