# SPDX-License-Identifier: Apache-2.0
"""Records of a replay, one a request. Names are those of vLLM's benchmarks/multi_turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Final

Token = str
"""A token as the server names it: "token_id:17" from vLLM, its text from other servers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token, and the log-probabilities of the best candidates at its place."""

    token: Token
    logprob: float
    top: dict[Token, float]


@dataclass(slots=True, kw_only=True)
class TurnRecord:
    """One request. Times in ms, None if it failed before them; `turn` counts from 1.

    Args:
        session: number of the session; -1 where there is no schedule.
        warmup: it is not counted.
        due_ms, start_time_ms: when it was due and when it was sent, from the start of the run.
        wait_answer_ms: how long after it was due the answer before it was complete.
        wait_limit_ms: how long it then waited for the limit of concurrent requests.
        ttft_ms, latency_ms: from when it was sent to the first token, and to the end.
        tpot_ms: from the first token to the end, over the tokens after the first. None for an
            answer that came in one piece.
        input_num_turns: messages of the prompt, those of both sides.
        output_num_chunks: pieces in which the answer came.
        cached_tokens: of the prompt, as the server reports them; None if it does not.
        has_usage: the server counted the tokens; else `output_num_tokens` are ids, or
            log-probabilities, or pieces.
        token_ids: of the answer, where they were asked for.
    """

    conversation_id: str
    turn: int
    session: int = -1
    warmup: bool = False
    due_ms: float | None = None
    start_time_ms: float | None = None
    wait_answer_ms: float = 0.0
    wait_limit_ms: float = 0.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None
    input_num_turns: int = 0
    input_num_tokens: int | None = None
    output_num_tokens: int | None = None
    output_num_chunks: int = 0
    cached_tokens: int | None = None
    has_usage: bool = False
    answer: str = ""
    token_ids: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(step.token for step in self.steps)

    @property
    def was_sent(self) -> bool:
        return self.start_time_ms is not None

    @property
    def delay_ms(self) -> float | None:
        """From when it was due to when it was sent."""
        if self.due_ms is None or self.start_time_ms is None:
            return None
        return self.start_time_ms - self.due_ms

    @property
    def lag_ms(self) -> float | None:
        """The rest of the delay: what the load generator itself was late."""
        delay_ms = self.delay_ms
        return None if delay_ms is None else delay_ms - self.wait_answer_ms - self.wait_limit_ms

    @property
    def due_ttft_ms(self) -> float | None:
        """From when it was due to its first token: what its user waited."""
        return _sum(self.delay_ms, self.ttft_ms)

    @property
    def due_latency_ms(self) -> float | None:
        return _sum(self.delay_ms, self.latency_ms)

    def to_json(self, *, texts: bool = True) -> dict[str, Any]:
        """Everything but the log-probabilities, which are many.

        Args:
            texts: what was answered, too.
        """
        left_out = {"steps"} if texts else {"steps", "answer", "token_ids"}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        if texts:
            values["tokens"] = list(self.tokens)
        for name in ("delay_ms", "lag_ms", "due_ttft_ms", "due_latency_ms"):
            values[name] = getattr(self, name)
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}


def failures(records: Iterable[TurnRecord]) -> list[TurnRecord]:
    return [record for record in records if record.error is not None]


NOT_SENT: Final = "not sent, because turn {turn} failed"
INTERRUPTED: Final = "interrupted"


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
