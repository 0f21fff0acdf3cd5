# SPDX-License-Identifier: Apache-2.0
"""Priorities of stored KV: what leaves a full tier before what."""

from __future__ import annotations

from enum import IntEnum


class Priority(IntEnum):
    """The lower goes first. Hints say low, normal, high and ended (hints.py); LOW_VALUE is the
    store's own word."""

    ENDED = -3
    """No request comes back to it, as its last one has said."""
    LOW_VALUE = -2
    """Sections where a conversation has gone on: a hit for those alone that branch off there."""
    LOW = -1
    NORMAL = 0
    HIGH = 1
