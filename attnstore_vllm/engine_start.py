# SPDX-License-Identifier: Apache-2.0
"""Since when an engine starts: no model was loaded before. Files that are younger may not be those
that vLLM has read.

vLLM tells no connector of its model before the model is loaded, so the time is noted when plugins
are loaded and settings are checked.
"""

from __future__ import annotations

import os
import time

_CONFIGURED_AT = "ATTNSTORE_CONFIGURED_AT"
"""Not a setting: it tells the processes that this one makes when it was configured."""


class _Start:
    """The time when this process began to start an engine."""

    def __init__(self) -> None:
        self.at = time.time()
        self._is_held = False

    def note(self, *, holds: bool) -> bool:
        """Now, unless one is being made: vLLM makes its configuration anew with a model loaded.

        Args:
            holds: it has this store, so that end() follows.
        Returns: whether it begins here.
        """
        if self._is_held:
            return False
        self.at, self._is_held = time.time(), holds
        return True

    def end(self) -> None:
        """The engine's weights have been looked at: another one in this process begins later."""
        self._is_held = False

    def note_fork(self) -> None:
        """In the child. What made this process hears of no end, and may be at its next engine."""
        self.at = time.time()


_start = _Start()
os.register_at_fork(after_in_child=_start.note_fork)


def configured_at() -> float:
    """Unix seconds: when this process began, or was first configured for the engine that it makes.
    No model was loaded before. A file that is younger may have changed since vLLM has read it."""
    return _start.at


def tell_children() -> None:
    """The processes that this one makes are to know when it was configured."""
    os.environ[_CONFIGURED_AT] = repr(_start.at)


def server_configured_at() -> float:
    """configured_at() of the process that the user started, which has made this one: it may have
    read a model's settings before."""
    try:
        told = float(os.environ.get(_CONFIGURED_AT, ""))
    except ValueError:
        return _start.at
    return told if told < _start.at else _start.at


def note_start(*, holds: bool) -> bool:
    """This process is configured for an engine. See _Start.note()."""
    return _start.note(holds=holds)


def end_start() -> None:
    """Weights have been compared with configured_at(), or the engine was refused before it loaded
    any: a later configuration is a new start."""
    _start.end()
