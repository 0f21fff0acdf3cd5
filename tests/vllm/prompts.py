# SPDX-License-Identifier: Apache-2.0
"""Prompts made of a seed."""

from __future__ import annotations

from random import Random

FIRST_TOKEN, LAST_TOKEN = 16, 1000
"""Plain tokens of every model here."""


def random_tokens(seed: object, count: int) -> list[int]:
    """The same tokens for the same seed; prompts of different seeds share no chunk."""
    rng = Random(repr(seed))
    return [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]
