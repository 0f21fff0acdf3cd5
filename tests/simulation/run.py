# SPDX-License-Identifier: Apache-2.0
"""Many seeds: python -m tests.simulation.run [--seeds N] [--first SEED] [--steps N]

A failure prints its seed; `--first SEED --seeds 1` plays it again.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from attnstore_vllm.store.tier_io import MakeTier
from attnstore_vllm.testing.dict_tier import MakeDictTier
from tests.simulation.world import World


def run(
    first: int, seeds: int, steps: int, *, progress: bool = False, tiers: Sequence[MakeTier] = ()
) -> Counter[str]:
    """What happened in all of them. Raises AssertionError, with the seed, if one goes wrong."""
    logging.disable(logging.ERROR)
    counts: Counter[str] = Counter()
    try:
        for seed in tqdm(range(first, first + seeds), unit="seed", disable=not progress):
            world = World(seed, more_tiers=tuple(tiers))
            try:
                world.run(steps)
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
            counts.update(world.counts)
    finally:
        logging.disable(logging.NOTSET)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate the store over a failing disk.")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--third-tier", action="store_true", help="with one made of a dictionary")
    args = parser.parse_args()
    tiers = [MakeDictTier(8)] if args.third_tier else []
    counts = run(args.first, args.seeds, args.steps, progress=True, tiers=tiers)
    print(f"{args.seeds} seeds, no wrong byte: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
