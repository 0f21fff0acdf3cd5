# SPDX-License-Identifier: Apache-2.0
"""An executor whose threads are not waited for at the end of the process.

concurrent.futures joins its threads then, so that one call on a disk that hangs would keep the
whole process.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DaemonPool(Executor):
    def __init__(self, num_threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any] | None, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._num_threads = num_threads
        for i in range(num_threads):
            threading.Thread(target=self._work, name=f"{name}_{i}", daemon=True).start()

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def hand(self, fn: Callable[_P, object], /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        """As submit(), where the result is not wanted. Makes no future: that takes as long as the
        rest, on a thread that may have no time."""
        self._calls.put((None, partial(fn, *args, **kwargs)))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when their calls have; waits for none."""
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future is not None and not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # it is told to the thread that waits for the future
                if future is None:
                    logger.exception("a call without a waiting caller has failed")
                else:
                    future.set_exception(error)
            else:
                if future is not None:
                    future.set_result(result)
            del call, future, function
