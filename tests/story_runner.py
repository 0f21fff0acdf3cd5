# SPDX-License-Identifier: Apache-2.0
"""Many random stories, each told by its seed, in several processes. The first that goes wrong ends
it."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

Tell = Callable[[int], Counter[str]]
"""Tells the story of a seed, and says how often each thing happened in it."""
_AT_ONCE = 25


def tell_some(first: int, count: int, tell: Tell) -> Counter[str]:
    """What happened in all of them together."""
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            found += tell(seed)
        except Exception as error:
            raise RuntimeError(f"story {seed}: {type(error).__name__}: {error}") from error
    return found


def tell_all(tell: Tell, first: int, count: int, jobs: int) -> Counter[str]:
    """The same, in several processes. Raises RuntimeError with the seed of one that is wrong."""
    starts = range(first, first + count, _AT_ONCE)
    if jobs == 1:
        some = (tell_some(at, min(_AT_ONCE, first + count - at), tell) for at in starts)
        return sum(some, Counter())
    found: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(jobs, logging.disable) as pool:
        tell_them = partial(tell_some, count=_AT_ONCE, tell=tell)
        for of_some in pool.imap_unordered(tell_them, starts):
            found += of_some
            sys.stderr.write(f"\r{found['stories']} stories")
    sys.stderr.write("\n")
    return found


def run(name: str, doc: str | None, tell: Tell, arguments: Sequence[str] | None) -> int:
    """The command `name`."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--stories", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first story")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for the counts, JSON")
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    before = logging.root.manager.disable
    logging.disable()  # of what was refused
    try:
        found = tell_all(tell, asked.first, asked.stories, asked.jobs)
    except RuntimeError as error:
        print(f"{name}: {error}")
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
