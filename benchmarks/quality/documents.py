# SPDX-License-Identifier: Apache-2.0
"""What reuse of documents costs the answers, through an engine with our connector.

Every row gets the same prompts, of which the first is computed whole: differences are of cases,
and so are their standard errors. document_cases.py has the prompts, document_engine.py the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.data import ROOT, Corpus
from benchmarks.quality.document_cases import (
    ANSWER,
    DOCUMENTS,
    GAP,
    LENGTH,
    Case,
    answers_of,
    chain_cases,
    text_cases,
)
from benchmarks.quality.document_engine import FAULTS, Row, Said
from benchmarks.quality.evaluate import Scores
from benchmarks.quality.export import load
from benchmarks.quality.served import equal
from benchmarks.quality.tokenizer import Alphabet
from benchmarks.report import machine

FULL = "full prefill"
ROWS = (
    Row(name=FULL),
    Row(name="full, from the store", stored="prompt"),
    Row(name="none", stored="behind"),
    Row(name="standalone: none", stored="alone"),
    Row(name="first 5 %", stored="behind", recompute=0.05),
    Row(name="first 15 %", stored="behind", recompute=0.15),
    Row(name="standalone: first 15 %", stored="alone", recompute=0.15),
    Row(name="first 30 %", stored="behind", recompute=0.3),
    Row(name="selected 5 %", stored="behind", recompute=0.05, recompute_by="deviation"),
    Row(name="selected 15 %", stored="behind", recompute=0.15, recompute_by="deviation"),
    Row(name="standalone: selected 15 %", stored="alone", recompute=0.15, recompute_by="deviation"),
    Row(name="selected 30 %", stored="behind", recompute=0.3, recompute_by="deviation"),
    Row(name="standalone: selected 30 %", stored="alone", recompute=0.3, recompute_by="deviation"),
    *(Row(name=fault, stored="behind", fault=fault) for fault in FAULTS),
)
"""Rows that follow each other with equal settings share an engine."""
ENGINE_DEADLINE_S = 3600.0


def measure(directory: Path, texts: int, chains: int, seed: int = 0) -> dict[str, Any]:
    """Measure the model in `directory`, as `train --two-hops` left it there.

    Args:
        texts, chains: cases of each kind.
    """
    began = time.time()
    model, corpus = load(directory), Corpus.load(directory)
    alphabet = Alphabet(model.shape.vocabulary)
    cases = text_cases(corpus.held_out, corpus.train, texts, seed)
    num_texts = len(cases)
    cases += chain_cases(corpus.held_out, corpus.train, alphabet, chains, seed)
    found = dict[str, list[Said]]()
    for some in engines(ROWS):
        found |= ask(directory, model.shape.window, some, cases)
    return {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "took_s": round(time.time() - began),
        "machine": machine(),
        "model": {
            "parameters": model.num_parameters,
            "layers": model.shape.layers,
            "window": model.shape.window,
        },
        "prompt": {
            "documents": DOCUMENTS,
            "document_tokens": LENGTH,
            "gap_tokens": GAP,
            "answer_tokens": ANSWER,
        },
        "texts": num_texts,
        "chains": len(cases) - num_texts,
        "questions": sum(len(case.hops) for case in cases),
        "rows": [asdict(row) | figures(found[row.name], found[FULL], cases) for row in ROWS],
    }


def settings_of(row: Row) -> tuple[float | str, str, str]:
    """What an engine is started with."""
    return row.recompute, row.recompute_by, row.fault


def engines(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows that one engine serves."""
    for _, some in groupby(rows, key=settings_of):
        yield list(some)


def ask(
    directory: Path, window: int, rows: Sequence[Row], cases: Sequence[Case]
) -> Iterator[tuple[str, list[Said]]]:
    """Start an engine and ask it. Raises: CalledProcessError, its log is on stderr."""
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as name:
        work, found = Path(name) / "work.json", Path(name) / "found.json"
        what = {
            "model": str(directory),
            "window": window,
            "rows": [asdict(row) for row in rows],
            "cases": [case.as_json() for case in cases],
        }
        work.write_text(json.dumps(what), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "benchmarks.quality.document_engine",
            str(work),
            str(found),
        ]
        subprocess.run(command, cwd=ROOT, check=True, timeout=ENGINE_DEADLINE_S)
        for row, answers in json.loads(found.read_text(encoding="utf-8")).items():
            yield row, [Said(**one) for one in answers]


def figures(said: Sequence[Said], full: Sequence[Said], cases: Sequence[Case]) -> dict[str, Any]:
    """Of one row, beside the row that computes all.

    said: for each case its forced answer, then for each text its greedy one.
    """
    texts = [n for n, case in enumerate(cases) if not case.hops]
    same = np.array(
        [
            equal(a.tokens, b.tokens) / len(b.tokens)
            for a, b in zip(said[len(cases) :], full[len(cases) :], strict=True)
        ]
    )
    losses = np.array([np.mean(said[n].losses) - np.mean(full[n].losses) for n in texts])
    mean, error = mean_of(losses)
    one, two = right(said, cases, 1), right(said, cases, 2)
    return {
        "moved_tokens": round(float(np.mean([one.moved for one in said])), 1),
        "own_pass_tokens": round(float(np.mean([one.passed for one in said])), 1),
        "whole_answer_equal": _spread(same == 1, 100),
        "equal_until_first_difference": _spread(same),
        "perplexity": float(np.exp(np.mean([np.mean(said[n].losses) for n in texts]))),
        "perplexity_over_full": {
            "value": float(np.exp(mean)),
            "standard_error": float(np.exp(mean) * error),
        },
        "key_recall": _spread(one, 100),
        "key_recall_points_lost": _spread(right(full, cases, 1) - one, 100),
        "two_hop_recall": _spread(two, 100),
        "two_hop_points_lost": _spread(right(full, cases, 2) - two, 100),
    }


def right(said: Sequence[Said], cases: Sequence[Case], hops: int) -> Scores:
    """The share of right answers to questions of so many hops, by case."""
    shares = []
    for one, case in zip(said, cases, strict=False):
        if case.hops:
            ranks = [one.ranks[at] for at in answers_of(case)]
            asked = [rank for rank, n in zip(ranks, case.hops, strict=True) if n == hops]
            shares.append(float(np.mean([rank == 1 for rank in asked])))
    return np.array(shares)


def mean_of(values: Scores) -> tuple[float, float]:
    """The mean of independent cases, and its standard error."""
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return float(values.mean()), float(error)


def _spread(values: Any, unit: float = 1.0) -> dict[str, float]:
    mean, error = mean_of(np.asarray(values, dtype=np.float64))
    return {"value": unit * mean, "standard_error": unit * error}
