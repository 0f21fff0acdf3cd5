# SPDX-License-Identifier: Apache-2.0
"""One run of all measurements of a model's directory: what goes into results/quality.json."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.quality.data import Ids, load_held_out
from benchmarks.quality.evaluate import (
    BATCH,
    Measured,
    Settings,
    Work,
    ask,
    make_work,
    perplexity_ratio,
    points,
    summary,
    text_losses,
)
from benchmarks.quality.export import load
from benchmarks.quality.methods import Method, Recompute, Truncation, Window, truncations
from benchmarks.quality.model import Llama
from benchmarks.quality.served import measure_served
from benchmarks.report import machine


def measure(directory: Path, settings: Settings, *, served: int = 0) -> dict[str, Any]:
    """Measure the model in `directory`, as `train` left it there, on what it has not seen.

    Args:
        served: documents that a real server is asked for, at each ratio.
    """
    began = time.time()
    model, held_out = load(directory), load_held_out(directory)
    works = [
        make_work(model, held_out, settings, r, settings.documents, settings.recall_documents)
        for r in settings.ratios
    ]
    few = settings.curve_documents
    for_curve = make_work(model, held_out, settings, settings.curve_ratio, few, few)
    recomputes = [Recompute()]
    for tokens in settings.curve_tokens:
        recomputes += [Recompute(first=tokens), Recompute(last=tokens)]
    total = len(Method) * sum(work.batches for work in works)
    total += (1 + len(recomputes)) * for_curve.batches
    with tqdm(total=total, desc="evaluate", unit="batch") as bar:
        cells, layers = [], []
        for work in works:
            found = {method: work.measure(method, bar.update) for method in Method}
            cells += [cell(work, found, overflow) for overflow in settings.overflows]
            layers += differences(work)
        baseline = for_curve.measure(Method.TT, bar.update)
        curve = []
        for recompute in recomputes:
            measured = for_curve.measure(Method.CA, bar.update, recompute)
            curve += [curve_point(recompute, measured, baseline, n) for n in settings.overflows]
    through_server: list[dict[str, Any]] = []
    if served:
        with tqdm(total=served * len(settings.ratios), desc="server", unit="document") as bar:
            through_server = measure_served(
                directory, held_out, model.shape.window, settings, served, bar.update
            )
    return {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "took_s": round(time.time() - began),
        "machine": machine(),
        "settings": _settings(settings),
        "model": about(model, held_out, works[0]),
        "cells": cells,
        "curve": curve,
        "layers": layers,
        "served": through_server,
    }


def cell(work: Work, found: dict[Method, Measured], overflow: int) -> dict[str, Any]:
    """The three methods at one ratio, after so many overflows."""
    recomputed = found[Method.TT]
    others = [method for method in Method if method is not Method.TT]
    window = work.model.shape.window
    drop = work.settings.drop(work.ratio, window)
    return {
        "ratio": work.ratio,
        "overflows": overflow,
        "documents": len(work.texts),
        "tokens": len(work.texts) * (drop - 1),
        "questions": len(work.streams) * ((window - drop) // work.settings.slot),
        "methods": {method.value: summary(found[method], overflow) for method in Method},
        "perplexity_ratio": {
            method.value: perplexity_ratio(found[method].loss(overflow), recomputed.loss(overflow))
            for method in others
        },
        "recall_points_lost": {
            method.value: points(recomputed.accuracy(overflow), found[method].accuracy(overflow))
            for method in others
        },
    }


def curve_point(
    recompute: Recompute, measured: Measured, baseline: Measured, overflow: int
) -> dict[str, Any]:
    """CA with a little recomputed, against TT."""
    return {
        "first": recompute.first,
        "last": recompute.last,
        "overflows": overflow,
        "perplexity_ratio": perplexity_ratio(measured.loss(overflow), baseline.loss(overflow)),
        "recall_points_lost": points(baseline.accuracy(overflow), measured.accuracy(overflow)),
    }


@torch.no_grad()
def differences(work: Work) -> list[dict[str, Any]]:
    """How far CA's K and V are from TT's in each layer: the norm of the difference over TT's."""
    settings, model = work.settings, work.model
    window = model.shape.window
    streams = torch.from_numpy(np.stack(work.texts[:BATCH]))
    both: list[list[tuple[int, Window]]] = []
    for method in (Method.CA, Method.TT):
        drop = settings.drop(work.ratio, window)
        truncation = Truncation(window, drop, method, settings.stored)
        both.append(list(truncations(model, streams, truncation, settings.overflows)))
    lines = []
    for (overflow, reused), (_, recomputed) in zip(*both, strict=True):
        pairs = list(zip(reused.used, recomputed.used, strict=True))
        lines.append(
            {
                "ratio": work.ratio,
                "overflows": overflow,
                "k": [_distance(a.k, b.k) for a, b in pairs],
                "v": [_distance(a.v, b.v) for a, b in pairs],
            }
        )
    return lines


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@torch.no_grad()
def about(model: Llama, held_out: dict[str, Ids], work: Work) -> dict[str, Any]:
    """What the model can do in a window that nothing was cut from."""
    shape, settings = model.shape, work.settings
    perplexity = {
        name: math.exp(float(text_losses(model, text, settings.documents).mean()))
        for name, text in held_out.items()
    }
    plain = Truncation(shape.window, settings.slot, Method.TT, settings.stored)
    half = shape.window // 2 // settings.slot * settings.slot
    right = []
    for at in range(0, len(work.streams), BATCH):
        streams = work.streams[at : at + BATCH]
        tokens = torch.from_numpy(np.stack([s.tokens[:half] for s in streams]))
        rng = np.random.default_rng((settings.seed, at))
        asked = np.stack([s.questions(0, half, rng) for s in streams])
        right.append(ask(model, Window(model, plain, tokens), asked))
    return {
        "parameters": model.num_parameters,
        "layers": shape.layers,
        "window": shape.window,
        "vocabulary": shape.vocabulary,
        "perplexity": perplexity,
        "recall": float(np.concatenate(right).mean()),
    }


def _settings(settings: Settings) -> dict[str, Any]:
    stored = "fp32" if settings.stored is None else str(settings.stored).removeprefix("torch.")
    return {
        "stored": stored,
        "seed": settings.seed,
        "slot": settings.slot,
        "curve_ratio": settings.curve_ratio,
        "curve_documents": settings.curve_documents,
    }
