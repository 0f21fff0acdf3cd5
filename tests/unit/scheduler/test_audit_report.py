# SPDX-License-Identifier: Apache-2.0
"""A report says of how many chunks `attnstore audit` has to wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.scheduler.report import report_of
from tests.helpers import tokens_of
from tests.unit.scheduler.test_audits import LENGTH, AuditWorld, opened


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    yield from opened(lambda **options: AuditWorld(monkeypatch, tmp_path, **options))


def test_a_report_counts_the_chunks_that_are_compared(start: Callable[..., Any]) -> None:
    world, tokens = start(), tokens_of(1, LENGTH)
    world.put(tokens)
    request = world.asks(tokens, "drawn")
    world.end_step(request)
    state = world.side.requests["drawn"]
    assert not state.audited, "all are copied by now"
    assert report_of(state)["audited_chunks"] == 4
    new = world.asks(tokens_of(2, LENGTH), "new")
    assert "audited_chunks" not in report_of(world.side.requests["new"])
    world.end_step(new)
    world.finish(request, new)
    world.end_step()
