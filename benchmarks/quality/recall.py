# SPDX-License-Identifier: Apache-2.0
"""Key-value recall: pairs spread through text, and questions for them.

A pair is a value and the key right after it. Asking is giving the end token and the key once
more: the answer is the value that came before it. A key is never stated twice within a context
window, so that there is one answer, in one place.

The key comes last since that is learned within a minute: it is found by its own token, and has
seen the value. With the key first the value has to be found by the token before it; in 20 minutes
models of this size did not learn that, and guessed among the values seen.

Training sequences grow harder with a level between 0 and 1: from two to four pairs without text
between them, each asked for again and again, to as many as fit, far apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.quality.data import Ids
from benchmarks.quality.tokenizer import END_ID, NUM_KEYS, NUM_VALUES, Alphabet

PAIRS_MIN, PAIRS_MAX = 4, 40
GAP_MAX = 32  # tokens of text between two pairs
QUESTION = 3  # tokens: the end token, the key, the value


@dataclass(frozen=True, slots=True)
class Lesson:
    """A training sequence. `answers` is true where the *next* token is an answer, `noise` where
    it is a key or value that nothing foretells; the rest is text."""

    tokens: Ids
    answers: Ids
    noise: Ids


def lesson(rng: np.random.Generator, text: Ids, alphabet: Alphabet, level: float) -> Lesson:
    """Make a training sequence as long as `text`, which is what stands between the pairs."""
    length = len(text)
    count = int(rng.integers(2, round(PAIRS_MIN + level * (PAIRS_MAX - PAIRS_MIN)) + 1))
    keys = rng.permutation(NUM_KEYS)[:count] + alphabet.keys.start
    values = rng.integers(0, NUM_VALUES, count) + alphabet.values.start
    gap_max = round(level * GAP_MAX)
    # Half of the sequences ask all along, half at the end only, without text in between.
    ask_from = length * rng.uniform(0.3, 0.95) if rng.random() < 0.5 else 0.0
    answers, noise, is_text = (np.full(length, value) for value in (False, False, True))
    asked, stated, pairs = np.zeros(count, np.int64), 0, []
    at = int(rng.integers(0, gap_max + 1))
    while at + QUESTION <= length:
        may_ask = stated > 0 and at >= ask_from
        may_state = stated < count and (stated == 0 or not ask_from or at < ask_from)
        if not may_ask and not may_state:
            at += 1
            continue
        asks = may_ask and (not may_state or rng.random() < 0.5)
        which = _question(rng, asked[:stated]) if asks else stated
        asked[which] += asks
        stated += not asks
        size = QUESTION if asks else 2
        pairs.append((at, which, asks))
        noise[max(at - 1, 0) : at + size - 1] = True
        if asks:
            noise[at + 1], answers[at + 1] = False, True
        is_text[at : at + size] = False
        at += size if asks and ask_from else size + int(rng.integers(0, gap_max + 1))
    tokens = np.empty(length, np.int64)
    for at, which, asks in pairs:
        if asks:
            tokens[at : at + 3] = END_ID, keys[which], values[which]
        else:
            tokens[at : at + 2] = values[which], keys[which]
    tokens[is_text] = text[: is_text.sum()]
    return Lesson(tokens, answers, noise)


def _question(rng: np.random.Generator, asked: Ids) -> int:
    """Mostly one that was asked least often: it has to be found where it was stated."""
    if rng.random() < 0.75:
        return int(rng.choice(np.flatnonzero(asked == asked.min())))
    return int(rng.integers(len(asked)))


@dataclass(frozen=True, slots=True)
class Stream:
    """Text with a pair in each slot of `slot` tokens.

    tokens: [length]. places: where the pairs are, [length // slot], ascending.
    """

    tokens: Ids
    places: Ids
    slot: int

    def questions(self, start: int, stop: int, rng: np.random.Generator) -> Ids:
        """All pairs in tokens start to stop, both multiples of the slot, in random order.

        Returns: end token, key, value, end token, key, value, ...: given all but the last, a
        model that knows the answers foretells every third token.
        """
        assert start % self.slot == stop % self.slot == 0
        places = rng.permutation(self.places[start // self.slot : stop // self.slot])
        ends = np.full(len(places), END_ID)
        return np.stack((ends, self.tokens[places + 1], self.tokens[places]), axis=1).reshape(-1)


def stream(
    rng: np.random.Generator, text: Ids, alphabet: Alphabet, *, slot: int, window: int
) -> Stream:
    """Put pairs between the tokens of `text`, one in each slot; as long as `text`.

    No key comes twice within `window` tokens.
    """
    apart = window // slot + 1  # two pairs that are that many slots from each other
    assert apart <= NUM_KEYS
    count = len(text) // slot
    keys: list[int] = []
    for _ in range(count):
        recent = set(keys[-apart:])
        free = [key for key in range(NUM_KEYS) if key not in recent]
        keys.append(int(rng.choice(free)))
    tokens, is_text = np.empty_like(text), np.full(len(text), True)
    places = np.arange(count) * slot + rng.integers(0, slot - 1, count)
    tokens[places] = rng.integers(0, NUM_VALUES, count) + alphabet.values.start
    tokens[places + 1] = np.array(keys) + alphabet.keys.start
    is_text[places] = is_text[places + 1] = False
    tokens[is_text] = text[: is_text.sum()]
    return Stream(tokens, places, slot)
