# SPDX-License-Identifier: Apache-2.0
"""A real server is killed under load, and its next life serves what was clean, and no more.

Twenty times: python -m tests.vllm.kill_loop --kills 20
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import kill_loop


@pytest.mark.long
def test_kills_under_load(models: Path, tmp_path: Path) -> None:
    lives, jobs = kill_loop.live(tmp_path, models, kills=2, seed=4)
    assert sum(life.clean_tokens for life in lives) > 500, "of the second life"
    assert sum(life.answered for life in lives) > 10
    verdict = kill_loop.judge(tmp_path, models, jobs, at_most=30)
    assert verdict.wrong == [], verdict
