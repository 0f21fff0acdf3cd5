# SPDX-License-Identifier: Apache-2.0
"""A server whose engine is a process of its own, as vLLM's is, until it is killed alone.

    python -m tests.crash.orphan DIRECTORY START_METHOD FAULT

The engine owns DIRECTORY and prints its number. FAULT: none; flush: the disk hangs when what is
dirty is to be written; step: a step goes on for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from attnstore_vllm.parent_watch import end_with_parent, parent_pid
from attnstore_vllm.preflight import lock_directory

FLUSHED = "flushed"


def engine(directory: Path, fault: str) -> None:
    lock_directory(directory, parent_pid())

    def flush(grace_s: float) -> None:
        while fault == "flush":
            time.sleep(1.0)
        (directory / FLUSHED).write_text(f"{grace_s}")

    end_with_parent()  # that of a worker within this process: it waits for what is written back
    end_with_parent(flush, str(directory))
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=worker_of, name="VllmWorker-0")
    worker.start()
    print(os.getpid(), worker.pid, flush=True)
    while fault == "step":
        pass
    time.sleep(3600.0)


def worker_of() -> None:
    end_with_parent()
    time.sleep(3600.0)


def main(directory: Path, method: str, fault: str) -> None:
    context: Any = multiprocessing.get_context(method)  # of whichever kind
    # A sibling that is forked later holds all that this process has open.
    context.Process(target=engine, args=(directory, fault), name="EngineCore").start()
    if method == "fork":
        context.Process(target=time.sleep, args=(60.0,), daemon=True).start()
    time.sleep(3600.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
