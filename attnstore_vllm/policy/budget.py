# SPDX-License-Identifier: Apache-2.0
"""So many bytes a second, in bursts. Pure: time is given."""

from __future__ import annotations

_ROUNDING_BYTES = 1
"""How much sums of rates may be short of."""


class Budget:
    """A token bucket. One transfer may overdraw it, so that none is too large to ever go.

    Args:
        bytes_per_s: None for no limit.
        burst_s: seconds of rate that may be saved up.
        empty_at: nothing is saved up at this time, since an earlier process may have taken it
            just before: starts must not add to the rate. Nor does it lend, since the next process
            knows of no debt: what is taken has to be saved up, of any size. None: all that may be
            is there at once.
    """

    def __init__(
        self, bytes_per_s: float | None, burst_s: float, *, empty_at: float | None = None
    ) -> None:
        assert bytes_per_s is None or bytes_per_s > 0
        self._rate = bytes_per_s
        self._most = (bytes_per_s or 0.0) * burst_s
        self._left = self._most if empty_at is None else 0.0
        self._at = empty_at
        self._lends = empty_at is None

    def has(self, now: float, num_bytes: int) -> bool:
        """Whether take() would take them. `now` in seconds of a steady clock."""
        if self._rate is None:
            return True
        most = self._most if self._lends else max(self._most, num_bytes)
        if self._at is not None:
            self._left = min(most, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left > (0 if self._lends else num_bytes - _ROUNDING_BYTES)

    def take(self, now: float, num_bytes: int) -> bool:
        """Take the bytes if anything is left, or all of them where nothing is lent. `now` in
        seconds of a steady clock."""
        if not self.has(now, num_bytes):
            return False
        self._left -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Give back bytes that were taken and not used."""
        self._left += num_bytes
