# SPDX-License-Identifier: Apache-2.0
"""Learning from requests, on the store's thread: when conversations return, and the hit curve."""

from __future__ import annotations

from attnstore_vllm.policy.hit_curve import HitCurve
from attnstore_vllm.policy.runs import ReturnEstimator
from attnstore_vllm.store.context import Context


def learn_from(context: Context, estimator: ReturnEstimator, curve: HitCurve) -> None:
    """The table is fitted beside the scheduler, and put in place at once."""
    while curve.news:
        with context.progress:  # for one at a time: the scheduler's thread may wait for it
            curve.catch_up(1)
    if not estimator.is_due:
        return
    with context.progress:
        seen = estimator.seen(context.clock())
    fit = seen.fit()
    with context.progress:
        estimator.learn(fit)
