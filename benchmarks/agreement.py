# SPDX-License-Identifier: Apache-2.0
"""Do two servers answer alike, and if not, is it rounding?

Greedy answers of one model differ between two runs when rounding moves the two best candidates
past each other: sums in bf16 depend on how a prompt was split and on who was in the same batch.
At the first token that differs both sides have read the same text, so they can be compared there:
each side saw a *gap*, the log-probability of its own choice over the other side's. Rounding can
explain the difference only if it moves gaps that far, gap_a + gap_b; how far it moves them is
measured on one server alone, which answers the same prompts split elsewhere and in other company
(see `gap_changes`). With the same split and company it gives the same bits: no measure at all.
After the first difference the texts differ, and so do the later turns of that conversation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from attnstore_lab.bench.records import Step, Token, TurnRecord

# The bound on rounding is the largest change measured times this: the run that is judged has
# more positions than the one that was measured.
MARGIN: Final = 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which two answers to the same text differ; `position` counts from 0.

    Gaps are in nats, None if the other side's token is not among the recorded candidates.
    """

    conversation: str
    turn: int
    position: int
    token_a: Token
    token_b: Token
    gap_a: float | None
    gap_b: float | None

    @property
    def change(self) -> float | None:
        if self.gap_a is None or self.gap_b is None:
            return None
        return self.gap_a + self.gap_b

    def is_within(self, bound: float) -> bool:
        return self.change is not None and self.change <= bound


@dataclass(frozen=True, slots=True)
class Agreement:
    """`compared` answers had the same history on both sides; `not_compared` had not, or failed."""

    compared: int
    identical: int
    not_compared: int
    differences: tuple[Difference, ...]


def compare(a: Sequence[TurnRecord], b: Sequence[TurnRecord]) -> Agreement:
    """Compare two replays of the same conversations, records in the same order."""
    pairs = list(comparable(a, b))
    differences = tuple(d for x, y in pairs if (d := _difference(x, y)) is not None)
    return Agreement(
        compared=len(pairs),
        identical=len(pairs) - len(differences),
        not_compared=len(a) - len(pairs),
        differences=differences,
    )


def comparable(
    a: Sequence[TurnRecord], b: Sequence[TurnRecord]
) -> Iterator[tuple[TurnRecord, TurnRecord]]:
    """Yield the pairs of answers whose whole history is the same on both sides."""
    ended: set[str] = set()
    for x, y in zip(a, b, strict=True):
        assert (x.conversation_id, x.turn) == (y.conversation_id, y.turn)
        if x.conversation_id in ended:
            continue
        if x.error is None and y.error is None:
            yield x, y
        if x.error is not None or y.error is not None or x.tokens != y.tokens:
            ended.add(x.conversation_id)


def gap_changes(a: Sequence[TurnRecord], b: Sequence[TurnRecord]) -> list[float]:
    """How far the gap between the two best candidates of `a` is moved in `b`, in nats.

    One value for each position with the same text before it, up to and with the first
    difference; positions where `b` did not record both candidates are left out.
    """
    changes = []
    for x, y in comparable(a, b):
        for step_a, step_b in zip(_head(x, y), y.steps, strict=False):
            best = sorted(step_a.top, key=lambda token: -step_a.top[token])[:2]
            if len(best) == 2:
                here, there = _gap(step_a, *best), _gap(step_b, *best)
                if here is not None and there is not None:
                    changes.append(abs(here - there))
    return changes


def rounding_bound(changes: Sequence[float]) -> float:
    """The largest change of a gap that is put down to rounding, in nats."""
    return MARGIN * max(changes, default=0.0)


def _head(x: TurnRecord, y: TurnRecord) -> list[Step]:
    """The steps of x whose text before them is the same in y."""
    pairs = zip(x.steps, y.steps, strict=False)
    same = len(list(takewhile(lambda pair: pair[0].token == pair[1].token, pairs)))
    return x.steps[: same + 1]


def _difference(x: TurnRecord, y: TurnRecord) -> Difference | None:
    if x.tokens == y.tokens:
        return None
    at = len(_head(x, y)) - 1
    if at >= min(len(x.steps), len(y.steps)):  # one answer is the beginning of the other
        return Difference(x.conversation_id, x.turn, at, "", "", None, None)
    here, there = x.steps[at], y.steps[at]
    return Difference(
        x.conversation_id,
        x.turn,
        at,
        here.token,
        there.token,
        _gap(here, here.token, there.token),
        _gap(there, there.token, here.token),
    )


def _gap(step: Step, over: Token, under: Token) -> float | None:
    if over not in step.top or under not in step.top:
        return None
    return step.top[over] - step.top[under]
