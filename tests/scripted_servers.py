# SPDX-License-Identifier: Apache-2.0
"""Servers that answer at once, as a test has said, in the place of real ones of benchmarks.e2e."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.e2e import answers, hits
from benchmarks.e2e.cases import ON_CPU, Case
from benchmarks.e2e.serving import Answer, Deadline, Served, Setup
from benchmarks.server import ServerError

FAR = 3.0
"""Nats: no rounding."""


def answer_to(prompt: Sequence[int], count: int, off: float = 0.0) -> Answer:
    tokens = tuple((sum(prompt) + i) % 1_000 for i in range(count))
    return Answer(tokens, tuple(((token, -0.1 - off), (1_001, -3.0 + off)) for token in tokens))


def _in_common(ids: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> int:
    """The longest beginning that one of the others has too."""
    found = 0
    for other in others:
        if ids[:found] == other[:found]:
            while found < min(len(ids), len(other)) and ids[found] == other[found]:
                found += 1
    return found


class FakeServed(Served):
    """A server that answers at once, as its setup says."""

    def __init__(self, setup: FakeSetup, name: str, store: Path | None, hbm: int) -> None:
        self._setup = setup
        self._name = name
        self._store = store
        self._hbm = hbm
        self._stored: set[tuple[int, ...]] = set()
        self._in_hbm: list[tuple[int, ...]] = []
        """Of those that are timed, the one asked longest ago first."""
        self._preempted = 0
        self._external = 0
        self._loaded = {"dram": 0, "nvme": 0}

    def ask(self, prompt: Sequence[int], max_tokens: int, salt: str | None = None) -> Answer:
        state, asked = self._setup.state, (*prompt, *map(ord, salt or ""))
        state.asked.append((self._name, len(prompt), salt))
        tier = "nvme" if self._name.endswith(("-again", "-HND")) else "dram"
        off = state.off.get(self._name, 0.0)
        if self._store is not None and (tier == "nvme" or asked in self._stored):
            self._loaded[tier] += len(prompt) * (tier in state.tiers)
            off += state.loads_off
        self._stored.add(asked)
        return answer_to(prompt, max_tokens, off)

    def ask_and_leave(self, prompt: Sequence[int], max_tokens: int, after_s: float) -> None:
        pass

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[None]:
        for _ in range(3):
            yield

    def ttft_ms(self, prompt: list[int]) -> float:
        """What is not in HBM is found, if it was asked before."""
        state, ids = self._setup.state, tuple(prompt)
        state.timed.append((self._name, len(ids)))
        if len(state.timed) == state.interrupted_at:
            raise KeyboardInterrupt
        there = _in_common(ids, self._in_hbm)
        found = max(0, _in_common(ids, list(self._stored)) - there) * state.finds
        if self._name != "none":
            self._external += found
        if self._store is not None:
            self._loaded["dram"] += found
        self._stored.add(ids)
        self._in_hbm.append(ids)
        while sum(map(len, self._in_hbm)) > self._hbm:
            del self._in_hbm[0]
        return (1.0 + found) * (2.0 if self._name == "offloading" else 1.0)

    def tokens_per_s(self, random: Random, prompt_tokens: int) -> float:
        return 98.0 if self._store is not None else 100.0

    def empty_hbm(self) -> None:
        """And what comes next is preempted, or not."""
        state = self._setup.state
        state.calm -= 1
        self._preempted += state.preempted * (state.calm < 0)

    def loaded(self) -> dict[str, int]:
        return dict(self._loaded)

    def counted(self, name: str, **labels: str) -> int:
        if name == hits.EXTERNAL_HITS:
            return self._external
        return self._preempted if name == answers.PREEMPTED else 1

    def complaints(self) -> list[str]:
        return []

    def facts(self) -> list[str]:
        return ["Using X attention backend"]


@dataclass(slots=True)
class State:
    """What servers do, by their names."""

    off: dict[str, float] = field(default_factory=dict)
    """So many nats beside the truth."""
    loads_off: float = 0.0
    """The same, of what was loaded."""
    dead: dict[str, str] = field(default_factory=dict)
    """They end at their start, with this log."""
    tiers: set[str] = field(default_factory=lambda: {"dram", "nvme"})
    finds: int = 1
    """0: what is timed is never found."""
    interrupted_at: int = 0
    """Ctrl-C comes while this number of timed requests is asked."""
    preempted: int = 1
    calm: int = 0
    """So many times that HBM is emptied before anything is preempted."""
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    asked: list[tuple[str, int, str | None]] = field(default_factory=list)
    timed: list[tuple[str, int]] = field(default_factory=list)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of Setup.serve."""


class FakeSetup(Setup):
    __slots__ = ("state",)
    state: State

    def __init__(self, work: Path) -> None:
        super().__init__(ON_CPU, work, work, True, [0, 1], None, work)
        object.__setattr__(self, "state", State())

    @contextmanager
    def serve(
        self,
        name: str,
        case: Case,
        deadline: Deadline,
        *,
        store: Path | None = None,
        hbm: int | None = None,
        **arguments: Any,
    ) -> Iterator[Served]:
        self.state.started.append(name)
        self.state.arguments[name] = arguments
        if name in self.state.dead:
            raise ServerError(self.state.dead[name])
        try:
            yield FakeServed(self, name, store, hbm or self.size.hbm)
        finally:
            self.state.ended.append(name)


class Hurried:
    """Stands in for the module time: sleeps no longer than it must."""

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)

    @staticmethod
    def sleep(seconds: float) -> None:
        pass
