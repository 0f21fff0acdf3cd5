# SPDX-License-Identifier: Apache-2.0
"""What a request computes or has in HBM, though it is stored, is used at once for all of it: the
same leaves DRAM afterwards as if each chunk had been used alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import NUM_KINDS
from attnstore_vllm.policy.visits import Run
from attnstore_vllm.types import Key
from tests.helpers import CHUNK_TOKENS, name_of, sequence_of, tokens_of
from tests.unit.tiers.test_saves_at_once import SLOTS, Logged

PROMPTS = 6
LENGTH = 8
ROUNDS = 40


def _names(number: int) -> list[ChunkName]:
    sequence = sequence_of(tokens_of(number, LENGTH * CHUNK_TOKENS))
    return [name_of(sequence, place) for place in range(LENGTH)]


@pytest.mark.parametrize("policy", ["attnstore", "lru", "fifo"])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_leave(policy: str, seed: int) -> None:
    def played(*, at_once: bool) -> tuple[Sequence[Key], int]:
        random, tiers = Random(seed), Logged(policy)
        num_used = 0
        for number in range(ROUNDS):
            tiers.now += random.choice([0.01, 1.0, 60.0])
            kind = random.randrange(NUM_KINDS)
            priority = random.choice([*Priority, *[Priority.NORMAL] * 8])
            run = Run(number, kind, tiers.now, False, priority)
            of_prompt = random.randrange(PROMPTS) if random.random() < 0.7 else PROMPTS + number
            names = _names(of_prompt)
            found: list[Chunk] = []
            for name in names:
                chunk = tiers.index.get(name.key)
                if chunk is None or chunk.dram.state is not State.READY:
                    break
                found.append(chunk)
            tiers.use(found, run)  # as it comes; another comes behind it, and runs later
            tiers.now += 0.001
            others = _names(random.randrange(PROMPTS))
            here = [c for c in map(tiers.index.get, [n.key for n in others]) if c is not None]
            if not set(here) & set(found):
                tiers.use(here, Run(1000 + number, kind, tiers.now, False))
            tiers.now += 0.001
            if at_once:
                known = tiers.use_stored(names, [run] * LENGTH)
                num_used += known
                names = names[known:]
            for name in names:
                chunk = tiers.begin_save(name, run, waits=True)
                if chunk is not None:
                    tiers.finish_save(chunk)
            tiers.write(random.choice([0, 3, 30]))
            tiers.check_integrity()
        for number in range(SLOTS // LENGTH + 1):  # all leave
            tiers.now += 1
            run = Run(ROUNDS + number, 0, tiers.now, False)
            for name in _names(1000 + number):
                tiers.write(1)
                chunk = tiers.begin_save(name, run)
                if chunk is not None:
                    tiers.finish_save(chunk)
        return tiers.left, num_used

    (alone, none), (at_once, num_used) = played(at_once=False), played(at_once=True)
    assert none == 0 and num_used > LENGTH
    assert at_once == alone and len(alone) > SLOTS


def test_it_ends_before_what_is_not_used_by_the_run_last() -> None:
    tiers, names = Logged("attnstore"), _names(1)
    run, other = Run(1, 0, 1.0, False), Run(2, 0, 2.0, False)
    chunks = [tiers.begin_save(name, run) for name in names[:6]]
    tiers.finish_save(*[chunk for chunk in chunks if chunk is not None])
    assert tiers.use_stored(names, [run] * LENGTH) == 6
    tiers.now = 2.0
    third = chunks[3]
    assert third is not None
    tiers.use([third], other)
    assert tiers.use_stored(names, [run] * LENGTH) == 3
    first = chunks[1]
    assert first is not None
    first.refused_by.add("nvme")  # it may be written now, which is looked at for each alone
    assert tiers.use_stored(names, [run] * LENGTH) == 1
