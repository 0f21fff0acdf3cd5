# SPDX-License-Identifier: Apache-2.0
"""Are the answers those of a server without the store, whatever the KV came from?

Greedy answers differ between two runs where rounding moves two candidates past each other: sums
depend on how a prompt was split and on who was in the same batch. So log-probabilities are
compared, up to the first token that differs (benchmarks/rounding.py). What they may differ by is
measured on servers without the store, which answer everything twice: computed, and with what is
left in HBM's prefix cache; in a crowd, where vLLM preempts as it comes, computed once more too,
under another cache_salt, so that nothing of the first time is used. With each comparison is kept
where answers part, and how far apart the reference's two best candidates were there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal

from benchmarks.e2e.cases import CASES, LAYOUT, Case, Size
from benchmarks.e2e.serving import Answer, Deadline, Served, Setup, why_it_ended
from benchmarks.rounding import bound, drift
from benchmarks.server import ServerError

Prompts = list[list[int]]
PREEMPTED: Final = "vllm:num_preemptions_total"
MOVED: Final = "vllm:attnstore_bytes_total"
FOUND: Final = 0.8
"""The share of the prompts' tokens that has to come from a tier that has them all."""
CROWDS_MAX: Final = 4
"""So many crowds may come until vLLM preempts one: on a busy machine clients come one by one."""
LEAVING: Final = 0.3
"""The share of a crowd that goes away before it has its answers."""
FARTHEST: Final = 1_000.0
"""The largest drift that is written down: JSON has no infinity."""
WRITTEN_DEADLINE_S: Final = 60.0
NOISE: Final = "noise"
"""The salt of what is computed once more."""


class Wrong(Exception):
    """A server did something else than it has to. Its message is the case's reason."""


class NotHere(Exception):
    """This vLLM, or this machine, does not run the case without the store either."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """Prompts for a server: some for one after the other, and a crowd."""

    asked: Prompts
    crowd: Prompts

    @classmethod
    def of(cls, size: Size) -> Prompted:
        random = Random(23)

        def some(count: int, shortest: int, longest: int) -> Prompts:
            lengths = [random.randrange(shortest, longest + 1) for _ in range(count)]
            return [
                [random.randrange(300, size.shape.vocab - 10) for _ in range(n)] for n in lengths
            ]

        return cls(some(*size.asked), some(*size.crowd))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.asked))


@dataclass(frozen=True, slots=True)
class Reference:
    """The answers of a server without the store, and how far they differ among themselves."""

    asked: list[Answer]
    crowd: list[Answer]
    noise: list[float]

    @property
    def limit(self) -> float:
        """Nats; a log-probability that is farther off is wrong."""
        return bound(self.noise)


Kind = Literal["asked", "crowd"]


@dataclass(slots=True)
class Tried:
    """The findings of a case so far: kept if it fails in the middle."""

    phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    """Things that the servers were to do and did not."""
    got: list[tuple[str, Kind, Sequence[Answer | None]]] = field(default_factory=list)
    """Answers of each phase; None is that of who went away."""

    def judge(self, reference: Reference) -> list[str]:
        """Compare all answers. Returns what is wrong with them."""
        wrong = []
        for phase, kind, got in self.got:
            want = reference.asked if kind == "asked" else reference.crowd
            pairs = [(a, b) for a, b in zip(want, got, strict=True) if b is not None]
            drifts = [drift(a, b) for a, b in pairs]
            beyond = sum(not found <= reference.limit for found in drifts)
            self.note(
                phase,
                answers=len(pairs),
                same_tokens=sum(a.tokens == b.tokens for a, b in pairs),
                wrong=beyond,
                drift=round(min(max(drifts, default=0.0), FARTHEST), 4),
                parted=first_differences(pairs),
                limit=round(reference.limit, 4),
            )
            if beyond:
                wrong.append(
                    f"{phase}: {beyond} of {len(pairs)} answers are off by up to "
                    f"{max(drifts):.3g} nats; rounding is up to {reference.limit:.3g}"
                )
        return wrong

    def note(self, phase: str, **figures: Any) -> None:
        self.phases.setdefault(phase, {}).update(figures)

    def wants(self, phase: str, what: str, value: int, least: int) -> None:
        self.note(phase, **{what: value})
        if value < least:
            self.lacking.append(f"{phase}: {what} is {value}; at least {least} was expected")


def first_differences(pairs: Sequence[tuple[Answer, Answer]]) -> list[list[float]]:
    """Of each pair that differs, the index of the first token that does, and the nats between the
    first one's two best candidates there (FARTHEST: it names one)."""
    found: list[list[float]] = []
    for want, got in pairs:
        for i, (ours, theirs) in enumerate(zip(want.tokens, got.tokens, strict=False)):
            if ours != theirs:
                best = [value for _, value in want.logprobs[i][:2]]
                found.append([i, round(best[0] - best[1], 3) if len(best) == 2 else FARTHEST])
                break
    return found


