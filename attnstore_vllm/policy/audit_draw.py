# SPDX-License-Identifier: Apache-2.0
"""Which hits are computed all the same, to be compared with what is stored. Pure: time is given."""

from __future__ import annotations

from hashlib import blake2b

from attnstore_vllm.policy.budget import Budget

BURST_S = 60.0
"""Seconds of the cap that may be saved up: a prompt is not cut, so one may take more than a
second's."""
_DRAW_BYTES = 8


class Draw:
    """Draws a share of hits. The same hits of the same order are drawn with the same seed, and who
    does not know it cannot tell which.

    Args:
        rate: the share of hits, 0 to 1.
        tokens_per_s: that are computed for it at most, in the mean over BURST_S.
        seed: 64 bytes at most, secret.
    """

    def __init__(self, rate: float, tokens_per_s: float, seed: bytes) -> None:
        self._below = round(rate * (1 << 8 * _DRAW_BYTES))
        self._budget = Budget(tokens_per_s, BURST_S)
        self._seed = seed
        self._number = 0

    def take(self, num_tokens: int, now: float, *, always: bool = False) -> int | None:
        """The number of this hit if it is drawn, else None. Cost: 1 us.

        Args:
            num_tokens: that the hit has.
            now: seconds of a steady clock.
            always: at any rate, and not of the cap: it is computed in any case.
        """
        self._number += 1
        if always:
            return self._number
        if int.from_bytes(self._drawn(self._number), "little") >= self._below:
            return None
        return self._number if self._budget.take(now, num_tokens) else None

    def turns(self, hit: int, num_chunks: int) -> list[int]:
        """The turn of each of a hit's chunks, where not all of them find a place: another order
        for each hit, so that no chunk is left out of all. Cost: 1 us each."""
        order = sorted(range(num_chunks), key=lambda chunk: self._drawn(hit, chunk))
        return [turn for _, turn in sorted(zip(order, range(num_chunks), strict=True))]

    def _drawn(self, *numbers: int) -> bytes:
        text = b"".join(number.to_bytes(_DRAW_BYTES, "little") for number in numbers)
        return blake2b(text, key=self._seed, digest_size=_DRAW_BYTES).digest()
