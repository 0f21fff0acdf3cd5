# SPDX-License-Identifier: Apache-2.0
"""Random stories of CudaEngine on the C++ of the CUDA half, over the fake driver."""

from __future__ import annotations

import re

import pytest

from tests import cuda_faults, cuda_stories
from tests.cuda_story import tell
from tests.fake_driver import ROOT

STORIES = 200
SHARES = 8


@pytest.mark.parametrize("share", range(SHARES))
def test_what_keeps_the_rules_is_as_if_nothing_overlapped(share: int) -> None:
    """`python -m tests.cuda_stories` tells many more."""
    for seed in range(share, STORIES, SHARES):
        tell(seed)


def test_a_story_is_the_same_each_time() -> None:
    assert tell(3) == tell(3)


def test_the_command_counts_and_ends_at_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cuda_stories.main(["--stories", "3", "--jobs", "1", "--json"]) == 0
    assert '"stories": 3' in capsys.readouterr().out
    monkeypatch.setattr(cuda_stories, "tell", lambda seed: 1 // 0)
    assert cuda_stories.main(["--stories", "3", "--first", "5", "--jobs", "1"]) == 1
    assert re.search("story 5: ZeroDivisionError", capsys.readouterr().out)


def test_every_fault_can_be_planted() -> None:
    """That each is seen takes minutes: `python -m tests.cuda_faults`."""
    for fault in cuda_faults.FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault.name


def test_a_wait_that_is_missing_is_seen() -> None:
    fault = next(one for one in cuda_faults.FAULTS if "a load does not wait" in one.name)
    assert "WrongBytesError" in cuda_faults.seen_by(fault, 40)
