# SPDX-License-Identifier: Apache-2.0
"""Learning from requests, on the store's thread: when conversations return, and the hit curve."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from attnstore_vllm.index.keys import SequenceKeys, encode_tokens
from attnstore_vllm.policy.hit_curve import HitCurve, LookedUp, mark_of
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.tiers.context import Context


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


def used_by(sequence: SequenceKeys, marks: Sequence[int], num_tokens: int) -> LookedUp:
    """The look-up of a prompt, for the curve. It keeps no tokens: of a request that is gone
    before the curve looks at them, it finds no tail."""
    alive, stop = ref(sequence), num_tokens - 1

    def part(number: int) -> tuple[bytes, bytes]:
        found = alive()
        if found is None:
            return b"", b""
        if number < len(marks):
            return found.extra(number), found.chunk_bytes(number)
        # Meanwhile the scheduler's thread may have changed them, even to fewer.
        end = found.token_ids[number * found.chunk_tokens : stop]
        return found.extra(number), encode_tokens(end)

    return LookedUp(mark_of(sequence.root), marks, num_tokens, part)
