# SPDX-License-Identifier: Apache-2.0
"""Training within a budget of minutes, and going on from a checkpoint.

Each batch is half plain text and half recall lessons. Both follow from the seed and the step, so
that a checkpoint needs no state of a random generator: weights, optimizer, step, time used and
the lessons' level are all. Texts grow with the budget used, lessons with what was learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from benchmarks.quality.data import Corpus, take
from benchmarks.quality.initial import initialize
from benchmarks.quality.model import Llama, Shape
from benchmarks.quality.recall import lesson
from benchmarks.quality.tokenizer import Alphabet
from benchmarks.quality.two_hop import FIRST_HOP, NONE, HopLesson
from benchmarks.quality.two_hop import lesson as two_hop_lesson

CHECKPOINT_FILE = "checkpoint.pt"
BETAS = (0.9, 0.95)
GRADIENT_NORM_MAX = 1.0
# From this share of the budget on, texts have the window's length over this.
TEXT_GROWTH = ((0.0, 4), (0.35, 2), (0.65, 1))
# The same for lessons, by level.
LESSON_GROWTH = ((0.0, 32), (1 / 6, 16), (2 / 6, 8), (3 / 6, 4), (4 / 6, 2), (5 / 6, 1))
# The same for lessons of two hops.
HOP_GROWTH = ((0.0, 16), (0.2, 8), (0.4, 4), (0.6, 2), (0.8, 1))
HOPS_FROM, HOP_LEVEL, TEXT_FROM = 0.3, 0.4, 0.45
"""Two hops begin at this level of one, with their own first level; and text begins at this one of
theirs. All at once they are not learned in the time."""
LENGTH_MIN = 16
LEVEL_STEP = 0.01
LEVEL_UP_ABOVE = 0.9  # share of answers that are right, smoothed
SMOOTHING = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What training depends on, besides the text and the budget."""

    seed: int = 0
    step_tokens: int = 4_096
    rate: float = 2e-3
    rate_last: float = 1e-4
    warmup: float = 0.02  # of the budget
    decay: float = 0.1
    lessons: float = 0.5  # of each batch's sequences
    two_hops: bool = False  # there are lessons of two_hop.py, too


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds of training, or steps, of which a test knows beforehand what they do."""

    seconds: float | None = None
    steps: int | None = None

    def used(self, step: int, seconds: float) -> float:
        """The share that is used, 0 to 1."""
        share = step / self.steps if self.steps else seconds / (self.seconds or math.inf)
        return min(1.0, share)


@dataclass(slots=True)
class Progress:
    step: int = 0
    seconds: float = 0.0
    level: float = 0.0
    right: float = 0.0  # share of answers, smoothed
    hop_level: float = HOP_LEVEL
    hop_right: float = 0.0
    tokens: int = 0

    def answered(self, right: float, *, two_hops: bool) -> None:
        """A step had this share of right answers."""
        if two_hops:
            self.hop_right += (1 - SMOOTHING) * (right - self.hop_right)
            self.hop_level += LEVEL_STEP * (self.hop_right > LEVEL_UP_ABOVE)
        else:
            self.right += (1 - SMOOTHING) * (right - self.right)
            self.level += LEVEL_STEP * (self.right > LEVEL_UP_ABOVE)
        self.level, self.hop_level = min(1.0, self.level), min(1.0, self.hop_level)


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of one length. tokens: [sequences, length + 1]; answers and text: [sequences,
    length], which of the next tokens are answers, and which are text; bound: [sequences, length],
    as HopLesson's."""

    tokens: torch.Tensor
    answers: torch.Tensor
    text: torch.Tensor
    bound: torch.Tensor | None = None


def make_batch(
    corpus: Corpus, recipe: Recipe, shape: Shape, progress: Progress, used: float
) -> tuple[Part, ...]:
    """What a step has of texts, of lessons of one hop, and of two."""
    rng = np.random.default_rng((recipe.seed, progress.step))
    is_learned = recipe.two_hops and progress.hop_level == 1
    lessons = recipe.lessons / 4 if is_learned else recipe.lessons
    length, count = _size(shape, TEXT_GROWTH, used, recipe.step_tokens * (1 - lessons))
    first = progress.step * count
    texts = np.stack([take(corpus.train, first + n, length + 1) for n in range(count)])
    plain = Part(
        torch.from_numpy(texts),
        torch.zeros(count, length, dtype=torch.bool),
        torch.ones(count, length, dtype=torch.bool),
    )
    tokens = recipe.step_tokens * lessons
    if not recipe.two_hops:
        return plain, _lessons(corpus, shape, progress, tokens, rng)
    parts = [_lessons(corpus, shape, progress, tokens / 2, rng)]
    if progress.level >= HOPS_FROM:
        parts.append(_lessons(corpus, shape, progress, tokens, rng, two_hops=True))
    if progress.hop_level >= TEXT_FROM:
        parts.append(plain)
    return tuple(parts)


def _lessons(
    corpus: Corpus,
    shape: Shape,
    progress: Progress,
    tokens: float,
    rng: np.random.Generator,
    *,
    two_hops: bool = False,
) -> Part:
    level = progress.hop_level if two_hops else progress.level
    length, count = _size(shape, HOP_GROWTH if two_hops else LESSON_GROWTH, level, tokens)
    first = progress.step * count
    make = two_hop_lesson if two_hops else lesson
    lessons = [
        make(
            rng,
            take(corpus.train, first + n, length + 1),
            Alphabet(shape.vocabulary),
            # Those who have learned something hard keep what was easy.
            level if rng.random() < 0.75 else level * rng.random(),
        )
        for n in range(count)
    ]
    answers = np.stack([one.answers[:-1] for one in lessons])
    noise = np.stack([one.noise[:-1] for one in lessons])
    bound = [one.bound[:-1] for one in lessons if isinstance(one, HopLesson)]
    return Part(
        torch.from_numpy(np.stack([one.tokens for one in lessons])),
        torch.from_numpy(answers),
        torch.from_numpy(~(answers | noise)),
        torch.from_numpy(np.stack(bound)) if bound else None,
    )


