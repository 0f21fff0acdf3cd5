# SPDX-License-Identifier: Apache-2.0
"""Many random stories of CudaEngine over the fake driver.

    python -m tests.cuda_stories [--stories 10000] [--first 0] [--jobs 2] [--out FILE]

The first story with a wrong byte ends it, with its seed. Needs a C++ compiler and no GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.cuda_story import tell
from tests.fake_driver import driver

_AT_ONCE = 25


def tell_some(first: int, count: int) -> Counter[str]:
    """What happened in all of them together."""
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            found += tell(seed)
        except Exception as error:
            raise RuntimeError(f"story {seed}: {type(error).__name__}: {error}") from error
    return found


def tell_all(first: int, count: int, jobs: int) -> Counter[str]:
    """The same, in several processes. Raises RuntimeError with the seed of one that is wrong."""
    driver()
    starts = range(first, first + count, _AT_ONCE)
    if jobs == 1:
        return sum((tell_some(at, min(_AT_ONCE, first + count - at)) for at in starts), Counter())
    found: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(jobs, logging.disable) as pool:
        for some in pool.imap_unordered(partial(tell_some, count=_AT_ONCE), starts):
            found += some
            sys.stderr.write(f"\r{found['stories']} stories")
    sys.stderr.write("\n")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stories", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first story")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for the counts, JSON")
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    before = logging.root.manager.disable
    logging.disable()  # of what was refused
    try:
        found = tell_all(asked.first, asked.stories, asked.jobs)
    except RuntimeError as error:
        print(f"cuda-stories: {error}")
        return 1
    finally:
        logging.disable(before)
    counts = {
        "stories": found.pop("stories"),
        "wrong": 0,
        "seconds": round(time.monotonic() - begun),
        **dict(sorted(found.items())),
    }
    print(json.dumps(counts))
    if asked.out:
        asked.out.write_text(json.dumps(counts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