def ask_crowd(
    served: Served, prompts: Prompts, max_tokens: int, salt: str | None = None
) -> list[Answer]:
    """All at once. With a salt, nothing is used that was computed without it."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(lambda prompt: served.ask(prompt, max_tokens, salt), prompts))


def ask_restless_crowd(
    served: Served, prompts: Prompts, max_tokens: int, seed: int
) -> list[Answer | None]:
    """All at once, and some go away soon: of those the answer is None."""
    random = Random(seed)
    count = max(1, int(LEAVING * len(prompts)))
    leaving = {i: random.uniform(0.05, 0.6) for i in random.sample(range(len(prompts)), count)}

    def one(i: int) -> Answer | None:
        if i in leaving:
            served.ask_and_leave(prompts[i], 4 * max_tokens, leaving[i])
            return None
        return served.ask(prompts[i], max_tokens)

    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(one, range(len(prompts))))


@dataclass(slots=True)
class Answers:
    """The cases in which answers are compared. References are kept from case to case."""

    setup: Setup
    prompted: Prompted
    _references: dict[tuple[Any, ...], Reference] = field(default_factory=dict)

    def try_case(self, name: str, deadline: Deadline, tried: Tried) -> None:
        """Raises: Wrong, NotHere; whatever else goes wrong goes up as well."""
        case = CASES[name]
        shared = self.reference(CASES[case.reference], case.reference, deadline)
        is_shared = case is not CASES[case.reference]
        try:
            self._try(name, case, deadline, tried)
        except ServerError as error:
            tried.judge(shared)
            if is_shared:
                self.reference(case, name, deadline)  # NotHere, if it ends without the store too
            raise Wrong(f"the server with the store ended: {why_it_ended(str(error))}") from error
        wrong = tried.judge(shared)
        if wrong and is_shared:
            # Another backend rounds in another way: only its own answers are the judge.
            wrong = tried.judge(self.reference(case, name, deadline))
        if wrong or tried.lacking:
            raise Wrong("; ".join([*wrong, *tried.lacking]))

    def reference(self, case: Case, name: str, deadline: Deadline) -> Reference:
        """Raises: NotHere if vLLM does not start so."""
        key = (case.arguments, tuple(case.environment.items()))
        if key not in self._references:
            try:
                with self.setup.serve(f"{name}-reference", case, deadline) as served:
                    self._references[key] = self._refer(served)
            except ServerError as error:
                why = why_it_ended(str(error))
                raise NotHere(f"without the store vLLM does not run so either: {why}") from error
        return self._references[key]

    def _refer(self, served: Served) -> Reference:
        size, (first, then) = self.setup.size, (self.prompted.asked, self.prompted.crowd)
        asked, again = ([served.ask(p, size.answer) for p in first] for _ in range(2))
        crowd, once_more, computed = (
            ask_crowd(served, then, size.crowd_answer, salt) for salt in (None, None, NOISE)
        )
        of_crowd = [*map(drift, crowd, once_more), *map(drift, crowd, computed)]
        return Reference(asked, crowd, [*map(drift, asked, again), *of_crowd])

    def _try(self, name: str, case: Case, deadline: Deadline, tried: Tried) -> None:
        """Computed, from DRAM, in crowds, and after a restart from NVMe."""
        size, asked = self.setup.size, self.prompted.asked
        store = self.setup.work / f"{name}-store"
        shutil.rmtree(store, ignore_errors=True)
        least = int(FOUND * self.prompted.num_tokens)

        def ask_all(served: Served, phase: str) -> dict[str, int]:
            before = served.loaded()
            got = [served.ask(prompt, size.answer) for prompt in asked]
            tried.got.append((phase, "asked", got))
            after = served.loaded()
            return {tier: after[tier] - before[tier] for tier in after}

        with self.setup.serve(name, case, deadline, store=store) as served:
            self._note(tried, served)
            ask_all(served, "computed")
            served.empty_hbm()
            tried.wants("dram", "loaded_tokens", ask_all(served, "dram")["dram"], least)
            self._crowds(served, tried)
            wait_until_written(served)
            self._note(tried, served)
        with self.setup.serve(f"{name}-again", case, deadline, store=store) as served:
            tried.wants("nvme", "loaded_tokens", ask_all(served, "nvme")["nvme"], least)
            self._note(tried, served)
        shutil.rmtree(store, ignore_errors=True)

    def _crowds(self, served: Served, tried: Tried) -> None:
        """Twice: first nothing of them is stored, then what was computed is. Each time they come
        again, CROWDS_MAX times at most, until vLLM has preempted one."""
        size, crowd = self.setup.size, self.prompted.crowd
        for seed, phase in enumerate(("crowd", "crowd again")):
            before = preempted = served.counted(PREEMPTED)
            for number in range(1, CROWDS_MAX + 1):
                name = phase if number == 1 else f"{phase}, number {number}"
                served.empty_hbm()
                loaded = served.loaded()
                got = ask_restless_crowd(served, crowd, size.crowd_answer, seed)
                tried.got.append((name, "crowd", got))
                now = served.loaded()
                tried.note(
                    name,
                    left=sum(answer is None for answer in got),
                    loaded_tokens=sum(now.values()) - sum(loaded.values()),
                )
                if (preempted := served.counted(PREEMPTED)) > before:
                    break
            tried.wants(name, "preempted", preempted - before, 1)

    def try_switch(self, name: str, deadline: Deadline, tried: Tried) -> None:
        """A server of one layout must not load what one of another has saved."""
        case, size = CASES[name], self.setup.size
        reference = self.reference(CASES[case.reference], case.reference, deadline)
        store = self.setup.work / f"{name}-store"
        shutil.rmtree(store, ignore_errors=True)
        for layout in ("NHD", "HND"):
            laid = Case(case.arguments, {LAYOUT: layout})
            try:
                with self.setup.serve(f"{name}-{layout}", laid, deadline, store=store) as served:
                    got = [served.ask(prompt, size.answer) for prompt in self.prompted.asked]
                    tried.got.append((layout, "asked", got))
                    loaded = sum(served.loaded().values())
                    tried.note(layout, loaded_tokens=loaded)
                    if loaded:
                        tried.lacking.append(f"{layout}: {loaded} tokens of the other were loaded")
                    wait_until_written(served)
                    self._note(tried, served)
            except ServerError as error:
                self.reference(laid, f"{name}-{layout}", deadline)
                raise Wrong(f"{layout}: the server ended: {why_it_ended(str(error))}") from error
        shutil.rmtree(store, ignore_errors=True)
        if wrong := [*tried.judge(reference), *tried.lacking]:
            raise Wrong("; ".join(wrong))

    @staticmethod
    def _note(tried: Tried, served: Served) -> None:
        tried.facts = list(dict.fromkeys([*tried.facts, *served.facts()]))
        tried.complaints = list(dict.fromkeys([*tried.complaints, *served.complaints()]))


def wait_until_written(served: Served) -> None:
    """Return when nothing more is written: a restart finds it on NVMe."""
    seen: list[int] = []
    deadline = time.monotonic() + WRITTEN_DEADLINE_S
    while time.monotonic() < deadline:
        served.ask([20, 21], 1)  # counts come with steps
        seen.append(served.counted(MOVED, direction="dram_to_nvme"))
        if seen[-1] > 0 and seen[-4:] == 4 * seen[-1:]:
            return
        time.sleep(0.25)
