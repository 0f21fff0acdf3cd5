# SPDX-License-Identifier: Apache-2.0
"""When a device that fails is left alone, and when it is tried again. Pure: time is given.

in use --FAILURES_MAX failures in a row, or a hang--> out of use, for a pause
out of use --pause over, a probe succeeded--> in use; failed: the pause doubles
"""

from __future__ import annotations

FAILURES_MAX = 5
PAUSE_MIN_S = 1.0
PAUSE_MAX_S = 60.0


class Breaker:
    """One direction of one device. Times are in seconds of any steady clock."""

    def __init__(self) -> None:
        self.in_use = True
        self._failures = 0
        self._pause_s = PAUSE_MIN_S
        self._probe_at = 0.0
        self._probing = False

    def success(self) -> bool:
        """A request succeeded. Returns True if the device is in use again with it."""
        self._failures = 0
        if self.in_use or not self._probing:
            return False
        self.in_use, self._probing = True, False
        self._pause_s = PAUSE_MIN_S
        return True

    def failure(self, now: float, *, hung: bool = False) -> bool:
        """A request failed, or (`hung`) is overdue. Returns True if the device goes out of use."""
        self._failures += 1
        if not self.in_use:
            if self._probing:
                self._probing = False
                self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
                self._probe_at = now + self._pause_s
            return False
        if self._failures < FAILURES_MAX and not hung:
            return False
        self.in_use = False
        self._probe_at = now + self._pause_s
        return True

    def take_probe(self, now: float) -> bool:
        """Whether one request is to be sent now to see how the device is. One at a time."""
        if self.in_use or self._probing or now < self._probe_at:
            return False
        self._probing = True
        return True

    def forget_probe(self) -> None:
        """How the probe has ended will not be told: another one may be sent."""
        self._probing = False
