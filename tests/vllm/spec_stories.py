# SPDX-License-Identifier: Apache-2.0
"""Many random stories over vLLM's KV cache specs, types of KV, layouts and ranks (spec_story.py).

    python -m tests.vllm.spec_stories [--stories 10000] [--first 0] [--jobs 2] [--json]

The first story in which a forward pass reads a wrong byte ends it, with its seed. Needs a C++
compiler and no GPU.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.fake_driver import driver
from tests.story_runner import run
from tests.vllm.spec_story import tell

_FOLDER = TemporaryDirectory()


@cache
def model() -> Path:
    """What vLLM reads in this process; what it keeps is never looked at."""
    return make_model(Path(_FOLDER.name) / "model", TINY, weights=False)


def tell_one(seed: int) -> Counter[str]:
    return tell(seed, model())


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process that tells some
    driver()  # it is built once
    return run("spec-stories", __doc__, tell_one, arguments)


if __name__ == "__main__":
    sys.exit(main())
