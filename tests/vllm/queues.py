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
    waiting, holding = _queues(theirs)
    running = {request.request_id: request for request in theirs.running}
    assert list(ours.store.residency.look_ahead) == [*ours.stages.names, *waiting]
    assert view._running.keys() - holding == running.keys()
    assert [name for name in view._running if name in running] == list(running)
    assert view._waiting.keys() | view._running.keys() == {*waiting, *holding, *running}
    assert view._waiting.keys().isdisjoint(view._running)
    return holding


def _queues(theirs: Any) -> tuple[list[str], set[str]]:
    """vLLM's waiting requests that hold no blocks, in its order, and those that hold some."""
    if hasattr(theirs, "kv_holding_waiting"):
        holding = {request.request_id for request in theirs.kv_holding_waiting}
        return [request.request_id for request in theirs.waiting], holding
    # vLLM 0.30 has one queue for all that it has skipped, before the others.
    kept = ("WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STREAMING_REQ")
    skipped = list(theirs.skipped_waiting)
    holding = {request.request_id for request in skipped if request.status.name in kept}
    waiting = [*skipped, *theirs.waiting]
    if theirs.policy.name == "PRIORITY":
        waiting.sort()
    return [name for r in waiting if (name := r.request_id) not in holding], holding
