# SPDX-License-Identifier: Apache-2.0
"""Perplexity and recall after truncation, for each method, on text the model has not seen.

Every method gets the same streams: within a document, and between methods, the tokens scored are
the same. Differences are of documents, and so are their confidence intervals (bootstrap over
documents, paired). The first token after a cut is not scored: what foretells it is the last token
kept, which CA and NKVT do not compute again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks.quality.data import Ids, take
from benchmarks.quality.methods import (
    NOTHING,
    Method,
    Recompute,
    Truncation,
    Window,
    stream_tokens,
    truncations,
)
from benchmarks.quality.model import Llama
from benchmarks.quality.recall import QUESTION, Stream, stream
from benchmarks.quality.tokenizer import Alphabet

Scores = NDArray[np.float64]
"""One number a document."""

BATCH = 8
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75)
    overflows: tuple[int, ...] = (1, 10)
    documents: int = 64  # for perplexity; fewer if there is not so much text
    recall_documents: int = 64
    curve_documents: int = 32
    curve_ratio: float = 0.5
    curve_tokens: tuple[int, ...] = (4, 16, 64)
    slot: int = 16  # tokens of the recall streams to each pair
    stored: torch.dtype | None = torch.bfloat16
    seed: int = 0

    def drop(self, ratio: float, window: int) -> int:
        """How many tokens this ratio cuts: whole slots."""
        return max(1, round(ratio * window / self.slot)) * self.slot


@dataclass(slots=True)
class Measured:
    """What one method did, by overflow: mean loss in nats, and share of right answers."""

    losses: dict[int, list[Scores]] = field(default_factory=dict)
    right: dict[int, list[Scores]] = field(default_factory=dict)

    def loss(self, overflow: int) -> Scores:
        return np.concatenate(self.losses[overflow])

    def accuracy(self, overflow: int) -> Scores:
        return np.concatenate(self.right[overflow])


@torch.no_grad()
def losses_after(
    model: Llama, streams: torch.Tensor, truncation: Truncation, wanted: Sequence[int]
) -> Iterator[tuple[int, Scores]]:
    """(overflow, mean loss of the text that follows it), streams as in `truncations`."""
    for overflow, window in truncations(model, streams, truncation, wanted):
        at = truncation.window + (overflow - 1) * truncation.drop
        following = streams[:, at : at + truncation.drop]
        logits = model.lm_head(window.feed(following[:, :-1]))
        yield overflow, losses_of(logits, following[:, 1:]).mean(1).double().numpy()


@torch.no_grad()
def answers_after(
    model: Llama,
    streams: Sequence[Stream],
    truncation: Truncation,
    wanted: Sequence[int],
    seed: int,
) -> Iterator[tuple[int, Scores]]:
    """(overflow, share of right answers), asking for every pair in what is kept."""
    tokens = torch.from_numpy(np.stack([s.tokens for s in streams]))
    for overflow, window in truncations(model, tokens, truncation, wanted):
        start = overflow * truncation.drop
        rng = np.random.default_rng((seed, overflow))
        asked = [s.questions(start, start + truncation.kept, rng) for s in streams]
        yield overflow, ask(model, window, np.stack(asked))


def ask(model: Llama, window: Window, asked: Ids) -> Scores:
    """The share of right answers to questions as Stream.questions has them: [sequences, n].

    As many questions at a time as the window has room for. Each is asked with the right answers
    to those before it.
    """
    room = (window.truncation.window - window.tokens.shape[1]) // QUESTION * QUESTION
    right = []
    for at in range(0, asked.shape[1], room):
        questions = torch.from_numpy(asked[:, at : at + room])
        logits = model.lm_head(window.fork().feed(questions)[:, 1::QUESTION])
        right.append((logits.argmax(-1) == questions[:, 2::QUESTION]).double())
    return torch.cat(right, dim=1).mean(1).numpy()


@torch.no_grad()
def text_losses(model: Llama, text: Ids, most: int) -> Scores:
    """Mean loss of each of up to `most` full windows of a text, nothing cut."""
    pieces = documents({"": text}, model.shape.window, most)
    scores = []
    for at in range(0, len(pieces), BATCH):
        tokens = torch.from_numpy(np.stack(pieces[at : at + BATCH]))
        scores.append(losses_of(model(tokens[:, :-1]), tokens[:, 1:]).mean(1).double().numpy())
    return np.concatenate(scores)


def losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return flat.view_as(targets)


def documents(held_out: dict[str, Ids], length: int, most: int) -> list[Ids]:
    """Up to `most` pieces of `length` tokens that do not overlap, evenly from all the texts."""
    pieces = [
        text[at : at + length]
        for text in held_out.values()
        for at in range(0, len(text) - length + 1, length)
    ]
    if not pieces:
        longest = max(len(text) for text in held_out.values())
        raise ValueError(f"what is held out has {longest} tokens; a document needs {length}")
    chosen = np.linspace(0, len(pieces) - 1, min(most, len(pieces))).round().astype(int)
    return [pieces[n] for n in chosen]


@dataclass(frozen=True, slots=True)
class Work:
    """Documents and recall streams that one or more methods are measured on."""

    model: Llama
    settings: Settings
    ratio: float
    texts: list[Ids]
    streams: list[Stream]

    @property
    def batches(self) -> int:
        return -(-len(self.texts) // BATCH) + -(-len(self.streams) // BATCH)

    def measure(
        self, method: Method, tick: Callable[[], object], recompute: Recompute = NOTHING
    ) -> Measured:
        """Run everything; `tick` is called after each batch."""
        settings, found = self.settings, Measured()
        window = self.model.shape.window
        drop = settings.drop(self.ratio, window)
        truncation = Truncation(window, drop, method, settings.stored, recompute)
        for at in range(0, len(self.texts), BATCH):
            tokens = torch.from_numpy(np.stack(self.texts[at : at + BATCH]))
            for n, score in losses_after(self.model, tokens, truncation, settings.overflows):
                found.losses.setdefault(n, []).append(score)
            tick()
        for at in range(0, len(self.streams), BATCH):
            streams = self.streams[at : at + BATCH]
            for n, score in answers_after(
                self.model, streams, truncation, settings.overflows, settings.seed + at
            ):
                found.right.setdefault(n, []).append(score)
            tick()
        return found


def make_work(
    model: Llama,
    held_out: dict[str, Ids],
    settings: Settings,
    ratio: float,
    num_texts: int,
    num_streams: int,
) -> Work:
    window = model.shape.window
    length = stream_tokens(window, settings.drop(ratio, window), max(settings.overflows))
    rng = np.random.default_rng((settings.seed, round(100 * ratio)))
    texts = list(held_out.values())
    streams = [
        stream(
            rng,
            take(texts[n % len(texts)], n, length),
            Alphabet(model.shape.vocabulary),
            slot=settings.slot,
            window=window,
        )
        for n in range(num_streams)
    ]
    return Work(model, settings, ratio, documents(held_out, length, num_texts), streams)


def interval(differences: Scores, seed: int = 0) -> dict[str, float]:
    """Mean and 95 % confidence interval, by resampling documents."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(differences), (RESAMPLES, len(differences)))
    low, high = np.percentile(differences[chosen].mean(1), (2.5, 97.5))
    return {"value": float(differences.mean()), "low": float(low), "high": float(high)}


def perplexity_ratio(loss: Scores, over: Scores) -> dict[str, float]:
    return {name: float(np.exp(v)) for name, v in interval(loss - over).items()}


def points(accuracy: Scores, over: Scores) -> dict[str, float]:
    """The difference of two accuracies in percentage points."""
    return {name: 100 * value for name, value in interval(accuracy - over).items()}


def summary(measured: Measured, overflow: int) -> dict[str, Any]:
    right, loss = measured.accuracy(overflow), measured.loss(overflow)
    return {
        "perplexity": float(np.exp(loss.mean())),
        "recall": float(right.mean()),
        "recall_standard_error": float(right.std(ddof=1) / len(right) ** 0.5),
    }
