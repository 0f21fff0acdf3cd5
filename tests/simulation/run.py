# SPDX-License-Identifier: Apache-2.0
"""Many seeds: python -m tests.simulation.run [--seeds N] [--first SEED] [--steps N]
    [--groups [--cuts]]

With --groups it is a vLLM in small that runs, with models of several KV cache groups, one after
the other; with --cuts it takes less than it is offered.

A failure prints its seed; `--first SEED --seeds 1` plays it again.
"""

from __future__ import annotations

import argparse
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from tqdm import tqdm

from attnstore_lab.testing.dict_tier import MakeDictTier
from attnstore_vllm.tiers.tier_io import MakeTier
from tests.simulation.group_memory import MODELS
from tests.simulation.group_world import GroupWorld
from tests.simulation.world import World


def run(
    first: int, seeds: int, steps: int, *, progress: bool = False, tiers: Sequence[MakeTier] = ()
) -> Counter[str]:
    """What happened in all of them. Raises AssertionError, with the seed, if one goes wrong."""
    return _run(lambda seed: World(seed, more_tiers=tuple(tiers)), first, seeds, steps, progress)


def run_groups(
    model: str,
    first: int,
    seeds: int,
    steps: int,
    *,
    progress: bool = False,
    cuts: bool = False,
) -> Counter[str]:
    """The same for a model of several KV cache groups (group_memory.py: MODELS).

    Args:
        cuts: see GroupWorld.
    """
    groups = MODELS[model]
    return _run(lambda seed: GroupWorld(seed, groups, cuts), first, seeds, steps, progress)


def _run(
    make: Callable[[int], World | GroupWorld], first: int, seeds: int, steps: int, progress: bool
) -> Counter[str]:
    logging.disable(logging.ERROR)
    counts: Counter[str] = Counter()
    try:
        for seed in tqdm(range(first, first + seeds), unit="seed", disable=not progress):
            with pytest.MonkeyPatch.context() as patch:
                # The store's own dice: from the seed as well, so that it can be played again.
                dice = Random(seed)
                patch.setattr(secrets, "randbits", dice.getrandbits)
                world = make(seed)
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
    parser.add_argument("--groups", action="store_true", help="models of several KV cache groups")
    parser.add_argument("--cuts", action="store_true", help="vLLM takes less than it is offered")
    args = parser.parse_args()
    if args.groups:
        for model in MODELS:
            counts = run_groups(
                model, args.first, args.seeds, args.steps, progress=True, cuts=args.cuts
            )
            print(f"{model}: {args.seeds} seeds, no wrong byte: {dict(sorted(counts.items()))}")
        return
    tiers = [MakeDictTier(8)] if args.third_tier else []
    counts = run(args.first, args.seeds, args.steps, progress=True, tiers=tiers)
    print(f"{args.seeds} seeds, no wrong byte: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
