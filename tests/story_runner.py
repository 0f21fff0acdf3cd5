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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

Tell = Callable[[int], Counter[str]]
"""Tells the story of a seed, and says how often each thing happened in it."""
_AT_ONCE = 25


def tell_some(first: int, stop: int, tell: Tell) -> Counter[str]:
    """What happened in those from `first` together: at most _AT_ONCE, none from `stop` on."""
    found: Counter[str] = Counter()
    for seed in range(first, min(first + _AT_ONCE, stop)):
        try:
            found += tell(seed)
        except Exception as error:
            raise RuntimeError(f"story {seed}: {type(error).__name__}: {error}") from error
    return found


def tell_all(tell: Tell, first: int, count: int, jobs: int) -> Counter[str]:
    """The same, in several processes. Raises RuntimeError with the seed of one that is wrong."""
    begun = time.monotonic()
    found: Counter[str] = Counter()
    starts = range(first, first + count, _AT_ONCE)
    with ExitStack() as undo:
        if jobs == 1:
            some: Iterator[Counter[str]] = (tell_some(at, first + count, tell) for at in starts)
        else:
            pool = multiprocessing.get_context("spawn").Pool(jobs, logging.disable)
            undo.enter_context(pool)
            some = pool.imap_unordered(partial(tell_some, stop=first + count, tell=tell), starts)
        for of_some in some:
            found += of_some
            seconds = time.monotonic() - begun
            sys.stderr.write(f"\r{found['stories']} of {count} stories, {seconds:.0f} s")
    sys.stderr.write("\n")
    return found


def run(name: str, doc: str | None, tell: Tell, arguments: Sequence[str] | None) -> int:
    """The command `name`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first story")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true", help="all counts, as JSON")
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
    seconds = round(time.monotonic() - begun)
    if asked.json:
        counts = {"stories": found.pop("stories"), "wrong": 0, "seconds": seconds}
        print(json.dumps(counts | dict(sorted(found.items())), indent=1))
    else:
        print(f"{name}: {found['stories']} stories, 0 wrong, {seconds} s")
    return 0
