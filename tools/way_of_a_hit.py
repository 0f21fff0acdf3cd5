# SPDX-License-Identifier: Apache-2.0
"""How far a reader has to go: the functions that a hit in DRAM of one request runs.

    python -m tools.way_of_a_hit [--tokens 1000] [--list]

vLLM's real engine with a tiny model, scheduler and worker in one process. Counted from the
request's arrival to its end: calls of functions of this package on the engine's thread
(sys.setprofile). A change of file is a call from one of its files into another.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "attnstore_vllm")
TESTS = str(ROOT / "tests")
"""Checks of the engine that the tests use: no part of the way."""
QUIET = {"gpu_memory_utilization": 0.3}


class Way:
    """Counts while it is entered. Comprehensions count as the function that they are in."""

    def __init__(self) -> None:
        self.functions: Counter[CodeType] = Counter()
        self.changes = 0

    def __enter__(self) -> Way:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name[0] == "<":
            return
        if caller is not None and caller.f_code.co_filename.startswith(TESTS):
            return
        self.functions[code] += 1
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        self.changes += caller is not None and caller.f_code.co_filename != code.co_filename


def measure(num_tokens: int) -> Way:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported, which reads it
    from attnstore_lab.testing.tiny_model import TINY  # noqa: PLC0415
    from tests.vllm.engine import Engine, EngineSpec  # noqa: PLC0415  wants vllm

    prompt = [7 + 13 * i % 300 for i in range(num_tokens)]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        work = Path(directory)
        engine = Engine(EngineSpec(models=work, shape=TINY, store=work / "store", vllm=QUIET))
        for _ in range(2):  # the first hit makes what lasts
            engine.ask(prompt)
            engine.settle()
            engine.forget_hbm()
        engine.ask(prompt[::-1])  # after a reset the first step looks at the weights
        with Way() as way:
            answer = engine.ask(prompt)
        assert answer.cached_tokens > num_tokens // 2, "that was no hit"
        engine.close()
    return way


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--list", action="store_true", help="name the functions, by file")
    args = parser.parse_args()
    way = measure(args.tokens)
    files = {code.co_filename for code in way.functions}
    if args.list:
        for code in sorted(way.functions, key=lambda c: (c.co_filename, c.co_firstlineno)):
            name = Path(code.co_filename).relative_to(ROOT)
            print(f"{way.functions[code]:>6}  {name}: {code.co_qualname}")
    print(
        f"a DRAM hit of {args.tokens} tokens: {len(way.functions)} functions in {len(files)} "
        f"files, {way.functions.total()} calls, {way.changes} changes of file"
    )


if __name__ == "__main__":
    main()
