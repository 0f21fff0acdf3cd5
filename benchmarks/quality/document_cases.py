# SPDX-License-Identifier: Apache-2.0
"""Prompts that bring documents, and what they are asked: pure, before any engine is started.

    gap | document | gap | document | ... | what is asked

Texts: all of the prompt is one piece of held-out text, cut into gaps and documents, and the text
goes on behind it. Chains: the first half of the documents has pairs, the second half aliases of
their keys, in text; asked are all keys (one hop) and all aliases (two hops, of two documents).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.quality.data import Ids, take
from benchmarks.quality.evaluate import documents
from benchmarks.quality.recall import QUESTION
from benchmarks.quality.tokenizer import END_ID, Alphabet
from benchmarks.quality.two_hop import Chains

DOCUMENTS, LENGTH, GAP = 4, 96, 6
ANSWER = 32
"""Tokens of a greedy answer, and of the text that goes on."""
SLOT = 16
"""Tokens of a document that have one statement of a chain."""
CHAINS = DOCUMENTS // 2 * LENGTH // SLOT
BEFORE = (40, 155)
"""Tokens of other text that a document was computed behind."""
BEHIND = 130
"""Tokens of other text behind a document that is stored: its blocks are whole."""


@dataclass(frozen=True, slots=True)
class Case:
    """gaps, documents: token ids, a gap before each document. forced: what a model must say, so
    that its log-probabilities are heard. names: 1 or 2, the hops of each question; [] of texts.
    before, behind: other texts, one a document."""

    gaps: list[list[int]]
    documents: list[list[int]]
    forced: list[int]
    hops: list[int]
    before: list[list[int]]
    behind: list[list[int]]

    @property
    def prompt(self) -> list[int]:
        pairs = zip(self.gaps, self.documents, strict=True)
        return [token for pair in pairs for part in pair for token in part]

    def ahead(self, *, alone: bool) -> list[list[int]]:
        """Prompts that leave each document in the store.

        alone: nothing stands before it (Prompt Cache's and KVLink's documents).
        """
        parts = zip(self.before, self.documents, self.behind, strict=True)
        return [[*([] if alone else before), *one, *behind] for before, one, behind in parts]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def text_cases(held_out: dict[str, Ids], other: Ids, many: int, seed: int) -> list[Case]:
    """Args:
    other: text that documents were computed behind.
    """
    rng = np.random.default_rng((seed, 1))
    size = DOCUMENTS * (GAP + LENGTH)
    cases = []
    for piece in documents(held_out, size + ANSWER, many):
        gaps, found = _cut(piece[:size])
        cases.append(Case(gaps, found, piece[size:].tolist(), [], *_around(rng, other)))
    return cases


def chain_cases(
    held_out: dict[str, Ids], other: Ids, alphabet: Alphabet, many: int, seed: int
) -> list[Case]:
    rng = np.random.default_rng((seed, 2))
    texts = list(held_out.values())
    cases = []
    for n in range(many):
        text = take(texts[n % len(texts)], n, DOCUMENTS * (GAP + LENGTH))
        gaps, found = _cut(text)
        chains = Chains.draw(rng, CHAINS, alphabet)
        half = DOCUMENTS // 2
        pairs = [chains.pair(n) for n in rng.permutation(CHAINS)]
        aliases = [chains.alias(n) for n in rng.permutation(CHAINS)]
        for statements, some in ((pairs, found[:half]), (aliases, found[half:])):
            _state(rng, statements, some)
        asked, hops = _questions(rng, chains)
        cases.append(Case(gaps, found, asked, hops, *_around(rng, other)))
    return cases


def _cut(text: Ids) -> tuple[list[list[int]], list[list[int]]]:
    """Gaps and documents."""
    parts = text.reshape(DOCUMENTS, GAP + LENGTH)
    return parts[:, :GAP].tolist(), parts[:, GAP:].tolist()


def _state(
    rng: np.random.Generator, statements: Sequence[tuple[int, int]], found: list[list[int]]
) -> None:
    """Write a statement into each slot of the documents, over their text."""
    for n, statement in enumerate(statements):
        one, slot = divmod(n, LENGTH // SLOT)
        at = slot * SLOT + int(rng.integers(0, SLOT - 1))
        found[one][at : at + 2] = statement


def _questions(rng: np.random.Generator, chains: Chains) -> tuple[list[int], list[int]]:
    """What is asked and the right answers, and how many hops each takes."""
    names = [*chains.keys.tolist(), *chains.aliases.tolist()]
    values = chains.values.tolist()
    order = rng.permutation(len(names)).tolist()
    asked = [token for n in order for token in (END_ID, names[n], values[n % len(values)])]
    return asked, [1 + n // len(values) for n in order]


def _around(rng: np.random.Generator, other: Ids) -> tuple[list[list[int]], list[list[int]]]:
    """Texts that stand before and behind documents when they are stored: none has a token of
    another, or it would be found there and moved itself."""
    lengths = [*rng.integers(*BEFORE, DOCUMENTS).tolist(), *[BEHIND] * DOCUMENTS]
    start = int(rng.integers(0, len(other) - sum(lengths)))
    stops = np.cumsum(lengths) + start
    parts = [other[stop - n : stop].tolist() for n, stop in zip(lengths, stops, strict=True)]
    return parts[:DOCUMENTS], parts[DOCUMENTS:]


def answers_of(case: Case) -> range:
    """The places in `forced` that are answers of questions."""
    return range(QUESTION - 1, len(case.forced), QUESTION)
