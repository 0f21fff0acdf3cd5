# SPDX-License-Identifier: Apache-2.0
"""Who asks when: a pure function of conversations, options and seed, made before the run.

Sessions begin as a Poisson process. Between two questions of a session lies a time that was drawn
too, so that each request has a time at which it is due, whether or not the server is ready. A
server that is slow is asked no more slowly for it: that would leave out the very requests that had
to wait ("coordinated omission"). A question that is due before the answer to the one before it has
come is sent once it has, and is late.

Each session draws from a generator of its own: what is said in one moves no other.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from random import Random
from typing import Literal

import numpy as np

from attnstore_lab.bench.conversations import Conversation
from attnstore_vllm.errors import ConfigError

ThinkKind = Literal["constant", "exponential", "lognormal", "data", "trace"]
THINK_FORMS = "constant:S, exponential:MEAN, lognormal:MEDIAN,SIGMA, data, or trace:FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Think:
    """Where the times between the questions of a session come from, in seconds.

    Args:
        first: the constant, the mean of the exponential or the median of the log-normal.
        sigma: standard deviation of the log-normal's logarithm.
        gaps: of real sessions (`kind` "trace"). A session takes those of one of them, drawn at
            random, in order, from the first again where they are too few.
        scale: all times are multiplied by it.
    """

    kind: ThinkKind = "constant"
    first: float = 0.0
    sigma: float = 0.0
    gaps: Sequence[Sequence[float]] = ()
    scale: float = 1.0

    def draw(self, conversation: Conversation, turns: int, rng: Random) -> Iterator[float]:
        """The times before turn 2, 3 and so on to `turns`."""
        real = rng.choice(self.gaps) if self.kind == "trace" else ()
        for n in range(turns - 1):
            match self.kind:
                case "constant":
                    value = self.first
                case "exponential":
                    value = rng.expovariate(1 / self.first) if self.first else 0.0
                case "lognormal":
                    value = self.first * rng.lognormvariate(0, self.sigma)
                case "trace":
                    value = real[n % len(real)]
                case "data":
                    value = conversation.times_s[n + 1] - conversation.times_s[n]
            yield value * self.scale


def parse_think(text: str) -> tuple[ThinkKind, list[str]]:
    """Take "lognormal:60,1" apart. Raises: ConfigError."""
    kind, _, rest = text.partition(":")
    arguments = [rest] if kind == "trace" else [part for part in rest.split(",") if part]
    wanted = {"constant": 1, "exponential": 1, "lognormal": 2, "data": 0, "trace": 1}.get(kind)
    if wanted is None or len(arguments) != wanted or "" in arguments:
        raise ConfigError(f"--think: {text!r} was found; expected {THINK_FORMS}")
    return kind, arguments  # type: ignore[return-value]  # one of the five


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load that is put on a server.

    Args:
        rate: sessions that begin in a second, on average; infinity: all at once.
        sessions: how many; None: each conversation once, or with `duration_s` as many as fit.
        duration_s: none begins later than this.
        turns: at most so many of each conversation.
        after_answer: a time to think counts from the end of the answer before it, and a request
            is due that much later: a user who reads. Else from when that question was due, and
            due times are fixed in advance.
        warmup: share of the requests, the first ones due, that are sent but not counted.
    """

    rate: float = 1.0
    sessions: int | None = None
    duration_s: float = math.inf
    turns: int | None = None
    think: Think = field(default_factory=Think)
    after_answer: bool = False
    warmup: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises: ConfigError naming the option."""
        for name, ok, expected in (
            ("rate", self.rate > 0, "more than 0"),
            ("sessions", self.sessions is None or self.sessions > 0, "more than 0"),
            ("duration", self.duration_s > 0, "more than 0"),
            ("turns", self.turns is None or self.turns > 0, "more than 0"),
            ("warmup", 0 <= self.warmup < 1, "a share, 0 or more and less than 1"),
            ("think", 0 <= self.think.first < math.inf, "seconds"),
            ("think", 0 <= self.think.sigma < 20, "a sigma of 0 or more"),
            ("think-scale", 0 <= self.think.scale < math.inf, "0 or more"),
        ):
            if not ok:
                raise ConfigError(f"--{name}: expected {expected}")
        if math.isinf(self.rate) and not math.isinf(self.duration_s) and self.sessions is None:
            raise ConfigError("--rate inf: expected --sessions, not --duration alone")


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation that will be held. Times in seconds from the start of the run.

    Args:
        number: of the session, from 0.
        conversation: its place among the conversations.
        use: how many sessions before this one hold the same conversation.
        thinks_s: before turn 2, 3 and so on.
    """

    number: int
    conversation: int
    use: int
    start_s: float
    thinks_s: tuple[float, ...]

    @property
    def due_s(self) -> tuple[float, ...]:
        """When each question is due; with `after_answer`, if answers took no time."""
        return tuple(accumulate(self.thinks_s, initial=self.start_s))


