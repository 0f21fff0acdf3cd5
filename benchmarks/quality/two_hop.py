# SPDX-License-Identifier: Apache-2.0
"""Two-hop recall: a value is paired with a key, and elsewhere the key gets an alias.

    ... value key ... text ... key alias ...    asked: END alias    the answer: value

Pairs and questions are as in recall.py, where each is one hop. An alias is a key that has no value
of its own: the token before it is the key that it stands for, which was paired before.

Asked for an alias, a model first finds the key, and with it the value. That is learned in minutes
only if the first hop is asked for, too: behind an early layer the key must be foretold
(HopLesson.bound). What an alias means can as well be found out where a document is read, and its KV
then hangs on what stood before it. Such models were tried, and not learned in the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.quality.data import Ids
from benchmarks.quality.recall import QUESTION
from benchmarks.quality.tokenizer import END_ID, NUM_KEYS, NUM_VALUES, Alphabet

CHAINS_MAX = 28
CHAIN = 10  # tokens: a pair, an alias, a question for each
GAP_MAX = 16  # tokens of text between two statements
NONE = -1
FIRST_HOP = 1
"""The layer, from 0, behind which the key of an asked alias should be known."""


@dataclass(frozen=True, slots=True)
class HopLesson:
    """As recall.Lesson; and bound: [length] the key of an asked alias; elsewhere NONE."""

    tokens: Ids
    answers: Ids
    noise: Ids
    bound: Ids


@dataclass(frozen=True, slots=True)
class Chains:
    """[chains] each; no key or alias comes twice."""

    values: Ids
    keys: Ids
    aliases: Ids

    @staticmethod
    def draw(rng: np.random.Generator, count: int, alphabet: Alphabet) -> Chains:
        names = rng.permutation(NUM_KEYS)[: 2 * count] + alphabet.keys.start
        values = rng.integers(0, NUM_VALUES, count) + alphabet.values.start
        return Chains(values, names[:count], names[count:])

    def pair(self, n: int) -> tuple[int, int]:
        return int(self.values[n]), int(self.keys[n])

    def alias(self, n: int) -> tuple[int, int]:
        return int(self.keys[n]), int(self.aliases[n])


def lesson(rng: np.random.Generator, text: Ids, alphabet: Alphabet, level: float) -> HopLesson:
    """A training sequence as long as `text`: statements between its tokens, then a question for
    each key and alias, as many as fit. In half of them all pairs come before all aliases."""
    length = len(text)
    most = max(2, min(CHAINS_MAX, length // CHAIN - 1))
    chains = Chains.draw(rng, int(rng.integers(2, most + 1)), alphabet)
    count = len(chains.values)
    if rng.random() < 0.5:
        order = np.concatenate([rng.permutation(count), rng.permutation(count)])
    else:
        order = rng.permutation(np.repeat(np.arange(count), 2))
    gap_max = min(round(level * GAP_MAX), max(0, length - CHAIN * count) // (2 * count))
    tokens = np.empty(length, np.int64)
    answers, noise = np.zeros(length, bool), np.zeros(length, bool)
    bound = np.full(length, NONE)
    is_text = np.full(length, True)
    at, seen = int(rng.integers(0, gap_max + 1)), set[int]()
    for which in order.tolist():
        is_alias = which in seen
        seen.add(which)
        tokens[at : at + 2] = chains.alias(which) if is_alias else chains.pair(which)
        is_text[at : at + 2] = False
        noise[max(at - 1, 0) : at + 2] = True
        at += 2 + int(rng.integers(0, gap_max + 1))
    names = np.concatenate((chains.keys, chains.aliases))
    for n in rng.permutation(2 * count).tolist():
        if at + QUESTION > length:
            break
        tokens[at : at + QUESTION] = END_ID, names[n], chains.values[n % count]
        is_text[at : at + QUESTION] = False
        noise[max(at - 1, 0) : at + QUESTION] = True
        noise[at + 1], answers[at + 1] = False, True
        if n >= count:
            bound[at + 1] = chains.keys[n % count]
        at += QUESTION
    tokens[is_text] = text[: is_text.sum()]
    return HopLesson(tokens, answers, noise, bound)
