# SPDX-License-Identifier: Apache-2.0
"""benchmarks/quality documents: lessons of two hops, prompts with documents, and their figures."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quality import documents
from benchmarks.quality.document_cases import (
    CHAINS,
    DOCUMENTS,
    GAP,
    LENGTH,
    Case,
    answers_of,
    chain_cases,
    text_cases,
)
from benchmarks.quality.document_engine import Said
from benchmarks.quality.tokenizer import END_ID, VOCABULARY_MIN, Alphabet
from benchmarks.quality.two_hop import NONE, lesson

ALPHABET = Alphabet(VOCABULARY_MIN)
SIZE = DOCUMENTS * (GAP + LENGTH)


def prose(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 200, length)


def resolve(tokens: list[int], name: int) -> tuple[int, int]:
    """By the definition: the value that a name comes to, and in how many hops."""
    before = tokens[tokens.index(name) - 1]
    if before in ALPHABET.values:
        return before, 1
    value, hops = resolve(tokens, before)
    return value, hops + 1


@pytest.mark.parametrize("length", [33, 129, 513])
@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_lessons_have_the_right_answers(length: int, level: float) -> None:
    hops = set[int]()
    for seed in range(20):
        one = lesson(np.random.default_rng(seed), prose(length), ALPHABET, level)
        tokens = one.tokens.tolist()
        end = tokens.index(END_ID)
        for at in np.flatnonzero(one.answers).tolist():
            value, num = resolve(tokens[:end], tokens[at])
            assert tokens[at + 1] == value
            assert tokens[at - 1] == END_ID
            hops.add(num)
            first = tokens[tokens.index(tokens[at]) - 1] if num == 2 else NONE
            assert one.bound[at] == first
        assert not (one.bound != NONE)[~one.answers].any()
        assert not (one.answers & one.noise).any()
    assert hops == {1, 2}


def test_texts_go_on_behind_the_prompt() -> None:
    text = prose(5 * (SIZE + 32))
    cases = text_cases({"": text}, prose(2000, 1), 4, 0)
    assert len(cases) == 4
    for case in cases:
        whole = [*case.prompt, *case.forced]
        assert "".join(map(chr, whole)) in "".join(map(chr, text.tolist()))
        assert case.hops == []


def test_chains_are_asked_over_two_documents() -> None:
    (case,) = chain_cases({"": prose(900)}, prose(2000, 1), ALPHABET, 1, 0)
    half = DOCUMENTS // 2
    pairs, aliases = (
        [token for document in some for token in document]
        for some in (case.documents[:half], case.documents[half:])
    )
    assert sorted(case.hops) == [1] * CHAINS + [2] * CHAINS
    for at, hops in zip(answers_of(case), case.hops, strict=True):
        name, value = case.forced[at - 1], case.forced[at]
        assert resolve(case.prompt, name) == (value, hops)
        assert (name in pairs, name in aliases) == ((True, True) if hops == 1 else (False, True))


def test_documents_are_stored_behind_other_texts_or_alone() -> None:
    (case,) = chain_cases({"": prose(900)}, prose(2000, 1), ALPHABET, 1, 0)
    for alone in (False, True):
        ahead = case.ahead(alone=alone)
        assert len(ahead) == DOCUMENTS
        for one, before, document in zip(ahead, case.before, case.documents, strict=True):
            start = 0 if alone else len(before)
            assert one[start : start + LENGTH] == document
            assert len(one) - start - LENGTH >= 128, "whole blocks of a document are stored"


def test_rows_with_equal_settings_share_an_engine() -> None:
    found = list(documents.engines(documents.ROWS))
    assert [row for some in found for row in some] == list(documents.ROWS)
    for some in found:
        assert len(set(map(documents.settings_of, some))) == 1
    assert len({documents.settings_of(some[0]) for some in found}) == len(found)


def test_figures_of_a_row() -> None:
    empty: list[list[int]] = []
    text = Case(empty, empty, [1, 2], [], empty, empty)
    asked = Case(empty, empty, [0, 5, 6, 0, 7, 8, 0, 9, 6], [1, 2, 2], empty, empty)
    cases = [text, text, asked]

    def said(losses: float, ranks: list[int], greedy: list[list[int]]) -> list[Said]:
        forced = [Said([1, 2], [losses, 0.5], [1, 1], 7, 7, 7) for _ in range(2)]
        heard = [9, 9, ranks[0], 9, 9, ranks[1], 9, 9, ranks[2]]
        answers = Said(asked.forced, [0.0] * 9, heard, 7, 7, 7)
        return [*forced, answers, *(Said(one, [], [], 7, 7, 7) for one in greedy)]

    full = said(0.5, [1, 1, 1], [[1, 2, 3, 4], [1, 2, 3, 4]])
    row = said(0.7, [1, 2, 1], [[1, 2, 3, 4], [1, 2, 9, 4]])
    found = documents.figures(row, full, cases)
    assert found["whole_answer_equal"] == {"value": 50.0, "standard_error": 50.0}
    assert found["equal_until_first_difference"]["value"] == 0.75
    assert found["perplexity_over_full"]["value"] == pytest.approx(np.exp(0.1))
    assert found["key_recall"]["value"] == 100.0
    assert found["two_hop_recall"]["value"] == 50.0
    assert found["two_hop_points_lost"]["value"] == 50.0
    assert found["key_recall_points_lost"]["value"] == 0.0


def test_a_standard_error_is_of_independent_cases() -> None:
    values = np.random.default_rng(0).normal(3, 2, 10_000)
    mean, error = documents.mean_of(values)
    assert mean == pytest.approx(3, abs=0.1)
    assert error == pytest.approx(0.02, rel=0.05)
