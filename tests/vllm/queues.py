# SPDX-License-Identifier: Apache-2.0
"""Our view of vLLM's queues, compared with them."""

from __future__ import annotations

from typing import Any

from attnstore_vllm.scheduler.scheduler import Scheduler


def check_queue(theirs: Any, ours: Scheduler) -> set[str]:
    """After a step was planned. Returns the requests that hold blocks while they wait: for a load,
    for more input, or for a place since they have had it.

    Those are not in the queue that look-ahead goes by. All others that are not running are, in
    vLLM's order; and whoever runs is known, in the order in which vLLM would put them back.

    Args:
        theirs: vLLM's scheduler.
    """
    view = ours._queue
    assert view is not None
    waiting = [request.request_id for request in theirs.waiting]
    holding = {request.request_id for request in theirs.kv_holding_waiting}
    running = {request.request_id: request for request in theirs.running}
    assert list(ours.store.residency.look_ahead) == waiting
    assert view._running.keys() - holding == running.keys()
    assert [name for name in view._running if name in running] == list(running)
    assert view._waiting.keys() | view._running.keys() == {*waiting, *holding, *running}
    assert view._waiting.keys().isdisjoint(view._running)
    return holding