def _size(
    shape: Shape, growth: tuple[tuple[float, int], ...], at: float, tokens: float
) -> tuple[int, int]:
    """Length and number of sequences."""
    divisor = [divisor for begin, divisor in growth if at >= begin][-1]
    length = max(LENGTH_MIN, shape.window // divisor)
    return length, max(1, round(tokens / length))


class Trainer:
    """A model in training.

    lower: the matrix products are in bf16 (autocast), weights and sums in fp32.
    """

    def __init__(self, shape: Shape, corpus: Corpus, recipe: Recipe, *, lower: bool) -> None:
        self.shape, self.corpus, self.recipe, self.lower = shape, corpus, recipe, lower
        self.model = Llama(shape)
        initialize(self.model, recipe.seed)
        self.progress = Progress()
        matrices = [w for w in self.model.parameters() if w.dim() == 2]
        vectors = [w for w in self.model.parameters() if w.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": recipe.decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=BETAS, fused=True)

    def step(self, used: float) -> dict[str, float]:
        """One step at this share of the budget. Returns the losses, in nats a token."""
        recipe, progress = self.recipe, self.progress
        parts = make_batch(self.corpus, recipe, self.shape, progress, used)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe, used)
        self.optimizer.zero_grad()
        # Each part has its share of the mean over all text, and a mean over its own answers.
        num_text = max(1, sum(int(part.text.sum()) for part in parts))
        has_text = not recipe.two_hops or progress.hop_level >= TEXT_FROM
        text = answers = right = 0.0
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.lower):
                states = self.model.states(part.tokens[:, :-1])
                logits = self.model.lm_head(states[-1])
                early = self._early(states, part)
            targets = part.tokens[:, 1:]
            losses = functional.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), reduction="none"
            ).view_as(targets)
            num_answers = int(part.answers.sum())
            text_loss = losses[part.text].sum() / num_text * has_text
            answers_loss = losses[part.answers].sum() / max(1, num_answers)
            (text_loss + answers_loss + early).backward()
            text += float(text_loss.detach())
            answers += float(answers_loss.detach())
            if num_answers:
                said = logits.detach()[part.answers].argmax(-1)
                right = float((said == targets[part.answers]).float().mean())
                progress.answered(right, two_hops=part.bound is not None)
            progress.tokens += targets.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        self.optimizer.step()
        progress.step += 1
        return {"text": text, "answers": answers, "right": right}

    def _early(self, states: list[torch.Tensor], part: Part) -> torch.Tensor:
        """The loss of the first of two hops, in the layer that should have taken it, in nats."""
        if part.bound is None:
            return torch.zeros(())
        is_bound = part.bound != NONE
        logits = self.model.lm_head(states[FIRST_HOP][is_bound])
        return functional.cross_entropy(logits.float(), part.bound[is_bound])

    def save(self, path: Path) -> None:
        """Write a checkpoint: the old one stays until the new one is whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "lower": self.lower,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same recipe; `lower` becomes what it was."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        self.lower = bool(state["lower"])


def learning_rate(recipe: Recipe, used: float) -> float:
    """Linear warm-up, then half a cosine down to rate_last."""
    if used < recipe.warmup:
        return recipe.rate * max(used / recipe.warmup, 0.01)
    done = (used - recipe.warmup) / (1 - recipe.warmup)
    return recipe.rate_last + (recipe.rate - recipe.rate_last) * (1 + math.cos(math.pi * done)) / 2


def train(
    trainer: Trainer,
    budget: Budget,
    checkpoint: Path,
    *,
    save_every_s: float = 60.0,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Train until the budget is used; what earlier runs used of it counts."""
    progress = trainer.progress
    total = budget.steps or round(budget.seconds or 0)
    unit = "step" if budget.steps else "s"
    losses: dict[str, float] = {}
    with tqdm(total=total, desc="train", unit=unit, mininterval=1.0) as bar:
        saved = last = clock()
        while (used := budget.used(progress.step, progress.seconds)) < 1:
            for name, value in trainer.step(used).items():
                losses[name] = losses.get(name, value) * 0.98 + value * 0.02
            now = clock()
            progress.seconds += now - last
            last = now
            bar.n = round(used * total)
            bar.set_postfix(_shown(progress, losses))
            if now - saved > save_every_s:
                trainer.save(checkpoint)
                saved = now
        bar.n = total
    trainer.save(checkpoint)


def _shown(progress: Progress, losses: dict[str, float]) -> dict[str, Any]:
    return {
        "step": progress.step,
        "tok/s": round(progress.tokens / max(progress.seconds, 1e-9)),
        "text": f"{losses['text']:.3f}",
        "right": f"{losses['right']:.0%}",
        "level": f"{progress.level:.2f}",
        "hops": f"{progress.hop_right:.0%} {progress.hop_level:.2f}",
    }


def bf16_is_faster(shape: Shape, corpus: Corpus, recipe: Recipe) -> bool:
    """Whether a step with matrix products in bf16 takes less time here. Cost: six steps."""
    times = {}
    for lower in (False, True):
        trainer = Trainer(shape, corpus, recipe, lower=lower)
        times[lower] = min(_seconds(trainer.step) for _ in range(3))
    return times[True] < times[False]


def _seconds(step: Callable[[float], object]) -> float:
    began = time.perf_counter()
    step(0.5)
    return time.perf_counter() - began
