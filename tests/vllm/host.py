# SPDX-License-Identifier: Apache-2.0
"""Runs an Engine in a child process and calls functions with it.

    host.call(function, *arguments)    # function(engine, *arguments), in the child

Functions and arguments go by pickle, so functions are those of a module. Assertions that fail
there fail here. Faults are planted there, for one call, by name (tests/vllm/faults.py).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from unittest import mock

from tests.vllm.engine import Engine, EngineSpec

P = ParamSpec("P")
R = TypeVar("R")

START_DEADLINE_S = 480.0
CALL_DEADLINE_S = 500.0
STOP_DEADLINE_S = 30.0
LOG_TAIL_LINES = 30
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class HostError(Exception):
    """The child raised or died. The message has its traceback, or the end of its log."""


class EngineHost:
    """One engine in a process of its own. A context manager; leaving it ends the process."""

    def __init__(
        self, spec: EngineSpec, log: Path, *, call_deadline_s: float = CALL_DEADLINE_S
    ) -> None:
        self.spec = spec
        self.log = log
        self._call_deadline_s = call_deadline_s
        environment = dict(ENVIRONMENT)
        num_ranks = spec.tensor_parallel * spec.pipeline_parallel
        if num_ranks > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                str(rank % (os.cpu_count() or 1)) for rank in range(num_ranks)
            )
        context = _forking()
        self.exit_code: int | None = None
        """Of close()."""
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec, log, environment))
        self._process.start()
        theirs.close()
        try:
            self._receive(START_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def call(
        self, function: Callable[Concatenate[Engine, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """function(engine, *args, **kwargs) in the child. Raises HostError."""
        self._pipe.send((function, None, args, kwargs))
        result: R = self._receive(self._call_deadline_s)
        return result

    def call_with_fault(
        self,
        fault: str,
        function: Callable[Concatenate[Engine, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """As call(), with a fault planted in the engine and its workers for this call only."""
        self._pipe.send((function, fault, args, kwargs))
        result: R = self._receive(self._call_deadline_s)
        return result

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """End the child, politely first. Nothing is left of it but its log."""
        with suppress(OSError):  # it is dead already
            self._pipe.send(None)
        self._process.join(STOP_DEADLINE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.exit_code = self._process.exitcode
        self._pipe.close()

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, deadline_s: float) -> Any:
        try:
            if not self._pipe.poll(deadline_s):
                raise HostError(f"no answer within {deadline_s:.0f} s\n{self._log_tail()}")
            worked, result = self._pipe.recv()
        except EOFError as error:
            raise HostError(f"the engine's process has died\n{self._log_tail()}") from error
        if not worked:
            raise HostError(f"{result}\n{self._log_tail()}")
        return result

    def _log_tail(self) -> str:
        lines = self.log_text().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- the end of {self.log} ---", *lines])


def _forking() -> ForkServerContext:
    """Engines are forked from one process that has imported vLLM."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.vllm.preload"])
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with mock.patch.dict(os.environ, ENVIRONMENT | path):
        forkserver.ensure_running()
    return context


def _serve(pipe: Connection, spec: EngineSpec, log: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(stream, sys.stdout.fileno())
    os.dup2(stream, sys.stderr.fileno())
    engine: Engine | None = None
    try:
        engine = Engine(spec)
        pipe.send((True, None))
        while (order := pipe.recv()) is not None:
            pipe.send(_obey(engine, *order))
    except EOFError:  # the test has died
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    if engine is not None:
        engine.close()
    sys.stdout.flush()


def _obey(
    engine: Engine, function: Callable[..., Any], fault: str | None, args: Any, kwargs: Any
) -> tuple[bool, Any]:
    from tests.vllm import faults

    try:
        if fault is None:
            return True, function(engine, *args, **kwargs)
        with faults.planted(engine, fault):
            return True, function(engine, *args, **kwargs)
    except BaseException:
        return False, traceback.format_exc()
