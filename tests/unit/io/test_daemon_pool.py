# SPDX-License-Identifier: Apache-2.0
"""Calls that are handed to a pool's thread, with nobody who waits for them."""

from __future__ import annotations

import queue
from concurrent.futures import Future

import pytest

from attnstore_vllm.io import daemon_pool
from attnstore_vllm.io.daemon_pool import DaemonPool


def test_a_call_that_nobody_waits_for_is_done_and_its_failure_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("of the call")

    done = queue.SimpleQueue[str]()
    pool = DaemonPool(1, "attnstore-test")
    monkeypatch.setattr(daemon_pool, "Future", None)  # none is made: it costs who hands it over
    pool.hand(fail)
    pool.hand(done.put, "after it")
    assert done.get(timeout=5.0) == "after it", "the thread goes on"
    assert "of the call" in caplog.text
    monkeypatch.setattr(daemon_pool, "Future", Future)
    assert pool.submit(len, "four").result(5.0) == 4
    pool.shutdown()
