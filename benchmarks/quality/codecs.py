# SPDX-License-Identifier: Apache-2.0
"""What an approximate codec costs the answers: perplexity and recall behind KV that came from it.

The first half of each window is computed, its KV goes through the codec as the store's would (the
native encoder and decoder, bf16), and the second half is foretold from what comes back. Every
codec gets the same documents and questions, so differences are of documents, as are their
confidence intervals. `2 bits` is a check that the measure can fail: the same groups and scales,
and three values a number. Answers through a real server, with int8 and fp8, are in
served_codecs.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from attnstore_lab.bench.summary import table
from attnstore_vllm.io.codec import CODECS, PayloadShape, Quantized
from benchmarks.quality.data import load_held_out
from benchmarks.quality.evaluate import (
    BATCH,
    Measured,
    Settings,
    ask,
    losses_of,
    make_work,
    perplexity_ratio,
    points,
    summary,
)
from benchmarks.quality.export import load
from benchmarks.quality.methods import Method, Truncation, Window
from benchmarks.quality.model import Kv, Llama
from benchmarks.quality.served_codecs import measure_served_codec
from benchmarks.report import machine

EXACT = "exact"
SERVED = ("int8", "fp8")
RATIO_GOAL, POINTS_GOAL = 1.005, 2.0
Change = Callable[[list[Kv]], list[Kv]]


def through(name: str) -> Change:
    """KV as the store gives it back with this codec."""
    plain = CODECS[name]
    assert isinstance(plain, Quantized)

    def change(layers: list[Kv]) -> list[Kv]:
        sequences, heads, tokens, dim = layers[0].k.shape
        step = heads * dim
        sides = (
            (0, dim, tokens, 0, step, dim, 0, 1),
            (tokens * step, dim, tokens, 0, step, dim, 0, 1),
        )
        codec = plain.of(PayloadShape("bfloat16", len(layers), 1, tokens, heads, dim, *sides))
        back = []
        for number in range(sequences):
            kv = torch.stack([torch.stack((kv.k[number], kv.v[number])) for kv in layers])
            # [layers, K and V, tokens, heads, dim]
            flat = kv.transpose(2, 3).to(torch.bfloat16).contiguous()
            raw = memoryview(flat.view(torch.uint8).numpy().tobytes())
            out, decoded = memoryview(bytearray(2 * len(raw))), bytearray(len(raw))
            size = codec.encode(raw, out, tokens)
            assert size and codec.decode(out[:size], memoryview(decoded))
            found = torch.frombuffer(decoded, dtype=torch.bfloat16).view(flat.shape)
            back.append(found.transpose(2, 3).to(layers[0].k.dtype))
        whole = torch.stack(back, 1)
        return [Kv(k, v) for k, v in whole.transpose(1, 2)]

    return change


def too_coarse(layers: list[Kv]) -> list[Kv]:
    """-1, 0 or 1 times the largest number: of a channel of K, of a token and head of V."""

    def rounded(numbers: torch.Tensor, dim: int) -> torch.Tensor:
        scale = numbers.abs().amax(dim, keepdim=True).clamp_min(1e-30)
        return (numbers / scale).round() * scale

    return [Kv(rounded(kv.k, 2), rounded(kv.v, 3)) for kv in layers]


CHANGES: dict[str, Change] = {
    EXACT: lambda layers: layers,
    "int8": through("int8"),
    "fp8": through("fp8"),
    "2 bits": too_coarse,
}


@torch.no_grad()
def measure(model: Llama, work: Any, settings: Settings, change: Change) -> Measured:
    found = Measured()
    half = model.shape.window // 2 // settings.slot * settings.slot
    plain = Truncation(model.shape.window, settings.slot, Method.TT, settings.stored)
    for at in range(0, len(work.texts), BATCH):
        texts = np.stack([text[: model.shape.window] for text in work.texts[at : at + BATCH]])
        tokens = torch.from_numpy(texts)
        window = Window(model, plain, tokens[:, :half])
        window.used = change(window.used)
        logits = model.lm_head(window.feed(tokens[:, half:-1]))
        loss = losses_of(logits, tokens[:, half + 1 :]).mean(1).double().numpy()
        found.losses.setdefault(1, []).append(loss)
    for at in range(0, len(work.streams), BATCH):
        streams = work.streams[at : at + BATCH]
        window = Window(
            model, plain, torch.from_numpy(np.stack([s.tokens[:half] for s in streams]))
        )
        window.used = change(window.used)
        rng = np.random.default_rng((settings.seed, at))
        asked = np.stack([s.questions(0, half, rng) for s in streams])
        found.right.setdefault(1, []).append(ask(model, window, asked))
    return found


def measure_codecs(directory: Path, settings: Settings, *, served: int = 0) -> dict[str, Any]:
    """Of the model in `directory`, as `train` left it there, on what it has not seen.

    Args:
        served: documents that a real server is asked for, with each codec.
    """
    began = _now()
    model, held_out = load(directory), load_held_out(directory)
    many = settings.documents
    work = make_work(model, held_out, settings, settings.curve_ratio, many, many)
    found = {name: measure(model, work, settings, change) for name, change in CHANGES.items()}
    exact = found[EXACT]
    through_server = measure_servers(directory, served) if served else []
    return {
        "measured_at": began,
        "machine": machine(),
        "parameters": model.num_parameters,
        "window": model.shape.window,
        "documents": len(work.texts),
        "streams": len(work.streams),
        "codecs": {
            name: summary(one, 1)
            | {
                "perplexity_ratio": perplexity_ratio(one.loss(1), exact.loss(1)),
                "recall_points_lost": points(exact.accuracy(1), one.accuracy(1)),
            }
            for name, one in found.items()
        },
        "served": through_server,
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def measure_servers(directory: Path, many: int) -> list[dict[str, Any]]:
    """One entry a codec, of a real server that is asked for so many documents."""
    model, held_out = load(directory), load_held_out(directory)
    found = []
    with tqdm(total=many * len(SERVED), desc="server", unit="document") as bar:
        for codec in SERVED:
            window = model.shape.window
            one = measure_served_codec(codec, directory, held_out, window, many, bar.update)
            found.append({"measured_at": _now(), "machine": machine()} | one)
    return found


def tables(result: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [("", "perplexity", "over exact", "recall", "points lost", "")]
    for name, one in result["codecs"].items():
        ratio, lost = one["perplexity_ratio"], one["recall_points_lost"]
        is_reached = ratio["value"] <= RATIO_GOAL and lost["value"] <= POINTS_GOAL
        rows.append(
            (
                name,
                f"{one['perplexity']:.2f}",
                *(f"{x['value']:.4f} ({x['low']:.4f} to {x['high']:.4f})" for x in (ratio,)),
                f"{one['recall']:.1%}",
                f"{lost['value']:.2f} ({lost['low']:.2f} to {lost['high']:.2f})",
                "" if name == EXACT else "reached" if is_reached else "MISSED",
            )
        )
    return f"{table(rows)}\n\n{served_table(result['served'])}"


def served_table(served: list[dict[str, Any]]) -> str:
    """Greedy answers of a real server, beside those that rounding alone changes."""
    rows: list[tuple[str, ...]] = [("same tokens as computed", "", "whole answers", "first tokens")]
    for one in served:
        for name, who in (("near", one["codec"]), ("again", f"{one['codec']}, exact KV")):
            found = one["agreement"][name]
            same = found["same_tokens"]
            rows.append(
                (
                    who,
                    f"{same['value']:.3f} ({same['low']:.3f} to {same['high']:.3f})",
                    f"{found['whole_answer_equal']:.2f}",
                    f"{found['first_token_equal']:.2f}",
                )
            )
    return table(rows)
