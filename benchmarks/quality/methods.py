# SPDX-License-Identifier: Apache-2.0
"""What can be done with the KV of what is kept when the beginning of a full window is cut.

    window of W tokens   | cut: r W | kept: (1 - r) W |
    after truncation                | kept            | the text goes on: r W |

TT    token truncation: the kept tokens are recomputed from scratch at positions 0, 1, ...
CA    CachedAttention: their KV is reused. K is rotated by the difference between the position it
      is wanted at and the one it was first computed at; V stays.
NKVT  naive KV truncation: their KV is reused with the old positions inside. The text that follows
      is at its new positions.

CA always rotates the K that was first computed, once, by the whole difference: however often the
window overflows, there is no rotation of a rotation.

Source: CachedAttention (ATC'24), section 3.4 and tables 1 and 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from benchmarks.quality.model import Kv, Llama, rotate, rotation


class Method(Enum):
    TT = "TT"
    CA = "CA"
    NKVT = "NKVT"


@dataclass(frozen=True, slots=True)
class Recompute:
    """With CA: so many tokens at the beginning and at the end of what is kept are recomputed."""

    first: int = 0
    last: int = 0


NOTHING = Recompute()


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cut `drop` tokens whenever `window` tokens are there.

    stored: the KV is kept in this dtype, as servers do in bf16; None keeps it as computed.
    """

    window: int
    drop: int
    method: Method
    stored: torch.dtype | None = None
    recompute: Recompute = NOTHING

    def __post_init__(self) -> None:
        assert 0 < self.drop < self.window
        assert self.recompute.first + self.recompute.last <= self.kept
        assert self.recompute == NOTHING or self.method is Method.CA

    @property
    def kept(self) -> int:
        return self.window - self.drop


class Window:
    """Conversations of equal length in a context window, and their KV.

    tokens: [sequences, n]. used: their KV as the model reads it, one a layer. first_k: their K as
    it was first computed, at positions first_at ([n]).
    """

    def __init__(self, model: Llama, truncation: Truncation, tokens: torch.Tensor) -> None:
        self.model, self.truncation = model, truncation
        self._begin(tokens)

    def _begin(self, tokens: torch.Tensor) -> None:
        """Compute all tokens from position 0."""
        self.tokens = tokens
        _, self.used = self._run(tokens, 0, None)
        self.first_k = [kv.k for kv in self.used]  # as first computed,
        self.first_at = torch.arange(tokens.shape[1])  # at these positions

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Go on with tokens [sequences, n]; returns their hidden states."""
        start = self.tokens.shape[1]
        assert start + tokens.shape[1] <= self.truncation.window
        hidden, new = self._run(tokens, start, self.used)
        self.tokens = torch.cat((self.tokens, tokens), dim=1)
        self.used = [old.then(kv) for old, kv in zip(self.used, new, strict=True)]
        self.first_k = [
            torch.cat((old, kv.k), dim=2) for old, kv in zip(self.first_k, new, strict=True)
        ]
        positions = torch.arange(start, start + tokens.shape[1])
        self.first_at = torch.cat((self.first_at, positions))
        return hidden

    def truncate(self) -> None:
        """Cut the beginning and do with the KV of the rest what the method says."""
        drop, method = self.truncation.drop, self.truncation.method
        assert self.tokens.shape[1] == self.truncation.window
        if method is Method.TT:
            self._begin(self.tokens[:, drop:])
            return
        self.tokens = self.tokens[:, drop:]
        self.used = [kv.cut(drop) for kv in self.used]
        self.first_k = [k[:, :, drop:] for k in self.first_k]
        self.first_at = self.first_at[drop:]
        if method is Method.CA:
            shift = torch.arange(len(self.first_at)) - self.first_at
            by = rotation(shift, self.model.shape.head_dim)
            self.used = [
                Kv(rotate(k, by), kv.v) for k, kv in zip(self.first_k, self.used, strict=True)
            ]
            self._recompute(0, self.truncation.recompute.first)
            kept = len(self.first_at)
            self._recompute(kept - self.truncation.recompute.last, kept)

    def _recompute(self, start: int, stop: int) -> None:
        """Replace the KV of tokens start to stop, given what is before them. This counts as the
        first computation from now on: it fits what is in the window better."""
        if start == stop:
            return
        before = [kv.cut(0, start) for kv in self.used] if start else None
        _, new = self._run(self.tokens[:, start:stop], start, before)
        for number, kv in enumerate(new):
            old = self.used[number]
            self.used[number] = old.cut(0, start).then(kv).then(old.cut(stop))
            k = self.first_k[number]
            self.first_k[number] = torch.cat((k[:, :, :start], kv.k, k[:, :, stop:]), dim=2)
        self.first_at = self.first_at.clone()
        self.first_at[start:stop] = torch.arange(start, stop)

    def fork(self) -> Window:
        """Another window with the same past; what either is fed does not show in the other."""
        other = object.__new__(Window)
        other.model, other.truncation = self.model, self.truncation
        other.tokens, other.used = self.tokens, list(self.used)
        other.first_k, other.first_at = list(self.first_k), self.first_at
        return other

    def _run(
        self, tokens: torch.Tensor, start: int, past: list[Kv] | None
    ) -> tuple[torch.Tensor, list[Kv]]:
        return self.model.run(tokens, start=start, past=past, stored=self.truncation.stored)


def stream_tokens(window: int, drop: int, overflows: int) -> int:
    """How many tokens a stream has whose window is full again after so many overflows."""
    return window + overflows * drop


def truncations(
    model: Llama, streams: torch.Tensor, truncation: Truncation, wanted: Collection[int]
) -> Iterator[tuple[int, Window]]:
    """Follow streams through overflow after overflow.

    streams: [sequences, stream_tokens], int64.
    wanted: after which overflows to stop, counted from 1.
    Returns: pairs (overflow, window), the window just truncated; the caller may feed it. What
        follows that overflow is streams[:, window + (overflow - 1) * drop :], `drop` tokens.
    """
    window, drop = truncation.window, truncation.drop
    if truncation.method is Method.TT:
        # What was before leaves nothing behind.
        for overflow in sorted(wanted):
            kept = streams[:, overflow * drop : (overflow - 1) * drop + window]
            yield overflow, Window(model, truncation, kept)
        return
    now = Window(model, truncation, streams[:, :window])
    for overflow in range(1, max(wanted) + 1):
        now.truncate()
        if overflow in wanted:
            yield overflow, now.fork()
        if overflow < max(wanted):
            at = window + (overflow - 1) * drop
            now.feed(streams[:, at : at + drop])
