# SPDX-License-Identifier: Apache-2.0
"""An engine ends with the process that started it.

vLLM's engine core is a child of the API server. When that is killed alone, vLLM's engine lives on:
nothing can reach it, it keeps the accelerator's memory and owns the store's directory, and every
restart is refused. So a thread of ours waits for the parent's end. Then it writes back what is
dirty and ends the process, also in the middle of a step.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import wait

logger = logging.getLogger(__name__)

ENGINE, WORKER = "EngineCore", "VllmWorker"
"""How the names of processes begin that vLLM makes. Workers are children of their engine."""
ENDS_WITHIN_S = 4.5
FLUSH_S = 2.5
"""For writing back. A store waits half a second for its thread and for each tier besides."""
LOOK_S = 0.25
"""Between two looks at who the parent is, where the kernel does not tell of its end."""


def parent_pid() -> int | None:
    """The process with which this one is to end. None: this is no engine's own process, but one
    that the user or Ray has started, and its end is theirs to choose."""
    parent = multiprocessing.parent_process()
    is_engine = multiprocessing.current_process().name.startswith((ENGINE, WORKER))
    return parent.pid if parent is not None and is_engine else None


def end_with_parent(flush: Callable[[float], None] | None = None, what: str = "") -> None:
    """End this process soon after its parent_pid(); without one this does nothing.

    Args:
        flush: writes what is to be kept, for so many seconds at most. Called on another thread.
            None: nothing is to be kept, and nothing is said. So it is in a worker, which vLLM
            tells to end too, and whose own end may take longer. An engine has to give it.
        what: is let go with this process, for the log.
    """
    parent = parent_pid()
    if flush is None and not multiprocessing.current_process().name.startswith(WORKER):
        return  # a worker within its engine's process
    if parent is not None:
        threading.Thread(
            target=_watch, args=(parent, flush, what), name="attnstore-parent", daemon=True
        ).start()


def _watch(parent: int, flush: Callable[[float], None] | None, what: str) -> None:
    _wait_for_end(parent)
    if flush is None:
        os._exit(1)
    # A thread without Python: it ends the process though the interpreter or the disk hangs.
    faulthandler.dump_traceback_later(ENDS_WITHIN_S, exit=True, file=2)
    try:
        logger.warning(
            "process %d, which started this engine, is gone. The engine writes back what it can "
            "within some seconds, lets go of %s and ends",
            parent,
            what,
        )
        flush(FLUSH_S)
    finally:
        os._exit(1)


def _wait_for_end(pid: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    was_ours = os.getppid() == pid  # not with a fork server
    # The pipe alone would not do: a forked sibling may hold its other end.
    ends: list[int] = [parent.sentinel]
    try:
        ends.append(os.pidfd_open(pid))
    except OSError as error:
        if error.errno == errno.ESRCH:
            return
    knows = len(ends) > 1
    while not wait(ends, None if knows else LOOK_S):
        if was_ours and os.getppid() != pid:
            return