def sessions(conversations: Sequence[Conversation], load: Load) -> Iterator[Session]:
    """All sessions, in the order in which they begin. Made one by one: nothing is kept.

    Conversations are drawn without replacement until all had their turn, then anew.
    Raises: ConfigError if the conversations do not have the times that are wanted.
    """
    assert conversations
    if load.think.kind == "data":
        for conversation in conversations:
            if not conversation.times_s:
                raise ConfigError(
                    f'--think data: conversation {conversation.id!r} has no "timestamp" in each '
                    "human turn; expected one, or --think trace:FILE"
                )
    arrivals = Random(f"{load.seed}/arrivals")
    wanted = load.sessions
    if wanted is None and math.isinf(load.duration_s):
        wanted = len(conversations)
    now_s = 0.0
    for number in count():
        use, place = divmod(number, len(conversations))
        if place == 0:
            order = list(range(len(conversations)))
            Random(f"{load.seed}/order/{use}").shuffle(order)
        if (wanted is not None and number >= wanted) or now_s > load.duration_s:
            return
        conversation = conversations[order[place]]
        turns = len(conversation.questions[: load.turns])
        thinks = load.think.draw(conversation, turns, Random(f"{load.seed}/think/{number}"))
        yield Session(number, order[place], use, now_s, tuple(thinks))
        if not math.isinf(load.rate):
            now_s += arrivals.expovariate(load.rate)


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule's totals, and which of its requests warm up.

    Args:
        first_counted: (due time, session, turn) of the first request that is counted.
        last_due_s: due time of the last request of all.
    """

    num_sessions: int
    num_requests: int
    num_warmup: int
    first_counted: tuple[float, int, int]
    last_due_s: float

    def warms_up(self, due_s: float, session: int, turn: int) -> bool:
        return (due_s, session, turn) < self.first_counted


def make_plan(conversations: Sequence[Conversation], load: Load) -> Plan:
    """Go through the schedule once; 8 bytes a request and a session are kept meanwhile."""
    due, lengths = array("d"), array("q")
    for session in sessions(conversations, load):
        lengths.append(len(session.thinks_s) + 1)
        due.extend(session.due_s)
    all_due = np.frombuffer(due)
    num_warmup = int(load.warmup * len(all_due))
    # By due time; those due at once in the order of sessions and turns, as they lie here.
    first = int(np.argsort(all_due, kind="stable")[num_warmup])
    ends = np.cumsum(np.frombuffer(lengths, np.int64))
    number = int(np.searchsorted(ends, first, side="right"))
    turn = first - (int(ends[number - 1]) if number else 0)
    return Plan(
        num_sessions=len(lengths),
        num_requests=len(all_due),
        num_warmup=num_warmup,
        first_counted=(float(all_due[first]), number, turn),
        last_due_s=float(all_due.max()),
    )
